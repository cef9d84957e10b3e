"""Check that replicas of a parameter shard have the same bits on all devices."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from sinklab.config.spec import Spec
from sinklab.parallel.device_mesh import MESH_AXES
from sinklab.process_group import ProcessGroup
from sinklab.train import state


def make_mismatch_finder(
    spec: Spec, mesh: jax.sharding.Mesh, group: ProcessGroup
) -> Callable[[int, dict], str | None]:
    """Make a function (step, params) -> description of a replica that differs, or None."""
    param_shardings = state.get_state_shardings(spec, mesh)['params']
    shapes = state.get_state_shapes(spec)['params']

    def sum_local_bits(params: dict) -> jax.Array:
        """Sum the bits of the shard of each leaf on this device: uint32_1N; a flipped bit changes the sum."""
        bits = (jax.lax.bitcast_convert_type(leaf, jnp.uint32) for leaf in jax.tree.leaves(params))
        return jnp.stack([part.sum(dtype=jnp.uint32) for part in bits])[None]

    param_specs = jax.tree.map(lambda leaf_sharding: leaf_sharding.spec, param_shardings)
    sum_bits = jax.jit(
        jax.shard_map(sum_local_bits, in_specs=(param_specs,), out_specs=PartitionSpec(MESH_AXES), check_vma=False)
    )
    leaves = list(zip(jax.tree_util.tree_leaves_with_path(param_shardings), jax.tree.leaves(shapes), strict=True))
    replica_groups = [
        (jax.tree_util.keystr(path), group_devices_by_shard(leaf_sharding, leaf.shape))
        for (path, leaf_sharding), leaf in leaves
    ]
    if all(len(devices) == 1 for _, device_groups in replica_groups for devices in device_groups):
        return lambda step, params: None

    def find_mismatch(step: int, params: dict) -> str | None:
        local_sums = {
            shard.device.id: np.asarray(shard.data)[0].tolist() for shard in sum_bits(params).addressable_shards
        }
        all_sums = {
            int(name): device_sums
            for process_sums in group.all_gather(local_sums)
            for name, device_sums in process_sums.items()
        }
        for index, (name, groups) in enumerate(replica_groups):
            for first, *others in groups:
                for other in others:
                    if all_sums[first.id][index] != all_sums[other.id][index]:
                        return f'{name} differs on {format_device(first)} and {format_device(other)}'
        return None

    return find_mismatch


def group_devices_by_shard(
    leaf_sharding: jax.sharding.NamedSharding, shape: tuple[int, ...]
) -> list[list[jax.Device]]:
    """Group the devices that hold the same shard of an array."""
    groups: dict[str, list[jax.Device]] = {}
    for device, index in leaf_sharding.devices_indices_map(shape).items():
        groups.setdefault(str(index), []).append(device)
    return list(groups.values())


def format_device(device: jax.Device) -> str:
    return f'device {device.id} of process {device.process_index}'
