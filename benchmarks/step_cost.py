"""Estimate of the cost of a 1B train step on TPU slices, from the compiled program and without a TPU.

    python -m benchmarks.step_cost [--topologies=v5e:16x16] [--rows=softmax_1b] [--peers] [--check | --write]

A line is a row of configs/scale.py on a topology, with the layout of a run (--remat=auto): seconds to compile, GiB
per chip, megabytes that a chip sends by purpose (weights gathered, gradients scattered, traffic between slices), the
share of gathered bytes that overlaps with computation, and estimates of the step time (a lower bound) and of the MFU
(an upper bound). --peers adds lines of MaxText on single slices, in the environment of `make peers`: the model of
softmax_1b, compiled by the same compiler with two of its remat policies. --check compares with
benchmarks/step_cost.json, and exits with 1 if a figure differs by more than 10 %. --write replaces that file.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
import numpy as np

from benchmarks.hlo import Collective, HloProgram, find_crossed_axes
from sinklab.chip_specs import CHIPS
from sinklab.config.spec import Layout, Spec
from sinklab.config.validate import parse_config
from sinklab.configs import scale
from sinklab.environment import get_package_versions
from sinklab.errors import UserError
from sinklab.model import flops
from sinklab.parallel.device_mesh import MESH_AXES
from sinklab.planning import topology
from sinklab.planning.compile_run import compile_run

FIGURES = Path(__file__).with_suffix('.json')
TOPOLOGIES = 'v5e:16x16', 'v5p:4x4x4', '2xv5e:8x8'
ROWS = 'softmax_1b', 'sigmoid_1b'
PEER_ROW = 'softmax_1b'
PEER_POLICIES = 'full', 'minimal'  # remat policies of MaxText
# Kernels of splash attention, and their matrix products relative to the two of a forward pass.
PEER_KERNEL_PASSES = {'splash_mha_fwd': 1.0, 'splash_mha_dq': 1.5, 'splash_mha_dkv': 2.0}
PEER_PYTHON = FIGURES.parents[1] / 'build' / 'peers' / 'maxtext' / 'bin' / 'python'
CLOCK_HZ = {'v4': 1.05e9, 'v5e': 1.5e9, 'v5p': 1.75e9}  # as the peak and the size of the matrix units imply
# Bytes per second that a chip sends to its neighbors over all links together: half of the published bidirectional
# bandwidth; that of v4 is from Jouppi et al. (2023).
LINK_BYTES_PER_SECOND = {'v4': 300e9, 'v5e': 200e9, 'v5p': 600e9}
MIN_BYTES = 2**20  # smaller collectives (losses, norms, gains) are ignored
CHECKED_FIGURES = 'bytes', 'gathered', 'scattered', 'between', 'beside', 'mfu'


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
        parser.error('MaxText is not installed; run: make peers')
    if topology.find_libtpu() is None:
        parser.error('wants the compiler of libtpu; make .venv/test installs it')
    rows = args.rows.split(',')
    if unknown := set(rows) - set(scale.ROWS):
        parser.error(f'--rows: {min(unknown)} is unknown; give some of {", ".join(scale.ROWS)}')
    versions = get_package_versions(('jax', 'jaxlib')) | dict(libtpu=find_libtpu_version())
    print(versions)
    print(
        f'{"":24}{"compiled":>9}{"GiB":>6}{"gathered":>10}{"scattered":>10}{"slices":>9}{"overlap":>8}{"ms":>6}{"MFU":>5}'
    )
    costs = {}
    for topology_name, row in itertools.product(args.topologies.split(','), rows):
        try:
            costs[f'{row} {topology_name}'] = cost = compute_cost(row, topology_name)
        except UserError as error:
            parser.error(str(error))
        print_cost(f'{row} {topology_name}', cost)
    single_slices = [name for name in args.topologies.split(',') if args.peers and 'x' not in name.partition(':')[0]]
    for topology_name, policy in itertools.product(single_slices, PEER_POLICIES):
        costs[f'MaxText {policy} {topology_name}'] = cost = compute_peer_cost(policy, topology_name)
        print_cost(f'MaxText {policy} {topology_name}', cost)
    if args.write:
        FIGURES.write_text(json.dumps(dict(versions=versions, costs=costs), indent=2) + '\n')
    return check_figures(costs) if args.check else 0


def find_libtpu_version() -> str | None:
    """Return the version of the libtpu library, as its installer has recorded it."""
    info_folders = Path(path).parents[1].glob('libtpu-*.dist-info') if (path := topology.find_libtpu()) else ()
    return next((folder.stem.removeprefix('libtpu-') for folder in info_folders), None)


@dataclasses.dataclass(frozen=True)
class StepTimeEstimate:
    """A lower bound of the seconds of a step, from published chip specs and the compiler's cycle counts."""

    matmul_seconds: float  # matrix products of the model, at peak FLOP/s
    compiler_seconds: float  # the compiler's estimate of everything except kernels
    kernel_seconds: float  # attention kernels, at peak FLOP/s
    synchronous_seconds: float  # synchronous collectives within a slice, without concurrent computation
    overlapped_seconds: float  # asynchronous collectives within a slice

    @property
    def seconds(self) -> float:
        compute_seconds = max(self.matmul_seconds, self.compiler_seconds + self.kernel_seconds)
        return self.synchronous_seconds + max(compute_seconds, self.overlapped_seconds)

    @property
    def mfu(self) -> float:
        return self.matmul_seconds / self.seconds


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
    chip_name: str,
    kernel_passes: float,
) -> StepTimeEstimate:
    """Estimate the time of one train step on a mesh of TPUs.

    Args:
        spec: Config of the run.
        micro_batch_size: Sequences that the attention kernels process at once, on all devices.
        program: Compiled train step.
        mesh: Mesh of the devices.
        chip_name: Name of the chip.
        kernel_passes: Forward passes of attention with as many matrix products as the kernels.
    """
    chip = CHIPS[chip_name]
    peak_flops = chip.flops_per_second / chip.devices_per_chip
    link_bytes = LINK_BYTES_PER_SECOND[chip_name] / chip.devices_per_chip
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
        compiler_seconds=program.estimate_cycles() / CLOCK_HZ[chip_name],
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
    if chip_name not in CLOCK_HZ:
        raise UserError(f'{topology_name}: the clock of {chip_name} is not known; give v4, v5e or v5p')
    result = compile_run(spec, Layout(remat='auto', attention='tpu'), chips, CHIPS[chip_name])
    program = HloProgram(result.executable.as_text())
    micro_batch_size = result.layout.get_micro_batch_size(spec.optimizer.batch_size)
    estimate = estimate_step_time(
        spec, micro_batch_size, program, result.mesh, chip_name, count_kernel_passes(program)
    )
    return dict(
        mesh=dict(result.mesh.shape),
        remat=result.layout.remat,
        compiled=round(result.compile_seconds),
        **summarize_step(result.peak_bytes, estimate, group_by_purpose(program.find_collectives(), result.mesh)),
    )


