"""Detection of parameter copies that differ between devices."""

import jax
import numpy as np
import pytest
from conftest import make_tiny_spec

from sinklab.config.spec import Hardware
from sinklab.parallel import device_mesh
from sinklab.train import state

LAYOUTS = [Hardware(data=4), Hardware(data=2, fsdp=2), Hardware(data=2, tensor=2), Hardware(fsdp=4)]


def flip_bit(array, device):
    """Return the array with one bit flipped in its part on a device."""
    parts = []
    for shard in array.addressable_shards:
        part = np.array(shard.data)
        part.view(np.uint32).flat[-1] ^= 1 if shard.device.id == device else 0
        parts.append(jax.device_put(part, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


@pytest.mark.slow
@pytest.mark.parametrize(
    'hardware', LAYOUTS, ids=lambda hardware: f'{hardware.data}-{hardware.fsdp}-{hardware.tensor}'
)
def test_mismatch_finder_finds_bit_that_differs_between_copies(hardware):
    spec = make_tiny_spec()
    with jax.set_mesh(mesh := device_mesh.make_mesh(hardware)):
        params = state.create_state(spec, mesh)['params']
        find_mismatch = state.make_mismatch_finder(spec, mesh)
        assert find_mismatch(params) is None
        embedding = params['embedding_VD']
        groups = state.group_devices_by_shard(embedding.sharding, embedding.shape)
        mismatch = find_mismatch(params | {'embedding_VD': flip_bit(embedding, 3)})
    assert (mismatch is not None) == any(len(group) > 1 for group in groups)
    assert mismatch is None or ('embedding_VD' in mismatch and 'device 3 of process 0' in mismatch)
