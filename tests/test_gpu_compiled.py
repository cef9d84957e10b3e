"""Tests that GPU kernels compile without a GPU."""

import jax
import jax.numpy as jnp
import pytest
from gpu_problems import REDUCTIONS

from benchmarks.example_specs import make_operations, make_specs
from sinklab.attn import mask
from sinklab.attn.backends import BACKENDS
from sinklab.attn.pallas import gpu
from sinklab.attn.pallas.kernel_interface import KernelSpec, ScoreSpec, SoftmaxReduction
from sinklab.planning import topology


@pytest.fixture(scope='module')
def absent_gpu():
    """Return (sharding, mesh) of an absent Hopper GPU."""
    if not topology.has_cuda_plugin():
        pytest.skip('jax_plugins.xla_cuda13 is not installed: nothing compiles for a GPU')
    from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

    (gpu_device,) = topology.make_gpu_devices('h100:1', 'h100')
    device = AbstractDevice(device_kind=gpu_device.device_kind, num_cores=None, platform='cuda')
    return SingleDeviceSharding(gpu_device), AbstractMesh((1,), ('x',), abstract_device=device)


@pytest.mark.slow
@pytest.mark.parametrize(('mask_name', 'width'), [('full', 96), ('causal', 128), ('documents', 64)])
@pytest.mark.parametrize('name', REDUCTIONS)
def test_gpu_kernels_compile_without_score_matrix(absent_gpu, name, mask_name, width):
    sharding, mesh = absent_gpu
    length = 4096

    def make_abstract_array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    query, key = (
        make_abstract_array(jnp.bfloat16, 1, 4, length, width),
        make_abstract_array(jnp.bfloat16, 1, 2, length, width),
    )
    parameter_HP, row = make_abstract_array(jnp.float32, 4, 0), make_abstract_array(jnp.float32, 1, 4, length)
    reduction = REDUCTIONS[name]
    rows = [row] * (reduction.num_statistics + (reduction == SoftmaxReduction()))

    def make_mask(start):
        causal = mask.make_causal_mask(length)
        return {
            'full': mask.make_full_mask(length),
            'causal': causal,
            'documents': causal & mask.make_document_mask(start),
        }[mask_name]

    def run_both_passes(start, query, key, value, parameter_HP, *rows):
        args = reduction, KernelSpec(ScoreSpec(width**-0.5), make_mask(start), None, parameter_HP), query, key, value
        output, statistics = gpu.forward(*args)
        return output, statistics, gpu.backward(*args, output, rows)

    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(run_both_passes).lower(
            make_abstract_array(jnp.int32, 1, length), query, key, key, parameter_HP, *rows
        )
        memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes < length * length


def make_operation_params():
    """Yield every supported operation under two masks; mark all but a few as exhaustive."""
    fast_operations = [('exp', 'sum'), ('sigmoid', 'none'), ('sigmoid', 'p_norm')]
    for operation in (candidate for candidate in make_operations() if candidate[0] != 'softpick'):
        for spec_name in ('causal', 'alibi'):
            marks = [] if operation in fast_operations and spec_name == 'causal' else [pytest.mark.exhaustive]
            yield pytest.param(operation, spec_name, marks=marks, id=f'{"/".join(operation)}-{spec_name}')


@pytest.mark.parametrize(('operation', 'spec_name'), [*make_operation_params()])
def test_gpu_kernels_of_every_operation_lower_to_mosaic_gpu(operation, spec_name):
    """Mosaic GPU lowers kernels without a GPU or a compiler; jax 0.11 lowers differently from 0.10."""
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType

    spec = make_specs(make_operations()[operation], 2, 512)[spec_name]

    def compute_sum(arrays):
        output, rows, _ = BACKENDS['gpu'].attend(*arrays, spec)
        return output.astype(jnp.float32).sum(), rows.abs_weight_sum_BHT

    array = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.bfloat16)
    device = AbstractDevice(device_kind='NVIDIA H100', num_cores=None, platform='cuda')
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ('x',), (AxisType.Auto,), abstract_device=device)):
        traced = jax.jit(jax.grad(compute_sum, has_aux=True)).trace([array] * 3)
        assert traced.lower(lowering_platforms=('cuda',)).as_text().count('mosaic_gpu') >= 3
