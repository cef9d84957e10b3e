"""What reading ahead hides of a reader that stalls, at steps that do nothing but take their time.

    python benchmarks/ahead.py [--steps=400] [--rounds=3] [--step=0.05] [--stall=0.5] [--every=2]

Stalls come at random, on average every so many seconds. Three walks take turns: nothing stalls, a batch is read
between two steps, and batches are read ahead as by `sinklab train`; the last two meet the same stalls. Hidden is the
share of what the second takes longer than the first that the third does not.
"""

import argparse
import contextlib
import os
import platform
import random
import statistics
import time
from collections.abc import Callable

import numpy as np

from sinklab import devices, sharding
from sinklab.spec import Hardware
from sinklab.train.ahead import Ahead
from sinklab.train.loop import AHEAD


def reader(given: argparse.Namespace, seed: int, stall: float) -> Callable[[int], object]:
    """read(number) -> a batch on the devices, now and then after a stall."""
    draw, mesh = random.Random(seed), devices.mesh(Hardware())
    stalled = {number for number in range(given.steps) if draw.random() < given.step / given.every}

    def read(number: int) -> object:
        time.sleep(stall if number in stalled else 0)
        return sharding.batch(lambda rows: np.full((len(rows), 129), number, np.int32), (8, 129), mesh)

    return read


def seconds(given: argparse.Namespace, take: Callable[[int], object]) -> float:
    """Of a walk, whose batches must come in their order."""
    start = time.perf_counter()
    for number in range(given.steps):
        assert int(take(number)[0, 0]) == number
        time.sleep(given.step)
    return time.perf_counter() - start


def round_of(given: argparse.Namespace, seed: int) -> tuple[float, float, float]:
    """Seconds of the three walks."""
    stalling = reader(given, seed, given.stall)
    calm, between = seconds(given, reader(given, seed, 0.0)), seconds(given, stalling)
    with contextlib.closing(Ahead(stalling, range(given.steps), AHEAD)) as batches:
        return calm, between, seconds(given, lambda _: batches.take())


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in dict(steps=400, rounds=3, step=0.05, stall=0.5, every=2.0).items():
        arguments.add_argument(f'--{name}', type=type(default), default=default)
    given = arguments.parse_args()
    reader(given, 0, 0.0)(0)  # the first batch makes the devices
    rounds = [round_of(given, seed) for seed in range(given.rounds)]
    calm, between, ahead = zip(*rounds, strict=True)
    hidden = [100 * (1 - (ahead - calm) / (between - calm)) for calm, between, ahead in rounds]
    print(f'{platform.processor() or platform.machine()}, {os.cpu_count()} cores, python {platform.python_version()}')
    print(f'nothing stalls, s:     {spread(calm)}')
    print(f'read between steps, s: {spread(between)}')
    print(f'read ahead, s:         {spread(ahead)}')
    print(f'hidden, %:             {spread(hidden)}')


def spread(values: list[float]) -> str:
    return f'{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})'


if __name__ == '__main__':
    main()
