"""GPU kernels are compiled for a GPU that is not there."""

import importlib
import importlib.util
import pkgutil

import jax
import jax.numpy as jnp
import pytest
from gpu_problems import SUMS

from sinklab.attend import mask
from sinklab.attend.kernels import gpu
from sinklab.attend.kernels.primitive import Problem, Scores, Softmax

PLUGINS = importlib.util.find_spec('jax_plugins') is not None
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 7 } runtime_version { major: 13 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@pytest.fixture(scope='module')
def absent():
    """A Hopper GPU that is not there: (its sharding, the mesh to trace under)."""
    plugins = pkgutil.iter_modules(importlib.import_module('jax_plugins').__path__) if PLUGINS else []
    if not any(module.name.startswith('xla_cuda') for module in plugins):
        pytest.skip('jax_plugins.xla_cuda13 is not installed: nothing compiles for a GPU')
    from jax.experimental import topologies
    from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

    found = topologies.get_topology_desc(platform='cuda', target_config=H100, topology='1x1x1')
    device = AbstractDevice(device_kind='NVIDIA H100 80GB HBM3', num_cores=None, platform='cuda')
    return SingleDeviceSharding(found.devices[0]), AbstractMesh((1,), ('x',), abstract_device=device)


@pytest.mark.slow
@pytest.mark.parametrize(('shown', 'width'), [('full', 96), ('causal', 128), ('documents', 64)])
@pytest.mark.parametrize('name', SUMS)
def test_kernels_compile_for_a_gpu_without_a_matrix_of_scores(absent, name, shown, width):
    sharding, mesh = absent
    length = 4096

    def of(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    query, key = of(jnp.bfloat16, 1, 4, length, width), of(jnp.bfloat16, 1, 2, length, width)
    parameter_HP, row = of(jnp.float32, 4, 0), of(jnp.float32, 1, 4, length)
    sums = SUMS[name]
    rows = [row] * (sums.statistics + (sums == Softmax()))

    def masked(start):
        causal = mask.causal(length)
        return {'full': mask.full(length), 'causal': causal, 'documents': causal & mask.document(start)}[shown]

    def both(start, query, key, value, parameter_HP, *rows):
        given = sums, Problem(Scores(width**-0.5), masked(start), None, parameter_HP), query, key, value
        output, statistics = gpu.forward(*given)
        return output, statistics, gpu.backward(*given, output, rows)

    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(both).lower(of(jnp.int32, 1, length), query, key, key, parameter_HP, *rows)
        memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes < length * length
