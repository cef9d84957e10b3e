"""Logical axis rules, and shardings of parameters and batches."""

import functools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from sinklab.parallel.device_mesh import MESH_AXES

BATCH_AXES = ('data', 'fsdp')

RULES = {
    'batch': BATCH_AXES,
    'layer': None,
    'embed': 'fsdp',
    'heads': 'tensor',
    'kv_heads': 'tensor',
    'head_width': None,
    'ffn': 'tensor',
    'vocabulary': 'tensor',
}


def shard_map_auto_axes(function: Callable, auto_axes: Collection[str], in_specs: Any, out_specs: Any) -> Callable:
    """Wrap a function in shard_map along the automatic mesh axes; return it unchanged if there are none."""
    if not auto_axes:
        return function
    # Without check_vma: the results of pallas_call and of cuDNN do not say along which axes they vary.
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names=set(auto_axes), check_vma=False)


def get_auto_axes() -> tuple[str, ...]:
    """Return the automatic mesh axes, which the compiler partitions."""
    mesh = jax.sharding.get_abstract_mesh()
    return () if mesh.empty else mesh.auto_axes


def make_auto_partition_spec(shape: tuple[int, ...], logical_axes: Sequence[str | None]) -> PartitionSpec:
    """Return the partition spec of an array along automatic mesh axes."""
    if not get_auto_axes():
        return PartitionSpec(*(None for _ in shape))
    mesh = jax.sharding.get_abstract_mesh()
    spec = restrict_spec(logical_to_mesh_axes(*logical_axes), mesh.auto_axes)
    spec = drop_indivisible_axes(mesh, shape, spec)
    return PartitionSpec(*(entry if count_shards(mesh, entry) > 1 else None for entry in spec))


def logical_to_mesh_axes(*logical_axes: str | None) -> PartitionSpec:
    """Convert the logical axes of an array, one name for each dimension, to mesh axes."""
    mesh_axes = [RULES[name] if name else None for name in logical_axes]
    used_axes = list_mesh_axes(mesh_axes)
    if len(set(used_axes)) < len(used_axes):
        raise ValueError(f'two of the axes {logical_axes} are mapped to one mesh axis: {mesh_axes}')
    return PartitionSpec(*mesh_axes)


def constrain_sharding(array: jax.Array, *logical_axes: str | None) -> jax.Array:
    """Constrain the sharding of an array; outside a mesh return it unchanged.

    Dimensions that the mesh axes do not divide are replicated.
    """
    if not get_auto_axes():
        return array
    return jax.lax.with_sharding_constraint(array, make_auto_partition_spec(array.shape, logical_axes))


def restrict_spec(spec: PartitionSpec, allowed_axes: Collection[str]) -> PartitionSpec:
    """Return the partition spec along the allowed mesh axes; along manual axes a device already has its shard."""
    return PartitionSpec(*(entry if set(to_axis_tuple(entry)) <= set(allowed_axes) else None for entry in spec))


def list_mesh_axes(spec: Iterable) -> list[str]:
    return [axis for entry in spec for axis in to_axis_tuple(entry)]


def to_axis_tuple(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry or ()


def drop_indivisible_axes(
    mesh: jax.sharding.Mesh | AbstractMesh, shape: tuple[int, ...], spec: PartitionSpec
) -> PartitionSpec:
    """Return the partition spec without axes that do not divide a dimension.

    Raises:
        ValueError: The batch cannot be divided; a batch is never replicated.
    """
    for entry, size in zip(spec, shape, strict=True):
        if entry == RULES['batch'] and size % count_shards(mesh, entry):
            raise ValueError(
                f'a batch of {size} sequences cannot be divided over {count_shards(mesh, entry)} devices'
            )
    return PartitionSpec(
        *(None if size % count_shards(mesh, entry) else entry for entry, size in zip(spec, shape, strict=True))
    )


def count_shards(mesh: jax.sharding.Mesh | AbstractMesh, axes: str | tuple[str, ...] | None) -> int:
    """Return the number of shards into which mesh axes divide a dimension."""
    return math.prod(mesh.shape[axis] for axis in to_axis_tuple(axes))


def count_batch_shards(mesh: jax.sharding.Mesh | AbstractMesh) -> int:
    """Return the number of shards of the batch."""
    return count_shards(mesh, RULES['batch'])


def get_logical_axes(leaf: nnx.Variable) -> tuple[str | None, ...]:
    """Return the logical axes of a parameter; stacked layers have one more in front."""
    axes = leaf.get_metadata()['axes']
    return ('layer',) * (len(leaf.shape) - len(axes)) + axes


def map_parameters(function: Callable[[nnx.Variable], Any], parameters: nnx.State) -> dict:
    """Map a function over the parameters, with their logical axes; return nested dicts."""
    return nnx.to_pure_dict(jax.tree.map(function, parameters, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)))


def make_parameter_shardings(mesh: jax.sharding.Mesh, parameters: nnx.State) -> dict:
    """Return a NamedSharding for each parameter."""
    return map_parameters(lambda leaf: NamedSharding(mesh, logical_to_mesh_axes(*get_logical_axes(leaf))), parameters)


def make_batch_sharding(mesh: jax.sharding.Mesh, shape: tuple[int, ...]) -> NamedSharding:
    return NamedSharding(mesh, drop_indivisible_axes(mesh, shape, logical_to_mesh_axes('batch', None)))


def make_replicated_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def make_per_device_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Return the sharding of an array with one entry for each device."""
    return NamedSharding(mesh, PartitionSpec(MESH_AXES))


def put_batch(ids_BT: np.ndarray, mesh: jax.sharding.Mesh) -> jax.Array:
    """Put a batch on devices; every process has the whole batch and contributes its shards."""
    return load_batch(lambda rows: ids_BT[rows.start : rows.stop], ids_BT.shape, mesh)


def make_per_device_array(value: int, mesh: jax.sharding.Mesh) -> jax.Array:
    """Make int32_D; each process sets the entries of its own devices to its `value`."""
    return jax.make_array_from_callback(
        (mesh.size,), make_per_device_sharding(mesh), lambda _: np.full(1, value, np.int32)
    )


def load_batch(
    read_rows: Callable[[range], np.ndarray], shape: tuple[int, int], mesh: jax.sharding.Mesh
) -> jax.Array:
    """Load a batch on devices; every process reads the rows of its own devices, each once."""
    read_rows = functools.cache(read_rows)
    batch_sharding = make_batch_sharding(mesh, shape)

    def read_shard(index: tuple[slice, ...]) -> np.ndarray:
        return read_rows(range(*index[0].indices(shape[0])))

    return jax.make_array_from_callback(shape, batch_sharding, read_shard)
