"""The process of one peer of benchmarks/peers.py: run steps on demand, and print their time.

Each peer has an environment of its own: nothing is imported here but the standard library and NumPy.
"""

import json
import os
import sys
import time
from collections.abc import Callable

import numpy as np


def serve(make_run_step: Callable[[dict], Callable[[], float]]) -> None:
    """Print the loss of a first step; then print milliseconds per step for each number of steps on standard input.

    Args:
        make_run_step: Receives the model and the batch, the last argument of the command as JSON, and returns a
            function that runs one step and returns its loss.
    """
    results = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)  # what libraries print is no result
    shape = json.loads(sys.argv[-1])
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: shape['threads']])  # sizes thread pools
    run_step = make_run_step(shape)
    print(run_step(), file=results, flush=True)
    for num_steps in map(int, sys.stdin):
        run_step()
        start = time.perf_counter()
        for _ in range(num_steps):
            run_step()
        print(1e3 * (time.perf_counter() - start) / num_steps, file=results, flush=True)


def make_ids(shape: dict) -> np.ndarray:
    """Return random ids_BT of T + 1 tokens, the same for all peers."""
    size = shape['batch'], shape['length'] + 1
    return np.random.default_rng(0).integers(0, shape['vocabulary'], size, np.int32)
