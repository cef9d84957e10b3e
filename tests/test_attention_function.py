"""Function `sinklab.attention` against NumPy formulas in float64 and against JAX, under jit, grad and vmap."""

import functools
import inspect
import subprocess
import sys

import formulas
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_specs import OPERATIONS

import sinklab
from sinklab.attn.operations import NORMALIZERS, SIMILARITIES, Similarity
from sinklab.config.spec import NORMALIZERS_BY_SIMILARITY, AttentionConfig

BATCH, LENGTH, HEADS, GROUPS, WIDTH, VALUE_WIDTH = 2, 9, 4, 2, 8, 6
POWERS = {'p_norm': 1.5}


def draw_arrays(seed=0, queries=LENGTH, keys=LENGTH, batch=(BATCH,), dtype=np.float32, groups=GROUPS):
    """Return query, key, value and bias whose rows of scores have both signs and a sum far from 0."""
    rng = np.random.default_rng(seed)
    shapes = (
        (*batch, queries, HEADS, WIDTH),
        (*batch, keys, groups, WIDTH),
        (*batch, keys, groups, VALUE_WIDTH),
        (*batch, HEADS, queries, keys),
    )
    query, key, value, bias = (rng.normal(size=shape) for shape in shapes)
    return [array.astype(dtype) for array in (query + 0.5, key + 0.5, value, bias)]


def compute_by_formula(query, key, value, bias, visible_TS, similarity, normalizer, scale, score_offset, gain):
    """Return (output, weights) by the formula of the pair, in float64, one head of one sequence at a time."""
    query, key, value, bias = (np.float64(array) for array in (query, key, value, bias))
    config = AttentionConfig(similarity, normalizer, 'identity', gain, POWERS.get(normalizer), 0.0)
    output = np.zeros((*query.shape[:3], value.shape[-1]))
    weights = np.zeros((len(query), HEADS, query.shape[1], key.shape[1]))
    for b, h in np.ndindex(len(query), HEADS):
        group = h * key.shape[2] // HEADS
        score_TS = scale * query[b, :, h] @ key[b, :, group].T + bias[b, h] + score_offset
        weights[b, h] = formulas.compute_weights(score_TS, visible_TS, config)
        output[b, :, h] = weights[b, h] @ value[b, :, group]
    return output, weights


def compute_visibility(queries, keys, is_causal, left_right):
    """Return the keys that each query sees, from the definition of both arguments."""
    t, s = np.indices((queries, keys))
    visible_TS = s <= t if is_causal else np.ones((queries, keys), bool)
    if left_right is not None:
        left, right = left_right if isinstance(left_right, tuple) else (left_right, left_right)
        visible_TS &= (t - left <= s) & (s <= t + right)
    return visible_TS


@pytest.mark.slow
@pytest.mark.parametrize(('similarity', 'normalizer'), OPERATIONS)
def test_attention_matches_float64_formula_of_every_pair(similarity, normalizer):
    query, key, value, bias = draw_arrays()
    mask = np.random.default_rng(1).uniform(size=(LENGTH, LENGTH)) < 0.7
    settings = dict(similarity=similarity, normalizer=normalizer, scale=0.4, score_offset=-0.3, gain=1.5)
    visible_TS = compute_visibility(LENGTH, LENGTH, True, (5, 0)) & mask
    expected = compute_by_formula(query, key, value, bias, visible_TS, **settings)
    options = dict(settings, power=POWERS.get(normalizer), is_causal=True, local_window_size=(5, 0))
    actual = sinklab.attention(query, key, value, bias, mask[None, None], return_weights=True, **options)
    for actual_array, expected_array in zip(actual, expected, strict=True):
        np.testing.assert_allclose(actual_array, expected_array, rtol=2e-4, atol=2e-5)
    output_without_bias = sinklab.attention(query, key, value, **options)
    expected_without_bias, _ = compute_by_formula(
        query, key, value, 0 * bias, compute_visibility(LENGTH, LENGTH, True, (5, 0)), **settings
    )
    np.testing.assert_allclose(output_without_bias, expected_without_bias, rtol=2e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize('implementation', ['dense', 'chunked'])
@pytest.mark.parametrize(
    ('queries', 'is_causal', 'left_right'),
    [
        (LENGTH, True, None),
        (5, True, 3),
        (13, True, None),
        (5, False, (2, 1)),
        (13, False, (0, 4)),
        (LENGTH, False, None),
    ],
    ids=str,
)
def test_attention_softmax_matches_jax_for_each_mask_and_query_count(implementation, queries, is_causal, left_right):
    query, key, value, _ = draw_arrays(queries=queries)
    value = np.concatenate([value, value[..., :2]], -1)  # jax requires values with the width of keys
    options = dict(is_causal=is_causal, local_window_size=left_right)
    visible_T = compute_visibility(queries, LENGTH, is_causal, left_right).any(-1)
    expected = jax.nn.dot_product_attention(query, key, value, **options)
    actual = sinklab.attention(query, key, value, implementation=implementation, **options)
    np.testing.assert_allclose(actual[:, visible_T], expected[:, visible_T], rtol=1e-5, atol=1e-6)
    assert not np.any(actual[:, ~visible_T])  # jax attends uniformly to all keys from these queries


@pytest.mark.slow
def test_attention_output_has_value_dtype_and_weights_are_float32():
    query, key, value, _ = draw_arrays(dtype=jnp.bfloat16)
    output, weights = sinklab.attention(query, key, value, is_causal=True, return_weights=True)
    assert (output.dtype, weights.dtype) == ('bfloat16', 'float32')
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)


