"""Properties of any weights: Propositions 1-4 of the paper for a repeated token."""

import math

import formulas
import jax
import numpy as np
import pytest
from flax import nnx
from tiny_specs import draw_params, make_tiny_spec, replace_operation

from sinklab.metrics import propositions, sink
from sinklab.train import state

pytestmark = pytest.mark.slow  # each case compiles its own program
T = 64
REPEATED_TOKENS = np.full((1, T), 7)
# Position encodings with which a repeated token has equal hidden states.
POSITIONS = 'none', *formulas.RELATIVE_POSITIONS, 'relative_t5', 'alibi', 'rotary'


def run_model(spec, params, tokens):
    """Return (logits, Capture), executed op by op."""
    with jax.disable_jit():
        return nnx.merge(state.make_abstract_model(spec)[0], params)(tokens, capture=True)


def run_repeated_token(position, pair=('exp', 'sum'), **changes):
    """Return (attention_LHTS, residual_LTD, parameters) for one repeated token."""
    spec = replace_operation(make_tiny_spec(model__position=position, data__length=T, **changes), *pair)
    params = draw_params(spec)
    _, captured = run_model(spec, params, REPEATED_TOKENS)
    return *(np.float64(x[:, 0]) for x in (captured.attention_BHTS, captured.residual_BTD)), params


@pytest.mark.parametrize('position', POSITIONS)
def test_repeated_token_has_equal_hidden_states_after_every_block(position):
    _, residual_LTD, _ = run_repeated_token(position)
    np.testing.assert_allclose(residual_LTD, residual_LTD[:, :1].repeat(T, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('position', ['learned', 'absolute'])
def test_repeated_token_has_unequal_hidden_states_with_position_embeddings(position):
    _, residual_LTD, _ = run_repeated_token(position)
    assert (np.abs(residual_LTD - residual_LTD[:, :1]).max(-1)[:, 1:] > 1e-2).all()


def test_proposition_1_attention_is_uniform_without_positions():
    attention_LHTS, _, _ = run_repeated_token('none')
    uniform_TS = np.tri(T) / np.arange(1, T + 1)[:, None]
    np.testing.assert_allclose(attention_LHTS, np.broadcast_to(uniform_TS, attention_LHTS.shape), atol=1e-6)
    np.testing.assert_allclose(
        sink.compute_importance(attention_LHTS, 1), sink.compute_uniform_importance(T), rtol=1e-5
    )
    assert round(sink.compute_uniform_importance(T), 4) == 0.0741


@pytest.mark.parametrize(('kind', 'alpha'), [('code', 0.334), ('printed', 0.225), ('negative', 0.022)])
def test_proposition_2_relative_positions_alone_determine_sink(kind, alpha):
    attention_LHTS, _, _ = run_repeated_token(f'relative_paper_{kind}')
    assert np.ptp(attention_LHTS, axis=(0, 1)).max() < 1e-5, 'it depends on weights'
    result = np.asarray(sink.compute_importance(attention_LHTS, 1))
    np.testing.assert_allclose(result, alpha, atol=5e-4)
    if kind == 'code':
        np.testing.assert_allclose(attention_LHTS[:, :, 1, 0], 0.731, atol=5e-4)
        np.testing.assert_allclose(attention_LHTS[:, :, 63, 0], 0.113, atol=5e-4)


def test_proposition_3_alibi_prefers_nearest_token():
    attention_LHTS, _, _ = run_repeated_token('alibi', model__heads=8)
    for head, slope in enumerate(0.5 ** np.arange(1, 9)):
        for t in range(T):
            weight_S = np.exp(-slope * (t - np.arange(t + 1)))
            result = attention_LHTS[:, head, t, : t + 1]
            np.testing.assert_allclose(result, [weight_S / weight_S.sum()] * 2, rtol=1e-4)
            assert (np.diff(result) > 0).all()
            assert (result[:, 0] <= (1 + 1e-5) / (t + 1)).all()
    alpha_LH = np.asarray(sink.compute_importance(attention_LHTS, 1))[..., 0]
    for slope, alpha in ((1 / 2, 0.028), (1 / 16, 0.054), (1 / 256, 0.072)):
        np.testing.assert_allclose(alpha_LH[:, round(-math.log2(slope)) - 1], alpha, atol=5e-4)
    assert (alpha_LH < sink.compute_uniform_importance(T)).all()


def test_proposition_4_rotary_attention_is_bounded():
    """Check that A_ti <= e^2xi / (e^2xi + t - 1), where xi = |q| |k| / sqrt(K)."""
    attention_LHTS, residual_LTD, params = run_repeated_token('rotary')
    stream_LD = np.stack([params['embedding_VD'][7], residual_LTD[0, 0]])
    weights = params['blocks']['attention']
    gain_LD = params['blocks']['attention_norms']['before']['gain_D']
    for layer, stream_D in enumerate(stream_LD):
        x_D = stream_D / np.sqrt((stream_D**2).mean() + 1e-5) * gain_LD[layer]
        for head in range(4):
            query, key = (x_D @ weights[name][layer, :, head] for name in ('query_DHK', 'key_DHK'))
            xi = np.linalg.norm(query) * np.linalg.norm(key) / 2
            for t in range(1, T + 1):
                bound = 1 / (1 + (t - 1) * np.exp(-2 * xi))
                assert (attention_LHTS[layer, head, t - 1] <= bound + 1e-5).all()
    assert np.abs(attention_LHTS[..., 63, :] - 1 / 64).max() > 0.01, 'nothing to bound'


@pytest.mark.parametrize('kind', formulas.RELATIVE_POSITIONS)
@pytest.mark.parametrize('change', [None, 'far', 'text'])
def test_proposition_2_holds_only_for_softmax_of_distance(kind, change):
    """Break it by another weight beyond distance 128, or by weights that depend on the text."""
    weight_TS = np.tri(160) * np.exp(formulas.compute_position_bias(kind, np.arange(160), 1)[0])
    attention_TS = weight_TS / weight_TS.sum(-1, keepdims=True)
    if change == 'far':
        attention_TS[150, 3] += 0.01
    if change == 'text':
        attention_TS[20, 7] += 0.01
    difference = np.abs(attention_TS - propositions.apply_last_row_by_distance(attention_TS)).max()
    assert (difference <= 1e-5) == (change is None)
