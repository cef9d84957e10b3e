"""The choice of the micro-batch and the remat policy, and out-of-memory errors."""

import jax
import pytest
from conftest import make_unpatched_mesh
from tiny_specs import make_tiny_spec

from sinklab.config.spec import Layout
from sinklab.errors import UserError
from sinklab.parallel import device_mesh
from sinklab.train import device_layout


def choose_micro_batch(batch_size, length, **sizes):
    spec, layout = make_tiny_spec(optimizer__batch_size=batch_size, data__length=length), Layout(**sizes)
    return device_layout.choose_micro_batch(spec, layout, device_mesh.make_mesh(layout))


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
def test_auto_remat_is_first_policy_whose_step_fits():
    spec, mesh = make_tiny_spec(), device_mesh.make_mesh(Layout())

    def choose_policy(remat, device_bytes):
        return device_layout.choose_remat_policy(spec, Layout(remat=remat), mesh, 'chunked', device_bytes)

    assert choose_policy('auto', 1e12) == device_layout.REMAT_POLICIES[0]
    assert choose_policy('qkv', 1) == 'qkv'
    with pytest.raises(UserError):
        choose_policy('auto', 1)


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
    assert device_layout.get_default_remat_policy(width, platform) == policy


@pytest.mark.parametrize(
    ('message', 'expected_type'),
    [
        ('RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123456 bytes.', UserError),
        ('RESOURCE_EXHAUSTED: Received message larger than max', jax.errors.JaxRuntimeError),
        ('INTERNAL: out of memory', jax.errors.JaxRuntimeError),
    ],
)
def test_translate_oom_errors_leaves_other_errors(message, expected_type):
    with pytest.raises(expected_type), device_layout.translate_oom_errors():
        raise jax.errors.JaxRuntimeError(message)


def test_format_device_layout_names_axes_and_is_empty_for_one_unknown_device():
    layout = Layout(data=2, fsdp=2)
    (line,) = device_layout.format_device_layout(layout, device_mesh.make_mesh(layout))
    assert all(text in line for text in ('4 devices', 'data 2', 'fsdp 2'))
    assert device_layout.format_device_layout(Layout(), make_unpatched_mesh(Layout(), jax.devices()[:1])) == []
