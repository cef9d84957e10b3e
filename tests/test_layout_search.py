"""Layout search by formula: candidates, rejections, and order by operations and bytes."""

import dataclasses
import math

import jax
import pytest
from conftest import make_tiny_spec

from sinklab.chip_specs import CHIPS
from sinklab.config.spec import SAVEABLE_ACTIVATIONS, Hardware
from sinklab.model import flops
from sinklab.parallel import device_mesh
from sinklab.planning import layout_search
from sinklab.train import memory_estimate, state

CHIP = dataclasses.replace(CHIPS['v5e'], memory_bytes=2**40)


def rank(hardware=Hardware(micro_batch='default', remat='auto'), chip=CHIP, **changes):  # noqa: B008 (frozen)
    return layout_search.rank_layouts(make_tiny_spec(**changes), hardware, jax.devices()[:4], chip, 'chunked')


@pytest.mark.slow
def test_rank_layouts_sorts_by_seconds_and_uses_all_devices():
    best_layouts, _ = rank()
    assert [layout.seconds for layout in best_layouts] == sorted(layout.seconds for layout in best_layouts)
    assert {
        math.prod(device_mesh.make_mesh(layout.hardware, jax.devices()[:4]).shape.values()) for layout in best_layouts
    } == {4}
    assert {layout.hardware.remat for layout in best_layouts} == set(memory_estimate.REMAT_POLICIES[1:]), (
        'what a run would not choose is not ranked'
    )


@pytest.mark.parametrize('remat', ['attention', 'none'])
@pytest.mark.parametrize(('micro_batch', 'size'), [(2, 2), (None, 4)])
def test_rank_layouts_keeps_given_options(remat, micro_batch, size):
    best_layouts, refused_layouts = rank(Hardware(fsdp=2, micro_batch=micro_batch, remat=remat))
    (layout,) = best_layouts + refused_layouts
    assert layout.hardware == Hardware(data=2, fsdp=2, micro_batch=size, remat=remat)


@pytest.mark.slow
def test_rank_layouts_reports_layouts_beyond_memory_or_indivisible():
    best_layouts, refused_layouts = rank(chip=dataclasses.replace(CHIP, memory_bytes=1000))
    assert best_layouts == []
    assert {'GiB' in layout.refused for layout in refused_layouts if layout.bytes} == {True}
    _, refused_layouts = rank(Hardware(micro_batch=3, remat='auto'))
    assert len({layout.refused for layout in refused_layouts}) == 1
    assert all(
        part in layout.refused
        for layout in refused_layouts
        for part in ('--micro_batch=3', 'config.optimizer.batch_size', '4')
    )


def test_generate_layouts_shards_parameters_within_slice():
    layouts = [*layout_search.generate_layouts(make_tiny_spec(), Hardware(), 8, 2)]
    assert {(layout.data, layout.fsdp) for layout in layouts} == {(2, 4)}
    assert {layout.fsdp for layout in layout_search.generate_layouts(make_tiny_spec(), Hardware(fsdp=8), 8, 2)} == {8}


@pytest.mark.slow
def test_rank_layouts_prefers_smaller_memory_for_equal_traffic():
    best_layouts, _ = rank(Hardware(micro_batch=4, remat='full'), model__dtype='bfloat16')
    assert [layout.hardware.fsdp for layout in best_layouts] == [4, 2, 1]
    assert [layout.bytes for layout in best_layouts] == sorted(layout.bytes for layout in best_layouts)


def test_count_recompute_flops_excludes_saved_activations():
    spec = make_tiny_spec()
    forward = flops.count_forward_flops(spec.model, spec.data.length)
    output_flops = 2 * spec.model.layers * spec.model.width * spec.model.ffn_width
    assert flops.count_recompute_flops(spec.model, spec.data.length, 'full') == pytest.approx(
        forward.total - forward.head - output_flops
    )
    assert flops.count_recompute_flops(spec.model, spec.data.length, ','.join(SAVEABLE_ACTIVATIONS)) == 0
    assert flops.count_recompute_flops(spec.model, spec.data.length, 'qkv,middle,ffn') == forward.attention


def test_estimate_sent_bytes_matches_documented_formula():
    """Compare with the formula of parallelism.md.

    It is (1/2 + 1/2 + 1) n (F - 1)/F along fsdp for each micro-batch, and 2 n/F (D - 1)/D along data.
    """
    spec = make_tiny_spec(model__dtype='bfloat16')
    hardware = Hardware(data=2, fsdp=2, micro_batch=2)
    mesh = device_mesh.make_mesh(hardware, jax.devices()[:4])
    n = 4 * sum(leaf.size for leaf in jax.tree.leaves(state.get_state_shapes(spec)['params']))
    assert layout_search.estimate_sent_bytes(spec, hardware, mesh) == pytest.approx(2 * 2 * n / 2 + 2 * n / 2 / 2)
