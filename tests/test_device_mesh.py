"""Meshes of simulated devices: axis sizes and rejected layouts."""

import dataclasses
import os

import jax
import numpy as np
import pytest
from conftest import make_unpatched_mesh

from sinklab.config.spec import Layout
from sinklab.errors import UserError
from sinklab.parallel import device_mesh


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """Simulated device with the attributes of a JAX device."""

    id: int
    process_index: int
    slice_index: int
    platform: str
    device_kind: str
    coords: tuple[int, ...] = ()
    core_on_chip: int = 0


def make_gpus(nodes, per_node=8):
    return [
        FakeDevice(n, n // per_node, n // per_node, 'gpu', 'NVIDIA H100 80GB HBM3') for n in range(nodes * per_node)
    ]


def make_tpus(shape, slices=1, kind='TPU v5 lite', per_host=4):
    devices = []
    for slice_index in range(slices):
        for position in np.ndindex(*reversed(shape)):
            device_id, coords = len(devices), tuple(reversed(position)) + (0,) * (3 - len(shape))
            devices.append(FakeDevice(device_id, device_id // per_host, slice_index, 'tpu', kind, coords))
    return devices


@pytest.mark.parametrize(
    ('devices', 'layout', 'sizes'),
    [
        (make_tpus((2, 4), per_host=8), Layout(), (1, 8, 1)),
        (make_tpus((16, 16)), Layout(), (1, 256, 1)),
        (make_tpus((4, 4, 4), kind='TPU v5p'), Layout(), (1, 64, 1)),
        (make_tpus((16, 16), slices=2), Layout(), (2, 256, 1)),
        (make_gpus(1), Layout(), (1, 8, 1)),
        (make_gpus(4), Layout(), (4, 8, 1)),
        (make_tpus((4, 4, 4), kind='TPU v5p'), Layout(data=8, fsdp=8), (8, 8, 1)),
        (make_tpus((4, 4, 4), kind='TPU v5p'), Layout(tensor=2), (1, 32, 2)),
        (make_tpus((16, 16)), Layout(fsdp=16), (16, 16, 1)),
        (make_tpus((16, 16)), Layout(data=64, fsdp=2, tensor=2), (64, 2, 2)),
        (make_tpus((4, 4), slices=2), Layout(fsdp=32), (1, 32, 1)),
        (make_tpus((4, 4), slices=2), Layout(data=4), (4, 8, 1)),
        (make_gpus(4), Layout(tensor=2), (4, 4, 2)),
    ],
)
def test_mesh_has_given_sizes_then_fsdp_within_slices_and_data_across(devices, layout, sizes):
    mesh = make_unpatched_mesh(layout, devices)
    assert tuple(mesh.shape.values()) == sizes
    assert sorted(device.id for device in mesh.devices.flat) == [device.id for device in devices], 'each device once'


def test_mesh_neighbours_are_network_neighbours():
    mesh = make_unpatched_mesh(Layout(data=16, fsdp=16), make_tpus((16, 16)))
    coords = np.array([[device.coords for device in row] for row in mesh.devices[:, :, 0]])
    for axis in (0, 1):
        distances = np.abs(np.diff(coords, axis=axis)).sum(-1)
        assert (distances == 1).all()


def test_mesh_data_axis_does_not_split_slices():
    mesh = make_unpatched_mesh(Layout(data=4), make_tpus((4, 4), slices=2))
    slices = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    assert (slices[:2] == 0).all()
    assert (slices[2:] == 1).all()


@pytest.mark.parametrize(
    ('devices', 'layout'),
    [
        (make_gpus(1), Layout(data=2, fsdp=2)),
        (make_gpus(1), Layout(fsdp=3)),
        (make_gpus(1), Layout(tensor=3)),
        (make_gpus(1), Layout(data=8, fsdp=4, tensor=2)),
        (make_gpus(3), Layout(data=2, fsdp=4, tensor=3)),
        ([*make_gpus(1), *make_gpus(2)[8:13]], Layout(fsdp=13)),
    ],
)
def test_mesh_rejects_idle_devices_and_incompatible_slices(devices, layout):
    with pytest.raises(UserError):
        make_unpatched_mesh(layout, devices)


@pytest.mark.parametrize(
    ('devices', 'layout', 'rings'),
    [
        (make_tpus((16, 16)), Layout(), (16, 16)),
        (make_tpus((16, 16)), Layout(data=16), (16,)),
        (make_tpus((4, 4, 4), kind='TPU v5p'), Layout(), (4, 4, 4)),
        (make_tpus((8, 8), slices=2), Layout(), (8, 8)),
        (make_gpus(1), Layout(), (8,)),
    ],
)
def test_find_rings_returns_network_rings_of_axis(devices, layout, rings):
    assert device_mesh.find_rings(make_unpatched_mesh(layout, devices))['fsdp'] == rings


HOST_MEMORY_BYTES = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')


def test_device_memory_of_cpu_is_share_of_host_memory():
    count = jax.local_device_count()
    assert count == 4, 'as the tests are set up'
    assert device_mesh.get_device_memory_bytes() == HOST_MEMORY_BYTES // count
