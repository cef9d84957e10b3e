"""Tests of published chip specifications by the device kinds of JAX."""

import pytest

from sinklab.chip_specs import CHIPS, find_chip, get_peak_flops


@pytest.mark.parametrize(
    ('kind', 'name'), [('TPU v5 lite', 'v5e'), ('TPU v5', 'v5p'), ('TPU v5p', 'v5p'), ('NVIDIA H200', 'h200')]
)
def test_find_chip_knows_device_kind(kind, name):
    assert find_chip(kind) is CHIPS[name]


def test_peak_flops_of_unlisted_chip_is_none():
    assert get_peak_flops('cpu') is None
    assert get_peak_flops('NVIDIA GeForce RTX 4090') is None
    assert get_peak_flops('NVIDIA H100 PCIe') is None, 'slower than the H100 that is listed'


def test_peak_flops_of_dual_device_chip_is_halved():
    assert get_peak_flops('TPU7x') == CHIPS['tpu7x'].flops_per_second / 2


@pytest.mark.parametrize('name', CHIPS)
def test_chip_specs_have_plausible_magnitude(name):
    """Catch a unit that is off by a thousand, or bits instead of bytes."""
    chip = CHIPS[name]
    assert 1e14 < chip.flops_per_second < 1e16
    assert 1e10 < chip.memory_bytes < 3e11
    assert 5e11 < chip.memory_bytes_per_second < 1e13
    assert 100 < chip.flops_per_second / chip.memory_bytes_per_second < 800, 'operations per byte'
