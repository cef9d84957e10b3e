"""Layouts by formula: what is looked at, what is refused, and that the order is that of operations and bytes."""

import dataclasses
import math

import jax
import pytest
from conftest import tiny

from sinklab.chip_specs import CHIPS
from sinklab.config.spec import SAVEABLE_ACTIVATIONS, Hardware
from sinklab.model import flops
from sinklab.parallel import device_mesh
from sinklab.planning import layout_search
from sinklab.train import memory_estimate, state

CHIP = dataclasses.replace(CHIPS['v5e'], memory_bytes=2**40)


def ranked(given=Hardware(), chip=CHIP, **changes):  # noqa: B008 (frozen)
    return layout_search.rank_layouts(tiny(**changes), given, jax.devices()[:4], chip, 'chunked')


@pytest.mark.slow
def test_layouts_that_fit_are_in_the_order_of_their_seconds_and_use_all_devices():
    best, _ = ranked()
    assert [one.seconds for one in best] == sorted(one.seconds for one in best)
    assert {math.prod(device_mesh.make_mesh(one.hardware, jax.devices()[:4]).shape.values()) for one in best} == {4}
    assert {one.hardware.remat for one in best} == set(memory_estimate.REMAT_POLICIES[1:]), (
        'what a run would not choose is not ranked'
    )


def test_what_is_given_is_kept():
    best, refused = ranked(Hardware(fsdp=2, micro_batch=2, remat='attention'))
    (only,) = best + refused
    assert only.hardware == Hardware(data=2, fsdp=2, micro_batch=2, remat='attention')


@pytest.mark.slow
def test_what_has_no_room_or_cannot_be_divided_is_told():
    best, refused = ranked(chip=dataclasses.replace(CHIP, memory_bytes=1000))
    assert best == []
    assert {'GiB, of' in one.refused for one in refused if one.bytes} == {True}
    _, refused = ranked(Hardware(micro_batch=3))
    assert {one.refused for one in refused} == {
        '--micro_batch=3 does not divide config.optimizer.batch_size, which is 4'
    }


def test_parameters_are_divided_within_a_slice():
    found = [*layout_search.generate_layouts(tiny(), Hardware(), 8, 2)]
    assert {(one.data, one.fsdp) for one in found} == {(2, 4)}
    assert {one.fsdp for one in layout_search.generate_layouts(tiny(), Hardware(fsdp=8), 8, 2)} == {8}


@pytest.mark.slow
def test_of_layouts_that_send_as_much_the_smallest_comes_first():
    best, _ = ranked(Hardware(micro_batch=4, remat='full'), model__dtype='bfloat16')
    assert [one.hardware.fsdp for one in best] == [4, 2, 1]
    assert [one.bytes for one in best] == sorted(one.bytes for one in best)


def test_what_is_made_again_is_what_is_not_kept():
    spec = tiny()
    once = flops.count_forward_flops(spec.model, spec.data.length)
    outward = 2 * spec.model.layers * spec.model.width * spec.model.ffn_width
    assert flops.count_recompute_flops(spec.model, spec.data.length, 'full') == pytest.approx(
        once.total - once.head - outward
    )
    assert flops.count_recompute_flops(spec.model, spec.data.length, ','.join(SAVEABLE_ACTIVATIONS)) == 0
    assert flops.count_recompute_flops(spec.model, spec.data.length, 'qkv,middle,ffn') == once.attention


def test_bytes_that_travel_are_those_of_the_page():
    """(1/2 + 1/2 + 1) n (F - 1)/F along fsdp for each micro-batch, 2 n/F (D - 1)/D along data (parallelism.md)."""
    spec = tiny(model__dtype='bfloat16')
    hardware = Hardware(data=2, fsdp=2, micro_batch=2)
    mesh = device_mesh.make_mesh(hardware, jax.devices()[:4])
    n = 4 * sum(leaf.size for leaf in jax.tree.leaves(state.get_state_shapes(spec)['params']))
    assert layout_search.estimate_sent_bytes(spec, hardware, mesh) == pytest.approx(2 * 2 * n / 2 + 2 * n / 2 / 2)
