"""Columns alone: what every query sees beside the text, and who is who among them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attending import attend, rule
from conftest import attention, operation, tiny
from flax import nnx

from sinklab.attn import reference
from sinklab.attn.mask import make_causal_mask
from sinklab.attn.spec import RelativePositionBias, ScoreBias
from sinklab.model.learned_kv import LEARNED_KV_KINDS, count_learned_kv
from sinklab.model.transformer import Transformer
from sinklab.train import state

KEY, VALUE = np.random.default_rng(0).normal(size=(2, 2, 5, 4, 4)).astype(np.float32)  # BSHK


def model(columns, **bias):
    """Of a K bias, that with the value 0."""
    bias = (dict(value='zero') if columns == 'k' else {}) | bias
    return tiny(
        model__columns__kind=columns, **{f'model__columns__{name}': value for name, value in bias.items()}
    ).model


def made(columns, **bias):
    return LEARNED_KV_KINDS[columns](model(columns, **bias), 4, nnx.Rngs(0))


def attached(columns, **bias):
    """(keys_BHK, values_BHK) of the column, the text standing behind it untouched."""
    key, value = made(columns, **bias).prepend(KEY, VALUE)
    np.testing.assert_array_equal(key[:, 1:], KEY)
    np.testing.assert_array_equal(value[:, 1:], VALUE)
    return np.asarray(key[:, 0]), np.asarray(value[:, 0])


@pytest.mark.parametrize('columns', ['none', 'v', 'sink_token'])
def test_columns_without_a_key_of_their_own_attach_nothing(columns):
    key, value = made(columns).prepend(KEY, VALUE)
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
def test_a_k_bias_has_the_value_that_is_fixed_for_it(value, norm, expected):
    _, found = attached('k', value=value, value_norm=norm)
    np.testing.assert_allclose(found, np.broadcast_to(expected, (2, 4, 4)))


@pytest.mark.parametrize('columns', ['k', 'kv'])
@pytest.mark.parametrize('width', [1, 2, 3])
def test_a_narrow_key_learns_its_first_dimensions_and_keeps_the_rest_at_zero(columns, width):
    key, _ = attached(columns, key_width=width)
    assert (key[..., width:] == 0).all()
    assert (key[..., :width] != 0).all()
    assert made(columns, key_width=width).key_HK.shape == (4, width)


@pytest.mark.parametrize('columns', ['k', 'kv', 'v', 'logit'])
@pytest.mark.parametrize('shared', [False, True])
def test_a_bias_is_learned_for_each_head_or_once(columns, shared):
    names = dict(k=['key_HK'], kv=['key_HK', 'value_HK'], v=['value_HK'], logit=['score_H'])[columns]
    learned = nnx.to_pure_dict(nnx.state(made(columns, shared=shared)))
    assert sorted(learned) == names
    assert {len(leaf) for leaf in learned.values()} == {1 if shared else 4}


def test_a_shared_column_is_one_for_all_heads():
    for found in attached('kv', shared=True):
        np.testing.assert_array_equal(found, np.broadcast_to(found[:1, :1], found.shape))
    key, value = attached('kv')
    assert not np.allclose(key[0, 0], key[0, 1])
    assert not np.allclose(value[0, 0], value[0, 1])


@pytest.mark.slow
def test_a_fixed_value_is_no_parameter_of_the_model():
    learned = {
        value: nnx.state(Transformer(model('k', value=value, value_norm=norm), 16, nnx.Rngs(0)))
        for value, norm in (('zero', None), ('first', 5.0), ('uniform', 5.0))
    }
    shapes = [jax.tree.map(jnp.shape, nnx.to_pure_dict(state)) for state in learned.values()]
    assert shapes[0] == shapes[1] == shapes[2]


PLACES = np.arange(5)[None]
CURVES = {
    'none': None,
    'distance': RelativePositionBias(
        lambda slope, distance: slope[0] * distance, np.array([[1.0], [2.0], [3.0], [4.0]])
    ),
}


def matrix(columns, curve):
    """bias_BHTS of five tokens, with those of the columns left of it."""
    bias = ScoreBias(CURVES[curve], PLACES, np.pad(PLACES, ((0, 0), (1, 0))), made(columns).get_bias_HC())
    plain = rule(attention('exp', 'sum'), make_causal_mask(5), 1, bias)
    moved = dataclasses.replace(plain, operation=dataclasses.replace(plain.operation, offset=0.5))
    return np.broadcast_to(moved.materialize_bias(5), (1, 4, 5, 6))


@pytest.mark.parametrize('curve', CURVES)
def test_a_bias_of_positions_is_zero_at_the_column_and_an_offset_is_not(curve):
    distance_TS = np.maximum(np.subtract.outer(np.arange(5), np.arange(5)), 0)
    text_HTS = 0.5 + distance_TS * np.arange(1, 5)[:, None, None] * (curve != 'none')
    for columns in ('k', 'kv'):
        np.testing.assert_allclose(matrix(columns, curve)[0], np.insert(text_HTS, 0, 0.5, axis=-1))


@pytest.mark.parametrize('curve', CURVES)
def test_a_logit_is_a_score_of_its_own_beside_those_of_positions(curve):
    logit, found = made('logit'), matrix('logit', curve)[0]
    np.testing.assert_allclose(found[..., 0], np.broadcast_to(logit.score_H[...] + 0.5, (4, 5)), rtol=1e-6)
    np.testing.assert_array_equal(found[..., 1:], matrix('k', curve)[0][..., 1:])


def test_the_first_token_is_column_number_count():
    assert {columns: count_learned_kv(model(columns)) for columns in LEARNED_KV_KINDS} == dict(
        none=0, v=0, sink_token=1, k=1, kv=1, logit=1
    )


@pytest.mark.slow
def test_a_column_is_before_the_text_for_those_who_read_the_matrix():
    score_BHTS = jnp.asarray(np.random.default_rng(0).normal(size=(1, 1, 3, 4)), jnp.float32)
    zeros = jnp.zeros((1, 3, 1, 2)), jnp.zeros((1, 4, 1, 2)), jnp.zeros((1, 4, 1, 2))
    found = attend((*zeros, score_BHTS), attention('exp', 'sum'), make_causal_mask(3), columns=1)[1]
    np.testing.assert_array_equal(found[0, 0] > 0, [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]])


TOKENS = np.random.default_rng(0).integers(0, 300, (2, 8))


def built(columns, normalizer='sum', **vectors):
    """(logits, Capture of its one layer) of softmax with a column, whose learned vectors are given."""
    spec = tiny(model__layers=1, model__columns__kind=columns, model__columns__value=model(columns).columns.value)
    graph, abstract = state.make_abstract_model(operation(spec, 'exp', normalizer))
    rng = np.random.default_rng(0)
    params = nnx.to_pure_dict(abstract)
    own = params['blocks']['attention'].pop('columns', {})
    params = jax.tree.map(lambda leaf: np.float32(0.5 * rng.normal(size=leaf.shape)), params)
    params['blocks']['attention']['columns'] = {name: np.float32(vectors[name]) for name in own}
    with jax.disable_jit():
        return nnx.merge(graph, params)(TOKENS, capture=True)


def same(one, other):
    """The same logits, and the same attention among the text."""
    (logits, captured), (others, theirs) = one, other
    np.testing.assert_allclose(logits, others, rtol=1e-4, atol=1e-5)
    text, theirs = (x.attention_BHTS[..., -TOKENS.shape[1] :] for x in (captured, theirs))
    np.testing.assert_allclose(text, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_softmax_off_by_one_is_a_k_bias_whose_key_is_zero():
    same(built('none', 'plus_one'), built('k', key_HK=np.zeros((1, 4, 4))))


@pytest.mark.slow
def test_softmax_off_by_one_is_a_sink_logit_of_zero():
    same(built('none', 'plus_one'), built('logit', score_H=np.zeros((1, 4, 1))))


@pytest.mark.slow
def test_a_kv_bias_whose_value_is_zero_is_a_k_bias():
    key = np.random.default_rng(1).normal(size=(1, 4, 4))
    same(built('kv', key_HK=key, value_HK=np.zeros((1, 4, 4))), built('k', key_HK=key))


@pytest.mark.slow
def test_a_sink_logit_far_below_the_scores_is_no_column_at_all():
    same(built('none'), built('logit', score_H=np.full((1, 4, 1), -100.0)))


@pytest.mark.slow
@pytest.mark.parametrize('scale', [1.0, 30.0])
def test_a_sink_logit_multiplies_the_output_by_the_sigmoid_of_how_far_it_lies_below(scale):
    """o = o_softmax sigmoid(logsumexp(scores) - logit)."""
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(1, 6, 4, 4)), jnp.float32) for _ in range(3))
    query, logit = scale * query, made('logit')
    logit.score_H[...] = scale * jnp.asarray(rng.normal(size=(4, 1)), jnp.float32)
    keys, values = logit.prepend(key, value)
    beside = rule(attention('exp', 'sum'), make_causal_mask(6), 1, ScoreBias(learned_HC=logit.get_bias_HC()))
    found = reference.attend(query, keys, values, beside).output_BTHK
    plain = reference.attend(query, key, value, rule(attention('exp', 'sum'), make_causal_mask(6))).output_BTHK
    score = np.einsum('bthk,bshk->bths', np.float64(query), np.float64(key)) / 2
    for t in range(6):
        total = np.logaddexp.reduce(score[0, t, :, : t + 1], -1)
        expected = plain[0, t] / (1 + np.exp(logit.score_H[...][:, 0] - total))[:, None]
        np.testing.assert_allclose(found[0, t], expected, rtol=1e-4, atol=1e-5)
