"""One process of several that train together on four devices: python train_process.py NUMBER COUNT PORT ARGUMENTS.

ARGUMENTS is JSON: config (changes to the tiny spec), folder (of checkpoints), last (step), out (a file). It goes on
from the newest checkpoint, saves at the last step, and writes what it read and what came of it.
"""

import functools
import hashlib
import json
import sys
from pathlib import Path

import jax
import numpy as np
from conftest import tiny
from jax.experimental import multihost_utils

from sinklab.checkpoint.checkpointer import Checkpointer
from sinklab.config.spec import Hardware
from sinklab.data.batches import load_run_data
from sinklab.parallel import device_mesh, sharding
from sinklab.run_dir import RunDir
from sinklab.train import state, step

NUMBER, COUNT, PORT = map(int, sys.argv[1:4])
GIVEN = json.loads(sys.argv[4])
jax.config.update('jax_num_cpu_devices', 4 // COUNT)
timeouts = dict(initialization_timeout=120, heartbeat_timeout_seconds=20, shutdown_timeout_seconds=60)
jax.distributed.initialize(f'127.0.0.1:{PORT}', COUNT, NUMBER, **timeouts)


class Collective:
    """A group that talks in collectives, while none of its processes is doing anything else."""

    index, count, longest = NUMBER, COUNT, 10_000

    def gather(self, name, value):
        said = np.frombuffer(json.dumps(value).encode().ljust(self.longest), np.uint8)
        heard = multihost_utils.process_allgather(said).reshape(self.count, self.longest)
        return [json.loads(row.tobytes()) for row in heard]

    def report_progress(self, activity, step=0, usual_seconds=None):
        pass


def main() -> None:
    spec, hardware = tiny(**GIVEN['config']), Hardware(data=4)
    mesh, data = device_mesh.make_mesh(hardware), load_run_data(spec)
    checkpoints = Checkpointer(RunDir(GIVEN['folder']), spec.checkpoint, data.fingerprint, Collective())
    found = dict(batches={}, losses={}, read=[])
    with jax.set_mesh(mesh):
        first = checkpoints.find_latest_valid_step()[0] or 0
        now = (
            checkpoints.restore(first, state.make_abstract_state(spec, mesh))
            if first
            else state.create_state(spec, mesh)
        )
        advance = step.make_train_step(spec, hardware, mesh)
        shape = spec.optimizer.batch_size, spec.data.length + 1
        for number in range(first + 1, GIVEN['last'] + 1):
            batch = sharding.load_batch(functools.partial(read, found['read'], data.batches, number - 1), shape, mesh)
            whole = multihost_utils.process_allgather(batch, tiled=True)
            found['batches'][number] = hashlib.sha256(whole.tobytes()).hexdigest()
            now, numbers = advance(now, batch, sharding.make_per_device_array(0, mesh))
            found['losses'][number] = float(numbers['train/loss']).hex()
        checkpoints.save(GIVEN['last'], now)
        checkpoints.close()
    Path(f'{GIVEN["out"]}-{NUMBER}.json').write_text(json.dumps(found))


def read(noted, batches, step, rows):
    noted.append([step, rows.start, rows.stop])
    return batches.read_rows(step, rows)


main()
