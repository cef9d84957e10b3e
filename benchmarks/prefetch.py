"""Benchmark of batch prefetching: the share of reader stalls that it hides.

    python benchmarks/prefetch.py [--steps=400] [--rounds=3] [--step_seconds=0.05] [--stall_seconds=0.5]
        [--stall_interval=2]

Stalls are random, on average one every --stall_interval seconds. Three loops take turns: without stalls, with batches
read between two steps, and with batches prefetched as by `sinklab train`. The second and the third loop have the same
stalls. The hidden share is the part of the extra time of the second loop, over the first, that the third loop does
not have.
"""

import argparse
import contextlib
import json
import random
import time
from collections.abc import Callable

import numpy as np
from argument_types import parse_count, parse_positive_number
from timing import format_spread

from sinklab.config.spec import Hardware
from sinklab.data.prefetch import prefetch
from sinklab.environment import get_package_versions
from sinklab.machine import describe_machine
from sinklab.parallel import device_mesh, sharding
from sinklab.train.loop import PREFETCH_DEPTH


def make_reader(args: argparse.Namespace, seed: int, stall_seconds: float) -> Callable[[int], object]:
    """Return read(step), which puts a batch on the devices, at random steps after a stall."""
    rng, mesh = random.Random(seed), device_mesh.make_mesh(Hardware())
    stalled_steps = {step for step in range(args.steps) if rng.random() < args.step_seconds / args.stall_interval}

    def read(step: int) -> object:
        time.sleep(stall_seconds if step in stalled_steps else 0)
        return sharding.load_batch(lambda rows: np.full((len(rows), 129), step, np.int32), (8, 129), mesh)

    return read


def time_steps(args: argparse.Namespace, get_batch: Callable[[int], object]) -> float:
    """Return the seconds of a loop, and assert that its batches come in order."""
    start = time.perf_counter()
    for step in range(args.steps):
        assert int(get_batch(step)[0, 0]) == step
        time.sleep(args.step_seconds)
    return time.perf_counter() - start


def run_round(args: argparse.Namespace, seed: int) -> tuple[float, float, float]:
    """Return the seconds of the three loops."""
    stalling_reader = make_reader(args, seed, args.stall_seconds)
    unstalled, unprefetched = time_steps(args, make_reader(args, seed, 0.0)), time_steps(args, stalling_reader)
    with contextlib.closing(prefetch(stalling_reader, range(args.steps), PREFETCH_DEPTH)) as batches:
        return unstalled, unprefetched, time_steps(args, lambda _: next(batches))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--steps', type=parse_count, default=400)
    parser.add_argument('--rounds', type=parse_count, default=3)
    for name, default, meaning in (
        ('step_seconds', 0.05, 'seconds of a step'),
        ('stall_seconds', 0.5, 'seconds of a stall'),
        ('stall_interval', 2.0, 'mean seconds from one stall to the next'),
    ):
        parser.add_argument(f'--{name}', type=parse_positive_number, default=default, metavar='S', help=meaning)
    args = parser.parse_args()
    make_reader(args, 0, 0.0)(0)  # warm-up: the first batch initializes the devices
    rounds = [run_round(args, seed) for seed in range(args.rounds)]
    unstalled, unprefetched, prefetched = zip(*rounds, strict=True)
    hidden_percent = [
        100 * (1 - (prefetched - unstalled) / (unprefetched - unstalled))
        for unstalled, unprefetched, prefetched in rounds
    ]
    print(describe_machine())
    print(json.dumps(get_package_versions(('jax', 'jaxlib', 'numpy'))))
    print(f'nothing stalls, s:     {format_spread(unstalled)}')
    print(f'read between steps, s: {format_spread(unprefetched)}')
    print(f'read ahead, s:         {format_spread(prefetched)}')
    print(f'hidden, %:             {format_spread(hidden_percent)}')


if __name__ == '__main__':
    main()
