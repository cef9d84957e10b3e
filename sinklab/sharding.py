"""Where arrays live: one table from the logical axes of arrays to the axes of the mesh."""

import functools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from sinklab.devices import AXES

BATCH = ('data', 'fsdp')

RULES = {
    'batch': BATCH,
    'layer': None,
    'embed': 'fsdp',
    'heads': 'tensor',
    'kv_heads': 'tensor',
    'head_width': None,
    'ffn': 'tensor',
    'vocabulary': 'tensor',
}


def on_each_part(function: Callable, axes: Collection[str], in_specs: Any, out_specs: Any) -> Callable:
    """The function of what each device has along axes that are the compiler's; itself where there are none."""
    if not axes:
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes), check_vma=False)


def compilers_axes() -> tuple[str, ...]:
    """The axes of the mesh that are the compiler's."""
    mesh = jax.sharding.get_abstract_mesh()
    return () if mesh.empty else mesh.auto_axes


def compilers(shape: tuple[int, ...], logical: Sequence[str | None]) -> PartitionSpec:
    """How the compiler is to divide an array, if at all."""
    if not compilers_axes():
        return PartitionSpec(*(None for _ in shape))
    mesh = jax.sharding.get_abstract_mesh()
    place = dividing(mesh, shape, left(mesh, partition(*logical)))
    return PartitionSpec(*(entry if ways(mesh, entry) > 1 else None for entry in place))


def partition(*logical: str | None) -> PartitionSpec:
    """The logical axes of an array, one name a dimension, as mesh axes."""
    physical = [RULES[name] if name else None for name in logical]
    used = axes_of(physical)
    if len(set(used)) < len(used):
        raise ValueError(f'two of the axes {logical} land on one mesh axis: {physical}')
    return PartitionSpec(*physical)


def place(array: jax.Array, *logical: str | None) -> jax.Array:
    """Tells the compiler where an array lives: nothing outside a mesh, and whole along what does not divide."""
    if not compilers_axes():
        return array
    mesh = jax.sharding.get_abstract_mesh()
    return jax.lax.with_sharding_constraint(array, dividing(mesh, array.shape, left(mesh, partition(*logical))))


def left(mesh: AbstractMesh, axes: PartitionSpec) -> PartitionSpec:
    """The partition along the axes that are the compiler's: along others a device has its part already."""
    return along(axes, mesh.auto_axes)


def along(axes: PartitionSpec, some: Collection[str]) -> PartitionSpec:
    """The partition along some axes of the mesh alone."""
    return PartitionSpec(*(entry if set(names_of(entry)) <= set(some) else None for entry in axes))


def axes_of(place: Iterable) -> list[str]:
    return [axis for entry in place for axis in names_of(entry)]


def names_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry or ()


def dividing(mesh: jax.sharding.Mesh | AbstractMesh, shape: tuple[int, ...], axes: PartitionSpec) -> PartitionSpec:
    """The partition, without the axes of dimensions that they do not divide; a batch is never laid whole on all."""
    for entry, size in zip(axes, shape, strict=True):
        if entry == RULES['batch'] and size % ways(mesh, entry):
            raise ValueError(f'a batch of {size} sequences cannot be divided over {ways(mesh, entry)} devices')
    return PartitionSpec(
        *(None if size % ways(mesh, entry) else entry for entry, size in zip(axes, shape, strict=True))
    )


def ways(mesh: jax.sharding.Mesh | AbstractMesh, axes: str | tuple[str, ...] | None = RULES['batch']) -> int:
    """Into how many parts these axes of the mesh divide something; a batch, if nothing else is said."""
    return math.prod(mesh.shape[axis] for axis in names_of(axes))


def logical(leaf: nnx.Variable) -> tuple[str | None, ...]:
    """The names of a parameter's axes; stacking layers puts one more in front."""
    axes = leaf.get_metadata()['axes']
    return ('layer',) * (len(leaf.shape) - len(axes)) + axes


def by_parameter(function: Callable[[nnx.Variable], Any], parameters: nnx.State) -> dict:
    """What a function says of each parameter, which knows its axes, as a tree of plain dicts."""
    return nnx.to_pure_dict(jax.tree.map(function, parameters, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)))


def of_parameters(mesh: jax.sharding.Mesh, parameters: nnx.State) -> dict:
    """A NamedSharding for each parameter."""
    return by_parameter(lambda leaf: NamedSharding(mesh, partition(*logical(leaf))), parameters)


def of_batch(mesh: jax.sharding.Mesh, shape: tuple[int, ...]) -> NamedSharding:
    return NamedSharding(mesh, dividing(mesh, shape, partition('batch', None)))


def share(mesh: jax.sharding.Mesh, size: int) -> float:
    """How much of a batch of so many sequences the devices of this process hold."""
    where = of_batch(mesh, (size, 1)).addressable_devices_indices_map((size, 1)).values()
    return len({row for index in where for row in range(*index[0].indices(size))}) / size


def of_replicas(mesh: jax.sharding.Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def of_devices(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Of an array with one entry for each device."""
    return NamedSharding(mesh, PartitionSpec(AXES))


def put(ids_BT: np.ndarray, mesh: jax.sharding.Mesh) -> jax.Array:
    """A batch on the devices that share it; every process holds the whole of it and gives its part."""
    return batch(lambda rows: ids_BT[rows.start : rows.stop], ids_BT.shape, mesh)


def of_each_device(value: int, mesh: jax.sharding.Mesh) -> jax.Array:
    """int32_D, in which every process gives the value of its own devices."""
    return jax.make_array_from_callback((mesh.size,), of_devices(mesh), lambda _: np.full(1, value, np.int32))


def batch(read: Callable[[range], np.ndarray], shape: tuple[int, int], mesh: jax.sharding.Mesh) -> jax.Array:
    """A batch on the devices that share it; every process reads the rows of its own devices, each once."""
    read = functools.cache(read)
    where = of_batch(mesh, shape)
    return jax.make_array_from_callback(shape, where, lambda index: read(range(*index[0].indices(shape[0]))))
