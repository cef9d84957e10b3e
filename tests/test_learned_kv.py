"""Tests of learned keys and values (columns) before the text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import make_attention_spec
from flax import nnx
from tiny_specs import make_attention_config, make_tiny_spec, replace_operation

from sinklab.attn import reference
from sinklab.attn.mask import make_causal_mask
from sinklab.attn.spec import ScoreBias
from sinklab.model.learned_kv import LEARNED_KV_KINDS, count_learned_kv
from sinklab.train import state


def make_model_spec(columns, shared=False):
    """Make the config of a model; a K bias has the value 0."""
    value = 'zero' if columns == 'k' else 'learned'
    return make_tiny_spec(
        model__learned_kv__kind=columns, model__learned_kv__value=value, model__learned_kv__shared=shared
    ).model


def make_learned_kv(columns, shared=False):
    return LEARNED_KV_KINDS[columns](make_model_spec(columns, shared), 4, nnx.Rngs(0))


@pytest.mark.parametrize(('shared', 'num_vectors'), [(False, 4), (True, 1)])
def test_learned_kv_parameters_are_per_head_or_shared(shared, num_vectors):
    for columns in ('k', 'kv', 'v', 'logit'):
        learned = jax.tree.leaves(nnx.to_pure_dict(nnx.state(make_learned_kv(columns, shared))))
        assert {len(leaf) for leaf in learned} == {num_vectors}


def test_count_learned_kv_returns_index_of_first_token():
    assert {columns: count_learned_kv(make_model_spec(columns)) for columns in LEARNED_KV_KINDS} == dict(
        none=0, v=0, sink_token=1, k=1, kv=1, logit=1
    )


TOKENS = np.random.default_rng(0).integers(0, 300, (2, 8))


def run_model(columns, normalizer='sum', **vectors):
    """Run a one-layer model with a column of given learned vectors; return (logits, Capture)."""
    spec = make_tiny_spec(
        model__layers=1,
        model__learned_kv__kind=columns,
        model__learned_kv__value=make_model_spec(columns).learned_kv.value,
    )
    graph, abstract = state.make_abstract_model(replace_operation(spec, 'exp', normalizer))
    rng = np.random.default_rng(0)
    params = nnx.to_pure_dict(abstract)
    vector_names = params['blocks']['attention'].pop('learned_kv', {})
    params = jax.tree.map(lambda leaf: np.float32(0.5 * rng.normal(size=leaf.shape)), params)
    params['blocks']['attention']['learned_kv'] = {name: np.float32(vectors[name]) for name in vector_names}
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
