"""Copies of one parameter on several devices, which have to hold the same bits."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from sinklab.devices import AXES
from sinklab.group import Group
from sinklab.spec import Spec
from sinklab.train import state


def comparison(spec: Spec, mesh: jax.sharding.Mesh, group: Group) -> Callable[[int, dict], str | None]:
    """differing(step, params) -> where a copy of a parameter is not as another, of any process; None if nowhere."""
    where = state.shardings(spec, mesh)['params']
    shapes = state.shapes(spec)['params']

    def local(params: dict) -> jax.Array:
        """uint32_1N: the bits of this device's part of each leaf, summed; one that flips changes the sum."""
        bits = (jax.lax.bitcast_convert_type(leaf, jnp.uint32) for leaf in jax.tree.leaves(params))
        return jnp.stack([part.sum(dtype=jnp.uint32) for part in bits])[None]

    given = jax.tree.map(lambda place: place.spec, where)
    sums = jax.jit(jax.shard_map(local, in_specs=(given,), out_specs=PartitionSpec(AXES), check_vma=False))
    leaves = list(zip(jax.tree_util.tree_leaves_with_path(where), jax.tree.leaves(shapes), strict=True))
    copies = [(jax.tree_util.keystr(path), alike(place, leaf.shape)) for (path, place), leaf in leaves]
    if all(len(devices) == 1 for _, parts in copies for devices in parts):
        return lambda step, params: None

    def differing(step: int, params: dict) -> str | None:
        own = {shard.device.id: np.asarray(shard.data)[0].tolist() for shard in sums(params).addressable_shards}
        found = {int(name): row for one in group.gather(f'copies {step}', own) for name, row in one.items()}
        for number, (name, groups) in enumerate(copies):
            for first, *others in groups:
                for other in others:
                    if found[first.id][number] != found[other.id][number]:
                        return f'{name} differs on {told(first)} and {told(other)}'
        return None

    return differing


def alike(place: jax.sharding.NamedSharding, shape: tuple[int, ...]) -> list[list[jax.Device]]:
    """The devices that hold the same part of an array, for each of its parts."""
    groups: dict[str, list[jax.Device]] = {}
    for device, index in place.devices_indices_map(shape).items():
        groups.setdefault(str(index), []).append(device)
    return list(groups.values())


def told(device: jax.Device) -> str:
    return f'device {device.id} of process {device.process_index}'
