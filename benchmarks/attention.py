"""Attention in chunks against the whole matrix on this machine, in one process, in turns.

    python benchmarks/attention.py [--lengths=512,2048,4096] [--rounds=7] [--matrix=4096]

One sequence, 4 heads of 64, causal, float32. A line is the median time of a call and its quartiles, and the memory of
the program beside its arguments and results; from lengths above --matrix on, chunks alone. `+ sinks` adds the scores
of the first four keys.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from sinklab.attend.backends import BACKENDS
from sinklab.attend.examples import operations
from sinklab.attend.mask import causal
from sinklab.attend.operation import Operation
from sinklab.attend.received import of_first_keys
from sinklab.attend.rule import Rule
from sinklab.train.environment import versions

OPERATIONS = {
    '/'.join(pair): operations()[pair] for pair in (('exp', 'sum'), ('sigmoid', 'none'), ('softpick', 'sum'))
}
RUNS = {'dense': ('dense', False), 'chunked': ('chunked', False), 'chunked + sinks': ('chunked', True)}
HEADS, WIDTH, KEYS = 4, 64, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--lengths', type=lengths, default='512,2048,4096', help='such as 512,2048 (default)')
    parser.add_argument('--rounds', type=int, default=7, choices=range(2, 100), metavar='N', help='2 to 99; 7')
    parser.add_argument('--matrix', type=int, default=4096, help='the longest of which the matrix is made')
    given = parser.parse_args()
    print(f'{jax.devices()[0].device_kind}, {versions(("jax", "jaxlib"))}')
    for length in given.lengths:
        for name, operation in OPERATIONS.items():
            for gradient in (False, True):
                runs = {
                    run: compiled(backend, operation, length, gradient, sinks)
                    for run, (backend, sinks) in RUNS.items()
                    if backend != 'dense' or length <= given.matrix
                }
                report(f'T={length:6} {name:13} {"with gradients" if gradient else "forward":15}', runs, given.rounds)


def lengths(given: str) -> list[int]:
    found = [int(one) for one in given.split(',')]
    if min(found) < 1:
        raise ValueError
    return found


def compiled(backend: str, operation: Operation, length: int, gradient: bool, sinks: bool) -> tuple[Callable, float]:
    """(call, MiB)."""
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(1, length, HEADS, WIDTH)), jnp.float32) for _ in range(3)]
    rule = Rule(operation, causal(length))

    def total(query, key, value):
        output, rows, _ = BACKENDS[backend].attend(query, key, value, rule, measured=sinks)
        found = of_first_keys(query, key, rows, rule, KEYS).share_BHS if sinks else 0.0
        return jnp.sum(output), found

    function = jax.value_and_grad(total, (0, 1, 2), has_aux=True) if gradient else total
    program = jax.jit(function).lower(*arrays).compile()
    return lambda: jax.block_until_ready(program(*arrays)), program.memory_analysis().temp_size_in_bytes / 2**20


def report(what: str, runs: dict, rounds: int) -> None:
    seconds = {name: [] for name in runs}
    for _ in range(rounds + 1):  # the first is not counted
        for name, (call, _) in runs.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    for name, each in seconds.items():
        low, middle, high = statistics.quantiles(each[1:], n=4)
        base = statistics.median(seconds.get('dense', each)[1:])
        spread = f'{1e3 * middle:8.1f} ms ({1e3 * low:.1f}-{1e3 * high:.1f})'
        print(f'{what} {name:16} {spread:28} {middle / base:6.2f} x{runs[name][1]:9.1f} MiB', flush=True)


if __name__ == '__main__':
    main()
