"""A text under a cache of x first and y recent tokens: in one pass, and token by token, in turn, in one process.

    python benchmarks/streaming.py [--size=paper] [--tokens=1024] [--cache=4+1020] [--rounds=2] [--dtype=float32]

Both are one program each, from ids to the sum of all losses, of one model with fresh parameters; token by token is a
scan that carries the cache. Times are of the clock, and of all cores together, which counts a second core and not who
else is at work. What the losses differ by, over the loss, is told with them.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

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
            return stream, sums(hidden_BTD, model.head[...], pair_2T[1:], gradient=False)[0]

        pairs_N2T = jnp.stack([ids_T[:-1], ids_T[1:]]).reshape(2, -1, tokens).swapaxes(0, 1)
        return jax.lax.scan(step, begin(model, cache), pairs_N2T)[1].sum()

    return of


class Call(NamedTuple):
    clock: float
    cores: float
    loss: float


def call(program: Callable, *given) -> Call:
    clock, cores = time.perf_counter(), time.process_time()
    loss = float(program(*given))
    return Call(time.perf_counter() - clock, time.process_time() - cores, loss)


def spread(values: list[float]) -> str:
    return f'{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})'


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument('--size', default='paper', choices=SIZES)
    arguments.add_argument('--dtype', default='float32', choices=('float32', 'bfloat16'))
    arguments.add_argument('--cache', default='4+1020', metavar='x+y')
    arguments.add_argument('--tokens', type=int, default=1024)
    arguments.add_argument('--rounds', type=int, default=2)
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
    programs['one pass'](params, ids_T)
    rounds = [{name: call(program, params, ids_T) for name, program in programs.items()} for _ in range(given.rounds)]
    print(f'{platform.processor() or platform.machine()}, {os.cpu_count()} cores, python {platform.python_version()}')
    print(json.dumps(versions(('jax', 'jaxlib', 'flax'))))
    for name, program in programs.items():
        memory = program.memory_analysis().temp_size_in_bytes / 2**20
        clock, cores = ([getattr(one[name], kind) for one in rounds] for kind in ('clock', 'cores'))
        print(f'{name}, s: clock {spread(clock)}, cores {spread(cores)}, {memory:.1f} MiB')
    for kind in ('clock', 'cores'):
        ratios = [getattr(one['token by token'], kind) / getattr(one['one pass'], kind) for one in rounds]
        print(f'ratio, {kind}: {spread(ratios)}')
    whole, scanned = (rounds[0][name].loss for name in ways)
    print(f'losses differ by: {abs(whole - scanned) / scanned:.1e}')


if __name__ == '__main__':
    main()
