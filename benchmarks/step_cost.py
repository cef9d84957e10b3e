"""Estimate of the cost of a 1B train step on TPU slices, from the compiled program and without a TPU.

    python benchmarks/step_cost.py [--topologies=v5e:16x16] [--rows=softmax_1b] [--peers] [--check | --write]

A line is a row of configs/scale.py on a topology, with the layout of a run (--remat=auto): seconds to compile, GiB
per chip, megabytes that a chip sends by purpose (weights gathered, gradients scattered, traffic between slices), the
share of gathered bytes that overlaps with computation, and estimates of the step time (a lower bound) and of the MFU
(an upper bound). The exit code is 1 if a rule below is broken. With --check it is also 1 if a figure differs by more
than 10 % from benchmarks/step_cost.json. --write adds the lines to that file; its other rows stay if they were made
with the same versions. --peers adds lines of MaxText, in the environment of `make peers`: the model of softmax_1b,
compiled by the same compiler with two of its remat policies. --check skips those of them that are not committed.
"""

import argparse
import collections
import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.cost_files import explain_different_versions, read_costs, write_costs  # noqa: E402
from benchmarks.hlo import Collective, HloProgram, find_crossed_axes  # noqa: E402
from sinklab.chip_specs import CHIPS, ChipSpec  # noqa: E402
from sinklab.config.spec import Hardware, Spec  # noqa: E402
from sinklab.config.validate import parse_config  # noqa: E402
from sinklab.configs import scale  # noqa: E402
from sinklab.environment import get_package_versions  # noqa: E402
from sinklab.errors import UserError, format_extra_command  # noqa: E402
from sinklab.model import flops  # noqa: E402
from sinklab.parallel.device_mesh import MESH_AXES, group_by_slice  # noqa: E402
from sinklab.planning import topology  # noqa: E402
from sinklab.planning.compile_run import CompiledRun, compile_run  # noqa: E402
from sinklab.train import memory_estimate, state  # noqa: E402

FIGURES = Path(__file__).with_suffix('.json')
TOPOLOGIES = 'v5e:16x16', 'v5p:4x4x4', '2xv5e:8x8'
ROWS = 'softmax_1b', 'sigmoid_1b'
PEER_ROW = 'softmax_1b'
PEER_PREFIX = 'MaxText '  # of the names of rows of MaxText
PEER_POLICIES = 'full', 'minimal'  # remat policies of MaxText
# Kernels of splash attention, and their matrix products relative to the two of a forward pass.
PEER_KERNEL_PASSES = {'splash_mha_fwd': 1.0, 'splash_mha_dq': 1.5, 'splash_mha_dkv': 2.0}
PEER_PYTHON = ROOT / 'build' / 'peers' / 'maxtext' / 'bin' / 'python'
MIN_BYTES = 2**20  # smaller collectives (losses, norms, gains) are ignored
MAX_OVERHEAD = 1.1  # limit of sent bytes / minimal bytes
MIN_OVERLAP = {
    'v5e': 0.6
}  # least share of all-gather bytes that overlaps with computation; other chips do not overlap them
CHECKED_FIGURES = (
    'bytes',
    'gathered',
    'scattered',
    'between',
    'beside',
    'mfu',
)  # figures that --check compares with the committed ones


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--topologies', default=','.join(TOPOLOGIES))
    parser.add_argument('--rows', default=','.join(ROWS))
    parser.add_argument('--peers', action='store_true', help='compile MaxText, too')
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument('--check', action='store_true')
    mode.add_argument('--write', action='store_true')
    args = parser.parse_args()
    jax.config.update('jax_platforms', 'cpu')
    if args.peers and not PEER_PYTHON.exists():
        sys.exit('step_cost: MaxText is not installed; run: make peers')
    if topology.find_libtpu() is None:
        sys.exit(f'step_cost: libtpu, which has the compiler, is not installed; {format_extra_command("tpu")}')
    rows = args.rows.split(',')
    if unknown := set(rows) - set(scale.ROWS):
        parser.error(f'--rows: {min(unknown)} is unknown; give some of {", ".join(scale.ROWS)}')
    peer_rows = [f'{PEER_PREFIX}{policy}' for policy in PEER_POLICIES] if args.peers else []
    names = [f'{row} {topology_name}' for topology_name in args.topologies.split(',') for row in (*rows, *peer_rows)]
    versions = get_package_versions(('jax', 'jaxlib')) | dict(libtpu=topology.find_libtpu_version())
    versions |= get_peer_versions() if args.peers else {}
    if args.write and (reason := explain_other_versions(versions, names)):
        parser.error(f'--write: {reason}')
    print(
        f'{"":24}{"compiled":>9}{"GiB":>6}{"gathered":>10}{"scattered":>10}{"slices":>9}{"overlap":>8}{"ms":>6}{"MFU":>5}'
    )
    costs, exit_code = {}, 0
    for name in names:
        row, topology_name = name.rsplit(' ', 1)
        compute = compute_peer_cost if row in peer_rows else compute_cost
        try:
            costs[name] = compute(row.removeprefix(PEER_PREFIX), topology_name)
        except UserError as error:
            parser.error(str(error))
        print_cost(name, costs[name])
        exit_code |= print_broken(name, costs[name]['broken'])
    if args.write:
        document = read_costs(FIGURES)
        write_costs(
            FIGURES,
            libtpu=versions['libtpu'],
            versions=document.get('versions', {}) | versions,
            costs=document['costs'] | costs,
        )
    return exit_code | (check_figures(costs) if args.check else 0)


