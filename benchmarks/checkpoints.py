"""What a checkpoint costs: the caller of a save, the save, its digests, and what verifies them before a restore.

    python benchmarks/checkpoints.py [--megabytes=1000] [--rounds=3]

A state of so many megabytes in eight arrays on one device is saved and restored in a new folder, as the loop does it.
Its files are in page cache, so that what is told is not the disk's.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from configs import default
from sinklab.checkpoint import digests
from sinklab.checkpoint.checkpoints import Checkpoints
from sinklab.files import tree
from sinklab.folder import Folder
from sinklab.parse import parse

ARRAYS = 8


def state(megabytes: int) -> dict[str, Any]:
    shape = ARRAYS, megabytes * 1_000_000 // (4 * ARRAYS)
    drawn = jax.random.normal(jax.random.key(0), shape)  # what is drawn does not compress
    return jax.block_until_ready(dict(step=jnp.int32(0), params={str(i): row for i, row in enumerate(drawn)}))


def timed(function: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def one_round(saved: dict) -> dict[str, float]:
    """Seconds of each part."""
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), saved)
    rules = parse(default.get_config().to_dict()).checkpoint
    with tempfile.TemporaryDirectory() as path:
        folder = Folder(path)
        checkpoints = Checkpoints(folder, rules, dict(store='benchmark'))
        checkpoints.save(1, saved)  # the first imports and compiles
        checkpoints.wait()
        called = timed(lambda: checkpoints.save(2, saved))
        checkpoints.wait()
        gigabytes = tree.size(folder.checkpoints / '2') / 1e9
        found = {
            'save, the caller': called,
            'save, until its digests are written': checkpoints.seconds,
            'digests': timed(lambda: digests.write(folder, 2, 0, 1, 0.0)),
            'verification': timed(checkpoints.sound),
            'restore': timed(lambda: jax.block_until_ready(checkpoints.restore(2, abstract))),
            'a poll': timed(checkpoints.poll),
        }
        checkpoints.close()
    return found | {f'{name}, a GB': found[name] / gigabytes for name in ('digests', 'verification')}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--megabytes', type=int, default=1000)
    parser.add_argument('--rounds', type=int, default=3)
    given = parser.parse_args()
    saved = state(given.megabytes)
    rounds = [one_round(saved) for _ in range(given.rounds)]
    for name in rounds[0]:
        seconds = [found[name] for found in rounds]
        print(f'{name}, s: {statistics.median(seconds):.4f} ({min(seconds):.4f} to {max(seconds):.4f})')


if __name__ == '__main__':
    main()
