"""Streaming inference: one pass, segments and single tokens match the reference cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import streaming_reference
from flax import nnx
from model_options import COMBINATIONS, GEMMA3, OPTIONS, SIGMOID, make_model_changes
from tiny_specs import draw_params, make_tiny_spec

from sinklab.attn import chunked
from sinklab.errors import UserError
from sinklab.loss_mask import exclude_from_loss
from sinklab.model.streaming import CacheConfig, init_stream, read_tokens
from sinklab.model.transformer import Transformer, compute_logits
from sinklab.train import state
from sinklab.train.generate import (
    Sampler,
    check_streaming,
    jit_model_function,
    measure_perplexity,
    sample_tokens,
    split_into_segments,
)

TOKENS = 1 + np.random.default_rng(0).permutation(299)[:14].astype(np.int32)
CACHES = [CacheConfig(0, 4), CacheConfig(2, 3)]
MODEL_CHANGES = OPTIONS | COMBINATIONS
# Every kind of position, column, operation and window.
SELECTED_CACHES = {
    **{f'position {kind}': CACHES[1] for kind in ('learned', 'relative_t5', 'alibi', 'rotary')},
    **dict.fromkeys(('learned, sink token', 'window, kv, qk_norm'), CACHES[0]),
    **dict.fromkeys(('sink token', 't5, logit', 'off by one, k, offset', 'linear, kv, add_wide'), CACHES[1]),
    **dict.fromkeys(('global layers, Gemma 3', 'global layers without positions'), CACHES[1]),
    **dict.fromkeys(('relu by its count, kv, window', 'gate value'), CACHES[1]),
}
WITHOUT_RECENT = [
    (name, CacheConfig(num_first, 0)) for name in ('position rotary', 'learned, sink token') for num_first in (0, 2)
]


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Shorten chunks, so that a pass has several and the last is not full."""
    monkeypatch.setattr(chunked, 'CHUNK_SIZE', 4)


@functools.cache
def make_spec_and_params(**changes):
    spec = make_tiny_spec(**changes)
    return spec, draw_params(spec)


def compute_logits_in_segments(spec, params, cache, size, token_T=TOKENS):
    """Return logits_TV of a text that is read `size` tokens at a time."""

    def step(model, stream, id_BT):
        hidden_BTD, stream = read_tokens(model, cache, stream, id_BT)
        return compute_logits(hidden_BTD, model.head[...])[0], stream

    program, parts = jit_model_function(spec, step), []
    stream = jit_model_function(spec, lambda model: init_stream(model, cache))(params)
    for start in range(0, len(token_T), size):
        logits_TV, stream = program(params, stream, token_T[None, start : start + size])
        parts.append(logits_TV)
    return np.concatenate(parts)


