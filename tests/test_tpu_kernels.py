"""Tests of TPU kernels with the TPU compiler of libtpu, without a TPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import compute_alibi_bias, make_attention_spec
from jax.sharding import AxisType, Mesh, SingleDeviceSharding
from tiny_specs import make_attention_config, make_tiny_spec

from sinklab.attn import mask as masks
from sinklab.attn.backends import BACKENDS
from sinklab.attn.spec import RelativePositionBias, ScoreBias
from sinklab.config.spec import Layout
from sinklab.model.positions import compute_alibi_slopes, compute_buckets
from sinklab.parallel import sharding
from sinklab.parallel.device_mesh import MESH_AXES
from sinklab.planning import topology
from sinklab.train import state, step

pytestmark = pytest.mark.skipif(
    topology.find_libtpu() is None,
    reason='libtpu, which has the compiler, could not be installed; pip install libtpu',
)
LENGTH, HEADS = 8192, 2
POSITIONS = np.arange(LENGTH)[None, :, None]
POSITION_BIASES = {
    'none': None,
    'alibi': RelativePositionBias(compute_alibi_bias, compute_alibi_slopes(HEADS)[:, None]),
    'buckets': RelativePositionBias(lambda _, distance: compute_buckets(distance), np.zeros((1, 0))),
}


def compile_gradient(
    chip, operation, backend='tpu', width=128, dtype=jnp.bfloat16, position_bias='none', documents=False
):
    """Compile forward and backward for one chip."""
    device_sharding = SingleDeviceSharding(topology.make_tpu_devices(chip)[0])
    bias = ScoreBias(POSITION_BIASES[position_bias], POSITIONS, POSITIONS)

    def compute_loss(query, key, value, start_BT):
        mask = (
            masks.make_causal_mask(LENGTH) & masks.make_document_mask(start_BT)
            if documents
            else masks.make_causal_mask(LENGTH)
        )
        attention_spec = make_attention_spec(make_attention_config(*operation), mask, bias=bias)
        return jnp.sum(BACKENDS[backend].attend(query, key, value, attention_spec).output_BTHK ** 2)

    qkv_shape = jax.ShapeDtypeStruct((1, LENGTH, HEADS, width), dtype, sharding=device_sharding)
    start_BT = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32, sharding=device_sharding)
    return jax.jit(jax.grad(compute_loss, (0, 1, 2))).lower(qkv_shape, qkv_shape, qkv_shape, start_BT).compile()


def count_square_matrices(program):
    """Return temporary memory in units of the square matrix of one head with one byte per element."""
    return program.memory_analysis().temp_size_in_bytes / LENGTH**2


@pytest.mark.slow
@pytest.mark.parametrize(
    ('chip', 'operation', 'options'),
    [
        ('v5e:2x2', ('elu1', 'p_norm'), dict(width=64, position_bias='buckets')),
        ('v5p:2x2x1', ('sigmoid', 'none'), dict(width=128, dtype=jnp.float32)),
        ('v6e:2x2', ('exp', 'plus_one'), dict(width=96, position_bias='alibi', documents=True)),
    ],
)
def test_kernels_compile_without_square_matrix(chip, operation, options):
    """Test each chip, operation, width, dtype, mask and position bias once."""
    assert count_square_matrices(compile_gradient(chip, operation, **options)) < 1


@pytest.mark.slow
def test_dense_attention_allocates_square_matrix():
    assert count_square_matrices(compile_gradient('v5e:2x2', ('exp', 'sum'), backend='dense')) > 1


@pytest.mark.slow
def test_training_step_compiles_for_mesh_of_chips():
    layout = Layout(data=1, fsdp=2, tensor=2, attention='tpu')
    spec = make_tiny_spec(model__head_width=64, model__width=256, model__dtype='bfloat16', data__length=256)
    chips = np.array(topology.make_tpu_devices('v5e:2x2')).reshape(1, 2, 2)
    mesh = Mesh(chips, MESH_AXES, axis_types=(AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        batch = jax.ShapeDtypeStruct((4, 257), jnp.int32, sharding=sharding.make_batch_sharding(mesh, (4, 257)))
        request = jax.ShapeDtypeStruct((4,), jnp.int32, sharding=sharding.make_per_device_sharding(mesh))
        train_step = step.make_train_step(spec, layout, mesh, 'tpu')
        program_text = train_step.lower(state.make_abstract_state(spec, mesh), batch, request).compile().as_text()
    assert 'sinklab_softmax_forward' in program_text
    assert 'sinklab_softmax_backward' in program_text