def explain_other_versions(versions: dict[str, str | None], names: list[str]) -> str | None:
    """Explain why the rows that stay in the file were made with other versions; None if they were not."""
    document = read_costs(FIGURES)
    recorded = dict(libtpu=document.get('libtpu')) | document.get('versions', {})
    kept_rows = document['costs'].keys() - set(names)
    kept_peer_rows = {name for name in kept_rows if name.startswith(PEER_PREFIX)}
    peer_versions = {name: version for name, version in versions.items() if 'maxtext' in name}
    own_versions = {name: version for name, version in versions.items() if name not in peer_versions}
    return explain_different_versions(recorded, own_versions, kept_rows) or explain_different_versions(
        recorded, peer_versions, kept_peer_rows
    )


def get_peer_versions() -> dict[str, str]:
    """Return the versions of MaxText and of its jax, in its own environment."""
    script = "import importlib.metadata; print(*map(importlib.metadata.version, ('maxtext', 'jax')))"
    maxtext, jax_version = subprocess.check_output([PEER_PYTHON, '-c', script], text=True).split()
    return {'maxtext': maxtext, 'jax of maxtext': jax_version}


@dataclasses.dataclass(frozen=True)
class StepTimeEstimate:
    """A lower bound of the seconds of a step, from published chip specs and the compiler's cycle counts."""

    matmul_seconds: float  # matrix products of the model, at peak FLOP/s
    compiler_seconds: float  # the compiler's estimate of everything except kernels
    kernel_seconds: float  # attention kernels, at peak FLOP/s
    synchronous_seconds: float  # synchronous collectives within a slice, without concurrent computation
    overlapped_seconds: float  # asynchronous collectives within a slice

    @property
    def compute_seconds(self) -> float:
        return max(self.matmul_seconds, self.compiler_seconds + self.kernel_seconds)

    @property
    def seconds(self) -> float:
        return self.synchronous_seconds + max(self.compute_seconds, self.overlapped_seconds)

    @property
    def mfu(self) -> float:
        return self.matmul_seconds / self.seconds

    @property
    def limit(self) -> str:
        """The overhead that takes most of the time beyond matrix products."""
        overheads = {
            'synchronous collectives': self.synchronous_seconds,
            'collectives longer than the computation that they overlap with': max(
                0.0, self.overlapped_seconds - self.compute_seconds
            ),
            'operations other than matrix products, and recomputation': self.compute_seconds - self.matmul_seconds,
        }
        return max(overheads, key=overheads.__getitem__)


