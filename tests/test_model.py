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
from flax import nnx
from model_options import COMBINATIONS, LENGTH, OPTIONS, TOKENS, make_model_changes
from tiny_specs import choose_covering_cases, draw_params, make_tiny_spec

from sinklab.attn import backends
from sinklab.attn import reference as attn_reference
from sinklab.config import spec
from sinklab.config.differences import flatten_dict
from sinklab.config.validate import parse_config
from sinklab.configs import default
from sinklab.model.learned_kv import LEARNED_KV_KINDS, count_learned_kv
from sinklab.model.transformer import Transformer
from sinklab.train import state
from sinklab.train.step import make_document_inputs

pytestmark = pytest.mark.slow  # each case compiles its own program


CASES = {**OPTIONS, **COMBINATIONS}


def iterate_fields(name):
    """Yield (path, value) of the fields of a case's model."""
    yield from flatten_dict(dataclasses.asdict(make_tiny_spec(**CASES[name]).model)).items()


# Cases that cover every value of every model field, with preference for combinations.
COVERING_CASES = choose_covering_cases(reversed(CASES), iterate_fields)


@pytest.fixture(
    scope='module',
    params=[pytest.param(name, marks=() if name in COVERING_CASES else pytest.mark.exhaustive) for name in CASES],
)
def name(request):
    return request.param


@pytest.fixture(scope='module', autouse=True)
def cache_cleanup():
    """Clear caches, because op-by-op execution compiles a gigabyte of small programs."""
    yield
    compute_vjp.cache_clear()
    jax.clear_caches()


@functools.cache
def make_case(name):
    """Return (spec, structure of the model, parameters)."""
    spec = make_tiny_spec(**CASES[name])
    return spec, state.make_abstract_model(spec)[0], draw_params(spec)


def run_model(name, params, token_BT, **options):
    spec, graph, _ = make_case(name)
    return nnx.merge(graph, params)(token_BT, **make_document_inputs(jnp.asarray(token_BT), spec), **options)


@functools.lru_cache(1)
def compute_vjp(name):
    """Return (logits, their VJP function for all parameters, Capture) for TOKENS, executed op by op."""
    with jax.disable_jit():
        return jax.vjp(lambda params: run_model(name, params, TOKENS, capture=True), make_case(name)[2], has_aux=True)


def apply_vjp(vjp_function, logits_BTV):
    with jax.disable_jit():
        return vjp_function(jnp.asarray(logits_BTV, jnp.float32))[0]


def test_model_logits_attention_and_residual_match_reference(name):
    spec, _, params = make_case(name)
    logits, _, captures = compute_vjp(name)
    assert count_learned_kv(spec.model) == (spec.model.learned_kv.kind in reference.COLUMN_KINDS)
    for number, tokens in enumerate(TOKENS):
        expected = reference.run_forward(params, tokens, spec)
        actual = (logits[number], captures.attention_BHTS[:, number], captures.residual_BTD[:, number])
        for actual_array, expected_array in zip(actual, expected, strict=True):
            np.testing.assert_allclose(
                actual_array, expected_array, rtol=1e-4, atol=1e-4 * np.abs(expected_array).max()
            )


def test_model_gradient_matches_finite_differences_of_reference(name):
    """Compare one directional derivative for each parameter."""
    spec, _, params = make_case(name)
    rng = np.random.default_rng(1)
    weight_TV = rng.normal(size=(LENGTH, 300))
    gradient = apply_vjp(compute_vjp(name)[1], np.stack([weight_TV, 0 * weight_TV]))
    leaves, tree = jax.tree.flatten(params)
    for index, gradient_leaf in enumerate(jax.tree.leaves(gradient)):
        direction, step = rng.normal(size=gradient_leaf.shape), 1e-6

        def compute_total(distance, index=index, direction=direction):
            moved_params = jax.tree.unflatten(
                tree, [*leaves[:index], leaves[index] + distance * direction, *leaves[index + 1 :]]
            )
            return np.sum(weight_TV * reference.run_forward(moved_params, TOKENS[0], spec)[0])

        expected = (compute_total(step) - compute_total(-step)) / (2 * step)
        norm = np.linalg.norm(gradient_leaf)
        assert norm > 0, 'a parameter without effect'
        np.testing.assert_allclose(np.sum(gradient_leaf * direction), expected, atol=2e-3 * norm)


POSITIONS = (0, 4, 10)


def find_visible_embeddings(name):
    """Return which embeddings can affect the logits at POSITIONS through all layers, by the mask's definition."""
    spec, token_T = make_case(name)[0], TOKENS[0]
    document_T = np.cumsum(token_T == 0) - (token_T == 0)
    masks = [reference.make_layer_spec(spec, layer).model.mask for layer in range(spec.model.layers)]
    visibility_by_layer = [
        formulas.compute_visibility(LENGTH, mask, document_T).astype(int) for mask in reversed(masks)
    ]
    return functools.reduce(np.matmul, visibility_by_layer)[POSITIONS, :] > 0


def find_affecting_embeddings(vjp_function):
    """Return which embeddings affect the logits at POSITIONS; all tokens differ, so each has its own row."""
    weight_V = np.where(
        np.isin(np.arange(300), TOKENS), 0, np.linspace(-1, 1, 300)
    )  # excludes rows that a tied head uses
    gradients = (
        vjp_function(np.einsum('b,t,v->btv', np.eye(2)[0], np.eye(LENGTH)[position], weight_V))
        for position in POSITIONS
    )
    return np.stack([np.abs(gradient['embedding_VD'][TOKENS[0]]).max(-1) > 0 for gradient in gradients])


