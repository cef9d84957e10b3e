"""bfloat16 precision: float32 accumulation and a bounded number of roundings.

Functions outside of a run are compiled with its compiler options: intermediates are rounded as written.
"""

import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from attention_cases import make_attention_spec
from flax import nnx
from model_options import COMBINATIONS, OPTIONS, TOKENS
from tiny_specs import draw_params, make_attention_config, make_case_params, make_tiny_spec

from sinklab.attn import chunked
from sinklab.attn import mask as masks
from sinklab.train import state, step
from sinklab.train.step import make_document_inputs

UNIT_ROUNDOFF = 2.0**-8  # relative error of a rounding to bfloat16
COMPILER_OPTIONS = state.ROUNDING_COMPILER_OPTIONS['bfloat16']
EXHAUSTIVE = pytest.mark.exhaustive
pytestmark = pytest.mark.slow


def compute_error(actual, expected):
    """Return the norm of the difference relative to the norm of the array."""
    actual, expected = np.float64(actual), np.float64(expected)
    assert np.isfinite(actual).all()
    assert expected.any(), 'zero gradient'
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def find_largest_error(actual, expected):
    """Return (error, name) of the parameter with the largest error."""
    expected = state.flatten_by_name(expected)
    return max((compute_error(leaf, expected[name]), name) for name, leaf in state.flatten_by_name(actual).items())


# Together, these models have every kind of parameter.
MODELS = {
    'kv, learned': dict(learned_kv__kind='kv', position='learned', qk_norm=True, head_norm=True, gate='elementwise'),
    'sink token, T5': dict(learned_kv__kind='sink_token', position='relative_t5', norm='sandwich', gate='headwise'),
    'logit, post': dict(learned_kv__kind='logit', norm='post', ffn='gelu', gate='value_state'),
    'v, mlp': dict(
        learned_kv__kind='v',
        attention__similarity='identity',
        attention__normalizer='none',
        attention__feature_map='mlp',
    ),
}


@pytest.mark.parametrize(
    'name', [pytest.param(name, marks=() if name == 'kv, learned' else [EXHAUSTIVE]) for name in MODELS]
)
def test_batch_gradient_is_mean_of_part_gradients(name):
    """Use every kind of parameter and a constant first token.

    Another order of sums changes the rounding of a few values in 2^15.
    """
    changes = {f'model__{field}': value for field, value in MODELS[name].items()}
    spec = make_tiny_spec(**changes, model__dtype='bfloat16')
    differentiate = jax.jit(jax.grad(step.make_loss(spec)), compiler_options=COMPILER_OPTIONS)
    params = draw_params(spec, deviation=0.3)
    ids_BT = np.random.default_rng(1).integers(2, spec.model.vocabulary, (2048, spec.data.length + 1))
    ids_BT[:, 0] = spec.data.fixed_token
    parts = [differentiate(params, ids_BT[first : first + 8]) for first in range(0, 2048, 8)]
    mean = jax.tree.map(lambda *arrays: np.mean(np.float64(arrays), 0), *parts)
    assert find_largest_error(differentiate(params, ids_BT), mean) < (UNIT_ROUNDOFF / 4, '')


def test_embedding_gradient_of_frequent_token_has_float32_precision():
    """Compare n equal sequences with one: a float32 sum of n equal addends has relative error n / 2^25."""
    spec = make_tiny_spec(model__dtype='bfloat16', model__layers=1)
    gradient = jax.jit(jax.grad(step.make_loss(spec)), compiler_options=COMPILER_OPTIONS)
    ids_BT = np.full((1, 17), 7, np.int32)
    actual, expected = gradient(draw_params(spec), np.repeat(ids_BT, 8192, 0)), gradient(draw_params(spec), ids_BT)
    assert compute_error(actual['embedding_VD'][7], expected['embedding_VD'][7]) < 16 * 8192 / 2**25