def count_kernel_passes(program: HloProgram) -> float:
    """Return the work of our attention kernels in units of one forward kernel, which has two matrix products.

    A kernel with `backward` in its name counts as five products, as that for TPUs has.
    """
    kernel_runs = program.count_kernels('sinklab_')
    return sum(times * (2.5 if 'backward' in name else 1) for name, times in kernel_runs.items())


def estimate_step_time(
    spec: Spec,
    micro_batch_size: int,
    program: HloProgram,
    mesh: jax.sharding.Mesh,
    chip: ChipSpec,
    kernel_passes: float,
) -> StepTimeEstimate:
    """Estimate the time of one train step on a mesh of TPUs.

    Args:
        spec: Config of the run.
        micro_batch_size: Sequences that the attention kernels process at once, on all devices.
        program: Compiled train step.
        mesh: Mesh of the devices.
        chip: Published figures of the chip.
        kernel_passes: Forward passes of attention with as many matrix products as the kernels.
    """
    peak_flops = chip.flops_per_second / chip.devices_per_chip
    link_bytes = chip.link_bytes_per_second / chip.devices_per_chip
    forward_flops = flops.count_forward_flops(spec.model, spec.data.length)
    length = spec.data.length
    attention_flops = micro_batch_size * length / mesh.size * forward_flops.attention / spec.model.layers
    # No bandwidth between slices is published.
    collectives = [collective for collective in program.find_collectives() if is_within_slice(collective, mesh)]
    transfers = [
        (collective.is_async, collective.sent_bytes / compute_link_fraction(collective, mesh) / link_bytes)
        for collective in collectives
    ]
    return StepTimeEstimate(
        matmul_seconds=flops.count_step_flops(spec) / mesh.size / peak_flops,
        compiler_seconds=program.estimate_cycles() / chip.clock_hz,
        kernel_seconds=kernel_passes * attention_flops / peak_flops,
        synchronous_seconds=sum(seconds for is_async, seconds in transfers if not is_async),
        overlapped_seconds=sum(seconds for is_async, seconds in transfers if is_async),
    )


def compute_link_fraction(collective: Collective, mesh: jax.sharding.Mesh) -> float:
    """Compute the fraction of a chip's links that a collective uses, from the directions of a torus."""
    chips = mesh.devices.flatten()
    group_chips = [chips[index] for index in collective.replica_groups[0]]
    return max(1, count_directions(group_chips)) / max(1, count_directions(chips))


def is_within_slice(collective: Collective, mesh: jax.sharding.Mesh) -> bool:
    return len({getattr(mesh.devices.flat[index], 'slice_index', 0) for index in collective.replica_groups[0]}) == 1


def count_directions(chips: Sequence[jax.Device]) -> int:
    """Count the coordinates in which devices differ."""
    return sum(len(set(coordinates)) > 1 for coordinates in zip(*(chip.coords for chip in chips), strict=True))


def compute_cost(row: str, topology_name: str) -> dict:
    spec = parse_config(scale.get_config(row).to_dict())
    chip_name, chips = topology.parse_topology(topology_name)
    if CHIPS[chip_name].clock_hz is None:
        sys.exit(f'step_cost: {topology_name}: the clock of {chip_name} is not known; give v4, v5e or v5p')
    result = compile_run(spec, Hardware(remat='auto', attention='tpu'), chips, CHIPS[chip_name], ['step'])
    mesh, step = result.mesh, result.programs['step']
    program = HloProgram(step.executable.as_text())
    micro_batch_size = result.hardware.get_micro_batch_size(spec.optimizer.batch_size)
    step_estimate = estimate_step_time(
        spec, micro_batch_size, program, mesh, result.chip, count_kernel_passes(program)
    )
    sent_collectives = group_by_purpose(program.find_collectives(), mesh)
    shape_bytes = memory_estimate.estimate_memory(spec, result.hardware, mesh, result.backend).total
    return dict(
        mesh=dict(mesh.shape),
        remat=result.hardware.remat,
        compiled=round(step.compile_seconds),
        by_shapes=shape_bytes,
        **summarize_step(result.peak_bytes, step_estimate, sent_collectives),
        broken=find_broken_rules(
            spec, result, shape_bytes, sent_collectives, program.list_array_shapes(), MIN_OVERLAP.get(chip_name)
        ),
    )


