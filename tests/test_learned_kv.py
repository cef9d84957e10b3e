"""Tests of learned keys and values (columns) before the text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import make_attention_spec
from conftest import make_attention_config, make_tiny_spec, replace_operation
from flax import nnx

from sinklab.attn import reference
from sinklab.attn.mask import make_causal_mask
from sinklab.attn.spec import RelativePositionBias, ScoreBias
from sinklab.model.learned_kv import LEARNED_KV_KINDS, count_learned_kv
from sinklab.train import state

KEY, VALUE = np.random.default_rng(0).normal(size=(2, 2, 5, 4, 4)).astype(np.float32)  # BSHK


def make_model_spec(columns, **fields):
    """Make the config of a model; a K bias has the value 0."""
    fields = (dict(value='zero') if columns == 'k' else {}) | fields
    return make_tiny_spec(
        model__columns__kind=columns, **{f'model__columns__{name}': value for name, value in fields.items()}
    ).model


def make_learned_kv(columns, **fields):
    return LEARNED_KV_KINDS[columns](make_model_spec(columns, **fields), 4, nnx.Rngs(0))


def attach_columns(columns, **fields):
    """Return (keys_BHK, values_BHK) of the column; assert that it leaves the text unchanged."""
    key, value = make_learned_kv(columns, **fields).prepend(KEY, VALUE)
    np.testing.assert_array_equal(key[:, 1:], KEY)
    np.testing.assert_array_equal(value[:, 1:], VALUE)
    return np.asarray(key[:, 0]), np.asarray(value[:, 0])


@pytest.mark.parametrize('columns', ['none', 'v', 'sink_token'])
def test_learned_kv_without_key_prepends_nothing(columns):
    key, value = make_learned_kv(columns).prepend(KEY, VALUE)
    np.testing.assert_array_equal(key, KEY)
    np.testing.assert_array_equal(value, VALUE)


@pytest.mark.parametrize(
    ('value', 'norm', 'expected'),
    [
        ('zero', None, [0, 0, 0, 0]),
        ('first', 1.0, [1, 0, 0, 0]),
        ('first', 5.0, [5, 0, 0, 0]),
        ('uniform', 1.0, [0.5] * 4),
        ('uniform', 20.0, [10.0] * 4),
    ],
)
def test_k_bias_has_configured_fixed_value(value, norm, expected):
    _, result = attach_columns('k', value=value, value_norm=norm)
    np.testing.assert_allclose(result, np.broadcast_to(expected, (2, 4, 4)))


@pytest.mark.parametrize('columns', ['k', 'kv'])
def test_narrow_key_is_zero_beyond_its_width(columns):
    key, _ = attach_columns(columns, key_width=2)
    assert (key[..., 2:] == 0).all()
    assert (key[..., :2] != 0).all()


@pytest.mark.parametrize('columns', ['k', 'kv', 'v', 'logit'])
@pytest.mark.parametrize('shared', [False, True])
def test_learned_kv_parameters_are_per_head_or_shared(columns, shared):
    names = dict(k=['key_HK'], kv=['key_HK', 'value_HK'], v=['value_HK'], logit=['score_H'])[columns]
    learned = nnx.to_pure_dict(nnx.state(make_learned_kv(columns, shared=shared)))
    assert sorted(learned) == names
    assert {len(leaf) for leaf in learned.values()} == {1 if shared else 4}


POSITIONS = np.arange(5)[None]
POSITION_BIASES = {
    'none': None,
    'distance': RelativePositionBias(
        lambda slope, distance: slope[0] * distance, np.array([[1.0], [2.0], [3.0], [4.0]])
    ),
}


def compute_bias_matrix(columns, bias_name):
    """Compute bias_BHTS of five tokens; the columns are on the left."""
    bias = ScoreBias(
        POSITION_BIASES[bias_name],
        POSITIONS,
        np.pad(POSITIONS, ((0, 0), (1, 0))),
        make_learned_kv(columns).get_score_bias_HC(),
    )
    spec = make_attention_spec(make_attention_config('exp', 'sum'), make_causal_mask(5), 1, bias)
    offset_spec = dataclasses.replace(spec, operation=dataclasses.replace(spec.operation, offset=0.5))
    return np.broadcast_to(offset_spec.materialize_bias(5), (1, 4, 5, 6))


@pytest.mark.parametrize('bias_name', POSITION_BIASES)
def test_position_bias_excludes_learned_kv_but_offset_includes_it(bias_name):
    distance_TS = np.maximum(np.subtract.outer(np.arange(5), np.arange(5)), 0)
    text_HTS = 0.5 + distance_TS * np.arange(1, 5)[:, None, None] * (bias_name != 'none')
    for columns in ('k', 'kv'):
        np.testing.assert_allclose(compute_bias_matrix(columns, bias_name)[0], np.insert(text_HTS, 0, 0.5, axis=-1))


@pytest.mark.parametrize('bias_name', POSITION_BIASES)
def test_sink_logit_is_independent_of_position_bias(bias_name):
    logit, result = make_learned_kv('logit'), compute_bias_matrix('logit', bias_name)[0]
    np.testing.assert_allclose(result[..., 0], np.broadcast_to(logit.score_H[...] + 0.5, (4, 5)), rtol=1e-6)
    np.testing.assert_array_equal(result[..., 1:], compute_bias_matrix('k', bias_name)[0][..., 1:])


def test_count_learned_kv_returns_index_of_first_token():
    assert {columns: count_learned_kv(make_model_spec(columns)) for columns in LEARNED_KV_KINDS} == dict(
        none=0, v=0, sink_token=1, k=1, kv=1, logit=1
    )


TOKENS = np.random.default_rng(0).integers(0, 300, (2, 8))


def run_model(columns, normalizer='sum', **vectors):
    """Run a one-layer model with a column of given learned vectors; return (logits, Capture)."""
    spec = make_tiny_spec(
        model__layers=1, model__columns__kind=columns, model__columns__value=make_model_spec(columns).columns.value
    )
    graph, abstract = state.make_abstract_model(replace_operation(spec, 'exp', normalizer))
    rng = np.random.default_rng(0)
    params = nnx.to_pure_dict(abstract)
    vector_names = params['blocks']['attention'].pop('columns', {})
    params = jax.tree.map(lambda leaf: np.float32(0.5 * rng.normal(size=leaf.shape)), params)
    params['blocks']['attention']['columns'] = {name: np.float32(vectors[name]) for name in vector_names}
    with jax.disable_jit():
        return nnx.merge(graph, params)(TOKENS, capture=True)


def assert_same(result, other_result):
    """Assert that two results have the same logits and the same attention among the text."""
    (logits, captured), (other_logits, other_captured) = result, other_result
    np.testing.assert_allclose(logits, other_logits, rtol=1e-4, atol=1e-5)
    text_attention, other_captured = (x.attention_BHTS[..., -TOKENS.shape[1] :] for x in (captured, other_captured))
    np.testing.assert_allclose(text_attention, other_captured, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_softmax_off_by_one_equals_k_bias_with_zero_key():
    assert_same(run_model('none', 'plus_one'), run_model('k', key_HK=np.zeros((1, 4, 4))))


@pytest.mark.slow
def test_kv_bias_with_zero_value_equals_k_bias():
    key = np.random.default_rng(1).normal(size=(1, 4, 4))
    assert_same(run_model('kv', key_HK=key, value_HK=np.zeros((1, 4, 4))), run_model('k', key_HK=key))


@pytest.mark.slow
@pytest.mark.parametrize('scale', [1.0, 30.0])
def test_sink_logit_scales_output_by_sigmoid_of_logsumexp_difference(scale):
    """Test that o = o_softmax sigmoid(logsumexp(scores) - logit)."""
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(1, 6, 4, 4)), jnp.float32) for _ in range(3))
    query, logit = scale * query, make_learned_kv('logit')
    logit.score_H[...] = scale * jnp.asarray(rng.normal(size=(4, 1)), jnp.float32)
    keys, values = logit.prepend(key, value)
    logit_spec = make_attention_spec(
        make_attention_config('exp', 'sum'), make_causal_mask(6), 1, ScoreBias(learned_HC=logit.get_score_bias_HC())
    )
    result = reference.attend(query, keys, values, logit_spec).output_BTHK
    plain_output = reference.attend(
        query, key, value, make_attention_spec(make_attention_config('exp', 'sum'), make_causal_mask(6))
    ).output_BTHK
    score = np.einsum('bthk,bshk->bths', np.float64(query), np.float64(key)) / 2
    for t in range(6):
        total = np.logaddexp.reduce(score[0, t, :, : t + 1], -1)
        expected = plain_output[0, t] / (1 + np.exp(logit.score_H[...][:, 0] - total))[:, None]
        np.testing.assert_allclose(result[0, t], expected, rtol=1e-4, atol=1e-5)
