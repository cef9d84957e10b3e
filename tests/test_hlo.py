"""Parser of HLO text, tested on literal texts and on a compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.hlo import HloProgram, parse_replica_groups

PROGRAM_TEXT = """
HloModule jit_step, is_scheduled=true, num_partitions=8

%region_0.add (x: f32[], y: f32[]) -> f32[] {
  ROOT %add.1 = f32[] add(%x, %y)
}

%fused.3 (p: bf16[8,64]) -> bf16[32,64] {
  ROOT %all-gather.2 = bf16[32,64]{1,0} all-gather(%p), replica_groups=[2,4]<=[8], dimensions={0}
}

%async_collective_fusion.3 (p: bf16[8,64]) -> bf16[32,64] {
  ROOT %all-gather.3 = bf16[32,64]{1,0} all-gather(%p), replica_groups=[2,4]<=[8], dimensions={0}
}

%fused.4 (p: bf16[8,64]) -> bf16[32,64] {
  ROOT %all-gather.4 = bf16[32,64]{1,0} all-gather(%p), replica_groups=[2,4]<=[8], dimensions={0}
}

%fused.all-reduce-scatter.1 (p: f32[32,64]) -> f32[8,64] {
  %all-reduce.5 = f32[32,64]{1,0} all-reduce(%p), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%region_0.add
  ROOT %slice.1 = f32[8,64]{1,0} dynamic-slice(%all-reduce.5, %i, %z), dynamic_slice_sizes={8,64}
}

%body.1 (c: (s32[], /*index=1*/bf16[8,64])) -> (s32[], bf16[8,64]) {
  %fusion.1 = bf16[32,64]{1,0} fusion(%g), calls=%async_collective_fusion.3, backend_config={"estimated_cycles":"100"}
  %async-collective-start.1 = bf16[32,64]{1,0} fusion(%g), calls=%fused.3
  %async-collective-done.1 = bf16[32,64]{1,0} fusion(%g), calls=%fused.4
  %fusion.2 = f32[8,64]{1,0} fusion(%h), calls=%fused.all-reduce-scatter.1, backend_config={"estimated_cycles":"20"}
  %sinklab_softmax_forward.7 = (f32[2,4]{1,0}, f32[2]{0}) custom-call(%q), custom_call_target="tpu_custom_call"
}

%condition.1 (c: (s32[], bf16[8,64])) -> pred[] {
  %constant.9 = s32[]{:T(128)} constant(22)
  ROOT %compare.1 = pred[] compare(%i, %constant.9), direction=LT
}

