"""Benchmark of streaming with a cache of x first and y recent tokens: one pass against token by token.

    python benchmarks/streaming.py [--size=paper] [--tokens=1024] [--cache=4+1020] [--rounds=2] [--dtype=float32]
    python benchmarks/streaming.py --run=RUN[@STEP] [--tokens=1024] [--cache=0+1024,4+1020] [--rounds=2]

Each variant is one program from ids to the sum of all losses, of the same model with initial parameters, or with
those of a checkpoint. Token by token is a scan that carries the cache. One pass is called once before it is timed,
token by token is not, because it takes a minute. The variants take turns in one process. The relative difference of
the losses is printed as well.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from argument_types import parse_count
from timing import format_spread

from sinklab.cli.checkpoint_flags import load_checkpoint, parse_cache
from sinklab.config.spec import Spec
from sinklab.config.validate import parse_config
from sinklab.configs import quickstart
from sinklab.configs.sizes import SIZES
from sinklab.environment import get_package_versions
from sinklab.errors import UserError
from sinklab.machine import describe_machine
from sinklab.model.streaming import (
    CacheConfig,
    StreamState,
    init_stream,
    read_tokens,
)
from sinklab.model.transformer import Transformer
from sinklab.train import state
from sinklab.train.generate import jit_model_function
from sinklab.train.loss import sum_losses


def load_model(args: argparse.Namespace) -> tuple[Spec, dict]:
    """Return the spec and the parameters of the measured model."""
    if args.run:
        checkpoint = load_checkpoint(args.run)
        model = dataclasses.replace(checkpoint.spec.model, dtype=args.dtype)
        return dataclasses.replace(checkpoint.spec, model=model), checkpoint.params
    config = quickstart.get_config('softmax', args.size)
    config.model.dtype = args.dtype
    spec = parse_config(config.to_dict())
    return spec, jax.jit(lambda: state.init_state(spec)['params'])()


def make_loss_function(cache: CacheConfig, chunk_tokens: int) -> Callable:
    """Return a function of a model and T + 1 ids that returns the sum of the losses.

    Args:
        cache: the cache config.
        chunk_tokens: tokens that are read at once; T must be a multiple of it.
    """

    def compute_loss(model: Transformer, ids_T: jax.Array) -> jax.Array:
        def step(stream: StreamState, pair_2T: jax.Array) -> tuple[StreamState, jax.Array]:
            hidden_BTD, stream = read_tokens(model, cache, stream, pair_2T[:1])
            return stream, sum_losses(hidden_BTD, model.head[...], pair_2T[1:], gradient=False)[0]

        pairs_N2T = jnp.stack([ids_T[:-1], ids_T[1:]]).reshape(2, -1, chunk_tokens).swapaxes(0, 1)
        return jax.lax.scan(step, init_stream(model, cache), pairs_N2T)[1].sum()

    return compute_loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model_group = parser.add_mutually_exclusive_group()
    model_group.add_argument('--size', default='paper', choices=SIZES, help='initial parameters of this size')
    model_group.add_argument('--run', metavar='RUN[@STEP]', help='a checkpoint')
    parser.add_argument('--dtype', default='float32', choices=('float32', 'bfloat16'))
    parser.add_argument('--cache', default='4+1020', metavar='x+y,...')
    parser.add_argument('--tokens', type=parse_count, default=1024)
    parser.add_argument('--rounds', type=parse_count, default=2)
    args = parser.parse_args()
    try:
        spec, params = load_model(args)
        caches = [parse_cache(cache_text, spec) for cache_text in args.cache.split(',')]
    except UserError as error:
        sys.exit(f'streaming: {error}')
    print(describe_machine())
    print(json.dumps(get_package_versions(('jax', 'jaxlib', 'flax'))))
    for cache in caches:
        measure_cache(args, spec, params, cache)


def measure_cache(args: argparse.Namespace, spec: Spec, params: dict, cache: CacheConfig) -> None:
    """Measure both variants with one cache, and print their times."""
    ids_T = np.random.default_rng(0).integers(spec.model.vocabulary, size=args.tokens + 1, dtype=np.int32)
    chunk_sizes = {'one pass': args.tokens, 'token by token': 1}
    programs = {
        name: jit_model_function(spec, make_loss_function(cache, chunk_tokens)).lower(params, ids_T).compile()
        for name, chunk_tokens in chunk_sizes.items()
    }
    jax.block_until_ready(programs['one pass'](params, ids_T))
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    for _ in range(args.rounds):
        for name, program in programs.items():
            start = time.perf_counter()
            loss = float(program(params, ids_T))
            rounds[name].append((time.perf_counter() - start, loss))
    print(f'cache {cache}, {args.tokens} tokens')
    for name, program in programs.items():
        memory = program.memory_analysis().temp_size_in_bytes / 2**20
        print(f'{name}: {format_spread([seconds for seconds, _ in rounds[name]], ".3g")} s, {memory:.1f} MiB')
    pairs = [*zip(*rounds.values(), strict=True)]
    ratios = [scanned_seconds / one_pass_seconds for (one_pass_seconds, _), (scanned_seconds, _) in pairs]
    print(f'ratio: {format_spread(ratios, ".3g")}')
    (_, one_pass_loss), (_, scanned_loss) = pairs[0]
    print(f'losses differ by: {abs(one_pass_loss - scanned_loss) / scanned_loss:.1e}')


if __name__ == '__main__':
    main()
