"""Static cost estimates of attention kernels by the TPU compiler, without a TPU.

    python benchmarks/tpu_cost.py [--chips=v5e,v6e] [--length=4096] [--width=128] [--heads=4] [--peers]
        [--check | --write]

A line is one kernel, without a mask, in bfloat16: the VLIW bundles of its main body for 1024 x 1024 scores, the share
of the matrix unit and of the vector unit that they use, and the compiler's estimate of cycles for the whole kernel.
The body has no branches, so its bundles are its cycles without stalls. The estimate counts only a part of a region
under a predicate, so it is not valid for splash. The estimator rejects v5e kernels that fetch scalars. --peers adds
the splash kernels of tokamax, in the environment of `make peers`. --check compares with benchmarks/tpu_cost.json, and
exits with 1 if bundles or cycles differ by more than 10 % or if a kernel costs more than its limit. --write adds the
lines to that file; other rows of it stay if they were made with the same versions.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the environment of tokamax does not have sinklab

from benchmarks.argument_types import parse_count
from benchmarks.cost_files import explain_different_versions, read_costs, write_costs

FIGURES = Path(__file__).with_suffix('.json')
PEER_PYTHON = Path(__file__).parents[1] / 'build' / 'peers' / 'maxtext' / 'bin' / 'python'  # has tokamax, too
CHIP_TOPOLOGIES = {'v5e': 'v5e:2x2', 'v5p': 'v5p:2x2x1', 'v6e': 'v6e:2x2'}
KERNELS = [
    f'{kind} {direction}'
    for direction in ('forward', 'backward')
    for kind in ('softmax', 'sigmoid', 'sigmoid normalized', 'elu1', 'splash')
]
SPLASH_BLOCK_NAMES = (
    'block_q',
    'block_kv',
    'block_kv_compute',
    'block_q_dkv',
    'block_kv_dkv',
    'block_kv_dkv_compute',
)
# Of the blocks and schedulers of tokamax that were tried, these need the fewest bundles.
TOKAMAX_BLOCKS = dict.fromkeys(SPLASH_BLOCK_NAMES, 512) | dict(
    block_q=1024, block_kv=2048, block_q_dkv=1024, block_kv_dkv=2048
)
# Scores that the body of a splash kernel computes.
SPLASH_SCORES = dict(splash=1024 * 1024, tokamax=TOKAMAX_BLOCKS['block_q'] * TOKAMAX_BLOCKS['block_kv'])
PEER_KERNELS = ['tokamax forward', 'tokamax backward']
BUNDLE_LIMITS = {
    ('softmax forward', 'splash forward'): 1.1,
    ('softmax backward', 'splash backward'): 1.1,
    ('sigmoid forward', 'softmax forward'): 1.0,
    ('sigmoid backward', 'softmax backward'): 1.03,
}
MIN_MATRIX_SHARE = 0.9  # least use of the matrix unit by a backward kernel that has a limit of bundles
FIGURE_SHAPE = 4096, 128, 4  # length, width, heads
UNIT_NAMES = {'matrix': ('MXU', 'MATMUL'), 'vector': ('VALU',)}  # versions of libtpu use different names
DUMP_FLAGS = '--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles|final_hlo-static'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--chips', default='v5e,v6e')
    parser.add_argument('--kernels', default=','.join(KERNELS))
    parser.add_argument('--peers', action='store_true', help='also compile the kernels of tokamax')
    for name, value in zip(('length', 'width', 'heads'), FIGURE_SHAPE, strict=True):
        parser.add_argument(f'--{name}', type=parse_count, default=value)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument('--check', action='store_true')
    mode.add_argument('--write', action='store_true')
    parser.add_argument('--one', nargs=2, metavar=('CHIP', 'KERNEL'), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return compile_kernel(*args.one, args)
    kernels = args.kernels.split(',') + (PEER_KERNELS if args.peers else [])
    if reason := find_argument_error(args):
        sys.exit(f'tpu_cost: {reason}')
    versions, peer_versions, document = get_versions(), get_peer_versions() if args.peers else {}, {}
    if args.write:
        document = read_costs(FIGURES)
        kept_rows = document['costs'].keys() - {
            f'{chip} {kernel}' for chip in args.chips.split(',') for kernel in kernels
        }
        kept_peer_rows = [name for name in kept_rows if name.partition(' ')[2] in PEER_KERNELS]
        if reason := explain_different_versions(
            document['versions'], versions, kept_rows
        ) or explain_different_versions(document['versions'], peer_versions, kept_peer_rows):
            parser.error(f'--write: {reason}')
    costs = {}
    print(versions | peer_versions)
    print(f'{"":34}{"bundles":>9}{"matrix":>8}{"vector":>8}{"cycles":>10}   a body of 1024 x 1024; T={args.length}')
    for chip in args.chips.split(','):
        for kernel in kernels:
            costs[f'{chip} {kernel}'] = kernel_cost = measure_cost(chip, kernel, args)
            cycles = kernel_cost['cycles'] or '-'
            print(
                f'{chip:5}{kernel:29}{kernel_cost["bundles"]:9}{kernel_cost["matrix"]:8.0%}{kernel_cost["vector"]:8.0%}{cycles:>10}',
                flush=True,
            )
    print_ratios(costs)
    if args.write:
        write_costs(
            FIGURES,
            versions=document['versions'] | versions | peer_versions,
            costs=document['costs'] | costs,
        )
    return max(check_figures(costs), check_limits(costs)) if args.check else 0


def find_argument_error(args: argparse.Namespace) -> str | None:
    """Return the reason why the arguments are invalid or nothing can be compiled; None if there is none."""
    from sinklab.planning import topology

    for option, names in (('chips', CHIP_TOPOLOGIES), ('kernels', KERNELS)):
        for name in getattr(args, option).split(','):
            if name not in names:
                return f'--{option}: {name!r} is unknown; give some of {", ".join(names)}'
    if args.length % 128:
        return f'--length={args.length} is not a multiple of 128'
    if args.peers and not PEER_PYTHON.exists():
        return 'tokamax is not installed; run: make peers'
    if (args.check or args.write) and (args.length, args.width, args.heads) != FIGURE_SHAPE:
        return 'committed figures are of --length={} --width={} --heads={}'.format(*FIGURE_SHAPE)
    return None if topology.find_libtpu() else 'wants the compiler of libtpu; make .venv/test installs it'


def print_ratios(costs: dict) -> None:
    """Print the ratios of each kernel to softmax of the same chip and direction, for common figures."""
    for name, kernel_cost in costs.items():
        chip, *kind, direction = name.split()
        softmax = costs.get(f'{chip} softmax {direction}')
        if softmax and kind != ['softmax']:
            softmax_ratios = {
                key: kernel_cost[key] / softmax[key]
                for key in ('bundles', 'cycles')
                if kernel_cost[key] and softmax[key]
            }
            print(
                f'{name}: '
                + ', '.join(f'{value:.2f} of our softmax in {key}' for key, value in softmax_ratios.items())
            )


def check_figures(costs: dict) -> int:
    """Return 1 if a figure differs by more than 10 % from the committed one, else 0."""
    committed, exit_code = json.loads(FIGURES.read_text())['costs'], 0
    for name, kernel_cost in costs.items():
        for key in ('bundles', 'cycles'):
            committed_value, value = committed.get(name, {}).get(key), kernel_cost[key]
            if committed_value != value and not (
                committed_value and value and abs(value / committed_value - 1) <= 0.1
            ):
                print(
                    f'{name}: {value} {key}, and {committed_value} are committed in {FIGURES.name}', file=sys.stderr
                )
                exit_code = 1
    return exit_code


def check_limits(costs: dict) -> int:
    """Return 1 if a kernel exceeds its limit of bundles or uses too little of the matrix unit, else 0."""
    exit_code = 0
    for chip, (kernel, other) in itertools.product(CHIP_TOPOLOGIES, BUNDLE_LIMITS):
        limit = BUNDLE_LIMITS[kernel, other]
        kernel_cost, other_cost = costs.get(f'{chip} {kernel}'), costs.get(f'{chip} {other}')
        if kernel_cost and other_cost and kernel_cost['bundles'] > limit * other_cost['bundles']:
            print(f'{chip} {kernel}: more than {limit} of the bundles of {other}', file=sys.stderr)
            exit_code = 1
        if kernel_cost and 'backward' in kernel and kernel_cost['matrix'] < MIN_MATRIX_SHARE:
            print(f'{chip} {kernel}: less than {MIN_MATRIX_SHARE:.0%} of the matrix unit', file=sys.stderr)
            exit_code = 1
    return exit_code


def measure_cost(chip: str, kernel: str, args: argparse.Namespace) -> dict:
    """Measure the cost of a kernel by two compilations in separate processes.

    The processes are separate because the estimator ends the process when it rejects a kernel.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_child(chip, kernel, args, f'--xla_jf_dump_to={folder} {DUMP_FLAGS}', check=True)
        figures = find_kernel_body(Path(folder))
        figures['bundles'] = round(figures['bundles'] * 2**20 / count_scores(kernel, args.length))
    with tempfile.TemporaryDirectory() as folder:
        if kernel.split()[0] not in SPLASH_SCORES:
            run_child(chip, kernel, args, f'--xla_jf_dump_static_llo_profile_to={folder}', check=False)
        profiles = [path.read_text() for path in Path(folder).iterdir()]
    estimates = [int(re.search(r'estimated_cycles: (\d+)', text)[1]) for text in profiles if 'sinklab_' in text]
    return figures | dict(cycles=max(estimates, default=None))


