"""Layout search by formula: candidates, rejections, and order by operations and bytes."""

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
def test_rank_layouts_sorts_by_seconds_and_uses_all_devices():
    best, _ = ranked()
    assert [one.seconds for one in best] == sorted(one.seconds for one in best)
    assert {math.prod(device_mesh.make_mesh(one.hardware, jax.devices()[:4]).shape.values()) for one in best} == {4}
    assert {one.hardware.remat for one in best} == set(memory_estimate.REMAT_POLICIES[1:]), (
        'what a run would not choose is not ranked'
    )


def test_rank_layouts_keeps_given_options():
    best, refused = ranked(Hardware(fsdp=2, micro_batch=2, remat='attention'))
    (only,) = best + refused
    assert only.hardware == Hardware(data=2, fsdp=2, micro_batch=2, remat='attention')


@pytest.mark.slow
def test_rank_layouts_reports_layouts_beyond_memory_or_indivisible():
    best, refused = ranked(chip=dataclasses.replace(CHIP, memory_bytes=1000))
    assert best == []
    assert {'GiB' in one.refused for one in refused if one.bytes} == {True}
    _, refused = ranked(Hardware(micro_batch=3))
    assert len({one.refused for one in refused}) == 1
    assert all(
        part in one.refused for one in refused for part in ('--micro_batch=3', 'config.optimizer.batch_size', '4')
    )


def test_generate_layouts_shards_parameters_within_slice():
    found = [*layout_search.generate_layouts(tiny(), Hardware(), 8, 2)]
    assert {(one.data, one.fsdp) for one in found} == {(2, 4)}
    assert {one.fsdp for one in layout_search.generate_layouts(tiny(), Hardware(fsdp=8), 8, 2)} == {8}


@pytest.mark.slow
def test_rank_layouts_prefers_smaller_memory_for_equal_traffic():
    best, _ = ranked(Hardware(micro_batch=4, remat='full'), model__dtype='bfloat16')
    assert [one.hardware.fsdp for one in best] == [4, 2, 1]
    assert [one.bytes for one in best] == sorted(one.bytes for one in best)


def test_count_recompute_flops_excludes_saved_activations():
    spec = tiny()
    once = flops.count_forward_flops(spec.model, spec.data.length)
    outward = 2 * spec.model.layers * spec.model.width * spec.model.ffn_width
    assert flops.count_recompute_flops(spec.model, spec.data.length, 'full') == pytest.approx(
        once.total - once.head - outward
    )
    assert flops.count_recompute_flops(spec.model, spec.data.length, ','.join(SAVEABLE_ACTIVATIONS)) == 0
    assert flops.count_recompute_flops(spec.model, spec.data.length, 'qkv,middle,ffn') == once.attention


def test_estimate_sent_bytes_matches_documented_formula():
    """Compare with the formula of parallelism.md.

    It is (1/2 + 1/2 + 1) n (F - 1)/F along fsdp for each micro-batch, and 2 n/F (D - 1)/D along data.
    """
    spec = tiny(model__dtype='bfloat16')
    hardware = Hardware(data=2, fsdp=2, micro_batch=2)
    mesh = device_mesh.make_mesh(hardware, jax.devices()[:4])
    n = 4 * sum(leaf.size for leaf in jax.tree.leaves(state.get_state_shapes(spec)['params']))
    assert layout_search.estimate_sent_bytes(spec, hardware, mesh) == pytest.approx(2 * 2 * n / 2 + 2 * n / 2 / 2)
