"""Static cost estimates of attention kernels by the TPU compiler, without a TPU.

    python -m benchmarks.tpu_cost [--chips=v5e,v5p,v6e] [--kernels='softmax forward,...'] [--check | --write]

A line is one kernel, without a mask, in bfloat16, for 4 heads of 128 and 4096 tokens: the VLIW bundles of its main
body for 1024 x 1024 scores, the share of the matrix unit and of the vector unit that they use, and the compiler's
estimate of cycles for the whole kernel. The body has no branches, so its bundles are its cycles without stalls. The
estimate counts only a part of a region under a predicate, so it is not valid for splash, the kernel of JAX. The
estimator rejects v5e kernels that fetch scalars. --check compares with benchmarks/tpu_cost.json, and exits with 1 if
bundles or cycles differ by more than 10 %. --write replaces that file.
"""

import argparse
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.example_specs import make_operations
from benchmarks.step_cost import find_libtpu_version
from sinklab.attn import kernel_attention
from sinklab.attn.mask import make_full_mask
from sinklab.attn.pallas import tpu
from sinklab.attn.pallas.kernel_interface import KernelSpec, ScoreSpec, SoftmaxReduction
from sinklab.environment import get_package_versions
from sinklab.planning import topology

FIGURES = Path(__file__).with_suffix('.json')
CHIP_TOPOLOGIES = {'v5e': 'v5e:2x2', 'v5p': 'v5p:2x2x1', 'v6e': 'v6e:2x2'}
KERNELS = [
    f'{kind} {direction}'
    for direction in ('forward', 'backward')
    for kind in ('softmax', 'sigmoid', 'sigmoid normalized', 'elu1', 'splash')
]
LENGTH = 4096
WIDTH = 128
HEADS = 4
SPLASH_BLOCK = 1024  # queries and keys that the body of a splash kernel computes
SPLASH_BLOCK_NAMES = 'block_q', 'block_kv', 'block_kv_compute', 'block_q_dkv', 'block_kv_dkv', 'block_kv_dkv_compute'
UNIT_NAMES = {'matrix': ('MXU', 'MATMUL'), 'vector': ('VALU',)}  # versions of libtpu use different names
DUMP_FLAGS = '--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles|final_hlo-static'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--chips', default=','.join(CHIP_TOPOLOGIES))
    parser.add_argument('--kernels', default=','.join(KERNELS))
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument('--check', action='store_true')
    mode.add_argument('--write', action='store_true')
    parser.add_argument('--one', nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        compile_kernel(*args.one)
        return 0
    chips, kernels = args.chips.split(','), args.kernels.split(',')
    for option, names, known in (('chips', chips, CHIP_TOPOLOGIES), ('kernels', kernels, KERNELS)):
        if unknown := [name for name in names if name not in known]:
            parser.error(f'--{option}: {unknown[0]!r} is unknown; give some of {", ".join(known)}')
    if not topology.find_libtpu():
        parser.error('wants the compiler of libtpu; make .venv/test installs it')
    versions = get_package_versions(('jax',)) | dict(libtpu=find_libtpu_version())
    print(versions)
    print(f'{"":34}{"bundles":>9}{"matrix":>8}{"vector":>8}{"cycles":>10}')
    costs = {}
    for chip, kernel in itertools.product(chips, kernels):
        costs[f'{chip} {kernel}'] = cost = measure_cost(chip, kernel)
        shares = f'{cost["matrix"]:8.0%}{cost["vector"]:8.0%}'
        print(f'{chip:5}{kernel:29}{cost["bundles"]:9}{shares}{cost["cycles"] or "-":>10}', flush=True)
    if args.write:
        FIGURES.write_text(json.dumps(dict(versions=versions, costs=costs), indent=2) + '\n')
    return check_figures(costs) if args.check else 0


def check_figures(costs: dict) -> int:
    """Return 1 if a figure differs by more than 10 % from the committed one, else 0."""
    committed = json.loads(FIGURES.read_text())['costs']
    exit_code = 0
    for name, key in itertools.product(costs, ('bundles', 'cycles')):
        value, expected = costs[name][key], committed.get(name, {}).get(key)
        if value != expected and not (value and expected and math.isclose(value, expected, rel_tol=0.1)):
            print(f'{name}: {value} {key}, and {expected} are committed in {FIGURES.name}', file=sys.stderr)
            exit_code = 1
    return exit_code


def measure_cost(chip: str, kernel: str) -> dict:
    """Measure the cost of a kernel by two compilations in separate processes.

    The processes are separate because the estimator ends the process when it rejects a kernel.
    """
    is_splash = kernel.startswith('splash')
    with tempfile.TemporaryDirectory() as folder:
        run_child(chip, kernel, f'--xla_jf_dump_to={folder} {DUMP_FLAGS}', check=True)
        figures = find_kernel_body(Path(folder))
    queries, keys = tpu.BLOCK_SIZES[0] // 2, tpu.BLOCK_SIZES[0]
    num_scores = tpu.choose_block_size(LENGTH, queries) * tpu.choose_block_size(LENGTH, keys)
    figures['bundles'] = round(figures['bundles'] * 2**20 / (SPLASH_BLOCK**2 if is_splash else num_scores))
    with tempfile.TemporaryDirectory() as folder:
        if not is_splash:
            run_child(chip, kernel, f'--xla_jf_dump_static_llo_profile_to={folder}', check=False)
        profiles = [path.read_text() for path in Path(folder).iterdir()]
    estimates = [int(re.findall(r'estimated_cycles: (\d+)', text)[0]) for text in profiles if 'sinklab_' in text]
    return figures | dict(cycles=max(estimates, default=None))


def run_child(chip: str, kernel: str, flags: str, check: bool) -> None:
    command = [sys.executable, '-m', 'benchmarks.tpu_cost', '--one', chip, kernel]
    environment = {**os.environ, 'LIBTPU_INIT_ARGS': flags, 'JAX_PLATFORMS': 'cpu', 'TF_CPP_MIN_LOG_LEVEL': '3'}
    process = subprocess.run(command, env=environment, cwd=FIGURES.parents[1], capture_output=True, text=True)
    if check and process.returncode:
        sys.exit(f'{chip} {kernel}: {process.stderr[-2000:]}')


def find_kernel_body(folder: Path) -> dict:
    """Return the figures of the longest branch-free sequence of bundles in a dump."""
    stretches = []
    for table in folder.glob('*final_hlo-static-per-bundle-utilization.txt'):
        name = table.name.split('final_hlo')[0].rsplit('-', 2)[0]
        text = next(path for path in folder.glob(f'{name}*final_bundles.txt') if 'schedule' not in path.name)
        head, rows = table.read_text().split('== UTILIZATION:')
        units, sizes = head.splitlines()[1].split(','), map(int, head.splitlines()[2].split())
        utilization = [
            dict(zip((unit.strip() for unit in units), map(int, row.split()), strict=True))
            for row in rows.strip().splitlines()
        ]
        capacity = dict(zip((unit.strip() for unit in units), sizes, strict=True))
        edges = sorted({0, len(utilization), *find_branch_addresses(text.read_text())})
        stretches += [(end - start, utilization[start:end], capacity) for start, end in itertools.pairwise(edges)]
    length, bundles, capacity = max(stretches, key=lambda stretch: stretch[0])

    def compute_share(names: tuple[str, ...]) -> float:
        unit = next(name for name in names if name in capacity)
        return sum(row[unit] for row in bundles) / capacity[unit] / length

    return dict(bundles=length, **{name: compute_share(names) for name, names in UNIT_NAMES.items()})


def find_branch_addresses(text: str) -> list[int]:
    """Return the addresses of bundles that are branch targets or that branch."""
    addresses = []
    for line in text.splitlines():
        address = re.match(r'\s*(0x[0-9a-f]+|0)\s+([A-Z]{2}:)?', line)
        if address and (address[2] or 'sbr.rel' in line):
            addresses.append(int(address[1], 16))
    return addresses


def compile_kernel(chip: str, kernel: str) -> None:
    mesh = Mesh(np.array(topology.make_tpu_devices(CHIP_TOPOLOGIES[chip])[:1]), 'x')
    sharding = NamedSharding(mesh, PartitionSpec())
    make_kernel = make_splash_kernel if kernel.startswith('splash') else make_sinklab_kernel
    function, shapes = make_kernel(kernel)
    jax.jit(function).lower(*(jax.ShapeDtypeStruct(*shape, sharding=sharding) for shape in shapes)).compile()


def make_sinklab_kernel(kernel: str) -> tuple[Callable, list]:
    """Return a kernel of the softmax or the linear primitive, and the shapes of its arguments."""
    name, *normalized, direction = kernel.split()
    pair = ('exp', 'sum') if name == 'softmax' else (name, 'sum' if normalized else 'none')
    sums = kernel_attention.choose_reduction(make_operations()[pair])
    spec = KernelSpec(ScoreSpec(WIDTH**-0.5), make_full_mask(LENGTH), None, jnp.zeros((HEADS, 0)))
    head_shape = (1, HEADS, LENGTH, WIDTH), jnp.bfloat16
    row_shape = (1, HEADS, LENGTH), jnp.float32
    if direction == 'forward':
        return lambda *arrays: tpu.forward(sums, spec, *arrays), [head_shape] * 3

    def backward(query, key, value, d_output, *rows):
        return tpu.backward(sums, spec, query, key, value, d_output, rows)

    return backward, [head_shape] * 4 + [row_shape] * (sums.num_statistics + (sums == SoftmaxReduction()))


def make_splash_kernel(kernel: str) -> tuple[Callable, list]:
    """Return the splash attention kernel of JAX or its gradient, and the shapes of its arguments."""
    blocks = dict.fromkeys(SPLASH_BLOCK_NAMES, SPLASH_BLOCK)
    sizes = splash_attention_kernel.BlockSizes(**blocks, use_fused_bwd_kernel=True)
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.FullMask((LENGTH, LENGTH))] * HEADS)
    attend = splash_attention_kernel.make_splash_mha(mask=mask, head_shards=1, q_seq_shards=1, block_sizes=sizes)
    shapes = [((HEADS, LENGTH, WIDTH), jnp.bfloat16)] * 3
    if kernel.endswith('forward'):
        return attend, shapes
    return jax.grad(lambda *arrays: attend(*arrays).astype(jnp.float32).sum(), (0, 1, 2)), shapes


if __name__ == '__main__':
    sys.exit(main())
