"""Properties of any weights: Propositions 1-4 of the paper for a repeated token, and identities of operations."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import draw_params, make_tiny_spec, replace_operation
from flax import nnx

from sinklab.metrics import sink
from sinklab.metrics.propositions import PROPOSITIONS
from sinklab.train import state, step

pytestmark = pytest.mark.slow  # each case compiles its own program
T = 64
REPEATED_TOKENS = np.full((1, T), 7)


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


@pytest.mark.parametrize('position', PROPOSITIONS)
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


# After one layer, hidden states differ where rows differ in the sum of their weights of text tokens.
ONE_LAYER = dict(model__layers=1)


@pytest.mark.parametrize(('columns', 'value'), [('k', 'zero'), ('logit', 'learned')])
def test_learned_column_share_follows_its_score_for_repeated_token(columns, value):
    attention_LHTS, _, _ = run_repeated_token(
        'none', model__columns__kind=columns, model__columns__value=value, **ONE_LAYER
    )
    t = np.arange(1, T + 1)
    star_LHT, first_LHT = attention_LHTS[..., 0], attention_LHTS[..., 1]
    odds_LH1 = star_LHT[..., :1] / first_LHT[..., :1]
    np.testing.assert_allclose(star_LHT, odds_LH1 / (odds_LH1 + t), rtol=1e-4)
    assert (np.abs(star_LHT - 1 / (t + 1)).max(-1) > 0.01).all()


def test_sigmoid_weights_of_repeated_token_are_equal_and_normalize_to_uniform():
    attention_LHTS, _, _ = run_repeated_token('none', ('sigmoid', 'none'), **ONE_LAYER)
    np.testing.assert_allclose(attention_LHTS, np.tri(T) * attention_LHTS[..., :1, :1], rtol=1e-5)
    np.testing.assert_allclose(
        sink.compute_importance(sink.normalize_rows(attention_LHTS), 1), sink.compute_uniform_importance(T), rtol=1e-4
    )


TOKENS = np.random.default_rng(0).integers(0, 300, (2, 12))


def test_added_heads_equal_concatenation_with_repeated_output_map():
    added = make_tiny_spec(model__combination='add')
    params = draw_params(added)
    repeated_params = jax.tree.map(lambda leaf: leaf, params)
    output_LHKD = params['blocks']['attention']['output_HKD']
    repeated_params['blocks']['attention']['output_HKD'] = output_LHKD.repeat(4, 1)
    actual, reference = (
        run_model(spec, inputs, TOKENS)[0] for spec, inputs in ((added, params), (make_tiny_spec(), repeated_params))
    )
    np.testing.assert_allclose(actual, reference, rtol=1e-4, atol=1e-4)


ALPHA = 0.25


def is_output_weight(path, _):
    return path[-1].key == 'output_HKD'


def make_optimizers(name):
    """Return the optimizer for attention scaled by alpha, and the equivalent one for W_O scaled by alpha."""
    rate, epsilon, decay = 1e-2, 1e-3, 0.1
    if name == 'adamw':
        optimizer = optax.adamw(rate, 0.9, 0.95, epsilon, weight_decay=decay)
        return optimizer, optax.adamw(rate * ALPHA, 0.9, 0.95, epsilon / ALPHA, weight_decay=decay / ALPHA)
    return optax.sgd(rate, 0.9), optax.sgd(rate * ALPHA**2, 0.9)


def train_model(spec, params, optimizer, steps=4):
    """Return the losses of a few steps, and the parameters after them."""
    compute_gradient, opt_state, losses = make_gradient_function(spec), optimizer.init(params), []
    ids = jnp.asarray(np.random.default_rng(1).integers(0, 300, (4, 13)))
    for _ in range(steps):
        value, gradient = compute_gradient(params, ids)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return losses, params


@functools.cache
def make_gradient_function(spec):
    return jax.jit(jax.value_and_grad(step.make_loss(spec)))


@pytest.mark.parametrize('name', ['adamw', 'sgd'])
def test_attention_gain_equals_scaled_output_map_and_optimizer(name):
    """Scale W_O by alpha (appendix D.4).

    For AdamW, scale its rate by alpha, and divide epsilon and decay by alpha. For SGD, scale its rate by alpha^2.
    """
    gain_spec = make_tiny_spec(model__attention__gain=ALPHA)
    params = draw_params(gain_spec)
    optimizer, output_optimizer = make_optimizers(name)
    gain_losses, final_params = train_model(gain_spec, params, optimizer)

    scaled_params = jax.tree_util.tree_map_with_path(
        lambda p, x: x * (ALPHA if is_output_weight(p, x) else 1), params
    )
    labels = jax.tree_util.tree_map_with_path(lambda p, x: 'output' if is_output_weight(p, x) else 'rest', params)
    partitioned_optimizer = optax.partition({'output': output_optimizer, 'rest': optimizer}, labels)
    scaled_losses, final_scaled_params = train_model(make_tiny_spec(), scaled_params, partitioned_optimizer)
    np.testing.assert_allclose(gain_losses, scaled_losses, rtol=1e-4)
    assert gain_losses[0] - gain_losses[-1] > 0.1, 'nothing was learned'
    actual, reference = (tree['blocks']['attention']['output_HKD'] for tree in (final_params, final_scaled_params))
    np.testing.assert_allclose(ALPHA * actual, reference, atol=1e-4)

    same_rate_losses, _ = train_model(make_tiny_spec(), scaled_params, optimizer)
    assert abs(same_rate_losses[-1] - gain_losses[-1]) > 1e-3, 'the rate of W_O has no say'