@pytest.mark.slow
def test_attention_accepts_arrays_without_batch_axis():
    arrays = draw_arrays()
    actual = sinklab.attention(*(array[0] for array in arrays), return_weights=True)
    expected = sinklab.attention(*arrays, return_weights=True)
    for actual_array, expected_array in zip(actual, expected, strict=True):
        np.testing.assert_allclose(actual_array, expected_array[0], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('implementation', ['dense', 'chunked'])
def test_attention_applies_scale_in_float32_also_if_jax_traces_it(implementation):
    rng = np.random.default_rng(0)
    query, key = (jnp.asarray(rng.normal(size=(1, 64, 2, 96)), jnp.bfloat16) for _ in range(2))
    attention = functools.partial(
        sinklab.attention, query, key, key.astype(jnp.float32), implementation=implementation
    )
    for scale in (0.3, -0.2, jnp.bfloat16(0.3)):
        score_BHTS = float(scale) * np.einsum('bthk,bshk->bhts', np.float64(query), np.float64(key))
        weights = np.exp(score_BHTS - score_BHTS.max(-1, keepdims=True))
        expected = np.einsum('bhts,bshk->bthk', weights / weights.sum(-1, keepdims=True), np.float64(key))
        for actual in (attention(scale=scale), jax.jit(lambda scale: attention(scale=scale))(scale)):
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
    slope = jax.grad(lambda scale: attention(scale=scale)[0, -1, 0, 0])(0.3)
    step = 1e-2
    difference = attention(scale=0.3 + step)[0, -1, 0, 0] - attention(scale=0.3 - step)[0, -1, 0, 0]
    np.testing.assert_allclose(slope, difference / (2 * step), rtol=1e-2)


def test_attention_rejects_traced_scale_that_is_no_scalar_number():
    query, key, value, _ = draw_arrays()
    for invalid_scale in (jnp.ones(WIDTH), jnp.ones((), bool)):
        with pytest.raises(sinklab.UserError) as raised:
            jax.jit(lambda scale: sinklab.attention(query, key, value, scale=scale))(invalid_scale)
        assert 'scale' in str(raised.value)
        assert len(str(raised.value).splitlines()) == 1


@pytest.mark.slow
def test_attention_under_vmap_matches_loop():
    arrays = [np.stack(pair) for pair in zip(draw_arrays(0), draw_arrays(1), strict=True)]
    for options in (dict(), dict(is_causal=True, similarity='sigmoid', normalizer='none')):
        attention = functools.partial(sinklab.attention, **options)
        for inputs in (arrays[:3], arrays):
            expected = np.stack([attention(*(array[index] for array in inputs)) for index in range(2)])
            np.testing.assert_allclose(jax.vmap(attention)(*inputs), expected, rtol=1e-5, atol=1e-6)


def test_attention_accepts_custom_similarity():
    query, key, value, _ = draw_arrays()

    def softplus(score, unit):
        weight = jax.nn.softplus(score)
        return weight, weight

    actual = sinklab.attention(query, key, value, similarity=Similarity(softplus), normalizer='none', is_causal=True)
    score = np.einsum('bthk,bshk->bhts', query, np.repeat(key, HEADS // GROUPS, 2)) / np.sqrt(WIDTH)
    weights = np.where(np.tri(LENGTH, dtype=bool), np.logaddexp(0, score), 0)
    expected = np.einsum('bhts,bshk->bthk', weights, np.repeat(value, HEADS // GROUPS, 2))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(sinklab.UserError):  # the shift of exp does not cancel without a sum
        sinklab.attention(query, key, value, similarity=SIMILARITIES['exp'], normalizer=NORMALIZERS['none'])


INVALID_ARGUMENTS = {
    'unknown similarity': (dict(similarity='sigmoyd'), ['sigmoyd', 'sigmoid', *SIMILARITIES]),
    'pair': (dict(similarity='exp', normalizer='none'), ['none', *NORMALIZERS_BY_SIMILARITY['exp']]),
    'no power': (dict(normalizer='p_norm'), ['p_norm', 'None']),
    'power of nothing': (dict(power=2.0), ['2.0', 'sum']),
    'gain': (dict(gain=-1.0), ['-1.0']),
    'offset': (dict(score_offset=float('nan')), ['score_offset', 'nan']),
    'scale': (dict(scale=float('nan')), ['scale', 'nan', 'finite']),
    'scale of a list': (dict(scale=[0.5]), ['scale', '[0.5]']),
    'scale of each width': (dict(scale=np.ones(WIDTH)), ['scale', 'one finite number']),
    'unknown implementation': (dict(implementation='fast'), ['fast', 'auto', 'dense', 'chunked']),
    'kernel of another platform': (dict(implementation='tpu'), ['tpu', 'cpu', 'dense', 'chunked']),
    'weights of chunks': (
        dict(implementation='chunked', return_weights=True),
        ['chunked', 'return_weights', 'dense'],
    ),
    'window': (dict(local_window_size=-1), ['-1']),
    'window of a half': (dict(local_window_size=0.5), ['0.5']),
    'mask of numbers': (dict(mask=np.zeros((LENGTH, LENGTH))), ['float', 'booleans']),
    'shape of mask': (dict(mask=np.zeros((3, LENGTH), bool)), [f'(3, {LENGTH})', 'BNTS']),
    'shape of bias': (dict(bias=np.zeros((1, 3, 1, 1))), ['(1, 3, 1, 1)', 'BNTS']),
}


@pytest.mark.parametrize('case', INVALID_ARGUMENTS)
def test_attention_rejects_invalid_argument_and_names_allowed_values(case):
    arguments, expected_words = INVALID_ARGUMENTS[case]
    with pytest.raises(sinklab.UserError) as raised:
        sinklab.attention(*draw_arrays()[:3], **arguments)
    (line,) = str(raised.value).splitlines()
    assert all(word in line for word in expected_words), line
    assert isinstance(raised.value, ValueError)


def test_attention_rejects_mismatched_shapes():
    query, key, value, _ = draw_arrays()
    for arrays in (
        (query[..., :3], key, value),
        (query, key[:, :4], value),
        (query, key, value[:1]),
        (query[:, :, :3], key, value),
        (query[0], key, value),
        (query[0, 0], key[0, 0], value[0, 0]),
        (query[:, :0], key, value),
        (np.int32(query), key, value),
    ):
        with pytest.raises(sinklab.UserError) as raised:
            sinklab.attention(*arrays)
        assert len(str(raised.value).splitlines()) == 1


def test_resolve_implementation_accepts_cudnn_with_static_scale_and_selects_dense_if_matrix_is_required(monkeypatch):
    from sinklab.attn import function as module

    query, key, _, _ = draw_arrays(dtype=jnp.bfloat16)
    spec = module.AttentionSpec(module.make_operation('exp', 'sum', scale=0.3), module.make_mask(9, 9, True, None))
    for needs, expected in (([], 'chunked'), (['bias'], 'dense'), (['return_weights'], 'dense')):
        assert module.resolve_implementation('auto', spec, query, key, key, needs) == expected
    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
    assert module.resolve_implementation('cudnn', spec, query, key, key, []) == 'cudnn'
    with pytest.raises(sinklab.UserError):  # of a traced scale
        jax.grad(lambda scale: sinklab.attention(query, key, key, scale=scale, implementation='cudnn').sum())(0.3)


@pytest.mark.parametrize(
    ('changes', 'expected_word'),
    [
        (dict(value=np.zeros((1, 5, 2, 6), jnp.bfloat16)), '6'),
        (dict(key=np.zeros((1, 5, 2, 8), np.float32)), 'float32'),
        (dict(value=np.zeros((1, 5, 2, 8), np.float32)), 'float32'),
        ({name: np.zeros((1, 10, 2, 8), jnp.bfloat16) for name in ('key', 'value')}, 'queries'),
    ],
    ids=['width of values', 'dtype of keys', 'dtype of values', 'number of keys'],
)
def test_attention_of_cudnn_rejects_arrays_that_do_not_match_queries(monkeypatch, changes, expected_word):
    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
    arrays = {name: np.zeros((1, 5, 2, 8), jnp.bfloat16) for name in ('query', 'key', 'value')} | changes
    with pytest.raises(sinklab.UserError, match=expected_word):
        sinklab.attention(**arrays, is_causal=True, implementation='cudnn')


@pytest.mark.slow
def test_package_import_is_lazy_and_lists_public_api():
    code = (
        'import sys, sinklab; assert "jax" not in sys.modules and "numpy" not in sys.modules; '
        'assert {"open", "attention", "UserError"} <= {*dir(sinklab)}; sinklab.attention; assert "jax" in sys.modules'
    )
    subprocess.run([sys.executable, '-c', code], check=True, timeout=120)
    with pytest.raises(AttributeError):
        sinklab.attentoin  # noqa: B018


def test_attention_docstring_lists_every_similarity_and_normalizer():
    assert {name for name, _ in OPERATIONS} == {*SIMILARITIES} == {*NORMALIZERS_BY_SIMILARITY}
    assert {name for _, name in OPERATIONS} == {*NORMALIZERS}
    lines = inspect.getdoc(sinklab.attention).splitlines()
    rows = [line.split('|')[1:-1] for line in lines if line.startswith('| `')]
    names_by_row = {cells[0].strip(' `'): cells[-1].replace(',', ' ').split() for cells in rows}
    assert {*names_by_row} == {*SIMILARITIES} | {*NORMALIZERS}
    for similarity, normalizers in NORMALIZERS_BY_SIMILARITY.items():
        assert {f'`{entry}`' for entry in normalizers} == {
            entry for entry in names_by_row[similarity] if entry.startswith('`')
        }
