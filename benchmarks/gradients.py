"""What bfloat16 does to the gradient of each parameter, over many sequences that begin with the same token.

    python benchmarks/gradients.py [--sequences=4096] [--part=8] [--models='logit, post;v, mlp']

Sums: the gradient of the whole batch against the mean, in float64, of those of its parts. A part adds few numbers, so
that sums of many in few digits show. Rounding: the same gradient against that of the model in float32. Both are the
largest error of an entry over the largest entry of its array, and four models have every kind of parameter.
"""

import argparse
import functools
import json
import os
import platform
from collections.abc import Callable

import jax
import numpy as np
from flax import nnx

from configs import default
from sinklab.parse import parse
from sinklab.spec import Spec
from sinklab.train import objective, state
from sinklab.train.environment import versions

MODELS = {
    'kv, learned': {
        'columns.kind': 'kv',
        'position': 'learned',
        'qk_norm': True,
        'head_norm': True,
        'gate': 'elementwise',
    },
    'sink token, T5': {
        'columns.kind': 'sink_token',
        'position': 'relative_t5',
        'norm': 'sandwich',
        'gate': 'headwise',
    },
    'logit, post': {'columns.kind': 'logit', 'norm': 'post', 'ffn': 'gelu', 'gate': 'value_state'},
    'v, mlp': {
        'columns.kind': 'v',
        'attention.similarity': 'identity',
        'attention.normalizer': 'none',
        'attention.feature_map': 'mlp',
    },
}


def built(changes: dict, dtype: str) -> Spec:
    config = default.get_config(size='smoke')
    config.update_from_flattened_dict({f'model.{name}': value for name, value in changes.items()})
    config.model.dtype = dtype
    return parse(config.to_dict())


def drawn(spec: Spec) -> dict:
    """Parameters that leave no part without effect."""
    rng = np.random.default_rng(0)
    shapes = nnx.to_pure_dict(state.architecture(spec)[1])
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: np.float32((path[-1].key == 'gain_D') + 0.3 * rng.normal(size=leaf.shape)), shapes
    )


def far(ours: dict, theirs: dict) -> dict[str, float]:
    """The largest error over the largest entry, by parameter."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True)
    return {
        '.'.join(entry.key for entry in path): float(np.abs(one - other).max() / np.abs(other).max())
        for (path, one), other in pairs
    }


def gradient(spec: Spec, params: dict, ids_BT: np.ndarray) -> dict:
    """In float64; compiled once for each number of sequences."""
    return jax.tree.map(np.float64, jax.device_get(compiled(spec)(params, ids_BT)))


@functools.cache
def compiled(spec: Spec) -> Callable:
    return jax.jit(jax.grad(objective.loss_of(spec)), compiler_options=state.ROUNDED['bfloat16'])


def given(spec: Spec, sequences: int) -> tuple[dict, np.ndarray]:
    """(parameters, ids_BT)."""
    ids_BT = np.random.default_rng(1).integers(2, spec.model.vocabulary, (sequences, spec.data.length + 1))
    ids_BT[:, 0] = spec.data.fixed_token
    return drawn(spec), ids_BT


def sums(changes: dict, sequences: int, part: int) -> dict[str, float]:
    spec = built(changes, 'bfloat16')
    params, ids_BT = given(spec, sequences)
    parts = [gradient(spec, params, ids_BT[at : at + part]) for at in range(0, sequences, part)]
    return far(gradient(spec, params, ids_BT), jax.tree.map(lambda *arrays: np.mean(arrays, 0), *parts))


def rounding(changes: dict, sequences: int) -> dict[str, float]:
    half, single = (built(changes, dtype) for dtype in ('bfloat16', 'float32'))
    return far(*(gradient(spec, *given(half, sequences)) for spec in (half, single)))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument('--sequences', type=int, default=4096)
    arguments.add_argument('--part', type=int, default=8)
    arguments.add_argument('--models', default=';'.join(MODELS))
    asked = arguments.parse_args()
    print(f'{platform.processor() or platform.machine()}, {os.cpu_count()} cores, python {platform.python_version()}')
    print(json.dumps(versions(('jax', 'jaxlib', 'flax'))))
    print(f'{"model":15} {"parameter":42} {"sums":>8} {"rounding":>8}')
    for name in asked.models.split(';'):
        changes = MODELS[name]
        rounded = rounding(changes, asked.sequences)
        for parameter, summed in sums(changes, asked.sequences, asked.part).items():
            print(f'{name:15} {parameter:42} {summed:8.1e} {rounded[parameter]:8.1e}')


if __name__ == '__main__':
    main()