def assert_near(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize(('name', 'cache'), [*SELECTED_CACHES.items(), *WITHOUT_RECENT], ids=str)
def test_one_pass_matches_reference_cache(name, cache):
    spec, params = make_spec_and_params(**MODEL_CHANGES[name])
    expected = streaming_reference.compute_logits(params, TOKENS, spec, cache.num_first, cache.num_recent)
    assert_near(compute_logits_in_segments(spec, params, cache, len(TOKENS)), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    'changes',
    [GEMMA3, SIGMOID | make_model_changes(learned_kv__kind='sink_token')],
    ids=['Gemma 3', 'sigmoid, sink token'],
)
def test_logits_do_not_depend_on_segment_size(changes):
    spec, params = make_spec_and_params(**changes)
    for size, cache in ((1, CacheConfig(0, 4)), (5, CacheConfig(3, 6)), (8, CacheConfig(14, 1))):
        assert_near(
            compute_logits_in_segments(spec, params, cache, size),
            compute_logits_in_segments(spec, params, cache, len(TOKENS)),
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    'name', ['position rotary', 'learned, sink token', 'alibi, k', 'window', 'global layers, Gemma 3']
)
def test_cache_that_keeps_all_tokens_matches_full_attention(name):
    spec, params = make_spec_and_params(**MODEL_CHANGES[name])
    expected = nnx.merge(state.make_abstract_model(spec)[0], params)(TOKENS[None])[0][0]
    for cache in (CacheConfig(0, 14), CacheConfig(10, 5)):
        assert_near(compute_logits_in_segments(spec, params, cache, len(TOKENS)), expected)


def test_cache_larger_than_text_is_clipped():
    assert CacheConfig(0, 10**9).clip(14) == CacheConfig(0, 14)
    assert CacheConfig(4, 8).clip(20) == CacheConfig(4, 8)


@pytest.mark.slow
def test_perplexity_covers_all_predicted_tokens():
    spec, params = make_spec_and_params(**make_model_changes(learned_kv__kind='sink_token'))
    ids = TOKENS.copy()
    ids[[0, 6]] = exclude_from_loss(ids[[0, 6]])
    logits_TV = streaming_reference.compute_logits(params, TOKENS, spec, 2, 3)[:-1]
    is_predicted = np.arange(1, 14) != 6
    expected = streaming_reference.compute_perplexity(logits_TV[is_predicted], TOKENS[1:][is_predicted])
    for segment_size in (5, 1024):
        result = measure_perplexity(spec, CacheConfig(2, 3), params, ids, segment_size)
        assert result.perplexity == pytest.approx(expected, rel=1e-4)
        assert result.num_predicted == 12


def test_segments_have_equal_size_and_hold_all_tokens():
    for length, max_size in ((14, 5), (10, 5), (3, 1024), (1, 1)):
        segments = split_into_segments(np.arange(length), -1, max_size)
        assert segments.shape[2] <= max_size
        assert segments.shape[0] == -(-length // max_size)
        np.testing.assert_array_equal(segments.ravel()[:length], np.arange(length))
        assert (segments.ravel()[length:] == -1).all()


@pytest.mark.slow
def test_memory_grows_linearly_with_text_length(monkeypatch):
    monkeypatch.setattr(chunked, 'CHUNK_SIZE', 128)
    spec, params = make_spec_and_params(model__layers=1)

    def measure_bytes(length):
        def run(model, id_BT):
            return read_tokens(model, CacheConfig(4, 60), init_stream(model, CacheConfig(4, 60)), id_BT)[0]

        program = jit_model_function(spec, run).lower(params, jax.ShapeDtypeStruct((1, length), jnp.int32)).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert measure_bytes(8192) < 2.2 * measure_bytes(4096)


@pytest.mark.parametrize(
    ('changes', 'cache', 'value'),
    [
        (make_model_changes(mask__prefix=3), CacheConfig(2, 3), 'model.mask.prefix'),
        (make_model_changes(mask__block=5), CacheConfig(2, 3), 'model.mask.block'),
        (make_model_changes(position='learned'), CacheConfig(4, 12), '4+12'),
        (make_model_changes(attention__feature_map='elu1'), CacheConfig(2, 3), 'elu1'),
        (make_model_changes(forget_gate=True), CacheConfig(2, 3), 'model.forget_gate'),
        (dict(data__task='backcopy', data__triggers=3), CacheConfig(2, 3), 'backcopy'),
    ],
    ids=['prefix', 'block', 'missing positions', 'feature map', 'forget gate', 'synthetic task'],
)
def test_check_streaming_refuses_what_cannot_be_streamed(changes, cache, value):
    with pytest.raises(UserError) as error:
        check_streaming(make_tiny_spec(**changes), cache)
    assert value in str(error.value)


def test_check_streaming_accepts_as_many_learned_positions_as_there_are():
    check_streaming(make_tiny_spec(model__position='learned'), CacheConfig(4, 11))
    check_streaming(
        make_tiny_spec(model__position='learned', model__learned_kv__kind='sink_token'), CacheConfig(4, 12)
    )
    check_streaming(make_tiny_spec(), CacheConfig(4, 1020))


def test_measure_perplexity_refuses_text_without_targets():
    spec, params = make_spec_and_params()
    for ids in (TOKENS[:1], np.append(TOKENS[:1], exclude_from_loss(TOKENS[1:]))):
        with pytest.raises(UserError):
            measure_perplexity(spec, CacheConfig(2, 3), params, ids)


GREEDY = Sampler(0.0, None)


def sample_ids(sampler=GREEDY, tokens=9, seed=0, prompt=TOKENS, **changes):
    spec, params = make_spec_and_params(**changes)
    return list(sample_tokens(spec, CacheConfig(2, 3), params, prompt, tokens, sampler, seed))


@pytest.mark.slow
@pytest.mark.parametrize(
    'changes', [{}, make_model_changes(position='learned', learned_kv__kind='sink_token')], ids=str
)
def test_sampling_at_zero_temperature_returns_argmax_under_cache(changes):
    spec, params = make_spec_and_params(**changes)
    ids = TOKENS.tolist()
    for token in sample_ids(**changes):
        assert token == streaming_reference.compute_logits(params, np.array(ids), spec, 2, 3)[-1].argmax()
        ids.append(token)
    assert len(ids) > len(TOKENS) + 1


@pytest.mark.slow
def test_sampling_is_deterministic_for_given_seed():
    sampler = Sampler(2.0, None)
    assert sample_ids(sampler) == sample_ids(sampler) != sample_ids(sampler, seed=1)
    assert sample_ids(Sampler(2.0, 1)) == sample_ids(Sampler(1e-12, None)) == sample_ids()


@pytest.mark.slow
def test_sampler_draws_most_likely_tokens_by_probability():
    logits_V, keys = jnp.log(jnp.array([0.1, 0.6, 0.3])), jax.random.split(jax.random.key(0), 4000)

    def compute_shares(sampler):
        tokens = jax.vmap(lambda key: sampler(logits_V, key))(keys)
        return np.bincount(tokens, minlength=3) / len(keys)

    np.testing.assert_allclose(compute_shares(Sampler(1.0, None)), [0.1, 0.6, 0.3], atol=0.03)
    np.testing.assert_allclose(compute_shares(Sampler(1.0, 2)), [0, 2 / 3, 1 / 3], atol=0.03)
    np.testing.assert_allclose(compute_shares(Sampler(0.5, 3)), np.array([1, 36, 9]) / 46, atol=0.03)
    np.testing.assert_array_equal(compute_shares(GREEDY), [0, 1, 0])


@pytest.mark.slow
def test_sampling_stops_at_end_token():
    ids = sample_ids()
    index = next(index for index, token in enumerate(ids) if token not in ids[:index] and index)
    assert sample_ids(data__end_token=ids[index], data__tokenizer='mine.json') == ids[:index]


def test_sampling_refuses_empty_prompt():
    with pytest.raises(UserError):
        sample_ids(prompt=TOKENS[:0])


@pytest.mark.parametrize(
    ('changes', 'kv_heads'), [({}, 2), (dict(learned_kv__kind='kv'), 4), (dict(gate='value'), 4)]
)
def test_cache_holds_one_entry_for_each_key_head(changes, kv_heads):
    """Learned keys and gated values belong to single query heads, so that these models share no keys."""
    spec = make_tiny_spec(**make_model_changes(heads=4, kv_heads=2, **changes))
    model = nnx.eval_shape(lambda: Transformer(spec.model, spec.data.length, nnx.Rngs(0)))
    caches = nnx.eval_shape(lambda model: init_stream(model, CacheConfig(1, 3)), model).caches
    shapes = {array.shape[3] for array in jax.tree.leaves(caches)}
    assert shapes == {kv_heads}
