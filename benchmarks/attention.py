"""Benchmark of chunked attention against dense attention, in turns in one process.

    python benchmarks/attention.py [--lengths=512,2048,4096] [--rounds=7] [--matrix=4096]

One sequence, 4 heads of 64, causal, float32. A line has the median time of a call with its quartiles, and the
temporary memory of the program, without arguments and results. Lengths above --matrix are measured in chunks only.
`+ sinks` adds the scores of the first four keys.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from sinklab.attn.backends import BACKENDS
from sinklab.attn.example_specs import make_operations
from sinklab.attn.key_mass import compute_key_mass
from sinklab.attn.mask import make_causal_mask
from sinklab.attn.operations import Operation
from sinklab.attn.spec import AttentionSpec
from sinklab.environment import get_package_versions

OPERATIONS = {
    '/'.join(pair): make_operations()[pair] for pair in (('exp', 'sum'), ('sigmoid', 'none'), ('softpick', 'sum'))
}
VARIANTS = {'dense': ('dense', False), 'chunked': ('chunked', False), 'chunked + sinks': ('chunked', True)}
NUM_HEADS, HEAD_WIDTH, NUM_KEYS = 4, 64, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--lengths', type=parse_lengths, default='512,2048,4096', help='such as 512,2048 (default)')
    parser.add_argument('--rounds', type=int, default=7, choices=range(2, 100), metavar='N', help='2 to 99; 7')
    parser.add_argument('--matrix', type=int, default=4096, help='the longest of which the matrix is made')
    args = parser.parse_args()
    print(f'{jax.devices()[0].device_kind}, {get_package_versions(("jax", "jaxlib"))}')
    for length in args.lengths:
        for name, operation in OPERATIONS.items():
            for gradient in (False, True):
                runs = {
                    variant: compile_call(backend, operation, length, gradient, sinks)
                    for variant, (backend, sinks) in VARIANTS.items()
                    if backend != 'dense' or length <= args.matrix
                }
                print_times(
                    f'T={length:6} {name:13} {"with gradients" if gradient else "forward":15}', runs, args.rounds
                )


def parse_lengths(text: str) -> list[int]:
    values = [int(item) for item in text.split(',')]
    if min(values) < 1:
        raise ValueError
    return values


def compile_call(
    backend: str, operation: Operation, length: int, with_gradient: bool, with_sinks: bool
) -> tuple[Callable, float]:
    """Return a compiled call and its temporary memory in MiB."""
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(1, length, NUM_HEADS, HEAD_WIDTH)), jnp.float32) for _ in range(3)]
    spec = AttentionSpec(operation, make_causal_mask(length))

    def compute_output_sum(query, key, value):
        output, rows, _ = BACKENDS[backend].attend(query, key, value, spec, needs_mass=with_sinks)
        sink_scores = compute_key_mass(query, key, rows, spec, NUM_KEYS).share_BHS if with_sinks else 0.0
        return jnp.sum(output), sink_scores

    function = (
        jax.value_and_grad(compute_output_sum, (0, 1, 2), has_aux=True) if with_gradient else compute_output_sum
    )
    program = jax.jit(function).lower(*arrays).compile()
    return lambda: jax.block_until_ready(program(*arrays)), program.memory_analysis().temp_size_in_bytes / 2**20


def print_times(title: str, runs: dict, rounds: int) -> None:
    seconds = {name: [] for name in runs}
    for _ in range(rounds + 1):  # the first round is warm-up
        for name, (call, _) in runs.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    for name, times in seconds.items():
        low, middle, high = statistics.quantiles(times[1:], n=4)
        baseline = statistics.median(seconds.get('dense', times)[1:])
        text = f'{1e3 * middle:8.1f} ms ({1e3 * low:.1f}-{1e3 * high:.1f})'
        print(f'{title} {name:16} {text:28} {middle / baseline:6.2f} x{runs[name][1]:9.1f} MiB', flush=True)


if __name__ == '__main__':
    main()
