"""Transformer model: equality with reference.py for every option, and properties that hold for any weights."""

import dataclasses
import functools
from typing import Literal, get_args, get_origin, get_type_hints

import formulas
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from conftest import choose_covering_cases, draw_params, make_tiny_spec
from flax import nnx
from model_options import COMBINATIONS, LENGTH, OPTIONS, TOKENS, make_model_changes

from sinklab.config import spec
from sinklab.config.validate import parse_config
from sinklab.configs import default
from sinklab.model.learned_kv import count_learned_kv
from sinklab.model.transformer import Transformer
from sinklab.run_dir import flatten_dict
from sinklab.train import state
from sinklab.train.forward import make_document_inputs

pytestmark = pytest.mark.slow  # each case has a program of its own to compile


CASES = {**OPTIONS, **COMBINATIONS}


def fields(name):
    """Yield (path, value) of the fields of a case's model."""
    yield from flatten_dict(dataclasses.asdict(make_tiny_spec(**CASES[name]).model)).items()


# Cases that cover every value of every model field, with preference for combinations.
COVERING = choose_covering_cases(reversed(CASES), fields)


@pytest.fixture(
    scope='module',
    params=[pytest.param(name, marks=() if name in COVERING else pytest.mark.exhaustive) for name in CASES],
)
def name(request):
    return request.param


@pytest.fixture(scope='module', autouse=True)
def forgotten():
    """Clear caches, because op-by-op execution compiles a gigabyte of small programs."""
    yield
    passed.cache_clear()
    jax.clear_caches()


@functools.cache
def case(name):
    """Return (spec, structure of the model, parameters)."""
    spec = make_tiny_spec(**CASES[name])
    return spec, state.make_abstract_model(spec)[0], draw_params(spec)


def run(name, params, token_BT, **how):
    spec, graph, _ = case(name)
    return nnx.merge(graph, params)(token_BT, **make_document_inputs(jnp.asarray(token_BT), spec), **how)


@functools.lru_cache(1)
def passed(name):
    """Return (logits, their VJP function for all parameters, Capture) for TOKENS, executed op by op."""
    with jax.disable_jit():
        return jax.vjp(lambda params: run(name, params, TOKENS, capture=True), case(name)[2], has_aux=True)


def pulled(pull, logits_BTV):
    with jax.disable_jit():
        return pull(jnp.asarray(logits_BTV, jnp.float32))[0]


def test_model_logits_attention_and_residual_match_reference(name):
    spec, _, params = case(name)
    logits, _, captured = passed(name)
    assert count_learned_kv(spec.model) == (spec.model.columns.kind in reference.COLUMN_KINDS)
    for number, tokens in enumerate(TOKENS):
        expected = reference.run_forward(params, tokens, spec)
        found = (logits[number], captured.attention_BHTS[:, number], captured.residual_BTD[:, number])
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())


def test_model_gradient_matches_finite_differences_of_reference(name):
    """Compare one directional derivative for each parameter."""
    spec, _, params = case(name)
    rng = np.random.default_rng(1)
    weight_TV = rng.normal(size=(LENGTH, 300))
    gradient = pulled(passed(name)[1], np.stack([weight_TV, 0 * weight_TV]))
    leaves, tree = jax.tree.flatten(params)
    for at, found in enumerate(jax.tree.leaves(gradient)):
        direction, step = rng.normal(size=found.shape), 1e-6

        def total(distance, at=at, direction=direction):
            moved = jax.tree.unflatten(tree, [*leaves[:at], leaves[at] + distance * direction, *leaves[at + 1 :]])
            return np.sum(weight_TV * reference.run_forward(moved, TOKENS[0], spec)[0])

        expected = (total(step) - total(-step)) / (2 * step)
        norm = np.linalg.norm(found)
        assert norm > 0, 'a parameter without effect'
        np.testing.assert_allclose(np.sum(found * direction), expected, atol=2e-3 * norm)


PLACES = (0, 4, 10)


def reached(name):
    """Return which embeddings can affect the logits at PLACES, by the definition of the mask, through all layers."""
    spec, token_T = case(name)[0], TOKENS[0]
    document_T = np.cumsum(token_T == 0) - (token_T == 0)
    seen_TS = formulas.compute_visibility(LENGTH, spec.model.mask, document_T)
    return np.linalg.matrix_power(seen_TS.astype(int), spec.model.layers)[PLACES, :] > 0


def moved(pull):
    """Return which embeddings affect the logits at PLACES; all tokens differ, so each has its own row."""
    weight_V = np.where(
        np.isin(np.arange(300), TOKENS), 0, np.linspace(-1, 1, 300)
    )  # excludes rows that a tied head uses
    gradients = (pull(np.einsum('b,t,v->btv', np.eye(2)[0], np.eye(LENGTH)[at], weight_V)) for at in PLACES)
    return np.stack([np.abs(gradient['embedding_VD'][TOKENS[0]]).max(-1) > 0 for gradient in gradients])


def test_model_logits_depend_exactly_on_visible_tokens(name):
    pull = passed(name)[1]
    np.testing.assert_array_equal(moved(functools.partial(pulled, pull)), reached(name))


