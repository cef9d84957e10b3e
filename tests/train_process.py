"""One of several processes that train on four devices: python train_process.py INDEX COUNT PORT ARGUMENTS.

ARGUMENTS is JSON: config (changes to the tiny spec), folder (of checkpoints), last (step), out (prefix of a file).
The process resumes from the newest checkpoint, and saves at the last step. It writes the rows that it read, the
digests of the batches, and the losses.
"""

import functools
import hashlib
import json
import sys
from pathlib import Path

import jax
from conftest import make_tiny_spec
from jax.experimental import multihost_utils

from sinklab.checkpoint.checkpointer import Checkpointer
from sinklab.config.spec import Hardware
from sinklab.data.run_data import load_run_data
from sinklab.parallel import device_mesh, sharding
from sinklab.process_group import ProcessGroup
from sinklab.run_dir import RunDir
from sinklab.train import state, step

PROCESS_INDEX, PROCESS_COUNT, PORT = map(int, sys.argv[1:4])
ARGUMENTS = json.loads(sys.argv[4])
jax.config.update('jax_num_cpu_devices', 4 // PROCESS_COUNT)
timeouts = dict(initialization_timeout=120, heartbeat_timeout_seconds=20, shutdown_timeout_seconds=60)
jax.distributed.initialize(f'127.0.0.1:{PORT}', PROCESS_COUNT, PROCESS_INDEX, **timeouts)


def main() -> None:
    spec, hardware = make_tiny_spec(**ARGUMENTS['config']), Hardware(data=4)
    mesh, data = device_mesh.make_mesh(hardware), load_run_data(spec)
    checkpoints = Checkpointer(
        RunDir(ARGUMENTS['folder']), spec.checkpoint, data.fingerprint, ProcessGroup(PROCESS_INDEX, PROCESS_COUNT)
    )
    results = dict(batches={}, losses={}, read=[])
    with jax.set_mesh(mesh):
        restored_step = checkpoints.choose_sound_step()[0] or 0
        train_state = (
            checkpoints.restore(restored_step, state.make_abstract_state(spec, mesh))
            if restored_step
            else state.create_state(spec, mesh)
        )
        train_step = step.make_train_step(spec, hardware, mesh)
        shape = spec.optimizer.batch_size, spec.data.length + 1
        for step_number in range(restored_step + 1, ARGUMENTS['last'] + 1):
            batch = sharding.load_batch(
                functools.partial(read_and_record, results['read'], data.batches, step_number - 1), shape, mesh
            )
            full_batch = multihost_utils.process_allgather(batch, tiled=True)
            results['batches'][step_number] = hashlib.sha256(full_batch.tobytes()).hexdigest()
            train_state, metrics = train_step(train_state, batch, sharding.make_per_device_array(0, mesh))
            results['losses'][step_number] = float(metrics['train/loss']).hex()
        checkpoints.save(ARGUMENTS['last'], train_state)
        checkpoints.close()
    Path(f'{ARGUMENTS["out"]}-{PROCESS_INDEX}.json').write_text(json.dumps(results))


def read_and_record(row_ranges, batches, step, rows):
    row_ranges.append([step, rows.start, rows.stop])
    return batches.read_rows(step, rows)


main()
