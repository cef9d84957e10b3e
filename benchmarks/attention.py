"""Benchmark of chunked attention against dense attention, in turns in one process.

    python benchmarks/attention.py [--lengths=512,2048,4096] [--rounds=7]
        [--max_dense_length=4096]

One sequence, 4 heads of 64, causal, float32. A line has the median time of a call with its quartiles, and the
temporary memory of the program, without arguments and results. Lengths above --max_dense_length are measured in
chunks only. `+ sinks` adds the scores of the first four keys.
"""

import argparse
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from argument_types import parse_count, parse_count_from_2, parse_counts
from timing import time_call

from sinklab.attn.backends import BACKENDS
from sinklab.attn.example_specs import make_operations
from sinklab.attn.key_attention_sums import compute_key_attention_sums
from sinklab.attn.mask import make_causal_mask
from sinklab.attn.operations import Operation
from sinklab.attn.spec import AttentionSpec
from sinklab.environment import get_package_versions
from sinklab.machine import describe_machine

OPERATIONS = {
    '/'.join(pair): make_operations()[pair] for pair in (('exp', 'sum'), ('sigmoid', 'none'), ('softpick', 'sum'))
}
VARIANTS = {'dense': ('dense', False), 'chunked': ('chunked', False), 'chunked + sinks': ('chunked', True)}
NUM_HEADS, HEAD_WIDTH, NUM_KEYS = 4, 64, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--lengths', type=parse_counts, default='512,2048,4096', metavar='N,...')
    parser.add_argument('--rounds', type=parse_count_from_2, default=7, metavar='N', help='from 2 on')
    parser.add_argument(
        '--max_dense_length',
        type=parse_count,
        default=4096,
        metavar='N',
        help='measure dense attention up to this length',
    )
    args = parser.parse_args()
    print(describe_machine())
    print(f'{jax.devices()[0].device_kind}, {get_package_versions(("jax", "jaxlib"))}')
    for length in args.lengths:
        for name, operation in OPERATIONS.items():
            for gradient in (False, True):
                runs = {
                    variant: compile_call(backend, operation, length, gradient, sinks)
                    for variant, (backend, sinks) in VARIANTS.items()
                    if backend != 'dense' or length <= args.max_dense_length
                }
                print_times(
                    f'T={length:6} {name:13} {"with gradients" if gradient else "forward":15}', runs, args.rounds
                )


def compile_call(
    backend: str, operation: Operation, length: int, with_gradient: bool, with_sinks: bool
) -> tuple[Callable, float]:
    """Return a compiled call and its temporary memory in MiB."""
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(1, length, NUM_HEADS, HEAD_WIDTH)), jnp.float32) for _ in range(3)]
    spec = AttentionSpec(operation, make_causal_mask(length))

    def compute_output_sum(query, key, value):
        output, rows, _ = BACKENDS[backend].attend(query, key, value, spec, needs_abs_weight_sum=with_sinks)
        sink_scores = compute_key_attention_sums(query, key, rows, spec, NUM_KEYS).share_BHS if with_sinks else 0.0
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
            seconds[name].append(time_call(call))
    dense = statistics.median(seconds['dense'][1:]) if 'dense' in seconds else None
    for name, times in seconds.items():
        low, middle, high = statistics.quantiles(times[1:], n=4)
        ratio = f'{middle / dense:.2f} x' if dense else '-'
        text = f'{1e3 * middle:8.1f} ms ({1e3 * low:.1f}-{1e3 * high:.1f})'
        print(f'{title} {name:16} {text:28} {ratio:>8}{runs[name][1]:9.1f} MiB', flush=True)


if __name__ == '__main__':
    main()