@pytest.mark.parametrize('name', ['exp-sum', 'alibi, sink token, documents'])
def test_compiled_model_logits_depend_exactly_on_visible_tokens(name):
    _, pull = jax.vjp(jax.jit(lambda params: run(name, params, TOKENS)[0]), case(name)[2])
    np.testing.assert_array_equal(moved(lambda weight: pull(jnp.float32(weight))[0]), reached(name))


@pytest.mark.parametrize('name', ['exp-sum', 'post, sink token, prefix'])
@pytest.mark.parametrize('remat', ['none', 'full'])
def test_compiled_model_logits_match_op_by_op_logits(name, remat):
    found, _ = jax.jit(functools.partial(run, name, remat=remat))(case(name)[2], TOKENS)
    np.testing.assert_allclose(found, passed(name)[0], rtol=1e-4, atol=1e-4)


def test_options_cover_every_literal_value():
    seen = [make_tiny_spec(**changes).model for changes in {**OPTIONS, **COMBINATIONS}.values()]
    for kind, part in (
        (spec.ModelConfig, None),
        (spec.AttentionConfig, 'attention'),
        (spec.LearnedKVConfig, 'columns'),
        (spec.RotaryConfig, 'rotary'),
    ):
        for field, hint in get_type_hints(kind).items():
            if get_origin(hint) is Literal and field not in ('dtype', 'initialization'):
                records = [getattr(model, part) if part else model for model in seen]
                assert {getattr(record, field) for record in records} == set(get_args(hint)), field


def test_model_captures_nothing_by_default():
    with jax.disable_jit():
        _, captured = run('exp-sum', case('exp-sum')[2], TOKENS)
    assert jax.tree.leaves(captured) == []


def fresh(**changes):
    """Return initial parameters."""
    spec = make_tiny_spec(**changes)
    return nnx.to_pure_dict(nnx.state(Transformer(spec.model, spec.data.length, nnx.Rngs(0))))


def test_released_initialization_has_expected_standard_deviations():
    params = fresh(**make_model_changes(layers=3, width=64, ffn_width=96, heads=8, columns__kind='kv'))
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
    assert (params['blocks']['ffn_norms']['before']['gain_D'] == 1).all()
    np.testing.assert_allclose(attention['columns']['key_HK'].std(), 0.02, rtol=0.3)


@pytest.mark.parametrize(
    ('ffn', 'initialization', 'std'),
    [
        ('relu', 'released', (2 / (5 * 96)) ** 0.5),
        ('geglu', 'released', (2 / (5 * 96)) ** 0.5),
        ('relu', 'released_even', 96**-0.5 / 2),
    ],
)
def test_released_initialization_scales_by_depth_only_with_swiglu(ffn, initialization, std):
    params = fresh(**make_model_changes(ffn=ffn, initialization=initialization, width=64, ffn_width=96))
    np.testing.assert_allclose(params['blocks']['ffn']['out_FD'].std(), std, rtol=0.05)


def test_gpt2_initialization_has_expected_standard_deviations():
    params = fresh(**make_model_changes(initialization='gpt2', layers=8, width=64, ffn_width=96))
    for weight, std in [
        (params['embedding_VD'], 0.02),
        (params['blocks']['ffn']['in_DF'], 0.02),
        (params['blocks']['attention']['output_HKD'], 0.005),
        (params['blocks']['ffn']['out_FD'], 0.005),
    ]:
        np.testing.assert_allclose(weight.std(), std, rtol=0.05)


def test_torch_initialization_has_expected_standard_deviations():
    params = fresh(**make_model_changes(initialization='torch', width=64, ffn_width=96))
    for weight, std in [
        (params['embedding_VD'], 1.0),
        (params['head_VD'], (3 * 64) ** -0.5),
        (params['blocks']['attention']['query_DHK'], (3 * 64) ** -0.5),
        (params['blocks']['ffn']['out_FD'], (3 * 96) ** -0.5),
    ]:
        np.testing.assert_allclose(weight.std(), std, rtol=0.05)


def test_bfloat16_logits_are_close_to_float32_logits():
    params = case('exp-sum')[2]
    exact, _ = run('exp-sum', params, TOKENS)
    half = state.make_abstract_model(make_tiny_spec(model__dtype='bfloat16'))[0]
    rough, captured = nnx.merge(half, params)(TOKENS, capture=True)
    assert rough.dtype == captured.attention_BHTS.dtype == jnp.float32
    np.testing.assert_allclose(rough, exact, atol=0.05 * np.abs(exact).max())
    np.testing.assert_allclose(captured.attention_BHTS.sum(-1), 1, atol=1e-5)


def test_baseline_60m_has_published_parameter_count():
    _, abstract = state.make_abstract_model(parse_config(default.get_config().to_dict()))
    params = nnx.to_pure_dict(abstract)
    maps = {name: params['blocks'][name] for name in ('attention', 'ffn')}
    assert round(sum(leaf.size for leaf in jax.tree.leaves(maps)) / 1e6, 2) == 58.98
    assert round((params['embedding_VD'].size + params['head_VD'].size) / 1e6, 1) == 77.5
