"""The loss in chunks against the formula through all logits, with and without gradients (`d`), on one device.

    python benchmarks/loss.py [--batch=8] [--length=512] [--width=256] [--vocabulary=8192] [--rounds=9]

A line is the median time of a call, its range, and the memory of the program beside its arguments and results.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from sinklab.model.transformer import logits
from sinklab.train.environment import versions
from sinklab.train.loss import cross_entropy


def whole(hidden_BTD: jax.Array, head_VD: jax.Array, target_BT: jax.Array) -> jax.Array:
    """The same mean, of targets from 0 on."""
    return optax.softmax_cross_entropy_with_integer_labels(logits(hidden_BTD, head_VD), target_BT).mean()


def arrays(given: argparse.Namespace, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    return (
        jax.random.normal(keys[0], (given.batch, given.length, given.width), dtype),
        jax.random.normal(keys[1], (given.vocabulary, given.width)) / given.width**0.5,
        jax.random.randint(keys[2], (given.batch, given.length), 0, given.vocabulary),
    )


def seconds(function: Callable, inputs: tuple) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function(*inputs))
    return time.perf_counter() - start


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in dict(batch=8, length=512, width=256, vocabulary=8192, rounds=9).items():
        arguments.add_argument(f'--{name}', type=int, default=size)
    given = arguments.parse_args()
    print(f'{platform.processor() or platform.machine()}, {os.cpu_count()} cores, python {platform.python_version()}')
    print(json.dumps(versions(('jax', 'jaxlib', 'optax'))))
    for dtype in (jnp.float32, jnp.bfloat16):
        inputs = arrays(given, dtype)
        functions = dict(chunks=cross_entropy, whole=whole)
        functions |= {f'd {name}': jax.value_and_grad(function, (0, 1)) for name, function in functions.items()}
        programs = {name: jax.jit(function).lower(*inputs).compile() for name, function in functions.items()}
        rounds = [{name: seconds(program, inputs) for name, program in programs.items()} for _ in range(given.rounds)]
        for name, program in programs.items():
            ms = sorted(1e3 * times[name] for times in rounds[1:])
            memory = program.memory_analysis().temp_size_in_bytes / 2**20
            spread = f'{statistics.median(ms):.1f} ms ({ms[0]:.1f} to {ms[-1]:.1f})'
            print(f'{dtype.__name__:8} {name:8} {spread}, {memory:.1f} MiB')


if __name__ == '__main__':
    main()
