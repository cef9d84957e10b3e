"""Error of bfloat16 in the gradient of each parameter, over many sequences with the same first token.

    python benchmarks/gradients.py [--sequences=4096] [--part_size=8] [--models='logit, post;v, mlp']

Sums: the gradient of the whole batch against the float64 mean of the gradients of its parts. A part adds few numbers,
so the difference shows the error of long sums in bfloat16. Rounding: the gradient of the whole batch against that of
the model in float32. Both are the largest error of an entry relative to the largest entry of its array. The four
models together have every kind of parameter.
"""

import argparse
import functools
import json
from collections.abc import Callable

import jax
import numpy as np
from argument_types import parse_count
from flax import nnx

from sinklab.config.spec import Spec
from sinklab.config.validate import parse_config
from sinklab.configs import default
from sinklab.environment import get_package_versions
from sinklab.machine import describe_machine
from sinklab.train import state, step

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


def make_spec(changes: dict, dtype: str) -> Spec:
    config = default.get_config(size='smoke')
    config.update_from_flattened_dict({f'model.{name}': value for name, value in changes.items()})
    config.model.dtype = dtype
    return parse_config(config.to_dict())


def make_parameters(spec: Spec) -> dict:
    """Return random parameters with which every part of the model has an effect."""
    rng = np.random.default_rng(0)
    shapes = nnx.to_pure_dict(state.make_abstract_model(spec)[1])
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: np.float32((path[-1].key == 'gain_D') + 0.3 * rng.normal(size=leaf.shape)), shapes
    )


def compute_errors(actual: dict, expected: dict) -> dict[str, float]:
    """Return {parameter: largest error relative to its largest expected entry}."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True)
    return {
        '.'.join(entry.key for entry in path): float(
            np.abs(actual_leaf - expected_leaf).max() / np.abs(expected_leaf).max()
        )
        for (path, actual_leaf), expected_leaf in pairs
    }


def compute_gradient(spec: Spec, params: dict, ids_BT: np.ndarray) -> dict:
    """Return the gradient in float64; jit compiles once per number of sequences."""
    return jax.tree.map(np.float64, jax.device_get(compile_gradient(spec)(params, ids_BT)))


@functools.cache
def compile_gradient(spec: Spec) -> Callable:
    return jax.jit(jax.grad(step.make_loss(spec)), compiler_options=state.ROUNDING_COMPILER_OPTIONS['bfloat16'])


def make_inputs(spec: Spec, num_sequences: int) -> tuple[dict, np.ndarray]:
    """Return the parameters and ids_BT, whose first token is the same in all sequences."""
    ids_BT = np.random.default_rng(1).integers(2, spec.model.vocabulary, (num_sequences, spec.data.length + 1))
    ids_BT[:, 0] = spec.data.fixed_token
    return make_parameters(spec), ids_BT


def measure_sum_error(changes: dict, num_sequences: int, part_size: int) -> dict[str, float]:
    spec = make_spec(changes, 'bfloat16')
    params, ids_BT = make_inputs(spec, num_sequences)
    parts = [
        compute_gradient(spec, params, ids_BT[start : start + part_size])
        for start in range(0, num_sequences, part_size)
    ]
    return compute_errors(
        compute_gradient(spec, params, ids_BT), jax.tree.map(lambda *arrays: np.mean(arrays, 0), *parts)
    )


def measure_rounding_error(changes: dict, num_sequences: int) -> dict[str, float]:
    half, single = (make_spec(changes, dtype) for dtype in ('bfloat16', 'float32'))
    return compute_errors(*(compute_gradient(spec, *make_inputs(half, num_sequences)) for spec in (half, single)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--sequences', type=parse_count, default=4096)
    parser.add_argument('--part_size', type=parse_count, default=8, help='sequences of a part')
    parser.add_argument('--models', default=';'.join(MODELS), metavar='NAME;...')
    args = parser.parse_args()
    if args.sequences % args.part_size:
        parser.error(f'--sequences={args.sequences} is not a multiple of --part_size={args.part_size}')
    if unknown := [name for name in args.models.split(';') if name not in MODELS]:
        parser.error(f'--models: {unknown[0]} is unknown; give some of {"; ".join(MODELS)}')
    print(describe_machine())
    print(json.dumps(get_package_versions(('jax', 'jaxlib', 'flax'))))
    print(f'{"model":15} {"parameter":42} {"sums":>8} {"rounding":>8}')
    for name in args.models.split(';'):
        changes = MODELS[name]
        rounding_errors = measure_rounding_error(changes, args.sequences)
        for parameter, sum_error in measure_sum_error(changes, args.sequences, args.part_size).items():
            print(f'{name:15} {parameter:42} {sum_error:8.1e} {rounding_errors[parameter]:8.1e}')


if __name__ == '__main__':
    main()
