"""The whole model against the one in reference.py, and what must hold for any weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from conftest import OPERATIONS, operation, tiny
from flax import nnx

from sinklab.model.positions import Rotary
from sinklab.model.transformer import Transformer
from sinklab.train import state

TOKENS = np.random.default_rng(0).integers(0, 300, (3, 12))


def model(spec):
    """A model whose norm gains are not all 1, so that a forgotten one shows."""
    built = Transformer(spec.model, nnx.Rngs(1))
    params = jax.tree.map(lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), nnx.state(built))
    nnx.update(built, params)
    return built, nnx.to_pure_dict(params)


@pytest.mark.parametrize(('similarity', 'normalizer'), OPERATIONS)
@pytest.mark.parametrize('position', ['rotary', 'none'])
def test_logits_and_capture_equal_the_reference(similarity, normalizer, position):
    spec = operation(tiny(model__position=position), similarity, normalizer)
    built, params = model(spec)
    logits, captured = built(TOKENS, capture=True)
    for number, tokens in enumerate(TOKENS):
        expected = reference.forward(params, tokens, spec.model)
        found = (logits[number], captured.attention_BHTS[:, number], captured.residual_BTD[:, number])
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())


def test_without_being_asked_nothing_is_captured():
    _, captured = model(tiny())[0](TOKENS)
    assert jax.tree.leaves(captured) == []


@pytest.mark.parametrize('jit', [False, True])
@pytest.mark.parametrize(('similarity', 'normalizer'), OPERATIONS)
def test_no_logit_depends_on_a_later_token(similarity, normalizer, jit):
    spec = operation(tiny(), similarity, normalizer)
    built, params = model(spec)
    structure = nnx.graphdef(built)
    table_TD = params['embedding_VD'][: spec.data.length]  # token t is row t: a gradient for every place

    def logit(table_TD, at):
        tree = {**params, 'embedding_VD': params['embedding_VD'].at[: len(table_TD)].set(table_TD)}
        logits, _ = nnx.merge(structure, tree)(jnp.arange(spec.data.length)[None])
        return logits[0, at].sum()

    gradient = jax.grad(logit)
    gradient = jax.jit(gradient, static_argnums=1) if jit else gradient
    for at in (0, 7, 15):
        moved = np.abs(gradient(table_TD, at)).max(-1)
        assert (moved[: at + 1] > 0).all()
        assert (moved[at + 1 :] == 0).all()


def test_rotary_scores_depend_on_the_distance_alone():
    query, key = (jax.random.normal(jax.random.key(seed), (1, 1, 1, 8)) for seed in range(2))
    queries, keys = Rotary().rotate(jnp.tile(query, (1, 10, 1, 1)), jnp.tile(key, (1, 10, 1, 1)))
    score = np.einsum('tk,sk->ts', queries[0, :, 0], keys[0, :, 0])
    for distance in range(-9, 10):
        diagonal = np.diagonal(score, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-5)


def test_the_released_initialization():
    spec = tiny(model__layers=3, model__width=64, model__ffn_width=96, model__heads=8)
    params = nnx.to_pure_dict(nnx.state(Transformer(spec.model, nnx.Rngs(0))))
    attention, ffn = params['blocks']['attention'], params['blocks']['ffn']
    for weight, std in [
        (params['embedding_VD'], (2 / (5 * 64)) ** 0.5),
        (params['head_VD'], (2 / (5 * 64)) ** 0.5),
        (attention['query_DHK'], (2 / (5 * 64)) ** 0.5),
        (attention['output_HKD'], (2 / (5 * 32)) ** 0.5),
        (ffn['gate_DF'], (2 / (5 * 64)) ** 0.5),
        (ffn['out_FD'], 96**-0.5 / 3),
    ]:
        np.testing.assert_allclose(weight.std(), std, rtol=0.05)
    assert not np.allclose(attention['query_DHK'][0], attention['query_DHK'][1]), 'layers start alike'
    assert (params['blocks']['ffn_norm']['gain_D'] == 1).all()


def test_the_initialization_of_gpt2():
    spec = tiny(model__initialization='gpt2', model__layers=8, model__width=64, model__ffn_width=96)
    params = nnx.to_pure_dict(nnx.state(Transformer(spec.model, nnx.Rngs(0))))
    for weight, std in [
        (params['embedding_VD'], 0.02),
        (params['blocks']['ffn']['in_DF'], 0.02),
        (params['blocks']['attention']['output_HKD'], 0.005),
        (params['blocks']['ffn']['out_FD'], 0.005),
    ]:
        np.testing.assert_allclose(weight.std(), std, rtol=0.05)


def test_half_precision_follows_single_precision():
    single, half = tiny(), tiny(model__dtype='bfloat16')
    params = model(single)[1]
    exact, _ = nnx.merge(state.architecture(single.model)[0], params)(TOKENS)
    rough, captured = nnx.merge(state.architecture(half.model)[0], params)(TOKENS, capture=True)
    assert rough.dtype == captured.attention_BHTS.dtype == jnp.float32
    np.testing.assert_allclose(rough, exact, atol=0.05 * np.abs(exact).max())
    np.testing.assert_allclose(captured.attention_BHTS.sum(-1), 1, atol=1e-5)


def test_the_60m_baseline_has_the_published_number_of_parameters():
    from configs import default
    from sinklab.spec import parse

    _, abstract = state.architecture(parse(default.get_config().to_dict()).model)
    params = nnx.to_pure_dict(abstract)
    maps = {name: params['blocks'][name] for name in ('attention', 'ffn')}
    assert round(sum(leaf.size for leaf in jax.tree.leaves(maps)) / 1e6, 2) == 58.98
    assert round((params['embedding_VD'].size + params['head_VD'].size) / 1e6, 1) == 77.5
