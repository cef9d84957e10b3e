"""Benchmark of the chunked loss against the loss of all logits, on one device.

    python benchmarks/loss.py [--batch=8] [--length=512] [--width=256] [--vocabulary=8192] [--rounds=9]

A line has the median time of a call, its range, and the temporary memory of the program, without arguments and
results.
"""

import argparse
import json
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from argument_types import parse_count, parse_count_from_2
from timing import time_call

from sinklab.environment import get_package_versions
from sinklab.machine import describe_machine
from sinklab.model.transformer import compute_logits
from sinklab.train.loss import cross_entropy


def compute_full_loss(hidden_BTD: jax.Array, head_VD: jax.Array, target_BT: jax.Array) -> jax.Array:
    """Compute the mean cross-entropy from all logits at once; targets must not be negative."""
    return optax.softmax_cross_entropy_with_integer_labels(compute_logits(hidden_BTD, head_VD), target_BT).mean()


def make_inputs(args: argparse.Namespace, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    return (
        jax.random.normal(keys[0], (args.batch, args.length, args.width), dtype),
        jax.random.normal(keys[1], (args.vocabulary, args.width)) / args.width**0.5,
        jax.random.randint(keys[2], (args.batch, args.length), 0, args.vocabulary),
    )


def make_call(program: Callable, inputs: tuple) -> Callable[[], object]:
    return lambda: jax.block_until_ready(program(*inputs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in dict(batch=8, length=512, width=256, vocabulary=8192).items():
        parser.add_argument(f'--{name}', type=parse_count, default=size)
    parser.add_argument(
        '--rounds', type=parse_count_from_2, default=9, metavar='N', help='from 2 on; the first is warm-up'
    )
    args = parser.parse_args()
    print(describe_machine())
    print(json.dumps(get_package_versions(('jax', 'jaxlib', 'optax'))))
    for dtype in (jnp.float32, jnp.bfloat16):
        inputs = make_inputs(args, dtype)
        functions = dict(chunked=cross_entropy, full=compute_full_loss)
        functions |= {
            f'{name} with gradients': jax.value_and_grad(function, (0, 1)) for name, function in functions.items()
        }
        programs = {name: jax.jit(function).lower(*inputs).compile() for name, function in functions.items()}
        calls = {name: make_call(program, inputs) for name, program in programs.items()}
        rounds = [{name: time_call(call) for name, call in calls.items()} for _ in range(args.rounds)]
        for name, program in programs.items():
            ms = sorted(1e3 * times[name] for times in rounds[1:])
            memory = program.memory_analysis().temp_size_in_bytes / 2**20
            text = f'{statistics.median(ms):.1f} ms ({ms[0]:.1f} to {ms[-1]:.1f})'
            print(f'{dtype.__name__:8} {name:22} {text}, {memory:.1f} MiB')


if __name__ == '__main__':
    main()
