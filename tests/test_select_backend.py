"""Tests of the selection, verification and rejection of attention backends."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import KERNEL_OPERATIONS, MASKS, interpret_pallas, make_alibi_bias, make_attention_spec
from conftest import make_attention_config, make_tiny_spec

from sinklab.attn import (
    backends,
    cudnn,
    kernel_attention,
    reference,
)
from sinklab.attn import mask as masks
from sinklab.attn.backends import BackendChoice, explain_unsupported, select_backend
from sinklab.attn.spec import AttentionProblem, RelativePositionBias, ScoreBias
from sinklab.config.spec import Hardware
from sinklab.errors import UserError
from sinklab.model.attention import make_attention_problem as make_problem
from sinklab.parallel import device_mesh, sharding

pytestmark = pytest.mark.usefixtures('small_blocks')
SOFTMAX_PROBLEM = AttentionProblem(
    make_attention_spec(make_attention_config('exp', 'sum'), masks.make_causal_mask(256)), 2, 64, 64, 'bfloat16'
)


def make_spec_change(*pair, length=256, power=2.0, **spec_fields):
    return dict(
        spec=make_attention_spec(
            make_attention_config(*pair, power=power), masks.make_causal_mask(length), **spec_fields
        )
    )


TABLE_BIAS = ScoreBias(RelativePositionBias(lambda table, distance: distance, np.zeros((1, 1)), is_elementwise=False))


@pytest.mark.parametrize(
    ('backend', 'platform', 'changes', 'message'),
    [
        ('tpu', 'cpu', {}, 'it needs tpu, and these devices are cpu'),
        ('cudnn', 'gpu', make_spec_change('sigmoid', 'none'), 'it supports only softmax'),
        (
            'cudnn',
            'gpu',
            dict(spec=make_attention_spec(make_attention_config('exp', 'sum'), masks.make_prefix_mask(256, 3))),
            'neither causal',
        ),
        ('cudnn', 'gpu', dict(value_width=128), 'equal widths'),
        ('cudnn', 'gpu', dict(dtype='float32'), 'needs bfloat16'),
        ('tpu', 'tpu', make_spec_change('softpick', 'sum'), 'softpick'),
        ('tpu', 'tpu', make_spec_change('exp', 'sum', bias=TABLE_BIAS), 'a learned table'),
        ('tpu', 'tpu', make_spec_change('sigmoid', 'p_norm', power=5.0), 'may underflow'),
        ('tpu', 'tpu', dict(width=512, value_width=512), 'heads wider than 256'),
        ('tpu', 'tpu', make_spec_change('exp', 'sum', length=2**20), 'does not fit in VMEM'),
    ],
)
def test_select_backend_rejects_unsupported_case_and_lists_alternatives(backend, platform, changes, message):
    with pytest.raises(UserError, match=message) as error:
        select_backend(backend, platform, dataclasses.replace(SOFTMAX_PROBLEM, **changes))
    assert 'auto, dense, chunked' in str(error.value)


def test_find_causal_window_returns_window_of_causal_masks_only():
    assert cudnn.find_causal_window(masks.make_causal_mask(8)) == 7
    assert cudnn.find_causal_window(masks.make_causal_mask(8) & masks.make_window_mask(8, 3)) == 2
    assert cudnn.find_causal_window(masks.make_prefix_mask(8, 3)) is None
    assert (
        cudnn.find_causal_window(masks.make_causal_mask(8) & masks.make_document_mask(jnp.zeros((1, 8), int))) is None
    )


@pytest.mark.slow
def test_cudnn_attend_applies_scale_of_operation(monkeypatch):
    jax_attention, spec = (
        jax.nn.dot_product_attention,
        make_attention_spec(make_attention_config('exp', 'sum'), masks.make_causal_mask(16)),
    )
    monkeypatch.setattr(
        jax.nn,
        'dot_product_attention',
        lambda *arrays, **kwargs: jax_attention(*arrays, **kwargs | dict(implementation='xla')),
    )
    query, key, value = (jax.random.normal(jax.random.key(seed), (1, 16, 2, 8)) for seed in range(3))
    for scale in (None, 0.7):
        scaled_spec = dataclasses.replace(spec, operation=dataclasses.replace(spec.operation, scale=scale))
        actual, expected = (attend(query, key, value, scaled_spec) for attend in (cudnn.attend, reference.attend))
        np.testing.assert_allclose(actual.output_BTHK, expected.output_BTHK, rtol=1e-4, atol=1e-5)


def test_cudnn_row_stats_are_float32_although_jax_rounds_them(monkeypatch):
    spec = make_attention_spec(make_attention_config('exp', 'sum'), masks.make_causal_mask(16))
    array = jnp.ones((1, 16, 2, 8), jnp.bfloat16)
    monkeypatch.setattr(jax.nn, 'dot_product_attention', lambda *arrays, **kwargs: (array, array[..., 0]))
    row_stats = cudnn.attend(array, array, array, spec).row_stats
    assert {leaf.dtype for leaf in jax.tree.leaves(row_stats)} == {jnp.dtype('float32')}


@pytest.mark.slow
@pytest.mark.parametrize('layout', [Hardware(data=2, tensor=2), Hardware(tensor=2), Hardware()], ids=str)
def test_cudnn_attend_receives_local_sequences_and_heads(monkeypatch, layout):
    spec, jax_attention = (
        make_attention_spec(make_attention_config('exp', 'sum'), masks.make_causal_mask(16)),
        jax.nn.dot_product_attention,
    )
    query, key, value = (jax.random.normal(jax.random.key(seed), (4, 16, 4, 8)) for seed in range(3))
    key, value = key[:, :, ::2], value[:, :, ::2]
    shapes = []

    def attend_with_xla(*arrays, implementation, local_window_size, **kwargs):
        shapes.append([array.shape for array in arrays])
        return jax_attention(*arrays, implementation='xla', local_window_size=local_window_size, **kwargs)

    expected, residual = jax_attention(query, key, value, is_causal=True, implementation='xla', return_residual=True)
    monkeypatch.setattr(jax.nn, 'dot_product_attention', attend_with_xla)
    mesh = device_mesh.make_mesh(layout)
    with jax.set_mesh(mesh):
        actual = jax.jit(lambda *arrays: cudnn.attend(*arrays, spec))(query, key, value)
    rows, heads = 4 // sharding.count_batch_shards(mesh), 2 // mesh.shape['tensor']
    assert shapes == [[(rows, 16, 2 * heads, 8), (rows, 16, heads, 8), (rows, 16, heads, 8)]]
    np.testing.assert_allclose(actual.output_BTHK, expected, atol=1e-6)
    np.testing.assert_allclose(actual.row_stats.shift_BHT, residual.swapaxes(1, 2), atol=1e-6)


@pytest.mark.slow
def test_select_backend_skips_kernel_with_wrong_output(monkeypatch):
    spec = make_attention_spec(
        make_attention_config('exp', 'p_norm'), MASKS['window'](256), 1, make_alibi_bias(columns=1)
    )
    problem = dataclasses.replace(SOFTMAX_PROBLEM, spec=spec)
    with interpret_pallas():
        assert select_backend('auto', 'tpu', problem) == BackendChoice('tpu')
        monkeypatch.setattr(kernel_attention, 'attend', double_output(kernel_attention.attend))
        choice = select_backend('auto', 'tpu', problem)
    assert choice.backend == 'chunked'
    assert 'wrong' in str(choice)


@pytest.mark.slow
@pytest.mark.parametrize(
    'changes',
    [
        dict(model__mask__window=5, model__position='alibi'),
        dict(model__mask__prefix=3, model__columns__kind='kv'),
        dict(model__mask__document=True, model__columns__kind='sink_token', model__position='relative_paper_code'),
    ],
)
def test_truncate_problem_keeps_mask_and_bias_of_run(changes):
    """Compare the first queries, keys and heads with those of the whole problem."""
    spec = make_tiny_spec(**changes, model__attention__similarity='sigmoid', model__attention__normalizer='none')
    problem, length = make_problem(spec.model, 16), 12
    truncated = backends.truncate_problem(problem, length)
    keys, columns = truncated.spec.mask.max_end, problem.spec.num_learned_kv
    mask = np.asarray(problem.spec.materialize_mask(16))[:, :, :length]
    np.testing.assert_array_equal(truncated.spec.materialize_mask(keys), mask[..., : columns + keys])
    assert not mask[..., columns + keys :].any()
    bias = np.broadcast_to(problem.spec.materialize_bias(16), (1, 4, problem.num_queries, columns + 16))
    expected = bias[:, : truncated.heads, :length, : columns + keys]
    np.testing.assert_array_equal(np.broadcast_to(truncated.spec.materialize_bias(keys), expected.shape), expected)


@pytest.mark.parametrize('platform', ['tpu', 'gpu'])
@pytest.mark.parametrize('operation', KERNEL_OPERATIONS, ids='-'.join)
def test_pallas_kernels_support_every_operation_except_softpick(operation, platform):
    spec = make_attention_spec(
        make_attention_config(*operation), masks.make_causal_mask(4096), 1, make_alibi_bias(columns=1)
    )
    assert explain_unsupported(platform, platform, AttentionProblem(spec, 8, 128, 128, 'bfloat16')) is None


@pytest.mark.slow
@pytest.mark.parametrize('poisoned_index', range(3))
def test_measure_error_is_infinite_for_nan_gradient(monkeypatch, poisoned_index):
    """Poison one gradient at a time."""

    @jax.custom_vjp
    def poison(*arrays):
        return arrays

    def backward(_, d_arrays):
        return tuple(
            d_array if index != poisoned_index else jnp.full_like(d_array, jnp.nan)
            for index, d_array in enumerate(d_arrays)
        )

    poison.defvjp(lambda *arrays: (arrays, None), backward)
    attend = kernel_attention.attend
    monkeypatch.setattr(
        kernel_attention, 'attend', lambda kernels, q, k, v, *rest: attend(kernels, *poison(q, k, v), *rest)
    )
    with interpret_pallas():
        assert backends.measure_error('tpu', SOFTMAX_PROBLEM) == float('inf')


@pytest.mark.slow
def test_select_backend_replaces_kernel_that_fails_to_lower():
    """Pallas raises ValueError when it lowers a TPU kernel without a TPU."""
    choice = select_backend('auto', 'tpu', SOFTMAX_PROBLEM)
    assert (choice.backend, choice.failed_backends) == ('chunked', ('tpu',))
    assert 'ValueError' in choice.rejection_reasons['tpu']
    assert choice.rejection_reasons['tpu'] in choice.describe_fallback()


def test_select_backend_counts_unsupported_case_as_no_failure():
    choice = select_backend(
        'auto', 'tpu', dataclasses.replace(SOFTMAX_PROBLEM, **make_spec_change('softpick', 'sum'))
    )
    assert (choice.backend, choice.failed_backends, choice.describe_fallback()) == ('chunked', (), None)


@pytest.mark.parametrize(
    'failure',
    [
        NotImplementedError('no such primitive'),
        jax.errors.JaxRuntimeError('INTERNAL: Mosaic failed to compile TPU kernel'),
        RuntimeError('cuDNN is not detected.'),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_select_backend_skips_kernel_that_jax_cannot_compile(monkeypatch, failure):
    monkeypatch.setattr(kernel_attention, 'attend', make_failing_function(failure))
    choice = select_backend('auto', 'tpu', SOFTMAX_PROBLEM)
    assert (choice.backend, choice.failed_backends) == ('chunked', ('tpu',))
    assert str(failure) in str(choice)


@pytest.mark.parametrize(
    'bug',
    [
        *(TypeError('unsupported operand'), ValueError('shapes do not fit'), AttributeError('no such field')),
        *(RuntimeError('dictionary changed size'), RecursionError('too deep'), AssertionError()),
    ],
    ids=lambda bug: type(bug).__name__,
)
def test_select_backend_propagates_bug_in_kernel(monkeypatch, bug):
    monkeypatch.setattr(kernel_attention, 'attend', make_failing_function(bug))
    with pytest.raises(type(bug)) as error:
        select_backend('auto', 'tpu', SOFTMAX_PROBLEM)
    assert error.value is bug


def test_jax_error_without_cudnn_contains_expected_message():
    arrays = [jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)] * 3
    attend_with_cudnn = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation='cudnn')
    with pytest.raises(RuntimeError, match=backends.NO_CUDNN_MESSAGE):
        jax.eval_shape(attend_with_cudnn, *arrays)


def make_failing_function(failure):
    def fail(*args, **kwargs):
        raise failure

    return fail


def double_output(attend):
    def attend_and_double(*args):
        result = attend(*args)
        return result._replace(output_BTHK=2 * result.output_BTHK)

    return attend_and_double


def test_verification_gives_backends_the_grouped_heads_of_the_model(monkeypatch):
    head_counts = []

    def attend(query_BTHK, key_BSGK, value_BSGK, spec):
        head_counts.append((query_BTHK.shape[2], key_BSGK.shape[2], value_BSGK.shape[2]))
        return reference.attend(query_BTHK, key_BSGK, value_BSGK, spec)

    monkeypatch.setitem(backends.BACKENDS, 'chunked', backends.XLABackend(attend))
    backends.measure_error('chunked', make_problem(make_tiny_spec(model__kv_heads=2).model, 16))
    assert set(head_counts) == {(2, 1, 1)}