def test_model_logits_depend_exactly_on_visible_tokens(name):
    vjp_function = compute_vjp(name)[1]
    np.testing.assert_array_equal(
        find_affecting_embeddings(functools.partial(apply_vjp, vjp_function)), find_visible_embeddings(name)
    )


@pytest.mark.parametrize('remat', ['none', 'full'])
def test_compiled_model_logits_match_op_by_op_logits(remat):
    name = 'post, sink token, prefix'
    logits, _ = jax.jit(functools.partial(run_model, name, remat=remat))(make_case(name)[2], TOKENS)
    np.testing.assert_allclose(logits, compute_vjp(name)[0], rtol=1e-4, atol=1e-4)


def test_options_cover_every_literal_value():
    models = [make_tiny_spec(**changes).model for changes in {**OPTIONS, **COMBINATIONS}.values()]
    for config_class, attribute in (
        (spec.ModelConfig, None),
        (spec.AttentionConfig, 'attention'),
        (spec.LearnedKVConfig, 'learned_kv'),
        (spec.RotaryConfig, 'rotary'),
        (spec.GlobalLayersConfig, 'global_layers'),
    ):
        for field, hint in get_type_hints(config_class).items():
            if get_origin(hint) is Literal and field not in ('dtype', 'initialization'):
                configs = [getattr(model, attribute) if attribute else model for model in models]
                assert {getattr(config, field) for config in configs} == set(get_args(hint)), field


def make_initial_params(**changes):
    """Return initial parameters."""
    spec = make_tiny_spec(**changes)
    return nnx.to_pure_dict(nnx.state(Transformer(spec.model, spec.data.length, nnx.Rngs(0))))


SIZES = make_model_changes(layers=3, width=64, ffn_width=96, heads=8)
FAN_IN_64, FAN_IN_96 = (2 / (5 * 64)) ** 0.5, (2 / (5 * 96)) ** 0.5
# Standard deviations of (embedding, head, queries, output of attention, output of the FFN).
INITIALIZATION_CASES = [
    ('released', 'swiglu', (FAN_IN_64, FAN_IN_64, FAN_IN_64, (2 / (5 * 32)) ** 0.5, 96**-0.5 / 3)),
    ('released', 'geglu', (FAN_IN_64, FAN_IN_64, FAN_IN_64, (2 / (5 * 32)) ** 0.5, FAN_IN_96)),
    ('released_even', 'relu', (FAN_IN_64, FAN_IN_64, FAN_IN_64, (2 / (5 * 32)) ** 0.5, 96**-0.5 / 3)),
    ('gpt2', 'swiglu', (0.02, 0.02, 0.02, 0.02 / 6**0.5, 0.02 / 6**0.5)),
    ('torch', 'swiglu', (1.0, (3 * 64) ** -0.5, (3 * 64) ** -0.5, (3 * 32) ** -0.5, (3 * 96) ** -0.5)),
]


@pytest.mark.parametrize(('initialization', 'ffn', 'stds'), INITIALIZATION_CASES)
def test_initialization_has_expected_standard_deviations(initialization, ffn, stds):
    params = make_initial_params(**SIZES, model__initialization=initialization, model__ffn=ffn)
    attention = params['blocks']['attention']
    weights = params['embedding_VD'], params['head_VD'], attention['query_DHK'], attention['output_HKD']
    for weight, std in zip((*weights, params['blocks']['ffn']['out_FD']), stds, strict=True):
        np.testing.assert_allclose(weight.std(), std, rtol=0.05)
    assert not np.allclose(attention['query_DHK'][0], attention['query_DHK'][1]), 'layers start alike'
    assert (params['blocks']['ffn_norms']['before']['gain_D'] == 1).all()


@pytest.mark.parametrize(('shared', 'num_vectors'), [(False, 4), (True, 1)])
def test_learned_kv_parameters_are_per_head_or_shared(shared, num_vectors):
    for kind, value in (('k', 'zero'), ('kv', 'learned'), ('v', 'learned'), ('logit', 'learned')):
        changes = make_model_changes(learned_kv__kind=kind, learned_kv__value=value, learned_kv__shared=shared)
        learned = LEARNED_KV_KINDS[kind](make_tiny_spec(**changes).model, 4, nnx.Rngs(0))
        assert {len(leaf) for leaf in jax.tree.leaves(nnx.to_pure_dict(nnx.state(learned)))} == {num_vectors}


def test_baseline_60m_has_published_parameter_count():
    _, abstract = state.make_abstract_model(parse_config(default.get_config().to_dict()))
    params = nnx.to_pure_dict(abstract)
    block_params = {name: params['blocks'][name] for name in ('attention', 'ffn')}
    assert round(sum(leaf.size for leaf in jax.tree.leaves(block_params)) / 1e6, 2) == 58.98
    assert round((params['embedding_VD'].size + params['head_VD'].size) / 1e6, 1) == 77.5


@pytest.mark.parametrize(('changes', 'kv_heads'), [({}, 2), (dict(model__gate='value_state'), 4)])
def test_backend_receives_keys_and_values_that_heads_share(monkeypatch, changes, kv_heads):
    tiny_spec, head_counts = make_tiny_spec(model__heads=4, model__kv_heads=2, **changes), []

    def attend(query_BTHK, key_BSGK, value_BSGK, spec):
        head_counts.append((query_BTHK.shape[2], key_BSGK.shape[2], value_BSGK.shape[2]))
        return attn_reference.attend(query_BTHK, key_BSGK, value_BSGK, spec)

    monkeypatch.setitem(backends.BACKENDS, 'chunked', backends.Backend(attend))
    model = Transformer(tiny_spec.model, 8, nnx.Rngs(0))
    model(jnp.zeros((1, 8), jnp.int32))
    assert set(head_counts) == {(4, kv_heads, kv_heads)}
