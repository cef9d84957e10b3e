"""Checks that a layout divides batch and parameters, and that the residual stream and the batch fit."""

import jax
import jax.numpy as jnp
from flax import nnx

from sinklab.config.spec import Hardware, Spec
from sinklab.errors import UserError
from sinklab.parallel import sharding
from sinklab.train import state

AnyMesh = jax.sharding.Mesh | jax.sharding.AbstractMesh
ID_BYTES = 4  # ids are int32
FIELD_OF_AXIS = {'embed': 'width', 'ffn': 'ffn_width'}  # config.model field of a logical axis, where the names differ


def check_layout(spec: Spec, hardware: Hardware, mesh: AnyMesh) -> None:
    """Raise UserError for a layout that cannot divide the batch or a parameter."""
    batch_size = spec.optimizer.batch_size
    micro_batch_size = batch_size if hardware.micro_batch == 'default' else hardware.get_micro_batch_size(batch_size)
    num_shards = sharding.count_batch_shards(mesh)
    if batch_size % micro_batch_size:
        raise UserError(
            f'--micro_batch={micro_batch_size} does not divide config.optimizer.batch_size, which is {batch_size}'
        )
    if micro_batch_size % num_shards:
        option = (
            f'--micro_batch={micro_batch_size}'
            if isinstance(hardware.micro_batch, int)
            else f'config.optimizer.batch_size, which is {micro_batch_size},'
        )
        raise UserError(
            f'{option} cannot be divided over {num_shards} devices (--data={mesh.shape["data"]} x '
            f'--fsdp={mesh.shape["fsdp"]}); use a multiple of {num_shards}, fewer devices, or more of them '
            'along --tensor'
        )
    parameters = state.make_abstract_model(spec)[1]
    for parameter in jax.tree.leaves(parameters, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        check_parameter_layout(mesh, parameter)


def check_parameter_layout(mesh: AnyMesh, parameter: nnx.Variable) -> None:
    for name, size in zip(sharding.get_logical_axes(parameter), parameter.shape, strict=True):
        axis = sharding.RULES[name] if name else None
        if axis and size % mesh.shape[axis]:
            description = f'config.model.{FIELD_OF_AXIS.get(name, name)} is {size}'
            raise UserError(f'{description}, which --{axis}={mesh.shape[axis]} does not divide')


def check_batch_memory(spec: Spec, hardware: Hardware, mesh: AnyMesh, memory_bytes: int) -> None:
    """Raise UserError if the residual stream of a micro-batch, or the ids of a batch, do not fit on a device."""
    model, batch_size, num_shards = spec.model, spec.optimizer.batch_size, sharding.count_batch_shards(mesh)
    micro_batch_size = hardware.get_micro_batch_size(batch_size)
    tokens_per_device = micro_batch_size * spec.data.length // num_shards
    min_bytes = tokens_per_device * model.layers * model.width * jnp.dtype(model.dtype).itemsize
    if min_bytes > memory_bytes:
        remedy = (
            'lower config.optimizer.batch_size, or give a smaller --micro_batch'
            if micro_batch_size > num_shards
            else 'lower config.data.length'
        )
        raise UserError(
            f'a step of {micro_batch_size} sequences needs at least {min_bytes / 2**30:.1f} GiB on a device of '
            f'{memory_bytes / 2**30:.1f} GiB; {remedy}'
        )
    ids_bytes = batch_size * (spec.data.length + 1) * ID_BYTES // num_shards
    if ids_bytes > memory_bytes:
        raise UserError(
            f'the ids of a batch of {batch_size} sequences need {ids_bytes / 2**30:.1f} GiB on a device of '
            f'{memory_bytes / 2**30:.1f} GiB; lower config.optimizer.batch_size'
        )
