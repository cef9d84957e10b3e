"""Tests that GPU kernels compile without a GPU."""

import jax
import jax.numpy as jnp
import pytest
from gpu_problems import REDUCTIONS

from sinklab.attn import mask
from sinklab.attn.backends import BACKENDS
from sinklab.attn.example_specs import make_operations, make_specs
from sinklab.attn.pallas import gpu
from sinklab.attn.pallas.kernel_interface import KernelSpec, ScoreSpec, SoftmaxReduction
from sinklab.planning import topology


@pytest.fixture(scope='module')
def absent():
    """Return (sharding, mesh) of an absent Hopper GPU."""
    if not topology.has_cuda_plugin():
        pytest.skip('jax_plugins.xla_cuda13 is not installed: nothing compiles for a GPU')
    from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

    (one,) = topology.make_gpu_devices('h100:1', 'h100')
    device = AbstractDevice(device_kind=one.device_kind, num_cores=None, platform='cuda')
    return SingleDeviceSharding(one), AbstractMesh((1,), ('x',), abstract_device=device)


@pytest.mark.slow
@pytest.mark.parametrize(('shown', 'width'), [('full', 96), ('causal', 128), ('documents', 64)])
@pytest.mark.parametrize('name', REDUCTIONS)
def test_gpu_kernels_compile_without_score_matrix(absent, name, shown, width):
    sharding, mesh = absent
    length = 4096

    def of(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    query, key = of(jnp.bfloat16, 1, 4, length, width), of(jnp.bfloat16, 1, 2, length, width)
    parameter_HP, row = of(jnp.float32, 4, 0), of(jnp.float32, 1, 4, length)
    sums = REDUCTIONS[name]
    rows = [row] * (sums.num_statistics + (sums == SoftmaxReduction()))

    def masked(start):
        causal = mask.make_causal_mask(length)
        return {
            'full': mask.make_full_mask(length),
            'causal': causal,
            'documents': causal & mask.make_document_mask(start),
        }[shown]

    def both(start, query, key, value, parameter_HP, *rows):
        given = sums, KernelSpec(ScoreSpec(width**-0.5), masked(start), None, parameter_HP), query, key, value
        output, statistics = gpu.forward(*given)
        return output, statistics, gpu.backward(*given, output, rows)

    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(both).lower(of(jnp.int32, 1, length), query, key, key, parameter_HP, *rows)
        memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes < length * length


def operations_and_masks():
    """Yield every supported operation under two masks; mark all but a few as slow."""
    fast = [('exp', 'sum'), ('sigmoid', 'none'), ('sigmoid', 'p_norm')]
    for operation in (each for each in make_operations() if each[0] != 'softpick'):
        for shown in ('causal', 'alibi'):
            marks = [] if operation in fast and shown == 'causal' else [pytest.mark.slow]
            yield pytest.param(operation, shown, marks=marks, id=f'{"/".join(operation)}-{shown}')


@pytest.mark.parametrize(('operation', 'shown'), [*operations_and_masks()])
def test_gpu_kernels_of_every_operation_lower_to_mosaic_gpu(operation, shown):
    """Mosaic GPU lowers kernels without a GPU or a compiler; jax 0.11 lowers differently from 0.10."""
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType

    spec = make_specs(make_operations()[operation], 2, 512)[shown]

    def total(arrays):
        output, rows, _ = BACKENDS['gpu'].attend(*arrays, spec, needs_mass=True)
        return output.astype(jnp.float32).sum(), rows.mass_BHT

    array = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.bfloat16)
    device = AbstractDevice(device_kind='NVIDIA H100', num_cores=None, platform='cuda')
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ('x',), (AxisType.Auto,), abstract_device=device)):
        traced = jax.jit(jax.grad(total, has_aux=True)).trace([array] * 3)
        assert traced.lower(lowering_platforms=('cuda',)).as_text().count('mosaic_gpu') >= 3
