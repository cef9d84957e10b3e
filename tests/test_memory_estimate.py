"""Memory estimates: comparison with JAX buffers, and errors with suggested flags."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from conftest import make_tiny_spec, make_unpatched_mesh

from sinklab.config.spec import Layout
from sinklab.errors import UserError
from sinklab.parallel import device_mesh
from sinklab.train import memory_estimate, state
from sinklab.train.step import make_hidden_states_fn


def estimate_memory(layout):
    return memory_estimate.estimate_memory(make_tiny_spec(), layout, device_mesh.make_mesh(layout), 'chunked')


@pytest.mark.slow
def test_estimate_matches_bytes_of_parameters_and_moments():
    single_device, sharded = estimate_memory(Layout()), estimate_memory(Layout(fsdp=4))
    shapes = state.get_state_shapes(make_tiny_spec())
    assert single_device.parameters == state.count_bytes(shapes['params'])
    assert single_device.moments == state.count_bytes(shapes['opt_state'])
    assert single_device.parameters / 4 < sharded.parameters < single_device.parameters / 3, (
        'but for gains, which all have'
    )


@pytest.mark.parametrize('remat', memory_estimate.REMAT_POLICIES)
@pytest.mark.slow
def test_estimate_matches_activations_kept_for_backward_pass(remat):
    spec, layout = make_tiny_spec(), Layout(remat=remat)
    params = state.init_state(spec)['params']
    ids = jnp.zeros((spec.optimizer.batch_size, spec.data.length), jnp.int32)
    _, backward = jax.vjp(lambda params: make_hidden_states_fn(spec, remat=remat)(params, ids)[0], params)
    param_pointers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)}
    arrays = [leaf for leaf in jax.tree.leaves(backward) if isinstance(leaf, jax.Array)]
    saved_arrays = [leaf for leaf in arrays if leaf.unsafe_buffer_pointer() not in param_pointers]
    assert estimate_memory(layout).activations == pytest.approx(state.count_bytes(saved_arrays), rel=0.1), (
        'but for what all sequences share'
    )


@pytest.mark.slow
def test_estimate_decreases_with_stronger_remat_policy():
    sizes = [estimate_memory(Layout(remat=remat)).activations for remat in memory_estimate.REMAT_POLICIES]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)


@pytest.mark.slow
def test_estimate_divides_activations_over_micro_batches_and_devices():
    total = estimate_memory(Layout()).activations
    assert estimate_memory(Layout(micro_batch=2)).activations < 0.6 * total
    assert estimate_memory(Layout(data=2)).activations < 0.6 * total


def choose_micro_batch(batch_size, length, **sizes):
    spec, layout = make_tiny_spec(optimizer__batch_size=batch_size, data__length=length), Layout(**sizes)
    return memory_estimate.choose_micro_batch(spec, layout, device_mesh.make_mesh(layout))


@pytest.mark.parametrize(
    ('batch_size', 'length', 'num_devices', 'micro_batch'),
    [
        (32, 64, 1, None),  # 2048 tokens
        (32, 256, 1, 4),
        (32, 256, 2, 4),
        (32, 256, 4, 8),  # 512 tokens on each device
        (34, 64, 1, 17),  # nearer to 1024 tokens than 2 sequences
        (37, 64, 1, None),  # of its divisors, 1 is too small
        (4, 2048, 1, 1),  # one sequence at least
        (4, 2048, 2, 2),  # one on each device
        (10**9, 64, 1, 16),
    ],
)
def test_cpu_computes_large_batch_in_parts(batch_size, length, num_devices, micro_batch):
    assert choose_micro_batch(batch_size, length, data=num_devices, micro_batch='default') == micro_batch


def test_micro_batch_is_as_requested():
    assert choose_micro_batch(32, 256, micro_batch=16) == 16
    assert choose_micro_batch(32, 256) is None
    assert choose_micro_batch(32, 256, fsdp=2, micro_batch='default') is None


@pytest.mark.slow
def test_choose_remat_policy_picks_least_recomputation_that_fits():
    spec, layout, mesh = make_tiny_spec(), Layout(remat='auto'), device_mesh.make_mesh(Layout())
    bytes_by_policy = {
        remat: estimate_memory(dataclasses.replace(layout, remat=remat)).total
        for remat in memory_estimate.REMAT_POLICIES[1:]
    }
    for remat, num_bytes in bytes_by_policy.items():
        device_bytes = num_bytes / memory_estimate.USABLE_MEMORY_FRACTION + 1
        assert memory_estimate.choose_remat_policy(spec, layout, mesh, 'chunked', device_bytes) == remat
    with pytest.raises(UserError):
        memory_estimate.choose_remat_policy(spec, layout, mesh, 'chunked', 1)
    assert memory_estimate.choose_remat_policy(spec, Layout(remat='qkv'), mesh, 'chunked', 1) == 'qkv'


@pytest.mark.parametrize(
    ('platform', 'width', 'policy'),
    [
        ('cpu', 64, 'attention,ffn'),
        ('cpu', 192, 'attention,ffn'),
        ('cpu', 384, 'attention,qkv,middle,ffn'),
        ('cpu', 768, 'attention,qkv,middle,ffn'),
        ('gpu', 64, 'none'),
        ('tpu', 2048, 'none'),
    ],
)
def test_default_remat_policy_depends_on_width_only_on_cpu(platform, width, policy):
    assert memory_estimate.get_default_remat_policy(width, platform) == policy


def raise_error(*_):
    raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123456 bytes.')


def test_translate_oom_errors_leaves_other_errors():
    with pytest.raises(UserError, match='123456 bytes'), memory_estimate.translate_oom_errors('the step'):
        raise_error()
    with pytest.raises(jax.errors.JaxRuntimeError), memory_estimate.translate_oom_errors('the step'):
        raise jax.errors.JaxRuntimeError('INTERNAL: something else')


@pytest.mark.slow
def test_format_device_layout_names_axes_and_is_empty_for_one_unknown_device():
    def format_layout(layout, mesh):
        return memory_estimate.format_device_layout(make_tiny_spec(), layout, mesh, 'chunked')

    layout = Layout(data=2, fsdp=2)
    (line,) = format_layout(layout, device_mesh.make_mesh(layout))
    assert all(text in line for text in ('4 devices', 'data 2', 'fsdp 2'))
    assert format_layout(Layout(), make_unpatched_mesh(Layout(), jax.devices()[:1])) == []
