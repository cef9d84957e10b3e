"""A text under a cache of x first and y recent tokens: in one pass, and token by token, in turn, in one process.

    python benchmarks/streaming.py [--size=quickstart] [--tokens=1024] [--cache=4+252] [--rounds=5] [--dtype=float32]

Both are one program each, from ids to the sum of all losses, of one model with fresh parameters; token by token is a
scan that carries the cache. What they differ by, over the loss, is told with the times.
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
import numpy as np

from configs import quickstart
from configs.sizes import SIZES
from sinklab.model.streaming import Cache, Stream, begin, read
from sinklab.model.transformer import Transformer
from sinklab.parse import parse
from sinklab.spec import Spec
from sinklab.train import state
from sinklab.train.environment import versions
from sinklab.train.loss import sums
from sinklab.train.streaming import check, compiled


def given_spec(given: argparse.Namespace) -> Spec:
    config = quickstart.get_config('softmax', given.size)
    config.model.dtype = given.dtype
    return parse(config.to_dict())


def one_pass(cache: Cache, tokens: int) -> Callable:
    """of(model, ids_T of T + 1) -> the sum of the losses; so many tokens are read at once."""

    def of(model: Transformer, ids_T: jax.Array) -> jax.Array:
        def step(stream: Stream, pair_2T: jax.Array) -> tuple[Stream, jax.Array]:
            hidden_BTD, stream = read(model, cache, stream, pair_2T[:1])
            return stream, sums(hidden_BTD, model.head_VD[...], pair_2T[1:], gradient=False)[0]

        pairs_N2T = jnp.stack([ids_T[:-1], ids_T[1:]]).reshape(2, -1, tokens).swapaxes(0, 1)
        return jax.lax.scan(step, begin(model, cache), pairs_N2T)[1].sum()

    return of


def seconds(program: Callable, *given) -> tuple[float, float]:
    """(of a call, what it gives)."""
    start = time.perf_counter()
    found = float(program(*given))
    return time.perf_counter() - start, found


def spread(values: list[float]) -> str:
    return f'{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})'


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument('--size', default='quickstart', choices=SIZES)
    arguments.add_argument('--dtype', default='float32', choices=('float32', 'bfloat16'))
    arguments.add_argument('--cache', default='4+252', metavar='x+y')
    arguments.add_argument('--tokens', type=int, default=1024)
    arguments.add_argument('--rounds', type=int, default=5)
    given = arguments.parse_args()
    spec, cache = given_spec(given), Cache(*map(int, given.cache.split('+')))
    check(spec, cache)
    params = jax.jit(lambda: state.initial(spec)['params'])()
    ids_T = np.random.default_rng(0).integers(spec.model.vocabulary, size=given.tokens + 1, dtype=np.int32)
    ways = {'one pass': given.tokens, 'token by token': 1}
    programs = {
        name: compiled(spec, one_pass(cache, at_once)).lower(params, ids_T).compile()
        for name, at_once in ways.items()
    }
    for program in programs.values():
        program(params, ids_T)
    rounds = [
        {name: seconds(program, params, ids_T) for name, program in programs.items()} for _ in range(given.rounds)
    ]
    print(f'{platform.processor() or platform.machine()}, {os.cpu_count()} cores, python {platform.python_version()}')
    print(json.dumps(versions(('jax', 'jaxlib', 'flax'))))
    for name, program in programs.items():
        memory = program.memory_analysis().temp_size_in_bytes / 2**20
        print(f'{name}, ms: {spread([1e3 * one[name][0] for one in rounds])}, {memory:.1f} MiB')
    print(f'ratio: {spread([one["token by token"][0] / one["one pass"][0] for one in rounds])}')
    whole, scanned = (rounds[0][name][1] for name in ways)
    print(f'losses differ by: {abs(whole - scanned) / scanned:.1e}')


if __name__ == '__main__':
    main()
