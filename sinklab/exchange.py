"""What devices give each other in a step: weights gathered as they are met, gradients scattered as they are made."""

import contextvars
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from sinklab import sharding
from sinklab.devices import rings

# Of the mesh that a program is being traced for, by axis: the rings of the network that it goes along.
RINGS: contextvars.ContextVar[Mapping[str, tuple[int, ...]] | None] = contextvars.ContextVar('rings', default=None)


def on_each(local: Callable, mesh: jax.sharding.Mesh, parameters: dict, gradient: bool = False) -> Callable:
    """local(params, ids_BT), written for one device and its part of both, with the parameters' shardings.

    Gives what is the same on all devices and, of a gradient, what is laid out as parameters are. Axes along
    which neither is divided stay the compiler's.
    """
    own, lines = {axis for axis, size in mesh.shape.items() if axis in sharding.BATCH or size == 1}, rings(mesh)

    def with_rings(*given: Any) -> Any:
        token = RINGS.set(lines)
        try:
            return local(*given)
        finally:
            RINGS.reset(token)

    places = jax.tree.map(lambda place: sharding.along(place.spec, own), parameters)
    return jax.shard_map(
        with_rings,
        in_specs=(places, PartitionSpec(sharding.BATCH)),
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
    return of_parts(gathered, array, logical)


def gathered(parts: list[tuple[int, str]], array: jax.Array) -> jax.Array:
    for dimension, axis in parts:
        first = jnp.moveaxis(array, dimension, 0)
        found = joined(first.reshape(len(first), -1), axis)
        array = jnp.moveaxis(found.reshape(-1, *first.shape[1:]), 0, dimension)
    return array


def part(array: jax.Array, *logical: str | None) -> jax.Array:
    """This device's part of the sum of the arrays of all devices that have the others."""
    return of_parts(parted, array, logical)


def parted(parts: list[tuple[int, str]], array: jax.Array) -> jax.Array:
    for dimension, axis in parts:
        first, ways = jnp.moveaxis(array, dimension, 0), jax.lax.axis_size(axis)
        kept = scattered(first.reshape(ways, len(first) // ways, -1), axis)
        array = jnp.moveaxis(kept.reshape(-1, *first.shape[1:]), 0, dimension)
    return array


def of_parts(function: Callable, array: jax.Array, logical: Sequence[str | None]) -> jax.Array:
    """function(parts, array), of which the compiler would gather what it has divided."""
    divided, place = parts(logical), sharding.compilers(array.shape, logical)
    if not divided:
        return array
    run = functools.partial(function, divided)
    return sharding.on_each_part(run, sharding.axes_of(place), (place,), place)(array)


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
    axes = [sharding.RULES[name] if name else None for name in logical]
    return [(dimension, axis) for dimension, axis in enumerate(axes) if axis in divided]