def test_chunked_attention_sums_key_gradients_in_float32():
    """Compare gradients from 64 chunks with those from one chunk, up to a last rounding."""
    spec, rng = (
        make_attention_spec(make_attention_config('sigmoid', 'none'), masks.make_full_mask(512)),
        np.random.default_rng(0),
    )
    arrays = [jnp.bfloat16(rng.uniform(size=(1, 512, 1, 4))) for _ in range(3)]

    def differentiate(chunk_size):
        def compute_total(arrays):
            return chunked.attend(*arrays, spec).output_BTHK.astype(jnp.float32).sum()

        with unittest.mock.patch.object(chunked, 'CHUNK_SIZE', chunk_size):
            return jax.jit(jax.grad(compute_total), compiler_options=COMPILER_OPTIONS)(arrays)

    for actual, expected in zip(differentiate(8), differentiate(512), strict=True):
        np.testing.assert_allclose(np.float64(actual), np.float64(expected), rtol=2 * UNIT_ROUNDOFF)


CASES = {**OPTIONS, **COMBINATIONS}
NUM_DRAWS = 4
# Roundings after a parameter, in two layers: parameter, operand, product, activation, gate, two norms, sum of heads,
# residual stream. The error of independent roundings grows as the square root of their number.
NUM_ROUNDINGS = 20
# These cases cover every kind of normalizer, learned key and position bias.
CASE_NAMES = ('exp-sum', 'sigmoid, kv', 'identity-clamped', 'softpick, logit', 'v', 'post, sink token, prefix')
CASE_NAMES += ('position learned', 't5, logit', 'position alibi')


def perturb(params, seed):
    """Return parameters with random errors of the size of a rounding."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: np.float32(leaf * (1 + UNIT_ROUNDOFF / 3**0.5 * rng.uniform(-1, 1, leaf.shape))), params
    )


def measure_rounding_change(function, params):
    """Return (result of a function, norm of its change by one rounding of each parameter)."""
    exact = jax.tree.map(np.float64, function(params))
    draws = [function(perturb(params, seed)) for seed in range(NUM_DRAWS)]
    norms = [jax.tree.map(lambda a, b: np.linalg.norm(a - b), exact, draw) for draw in draws]
    return exact, jax.tree.map(lambda *norms: np.mean(norms), *norms)


def compile_gradient(spec):
    """Return run(params) -> (gradient of a weighted sum of logits, logits_BTV)."""
    graph = state.make_abstract_model(spec)[0]
    weight_BTV = np.random.default_rng(1).normal(size=(*TOKENS.shape, 300)).astype(np.float32)

    def compute_total(params):
        logits_BTV, _ = nnx.merge(graph, params)(TOKENS, **make_document_inputs(jnp.asarray(TOKENS), spec))
        return jnp.sum(weight_BTV * logits_BTV), logits_BTV

    return jax.jit(jax.grad(compute_total, has_aux=True), compiler_options=COMPILER_OPTIONS)


@pytest.mark.parametrize('name', make_case_params(CASE_NAMES, CASE_NAMES[::3]))
def test_logits_and_gradients_match_reference_within_roundings(name):
    """Compare logits with NumPy float64, and gradients with float32, which test_model.py compares with NumPy."""
    float32_spec, bfloat16_spec = (
        make_tiny_spec(**CASES[name], model__dtype=dtype) for dtype in ('float32', 'bfloat16')
    )
    params = draw_params(float32_spec)
    gradient, logits_BTV = compile_gradient(bfloat16_spec)(params)
    assert logits_BTV.dtype == jnp.float32

    expected, change = measure_rounding_change(
        lambda params: np.stack([reference.run_forward(params, ids_T, float32_spec)[0] for ids_T in TOKENS]), params
    )
    assert np.linalg.norm(logits_BTV - expected) < NUM_ROUNDINGS**0.5 * change

    compute_gradient = compile_gradient(float32_spec)
    expected, change = map(
        state.flatten_by_name, measure_rounding_change(lambda params: compute_gradient(params)[0], params)
    )
    for name, leaf in state.flatten_by_name(gradient).items():  # forward and backward
        assert np.linalg.norm(leaf - expected[name]) < (2 * NUM_ROUNDINGS) ** 0.5 * change[name], name