def count_scores(kernel: str, length: int) -> int:
    """Return the number of scores that the body of a kernel computes, forward or backward."""
    from sinklab.attn.pallas import tpu

    if (kind := kernel.split()[0]) in SPLASH_SCORES:
        return SPLASH_SCORES[kind]
    queries, keys = tpu.BLOCK_SIZES[0] // 2, tpu.BLOCK_SIZES[0]
    return tpu.choose_block_size(length, queries) * tpu.choose_block_size(length, keys)


def run_child(chip: str, kernel: str, args: argparse.Namespace, flags: str, check: bool) -> None:
    command = [
        str(PEER_PYTHON) if kernel in PEER_KERNELS else sys.executable,
        __file__,
        f'--length={args.length}',
        f'--width={args.width}',
        f'--heads={args.heads}',
    ]
    environment = {**os.environ, 'LIBTPU_INIT_ARGS': flags, 'JAX_PLATFORMS': 'cpu', 'TF_CPP_MIN_LOG_LEVEL': '3'}
    process = subprocess.run([*command, '--one', chip, kernel], env=environment, capture_output=True, text=True)
    if check and process.returncode:
        sys.exit(f'{chip} {kernel}: {process.stderr[-2000:]}')


def find_kernel_body(folder: Path) -> dict:
    """Return the figures of the longest branch-free sequence of bundles in a dump."""
    stretches = []
    for table in folder.glob('*final_hlo-static-per-bundle-utilization.txt'):
        name = table.name.split('final_hlo')[0].rsplit('-', 2)[0]
        text = next(path for path in folder.glob(f'{name}*final_bundles.txt') if 'schedule' not in path.name)
        head, rows = table.read_text().split('== UTILIZATION:')
        units, capacity = head.splitlines()[1].split(','), map(int, head.splitlines()[2].split())
        utilization = [
            dict(zip((unit.strip() for unit in units), map(int, row.split()), strict=True))
            for row in rows.strip().splitlines()
        ]
        capacity = dict(zip((unit.strip() for unit in units), capacity, strict=True))
        edges = sorted({0, len(utilization), *find_branch_addresses(text.read_text())})
        stretches += [(end - start, utilization[start:end], capacity) for start, end in itertools.pairwise(edges)]
    length, bundles, capacity = max(stretches, key=lambda stretch: stretch[0])

    def share(names: tuple[str, ...]) -> float:
        unit = next(name for name in names if name in capacity)
        return sum(row[unit] for row in bundles) / capacity[unit] / length

    return dict(bundles=length, **{name: share(names) for name, names in UNIT_NAMES.items()})


