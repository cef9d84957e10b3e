"""Benchmark of chunked attention against dense attention, in turns in one process.

    python -m benchmarks.attention [--lengths=512,2048,4096] [--rounds=7] [--max_dense_length=4096]

One sequence, 4 heads of 64, causal, float32. A line has the median time of a call with its extremes, and the
temporary memory of the program, without arguments and results. Lengths above --max_dense_length are measured in
chunks only.
"""

import argparse
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.argument_types import parse_count, parse_counts
from benchmarks.example_specs import make_operations
from benchmarks.machine import describe_machine
from benchmarks.timing import format_spread, time_in_turns
from sinklab.attn.backends import BACKENDS
from sinklab.attn.mask import make_causal_mask
from sinklab.attn.spec import AttentionSpec
from sinklab.environment import get_package_versions

OPERATIONS = ('exp', 'sum'), ('sigmoid', 'none'), ('softpick', 'sum')
NUM_HEADS, HEAD_WIDTH = 4, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--lengths', type=parse_counts, default='512,2048,4096', metavar='N,...')
    parser.add_argument('--rounds', type=parse_count, default=7, metavar='N')
    parser.add_argument('--max_dense_length', type=parse_count, default=4096, metavar='N')
    args = parser.parse_args()
    print(describe_machine())
    print(f'{jax.devices()[0].device_kind}, {get_package_versions(("jax", "jaxlib"))}')
    for length, operation, with_gradient in itertools.product(args.lengths, OPERATIONS, (False, True)):
        backends = ('dense', 'chunked') if length <= args.max_dense_length else ('chunked',)
        shape = 1, length, NUM_HEADS, HEAD_WIDTH
        arrays = make_arrays(shape, jnp.float32)
        programs = {
            backend: jax.jit(make_function(backend, operation, length, with_gradient)).lower(*arrays).compile()
            for backend in backends
        }
        calls = {name: functools.partial(program, *arrays) for name, program in programs.items()}
        seconds = time_in_turns(calls, args.rounds)
        for name, program in programs.items():
            title = f'T={length:6} {"/".join(operation):13} {"with gradients" if with_gradient else "forward":15}'
            memory = program.memory_analysis().temp_size_in_bytes / 2**20
            text = format_spread([1e3 * value for value in seconds[name]], '.1f')
            print(f'{title} {name:8} {text} ms, {memory:.1f} MiB', flush=True)


def make_arrays(shape: tuple[int, ...], dtype: jnp.dtype) -> list[jax.Array]:
    """Return random queries, keys, values and cotangents of the output."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), dtype) for _ in range(4)]


def make_function(backend: str, operation: tuple[str, str], length: int, with_gradient: bool) -> Callable:
    """Return a function (query, key, value, cotangent): causal attention, or its gradients."""
    spec = AttentionSpec(make_operations()[operation], make_causal_mask(length))

    def attend(query, key, value, cotangent):
        return BACKENDS[backend].attend(query, key, value, spec)[0]

    def compute_weighted_sum(query, key, value, cotangent):
        output = attend(query, key, value, cotangent)
        return jnp.sum(output.astype(jnp.float32) * cotangent.astype(jnp.float32))

    return jax.grad(compute_weighted_sum, (0, 1, 2)) if with_gradient else attend


if __name__ == '__main__':
    main()
