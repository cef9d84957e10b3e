"""Where arrays live: one table from the logical axes of arrays to the axes of the mesh."""

import contextvars
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from sinklab.devices import AXES, rings

BATCH = ('data', 'fsdp')

# Of the mesh that a program is being traced for, by axis: the rings of the network that it goes along.
RINGS: contextvars.ContextVar[Mapping[str, tuple[int, ...]] | None] = contextvars.ContextVar('rings', default=None)

RULES = {
    'batch': BATCH,
    'layer': None,
    'embed': 'fsdp',
    'heads': 'tensor',
    'head_width': None,
    'ffn': 'tensor',
    'vocabulary': 'tensor',
}


def on_each(local: Callable, mesh: jax.sharding.Mesh, parameters: dict, gradient: bool = False) -> Callable:
    """local(params, ids_BT), written for one device and its part of both, with the parameters' shardings.

    Gives what is the same on all devices and, of a gradient, what is laid out as parameters are. Axes along which
    neither is divided stay the compiler's.
    """
    own, lines = {axis for axis, size in mesh.shape.items() if axis in BATCH or size == 1}, rings(mesh)

    def with_rings(*given: Any) -> Any:
        token = RINGS.set(lines)
        try:
            return local(*given)
        finally:
            RINGS.reset(token)

    places = jax.tree.map(lambda place: along(place.spec, own), parameters)
    return jax.shard_map(
        with_rings,
        in_specs=(places, PartitionSpec(BATCH)),
        out_specs=(PartitionSpec(), places) if gradient else PartitionSpec(),
        axis_names=own,
        check_vma=False,
    )


def own_axes() -> tuple[str, ...]:
    """The axes of the mesh along which the program that is being traced is written for one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return () if mesh.empty else mesh.manual_axes


def whole(array: jax.Array, *logical: str | None) -> jax.Array:
    """The array of which this device has a part."""
    return on_each_part(functools.partial(gathered, parts(logical)), array, logical)


def gathered(parts: list[tuple[int, str]], array: jax.Array) -> jax.Array:
    for dimension, axis in parts:
        first = jnp.moveaxis(array, dimension, 0)
        found = joined(first.reshape(len(first), -1), axis)
        array = jnp.moveaxis(found.reshape(-1, *first.shape[1:]), 0, dimension)
    return array


def part(array: jax.Array, *logical: str | None) -> jax.Array:
    """This device's part of the sum of the arrays of all devices that have the others."""
    return on_each_part(functools.partial(parted, parts(logical)), array, logical)


def parted(parts: list[tuple[int, str]], array: jax.Array) -> jax.Array:
    for dimension, axis in parts:
        first, ways = jnp.moveaxis(array, dimension, 0), jax.lax.axis_size(axis)
        kept = scattered(first.reshape(ways, len(first) // ways, -1), axis)
        array = jnp.moveaxis(kept.reshape(-1, *first.shape[1:]), 0, dimension)
    return array


def on_each_part(function: Callable, array: jax.Array, logical: Sequence[str | None]) -> jax.Array:
    """function(array) of the part of each device along axes that are the compiler's, which it would gather."""
    place = compilers(array.shape, logical)
    axes = set(axes_of(place))
    if not axes:
        return function(array)
    return jax.shard_map(function, in_specs=place, out_specs=place, axis_names=axes, check_vma=False)(array)


def compilers(shape: tuple[int, ...], logical: Sequence[str | None]) -> PartitionSpec:
    """How the compiler is to divide an array, if at all."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not mesh.auto_axes:
        return PartitionSpec(*(None for _ in shape))
    place = dividing(mesh, shape, left(mesh, partition(*logical)))
    return PartitionSpec(*(entry if ways(mesh, entry) > 1 else None for entry in place))


def scattered(array_nDN: jax.Array, axis: str) -> jax.Array:
    """This device's entry of the sum, ring after ring."""
    array_RN = array_nDN.reshape(-1, array_nDN.shape[-1])
    for size, groups in along_rings(axis, 1):
        parts = array_RN.reshape(size, -1, array_RN.shape[-1])
        array_RN = jax.lax.psum_scatter(parts, axis, axis_index_groups=groups)
    return array_RN


def joined(array_RN: jax.Array, axis: str) -> jax.Array:
    """The arrays of all devices one after another, ring after ring."""
    for _, groups in reversed(along_rings(axis, 2)):
        parts = jax.lax.all_gather(array_RN, axis, axis_index_groups=groups)
        array_RN = parts.reshape(-1, array_RN.shape[-1])
    return array_RN


def along_rings(axis: str, most: int) -> list[tuple[int, list[list[int]] | None]]:
    """(devices, groups of them) of each ring, or of so many together: over more the compiler for TPUs adds arrays."""
    rings = (RINGS.get() or {}).get(axis, (jax.lax.axis_size(axis),))
    outer = max(0, len(rings) - most)
    sizes = *rings[:outer], math.prod(rings[outer:])
    number = np.arange(math.prod(sizes)).reshape(sizes)
    if len(sizes) == 1:
        return [(sizes[0], None)]
    return [(size, np.moveaxis(number, at, -1).reshape(-1, size).tolist()) for at, size in enumerate(sizes)]


def parts(logical: Sequence[str | None]) -> list[tuple[int, str]]:
    """(dimension, axis of the mesh) of what is divided where the program is written for one device."""
    mesh = jax.sharding.get_abstract_mesh()
    divided = {axis for axis in own_axes() if mesh.shape[axis] > 1}
    return [(dimension, RULES[name]) for dimension, name in enumerate(logical) if name and RULES[name] in divided]


def partition(*logical: str | None) -> PartitionSpec:
    """The logical axes of an array, one name a dimension, as mesh axes."""
    physical = [RULES[name] if name else None for name in logical]
    used = axes_of(physical)
    if len(set(used)) < len(used):
        raise ValueError(f'two of the axes {logical} land on one mesh axis: {physical}')
    return PartitionSpec(*physical)


def place(array: jax.Array, *logical: str | None) -> jax.Array:
    """Tells the compiler where an array lives: nothing outside a mesh, and whole along what does not divide."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not mesh.auto_axes:
        return array
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