def summarize_step(peak_bytes: int, step_estimate: StepTimeEstimate, sent_collectives: dict[str, list]) -> dict:
    return dict(
        bytes=peak_bytes,
        **{
            purpose: round(sum(collective.sent_bytes for collective in sent_collectives[purpose]))
            for purpose in ('gathered', 'scattered', 'between')
        },
        beside=round(compute_overlap(sent_collectives['gathered']), 3),
        milliseconds=round(1e3 * step_estimate.seconds),
        mfu=round(step_estimate.mfu, 3),
        limit=step_estimate.limit,
    )


def compute_peer_cost(policy: str, topology_name: str) -> dict:
    """Compile the step of MaxText in its own environment, and estimate its cost as that of ours."""
    spec = parse_config(scale.get_config(PEER_ROW).to_dict())
    chip_name, chips = topology.parse_topology(topology_name)
    num_slices, shape = len(group_by_slice(chips)), topology_name.rpartition(':')[2]
    with tempfile.TemporaryDirectory() as folder:
        request = dict(
            topology=f'{chip_name}:{shape}',
            num_slices=num_slices,
            num_devices=len(chips),
            shape={
                name: getattr(spec.model, name)
                for name in ('layers', 'heads', 'width', 'head_width', 'ffn_width', 'vocabulary', 'dtype')
            }
            | dict(batch=spec.optimizer.batch_size, length=spec.data.length),
            options=dict(remat_policy=policy),
            out=f'{folder}/step',
        )
        environment = os.environ | topology.LIBTPU_ENVIRONMENT | dict(TPU_LIBRARY_PATH=topology.find_libtpu())
        script = Path(__file__).with_name('peer_maxtext_compile.py')
        done = subprocess.run(
            [PEER_PYTHON, script, json.dumps(request)],
            env={name: value for name, value in environment.items() if name != 'PYTHONPATH'},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            sys.exit(f'step_cost: MaxText ended with exit code {done.returncode}:\n{done.stderr[-2000:]}')
        program = HloProgram(Path(f'{folder}/step.hlo').read_text())
        measured = json.loads(Path(f'{folder}/step.json').read_text())
    peak_bytes = sum(measured['bytes'].values()) - 2 * measured['bytes']['alias']
    mesh = jax.sharding.Mesh(np.array(chips).reshape(num_slices, -1, 1), MESH_AXES)
    kernel_passes = sum(
        passes * sum(program.count_kernels(prefix).values()) for prefix, passes in PEER_KERNEL_PASSES.items()
    )
    step_estimate = estimate_step_time(
        spec, spec.optimizer.batch_size, program, mesh, CHIPS[chip_name], kernel_passes
    )
    sent_collectives = group_by_purpose(program.find_collectives(), mesh)
    # MaxText sums gradients in bfloat16, and every device receives the sum.
    sent_collectives['scattered'] += [
        collective for collective in sent_collectives['others'] if collective.kind == 'all-reduce'
    ]
    return dict(
        remat=policy,
        compiled=round(measured['seconds']),
        **summarize_step(peak_bytes, step_estimate, sent_collectives),
        broken=[],  # the rules are those of our steps
    )


def group_by_purpose(collectives: list, mesh) -> dict[str, list]:
    """Group the collectives of at least MIN_BYTES by purpose."""
    purposes = {
        ('all-gather', 'fsdp'): 'gathered',
        ('reduce-scatter', 'fsdp'): 'scattered',
        ('collective-permute', 'fsdp'): 'scattered',  # the compiler rewrites some reduce-scatters to it
        ('all-reduce', 'data'): 'between',
    }
    groups = collections.defaultdict(list)
    for collective in collectives:
        if collective.num_bytes >= MIN_BYTES:
            groups[purposes.get((collective.kind, find_crossed_axes(collective, mesh)), 'others')].append(collective)
    return groups


def compute_overlap(gathers: list) -> float:
    """Return the share of all-gather bytes that overlaps with computation."""
    return sum(collective.sent_bytes for collective in gathers if collective.is_async) / max(
        1, sum(collective.sent_bytes for collective in gathers)
    )


def find_broken_rules(
    spec: Spec,
    result: CompiledRun,
    shape_bytes: int,
    sent_collectives: dict[str, list],
    array_shapes: set[tuple[int, ...]],
    min_overlap: float | None,
) -> list[str]:
    """Return the rules that a compiled step breaks.

    Args:
        spec: the spec of the run.
        result: the compiled run.
        shape_bytes: the estimate of memory from shapes.
        sent_collectives: the collectives by purpose.
        array_shapes: the shapes of all arrays of the step.
        min_overlap: the least share of all-gather bytes that must overlap with computation; None for no limit.
    """
    matrices = [
        leaf
        for leaf in jax.tree.leaves(state.get_state_shapes(spec)['params'])
        if leaf.ndim > 2 or leaf.size > MIN_BYTES
    ]
    weight_bytes, (data, fsdp) = (
        4 * sum(leaf.size for leaf in matrices),
        (result.mesh.shape['data'], result.mesh.shape['fsdp']),
    )
    scattered, between = (
        sum(collective.sent_bytes for collective in sent_collectives[purpose]) for purpose in ('scattered', 'between')
    )
    stacked = {merged for leaf in matrices if leaf.ndim > 2 for merged in list_merged_shapes(leaf.shape)}
    rules = {
        'the step fits into the memory of a chip': result.peak_bytes <= result.memory_bytes,
        'the estimate from shapes is at least the peak memory': shape_bytes >= result.peak_bytes,
        'all-gathers overlap with computation': min_overlap is None
        or compute_overlap(sent_collectives['gathered']) >= min_overlap,
        'weights are gathered in bfloat16': all(
            type_text.startswith('bf16')
            for collective in sent_collectives['gathered']
            for type_text in collective.types
        ),
        'no other collective sends 1 MiB or more': not sent_collectives['others'],
        f'reduce-scatters of gradients send at most {MAX_OVERHEAD} of the least bytes': scattered
        <= MAX_OVERHEAD * weight_bytes * (fsdp - 1) / fsdp,
        'all gradients are reduce-scattered': scattered >= weight_bytes * (fsdp - 1) / fsdp,
        'gradients are all-reduced once between slices': between
        <= MAX_OVERHEAD * 2 * weight_bytes / fsdp * (data - 1) / data,
        'no array has all layers of a parameter': not array_shapes & stacked,
    }
    return [rule for rule, is_met in rules.items() if not is_met]


def list_merged_shapes(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return a shape, and its variants with two neighboring dimensions merged."""
    merged = [(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :]) for axis in range(1, len(shape) - 1)]
    return [shape, *(candidate for candidate in merged if len(candidate) > 2)]


def print_cost(name: str, row_cost: dict) -> None:
    sent = ''.join(
        f'{row_cost[purpose] / 1e6:{width}.0f}'
        for purpose, width in dict(gathered=10, scattered=10, between=9).items()
    )
    print(
        f'{name:24}{row_cost["compiled"]:7} '
        f's{row_cost["bytes"] / 2**30:6.2f}{sent}{row_cost["beside"]:8.0%}{row_cost["milliseconds"]:6}'
        f'{row_cost["mfu"]:5.0%}',
        flush=True,
    )


def print_broken(name: str, messages: list[str]) -> int:
    for message in messages:
        print(f'{name}: broken: {message}', file=sys.stderr)
    return bool(messages)


def check_figures(costs: dict) -> int:
    """Return 1 if a figure differs by more than 10 % from the committed one, else 0."""
    committed = json.loads(FIGURES.read_text())['costs']
    messages = {
        name: [
            f'{key} is {entry[key]}, and {committed[name][key]} is committed'
            for key in CHECKED_FIGURES
            if not math.isclose(entry[key], committed[name][key], rel_tol=0.1, abs_tol=0.01)
        ]
        if name in committed
        else ['no figures of it are committed']
        for name, entry in costs.items()
        if name in committed or not name.startswith(PEER_PREFIX)
    }
    return max((print_broken(name, entry) for name, entry in messages.items()), default=0)


if __name__ == '__main__':
    sys.exit(main())
