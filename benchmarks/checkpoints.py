"""Benchmark of checkpoints: saving, digests, verification and restoring.

    python benchmarks/checkpoints.py [--megabytes=1000] [--rounds=3]

A state of --megabytes in eight arrays on one device is saved and restored in a new folder, as by the training loop.
The time that save() blocks its caller is measured separately. The files are in the page cache, so the disk is not
measured.
"""

import argparse
import json
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
from argument_types import parse_count
from timing import format_spread, time_call

from sinklab.checkpoint import digests
from sinklab.checkpoint.checkpointer import Checkpointer
from sinklab.config.validate import parse_config
from sinklab.configs import default
from sinklab.environment import get_package_versions
from sinklab.machine import describe_machine
from sinklab.run_dir import RunDir
from sinklab.storage.files import compute_size

NUM_ARRAYS = 8


def make_state(megabytes: int) -> dict[str, Any]:
    shape = NUM_ARRAYS, megabytes * 1_000_000 // (4 * NUM_ARRAYS)
    values = jax.random.normal(jax.random.key(0), shape)  # random values do not compress
    return jax.block_until_ready(dict(step=jnp.int32(0), params={str(i): row for i, row in enumerate(values)}))


def run_round(train_state: dict) -> dict[str, float]:
    """Return the seconds of each part."""
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), train_state)
    checkpoint_spec = parse_config(default.get_config().to_dict()).checkpoint
    with tempfile.TemporaryDirectory() as path:
        run_dir = RunDir(path)
        checkpointer = Checkpointer(run_dir, checkpoint_spec, dict(store='benchmark'))
        checkpointer.save(1, train_state)  # warm-up: the first save imports and compiles
        checkpointer.wait_until_finished()
        save_call_seconds = time_call(lambda: checkpointer.save(2, train_state))
        save_seconds = save_call_seconds + time_call(checkpointer.wait_until_finished)
        gigabytes = compute_size(run_dir.checkpoint_dir / '2') / 1e9
        seconds = {
            'save, until the call returns': save_call_seconds,
            'save, until its digests are written': save_seconds,
            'digests': time_call(lambda: digests.write_digests(run_dir.checkpoint_dir / '2', 0, 1)),
            'verification': time_call(checkpointer.choose_sound_step),
            'restore': time_call(lambda: jax.block_until_ready(checkpointer.restore(2, abstract))),
            'check for a save error': time_call(checkpointer.raise_save_error),
        }
        checkpointer.close()
    return seconds | {f'{name}, per GB': seconds[name] / gigabytes for name in ('digests', 'verification')}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--megabytes', type=parse_count, default=1000)
    parser.add_argument('--rounds', type=parse_count, default=3)
    args = parser.parse_args()
    train_state = make_state(args.megabytes)
    rounds = [run_round(train_state) for _ in range(args.rounds)]
    print(describe_machine())
    print(json.dumps(get_package_versions(('jax', 'jaxlib', 'orbax-checkpoint'))))
    for name in rounds[0]:
        spread = format_spread([result[name] for result in rounds], '.4f')
        print(f'{name}, s: {spread}')


if __name__ == '__main__':
    main()
