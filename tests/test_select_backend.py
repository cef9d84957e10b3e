"""Tests of the selection, verification and rejection of attention backends."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import KERNEL_OPERATIONS, MASKS, interpret_pallas, make_alibi_bias, make_attention_spec
from tiny_specs import make_attention_config, make_tiny_spec

from sinklab.attn import backends, cudnn, kernel_attention, reference
from sinklab.attn import mask as masks
from sinklab.attn.backends import BackendChoice, explain_unsupported, select_backend
from sinklab.attn.spec import AttentionProblem, RelativePositionBias, ScoreBias
from sinklab.config.spec import Layout
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


FORGET_GATE_PROBLEM = make_problem(make_tiny_spec(model__forget_gate=True, model__dtype='bfloat16').model, 16)
PREFIX_MASK_SPEC = make_attention_spec(make_attention_config('exp', 'sum'), masks.make_prefix_mask(256, 3))


@pytest.mark.parametrize(
    ('backend', 'platform', 'changes', 'reason'),
    [
        ('tpu', 'cpu', {}, 'cpu'),
        ('cudnn', 'gpu', make_spec_change('sigmoid', 'none'), 'sigmoid'),
        ('cudnn', 'gpu', dict(spec=PREFIX_MASK_SPEC), 'causal'),
        ('cudnn', 'gpu', dict(value_width=128), '128'),
        ('cudnn', 'gpu', dict(dtype='float32'), 'float32'),
        ('tpu', 'tpu', make_spec_change('softpick', 'sum'), 'softpick'),
        ('tpu', 'tpu', make_spec_change('exp', 'sum', bias=TABLE_BIAS), 'table'),
        *((name, name, dict(spec=FORGET_GATE_PROBLEM.spec), 'forget gate') for name in ('tpu', 'gpu')),
        ('cudnn', 'gpu', dict(spec=FORGET_GATE_PROBLEM.spec), 'biases'),
        ('tpu', 'tpu', make_spec_change('sigmoid', 'p_norm', power=5.0), 'power'),
        ('tpu', 'tpu', dict(width=512, value_width=512), '512'),
        ('tpu', 'tpu', make_spec_change('exp', 'sum', length=2**20), 'VMEM'),
    ],
)
def test_select_backend_rejects_unsupported_case_and_lists_alternatives(backend, platform, changes, reason):
    with pytest.raises(UserError) as error:
        select_backend(backend, platform, dataclasses.replace(SOFTMAX_PROBLEM, **changes))
    assert reason in str(error.value)
    assert 'auto, dense, chunked' in str(error.value)


def test_find_causal_window_returns_window_of_causal_masks_only():
    assert cudnn.find_causal_window(masks.make_causal_mask(8)) == 7
    assert cudnn.find_causal_window(masks.make_causal_mask(8) & masks.make_window_mask(8, 3)) == 2
    assert cudnn.find_causal_window(masks.make_prefix_mask(8, 3)) is None
    assert (
        cudnn.find_causal_window(masks.make_causal_mask(8) & masks.make_document_mask(jnp.zeros((1, 8), int))) is None
    )


def test_cudnn_row_stats_are_float32_although_jax_rounds_them(monkeypatch):
    spec = make_attention_spec(make_attention_config('exp', 'sum'), masks.make_causal_mask(16))
    array = jnp.ones((1, 16, 2, 8), jnp.bfloat16)
    monkeypatch.setattr(jax.nn, 'dot_product_attention', lambda *arrays, **kwargs: (array, array[..., 0]))
    row_stats = cudnn.attend(array, array, array, spec).row_stats
    assert {leaf.dtype for leaf in jax.tree.leaves(row_stats)} == {jnp.dtype('float32')}


@pytest.mark.slow
@pytest.mark.parametrize('layout', [Layout(data=2, tensor=2), Layout(tensor=2), Layout()], ids=str)
def test_cudnn_attend_receives_scale_and_local_sequences_and_heads(monkeypatch, layout):
    spec = make_attention_spec(make_attention_config('exp', 'sum'), masks.make_causal_mask(16))
    spec = dataclasses.replace(spec, operation=dataclasses.replace(spec.operation, scale=0.7))
    jax_attention = jax.nn.dot_product_attention
    query, key, value = (jax.random.normal(jax.random.key(seed), (4, 16, 4, 8)) for seed in range(3))
    key, value = key[:, :, ::2], value[:, :, ::2]
    shapes = []

    def attend_with_xla(*arrays, implementation, local_window_size, **kwargs):
        shapes.append([array.shape for array in arrays])
        return jax_attention(*arrays, implementation='xla', local_window_size=local_window_size, **kwargs)

    options = dict(scale=0.7, is_causal=True, implementation='xla', return_residual=True)
    expected, residual = jax_attention(query, key, value, **options)
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


@pytest.mark.parametrize('operation', KERNEL_OPERATIONS, ids='-'.join)
def test_pallas_kernels_support_every_operation_except_softpick(operation):
    spec = make_attention_spec(
        make_attention_config(*operation), masks.make_causal_mask(4096), 1, make_alibi_bias(columns=1)
    )
    problem = AttentionProblem(spec, 8, 128, 128, 'bfloat16')
    assert [explain_unsupported(platform, platform, problem) for platform in ('tpu', 'gpu')] == [None, None]


@pytest.mark.slow
def test_measure_error_is_infinite_for_nan_gradient(monkeypatch):
    @jax.custom_vjp
    def poison(array):
        return array

    poison.defvjp(lambda array: (array, None), lambda _, d_array: (jnp.full_like(d_array, jnp.nan),))
    attend = kernel_attention.attend
    monkeypatch.setattr(
        kernel_attention, 'attend', lambda kernels, q, k, v, *rest: attend(kernels, q, poison(k), v, *rest)
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


@pytest.mark.parametrize('failure', [NotImplementedError('no such primitive'), RuntimeError('no cuDNN')], ids=repr)
def test_select_backend_replaces_kernel_that_raises_error(monkeypatch, failure):
    def fail(*args):
        raise failure

    monkeypatch.setattr(kernel_attention, 'attend', fail)
    choice = select_backend('auto', 'tpu', SOFTMAX_PROBLEM)
    assert (choice.backend, choice.failed_backends) == ('chunked', ('tpu',))
    assert str(failure) in choice.describe_fallback()


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

    monkeypatch.setitem(backends.BACKENDS, 'chunked', backends.Backend(attend))
    backends.measure_error('chunked', make_problem(make_tiny_spec(model__kv_heads=2).model, 16))
    assert set(head_counts) == {(2, 1, 1)}