def find_branch_addresses(text: str) -> list[int]:
    """Return the addresses of bundles that are branch targets or that branch."""
    addresses = []
    for line in text.splitlines():
        address = re.match(r'\s*(0x[0-9a-f]+|0)\s+([A-Z]{2}:)?', line)
        if address and (address[2] or 'sbr.rel' in line):
            addresses.append(int(address[1], 16))
    return addresses


def get_versions() -> dict[str, str | None]:
    from sinklab.environment import get_package_versions
    from sinklab.planning import topology

    return get_package_versions(('jax',)) | dict(libtpu=topology.find_libtpu_version())


def get_peer_versions() -> dict[str, str]:
    """Return the versions of tokamax and of its jax, in its own environment."""
    script = "import importlib.metadata; print(*map(importlib.metadata.version, ('tokamax', 'jax')))"
    tokamax, jax = subprocess.check_output([PEER_PYTHON, '-c', script], text=True).split()
    return {'tokamax': tokamax, 'jax of tokamax': jax}


def compile_kernel(chip: str, kernel: str, args: argparse.Namespace) -> int:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from sinklab.planning import topology

    mesh = Mesh(np.array(topology.make_tpu_devices(CHIP_TOPOLOGIES[chip])[:1]), 'x')
    sharding = NamedSharding(mesh, PartitionSpec())
    makers = dict(splash=make_splash_kernel, tokamax=make_tokamax_kernel)
    function, shapes = makers.get(kernel.split()[0], make_sinklab_kernel)(kernel, args)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # tokamax reads the kind of the chip from it
        jax.jit(function).lower(*(jax.ShapeDtypeStruct(*shape, sharding=sharding) for shape in shapes)).compile()
    return 0


