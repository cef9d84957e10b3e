"""What is published of chips, by the names that jax has for them."""

import pytest

from sinklab.chip_specs import CHIPS, find_chip, get_peak_flops

KINDS = {
    'TPU v4': 'v4',
    'TPU v5 lite': 'v5e',
    'TPU v5': 'v5p',
    'TPU v5p': 'v5p',
    'TPU v6 lite': 'v6e',
    'TPU7x': 'tpu7x',
    'NVIDIA A100-SXM4-80GB': 'a100',
    'NVIDIA H100 80GB HBM3': 'h100',
    'NVIDIA H200': 'h200',
    'NVIDIA B200': 'b200',
}


@pytest.mark.parametrize('kind', KINDS)
def test_a_device_is_known_by_its_kind(kind):
    assert find_chip(kind) is CHIPS[KINDS[kind]]


def test_what_is_not_published_here_has_no_peak():
    assert get_peak_flops('cpu') is None
    assert get_peak_flops('NVIDIA GeForce RTX 4090') is None
    assert get_peak_flops('NVIDIA H100 PCIe') is None, 'slower than the H100 that is listed'


def test_two_devices_of_a_chip_share_it():
    assert get_peak_flops('TPU7x') == CHIPS['tpu7x'].flops_per_second / 2


@pytest.mark.parametrize('name', CHIPS)
def test_figures_are_of_the_right_size(name):
    """A unit that is off by a thousand, or bits for bytes, would show."""
    chip = CHIPS[name]
    assert 1e14 < chip.flops_per_second < 1e16
    assert 1e10 < chip.memory_bytes < 3e11
    assert 5e11 < chip.memory_bytes_per_second < 1e13
    assert 1e11 < chip.link_bytes_per_second < 1e12
    assert 100 < chip.flops_per_second / chip.memory_bytes_per_second < 800, 'operations a byte'