ENTRY %main.1 (p: bf16[8,64]) -> f32[] {
  %while.1 = (s32[], /*index=1*/bf16[8]{0}) while(%t), condition=%condition.1, body=%body.1
  %all-reduce.7 = (f32[10]{0}, f32[]) all-reduce(%a, %b), replica_groups=mesh['x'=2,'y'=4] {'x'}
  %all-gather-start.1 = (bf16[4]{0}, bf16[8]{0}) all-gather-start(%k), replica_groups={{0,4},{1,5},{2,6},{3,7}}
}
"""


def test_find_collectives_returns_sizes_and_execution_counts():
    collectives = HloProgram(PROGRAM_TEXT).find_collectives()
    assert len(collectives) == 4, 'start, continuation and done of a collective count as one'
    by_kind = {collective.kind + str(collective.num_executions): collective for collective in collectives}
    gather, scatter = by_kind['all-gather22'], by_kind['reduce-scatter22']
    assert (gather.num_bytes, gather.is_async, len(gather.replica_groups[0])) == (32 * 64 * 2, True, 4)
    assert (scatter.num_bytes, scatter.is_async) == (32 * 64 * 4, False)
    assert scatter.sent_bytes == 22 * 32 * 64 * 4 * 3 / 4
    reduce, start = by_kind['all-reduce1'], by_kind['all-gather1']
    assert (reduce.num_bytes, reduce.replica_groups[0], reduce.sent_bytes) == (44, (0, 4), 44)
    assert (start.num_bytes, start.is_async, start.replica_groups[1]) == (16, True, (1, 5))


def test_find_collectives_includes_megascale_transfers():
    attributes = (
        '_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{1,2}x{0:63}",'
        '_xla_megascale_transfer_type="ALL_REDUCE"'
    )
    text = (
        'ENTRY %main.1 (p: f32[8,128]) -> f32[8,128] {\n'
        f'  %send.1 = (f32[8,128]{{1,0}}, u32[], token[]) send(%p, %t), frontend_attributes={{{attributes}}}\n'
        f'  %recv.1 = (f32[8,128]{{1,0}}, u32[], token[]) recv(%t), frontend_attributes={{{attributes}}}\n'
        '  %send.2 = (f32[8,128]{1,0}, u32[], token[]) send(%p, %t), is_host_transfer=true\n}\n'
    )
    (collective,) = HloProgram(text).find_collectives()
    assert collective.kind == 'all-reduce'
    assert collective.replica_groups == ((0, 64),)
    assert collective.is_async
    assert collective.sent_bytes == 4 * 8 * 128


def test_cycles_and_kernels_are_multiplied_by_loop_iterations():
    program = HloProgram(PROGRAM_TEXT)
    assert program.estimate_cycles() == 22 * 120
    assert program.count_kernels('sinklab_') == {'softmax_forward': 22}


@pytest.mark.parametrize(
    ('text', 'groups'),
    [
        ('replica_groups={{0,1},{2,3}}', ((0, 1), (2, 3))),
        ('replica_groups=[2,2]<=[4]', ((0, 1), (2, 3))),
        ('replica_groups=[2,2]<=[2,2]T(1,0)', ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", ((0, 1, 2, 3),)),
        ('source_target_pairs={{0,1},{1,0}}', ((0, 1), (1, 0))),
        ('replica_groups={}, to_apply=%add', ((0, 1, 2, 3),)),
    ],
)
def test_parse_replica_groups_reads_every_notation(text, groups):
    assert parse_replica_groups(text, 4) == groups


def test_parse_replica_groups_rejects_unknown_notation():
    with pytest.raises(ValueError):
        parse_replica_groups('replica_groups=new', 4)


@pytest.mark.parametrize(
    ('type_text', 'opcode', 'num_bytes'),
    [
        ('((bf16[4], f32[2]), (bf16[8], f32[4]))', 'all-gather', 32),
        ('(f32[4], f32[2])', 'all-reduce', 24),
        ('(f32[4], f32[4], u32[], u32[])', 'collective-permute', 16),
    ],
)
def test_find_collectives_counts_results_of_start_operation(type_text, opcode, num_bytes):
    (collective,) = HloProgram(
        f'HloModule m, num_partitions=2\n\nENTRY %main (p: f32[4]) -> f32[4] {{\n'
        f'  %start.1 = {type_text} {opcode}-start(%p), replica_groups={{}}\n}}\n'
    ).find_collectives()
    assert (collective.kind, collective.num_bytes) == (opcode, num_bytes)
    assert (collective.replica_groups, collective.is_async) == (((0, 1),), True)


def test_find_collectives_marks_async_start_as_async():
    text = (
        'HloModule m, num_partitions=2\n\n%wrapped (p: f32[4]) -> f32[2] {\n'
        '  ROOT %rs = f32[2] reduce-scatter(%p), replica_groups={{0,1}}\n}\n\n'
        'ENTRY %main (p: f32[4]) -> f32[2] {\n'
        '  %start = ((f32[4]), f32[2]) async-start(%p), calls=%wrapped\n}\n'
    )
    (collective,) = HloProgram(text).find_collectives()
    assert (collective.kind, collective.num_bytes, collective.is_async) == ('reduce-scatter', 16, True)


def test_find_collectives_reads_compiled_scan():
    mesh = jax.make_mesh((4,), ('fsdp',), axis_types=(AxisType.Auto,))
    weights_LDF = jax.device_put(np.ones((5, 8, 16), np.float32), NamedSharding(mesh, PartitionSpec(None, 'fsdp')))

    def compute_local(weights_LdF, x_BD):
        def apply_layer(x_BD, weight_dF):
            whole_DF = jax.lax.all_gather(weight_dF, 'fsdp', tiled=True)
            return jnp.tanh(x_BD @ whole_DF @ whole_DF.T), None

        return jax.lax.psum(jax.lax.scan(apply_layer, x_BD, weights_LdF)[0].sum(), 'fsdp')

    row_spec = PartitionSpec('fsdp')
    run = jax.shard_map(
        compute_local,
        mesh=mesh,
        in_specs=(PartitionSpec(None, 'fsdp'), row_spec),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    program = HloProgram(jax.jit(run).lower(weights_LDF, np.ones((8, 8), np.float32)).compile().as_text())
    collectives = {collective.kind: collective for collective in program.find_collectives()}
    assert (collectives['all-gather'].num_executions, collectives['all-gather'].num_bytes) == (5, 8 * 16 * 4)
    assert (collectives['all-reduce'].num_executions, collectives['all-reduce'].num_bytes) == (1, 4)
    assert collectives['all-gather'].replica_groups == ((0, 1, 2, 3),)