def make_sinklab_kernel(kernel: str, args: argparse.Namespace):
    """Return a kernel of the softmax or the linear primitive, and the shapes of its arguments."""
    import jax.numpy as jnp

    from sinklab.attn import kernel_attention
    from sinklab.attn.example_specs import make_operations
    from sinklab.attn.mask import make_full_mask
    from sinklab.attn.pallas import tpu
    from sinklab.attn.pallas.kernel_interface import KernelSpec, ScoreSpec, SoftmaxReduction

    name, *normalized, direction = kernel.split()
    pair = ('exp', 'sum') if name == 'softmax' else (name, 'sum' if normalized else 'none')
    sums = kernel_attention.choose_reduction(make_operations()[pair])
    common_args = (
        sums,
        KernelSpec(ScoreSpec(args.width**-0.5), make_full_mask(args.length), None, jnp.zeros((args.heads, 0))),
    )
    head_shape = (1, args.heads, args.length, args.width), jnp.bfloat16
    row_shape = head_shape[0][:3], jnp.float32
    if direction == 'forward':
        return lambda *arrays: tpu.forward(*common_args, *arrays), [head_shape] * 3

    def backward(query, key, value, d_output, *rows):
        return tpu.backward(*common_args, query, key, value, d_output, rows)

    return backward, [head_shape] * 4 + [row_shape] * (sums.num_statistics + (sums == SoftmaxReduction()))


def make_splash_kernel(kernel: str, args: argparse.Namespace):
    """Return the splash attention kernel of JAX with blocks of 1024, and the shapes of its arguments."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    sizes = splash_attention_kernel.BlockSizes(**dict.fromkeys(SPLASH_BLOCK_NAMES, 1024), use_fused_bwd_kernel=True)
    full_mask = splash_attention_mask.FullMask((args.length, args.length))
    mask = splash_attention_mask.MultiHeadMask([full_mask] * args.heads)
    attend = splash_attention_kernel.make_splash_mha(mask=mask, head_shards=1, q_seq_shards=1, block_sizes=sizes)
    return differentiate_splash(attend, kernel, args)


def make_tokamax_kernel(kernel: str, args: argparse.Namespace):
    """Return the splash attention kernel of tokamax with TOKAMAX_BLOCKS, and the shapes of its arguments.

    tokamax has no public function with the sizes of blocks; MaxText imports the same module.
    """
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    config = splash_attention_kernel.SplashConfig(**TOKAMAX_BLOCKS, use_experimental_scheduler=True)
    mask = splash_attention_mask.FullMask((args.length, args.length))
    attend = splash_attention_kernel.make_splash_mha(mask=mask, q_seq_shards=1, config=config)
    return differentiate_splash(attend, kernel, args)


def differentiate_splash(attend, kernel: str, args: argparse.Namespace):
    """Return a splash kernel or its gradient, and the shapes of its arguments."""
    import jax
    import jax.numpy as jnp

    head_shape = (args.heads, args.length, args.width), jnp.bfloat16
    if kernel.endswith('forward'):
        return attend, [head_shape] * 3
    return jax.grad(lambda *arrays: attend(*arrays).astype(jnp.float32).sum(), (0, 1, 2)), [head_shape] * 3


if __name__ == '__main__':
    sys.exit(main())