def summarize_step(peak_bytes: int, estimate: StepTimeEstimate, collectives: dict[str, list[Collective]]) -> dict:
    sent = {purpose: sum_sent_bytes(collectives[purpose]) for purpose in ('gathered', 'scattered', 'between')}
    overlapping = sum_sent_bytes(collective for collective in collectives['gathered'] if collective.is_async)
    return dict(
        bytes=peak_bytes,
        **sent,
        beside=round(overlapping / max(1, sent['gathered']), 3),
        milliseconds=round(1e3 * estimate.seconds),
        mfu=round(estimate.mfu, 3),
    )


def sum_sent_bytes(collectives: Iterable[Collective]) -> int:
    return round(sum(collective.sent_bytes for collective in collectives))


def compute_peer_cost(policy: str, topology_name: str) -> dict:
    """Compile the step of MaxText in its own environment, and estimate its cost as that of ours."""
    spec = parse_config(scale.get_config(PEER_ROW).to_dict())
    chip_name, chips = topology.parse_topology(topology_name)
    names = 'layers', 'heads', 'width', 'head_width', 'ffn_width', 'vocabulary', 'dtype'
    with tempfile.TemporaryDirectory() as folder:
        request = {name: getattr(spec.model, name) for name in names} | dict(
            topology=topology_name,
            batch=spec.optimizer.batch_size / len(chips),
            length=spec.data.length,
            remat_policy=policy,
            out=f'{folder}/step',
        )
        environment = os.environ | topology.LIBTPU_ENVIRONMENT | dict(TPU_LIBRARY_PATH=topology.find_libtpu())
        environment.pop('PYTHONPATH', None)
        command = [PEER_PYTHON, FIGURES.with_name('peer_maxtext.py'), json.dumps(request)]
        process = subprocess.run(command, env=environment, capture_output=True, text=True)
        if process.returncode:
            sys.exit(f'step_cost: MaxText ended with exit code {process.returncode}:\n{process.stderr[-2000:]}')
        program = HloProgram(Path(f'{folder}/step.hlo').read_text())
        measured = json.loads(Path(f'{folder}/step.json').read_text())
    mesh = jax.sharding.Mesh(np.array(chips).reshape(1, -1, 1), MESH_AXES)
    kernel_passes = sum(
        passes * sum(program.count_kernels(prefix).values()) for prefix, passes in PEER_KERNEL_PASSES.items()
    )
    estimate = estimate_step_time(spec, spec.optimizer.batch_size, program, mesh, chip_name, kernel_passes)
    collectives = group_by_purpose(program.find_collectives(), mesh)
    # MaxText sums gradients in bfloat16, and every device receives the sum.
    collectives['scattered'] += [
        collective for collective in collectives['others'] if collective.kind == 'all-reduce'
    ]
    return dict(
        remat=policy,
        compiled=round(measured['seconds']),
        **summarize_step(measured['peak_bytes'], estimate, collectives),
    )


def group_by_purpose(collectives: list[Collective], mesh: jax.sharding.Mesh) -> dict[str, list[Collective]]:
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


def print_cost(name: str, cost: dict) -> None:
    sent = ''.join(
        f'{cost[purpose] / 1e6:{width}.0f}' for purpose, width in dict(gathered=10, scattered=10, between=9).items()
    )
    print(
        f'{name:24}{cost["compiled"]:7} s{cost["bytes"] / 2**30:6.2f}{sent}{cost["beside"]:8.0%}'
        f'{cost["milliseconds"]:6}{cost["mfu"]:5.0%}',
        flush=True,
    )


def check_figures(costs: dict) -> int:
    """Return 1 if a figure differs by more than 10 % from the committed one, else 0."""
    committed = json.loads(FIGURES.read_text())['costs']
    exit_code = 0
    for name, key in itertools.product(costs, CHECKED_FIGURES):
        value, expected = costs[name][key], committed.get(name, {}).get(key, math.nan)
        if not math.isclose(value, expected, rel_tol=0.1, abs_tol=0.01):
            print(f'{name}: {key} is {value}, and {expected} is committed in {FIGURES.name}', file=sys.stderr)
            exit_code = 1
    return exit_code


if __name__ == '__main__':
    sys.exit(main())
