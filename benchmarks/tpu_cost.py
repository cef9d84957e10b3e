"""What the TPU compiler says that attention kernels cost: no chip, no clock, static estimates.

    python benchmarks/tpu_cost.py [--chips=v5e,v6e] [--length=4096] [--width=128] [--heads=4] [--check | --write]

A line is one kernel, without a mask, in bfloat16: VLIW bundles of its main body for 1024 x 1024 scores, how much of
the matrix unit and of the vector unit they fill, and the compiler's own estimate of cycles for the whole kernel. The
body is straight code, so its bundles are cycles but for what it waits for. The estimate counts a region under a
predicate in part, so it is no use for splash; the estimator refuses v5e kernels that fetch scalars. --check compares
with benchmarks/tpu_cost.json and exits 1 where bundles or cycles are more than 10 % off; --write makes that file.
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

FIGURES = Path(__file__).with_suffix('.json')
CHIPS = {'v5e': 'v5e:2x2', 'v5p': 'v5p:2x2x1', 'v6e': 'v6e:2x2'}
KERNELS = [
    f'{kind} {direction}'
    for direction in ('forward', 'backward')
    for kind in ('softmax', 'sigmoid', 'sigmoid normalized', 'elu1', 'splash')
]
SIZE = 4096, 128, 4  # length, width, heads
UNITS = {'matrix': ('MXU', 'MATMUL'), 'vector': ('VALU',)}  # as one libtpu or another names them
BUNDLES = '--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles|final_hlo-static'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--chips', default='v5e,v6e')
    parser.add_argument('--kernels', default=','.join(KERNELS))
    for name, value in zip(('length', 'width', 'heads'), SIZE, strict=True):
        parser.add_argument(f'--{name}', type=int, default=value)
    what = parser.add_mutually_exclusive_group()
    what.add_argument('--check', action='store_true')
    what.add_argument('--write', action='store_true')
    parser.add_argument('--one', nargs=2, metavar=('CHIP', 'KERNEL'), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        return compile_kernel(*given.one, given)
    if reason := refused(given):
        sys.exit(f'tpu_cost: {reason}')
    found = {}
    print(versions())
    print(f'{"":34}{"bundles":>9}{"matrix":>8}{"vector":>8}{"cycles":>10}   a body of 1024 x 1024; T={given.length}')
    for chip in given.chips.split(','):
        for kernel in given.kernels.split(','):
            found[f'{chip} {kernel}'] = one = cost(chip, kernel, given)
            cycles = one['cycles'] or '-'
            print(
                f'{chip:5}{kernel:29}{one["bundles"]:9}{one["matrix"]:8.0%}{one["vector"]:8.0%}{cycles:>10}',
                flush=True,
            )
    ratios(found)
    if given.write:
        FIGURES.write_text(
            json.dumps(dict(command=' '.join(sys.argv), versions=versions(), costs=found), indent=2) + '\n'
        )
    return moved(found) if given.check else 0


def refused(given: argparse.Namespace) -> str | None:
    """Why nothing can be compiled."""
    from sinklab import topology

    for option, names in (('chips', CHIPS), ('kernels', KERNELS)):
        for name in getattr(given, option).split(','):
            if name not in names:
                return f'--{option}: {name!r} is unknown; give some of {", ".join(names)}'
    if (given.check or given.write) and (given.length, given.width, given.heads) != SIZE:
        return 'committed figures are of --length={} --width={} --heads={}'.format(*SIZE)
    return None if topology.library() else 'wants the compiler of libtpu; make .venv/test installs it'


def ratios(found: dict) -> None:
    """Each kernel over softmax of the same chip and direction, in whatever both have."""
    for name, one in found.items():
        chip, *kind, direction = name.split()
        softmax = found.get(f'{chip} softmax {direction}')
        if softmax and kind != ['softmax']:
            over = {key: one[key] / softmax[key] for key in ('bundles', 'cycles') if one[key] and softmax[key]}
            print(f'{name}: ' + ', '.join(f'{value:.2f} of our softmax in {key}' for key, value in over.items()))


def moved(found: dict) -> int:
    """1 if a figure is more than a tenth from the committed one."""
    committed, code = json.loads(FIGURES.read_text())['costs'], 0
    for name, one in found.items():
        for key in ('bundles', 'cycles'):
            before, now = committed.get(name, {}).get(key), one[key]
            if before != now and not (before and now and abs(now / before - 1) <= 0.1):
                print(f'{name}: {now} {key}, and {before} are committed in {FIGURES.name}', file=sys.stderr)
                code = 1
    return code


def cost(chip: str, kernel: str, given: argparse.Namespace) -> dict:
    """Compiles twice, each in a process of its own: the estimator takes the process with it when it refuses."""
    with tempfile.TemporaryDirectory() as folder:
        run(chip, kernel, given, f'--xla_jf_dump_to={folder} {BUNDLES}', check=True)
        found = body(Path(folder))
        found['bundles'] = round(found['bundles'] * 2**20 / scores(kernel, given.length))
    with tempfile.TemporaryDirectory() as folder:
        if not kernel.startswith('splash'):
            run(chip, kernel, given, f'--xla_jf_dump_static_llo_profile_to={folder}', check=False)
        profiles = [path.read_text() for path in Path(folder).iterdir()]
    estimates = [int(re.search(r'estimated_cycles: (\d+)', text)[1]) for text in profiles if 'sinklab_' in text]
    return found | dict(cycles=max(estimates, default=None))


def scores(kernel: str, length: int) -> int:
    """How many a body computes."""
    from sinklab.attend.kernels import tpu

    queries, keys = (
        (1024, 1024)
        if kernel.startswith('splash')
        else (tpu.dividing(length, tpu.BLOCKS[0] // 2), tpu.dividing(length, tpu.BLOCKS[0]))
    )
    return queries * keys


def run(chip: str, kernel: str, given: argparse.Namespace, flags: str, check: bool) -> None:
    command = [
        sys.executable,
        __file__,
        f'--length={given.length}',
        f'--width={given.width}',
        f'--heads={given.heads}',
    ]
    environment = {**os.environ, 'LIBTPU_INIT_ARGS': flags, 'JAX_PLATFORMS': 'cpu', 'TF_CPP_MIN_LOG_LEVEL': '3'}
    process = subprocess.run([*command, '--one', chip, kernel], env=environment, capture_output=True, text=True)
    if check and process.returncode:
        sys.exit(f'{chip} {kernel}: {process.stderr[-2000:]}')


def body(folder: Path) -> dict:
    """The longest stretch of bundles between labels and branches, of the kernel that has the longest."""
    stretches = []
    for table in folder.glob('*final_hlo-static-per-bundle-utilization.txt'):
        name = table.name.split('final_hlo')[0].rsplit('-', 2)[0]
        text = next(path for path in folder.glob(f'{name}*final_bundles.txt') if 'schedule' not in path.name)
        head, rows = table.read_text().split('== UTILIZATION:')
        units, capacity = head.splitlines()[1].split(','), map(int, head.splitlines()[2].split())
        used = [
            dict(zip((unit.strip() for unit in units), map(int, row.split()), strict=True))
            for row in rows.strip().splitlines()
        ]
        capacity = dict(zip((unit.strip() for unit in units), capacity, strict=True))
        edges = sorted({0, len(used), *breaks(text.read_text())})
        stretches += [(end - start, used[start:end], capacity) for start, end in itertools.pairwise(edges)]
    length, bundles, capacity = max(stretches, key=lambda stretch: stretch[0])

    def share(names: tuple[str, ...]) -> float:
        unit = next(name for name in names if name in capacity)
        return sum(row[unit] for row in bundles) / capacity[unit] / length

    return dict(bundles=length, **{name: share(names) for name, names in UNITS.items()})


def breaks(text: str) -> list[int]:
    """Addresses of the bundles that are jumped to or that jump."""
    found = []
    for line in text.splitlines():
        address = re.match(r'\s*(0x[0-9a-f]+|0)\s+([A-Z]{2}:)?', line)
        if address and (address[2] or 'sbr.rel' in line):
            found.append(int(address[1], 16))
    return found


def versions() -> dict:
    from sinklab import topology
    from sinklab.train.environment import versions

    return versions(('jax',)) | dict(libtpu=topology.version())


def compile_kernel(chip: str, kernel: str, given: argparse.Namespace) -> int:
    import jax
    from jax.sharding import SingleDeviceSharding

    from sinklab import topology

    where = SingleDeviceSharding(topology.devices(CHIPS[chip])[0])
    run = splash if kernel.startswith('splash') else ours
    function, shapes = run(kernel, given)
    jax.jit(function).lower(*(jax.ShapeDtypeStruct(*shape, sharding=where) for shape in shapes)).compile()
    return 0


def ours(kernel: str, given: argparse.Namespace):
    """(function, shapes): one kernel of the softmax or the linear primitive."""
    import jax.numpy as jnp

    from sinklab.attend import epilogue
    from sinklab.attend.examples import operations
    from sinklab.attend.kernels import tpu
    from sinklab.attend.kernels.primitive import Problem, Scores, Softmax
    from sinklab.attend.mask import full

    name, *normalized, direction = kernel.split()
    pair = ('exp', 'sum') if name == 'softmax' else (name, 'sum' if normalized else 'none')
    sums = epilogue.sums(operations()[pair])
    how = sums, Problem(Scores(given.width**-0.5), full(given.length), None, jnp.zeros((given.heads, 0)))
    head = (1, given.heads, given.length, given.width), jnp.bfloat16
    row = head[0][:3], jnp.float32
    if direction == 'forward':
        return lambda *arrays: tpu.forward(*how, *arrays), [head] * 3

    def backward(query, key, value, d_output, *rows):
        return tpu.backward(*how, query, key, value, d_output, rows)

    return backward, [head] * 4 + [row] * (sums.statistics + (sums == Softmax()))


def splash(kernel: str, given: argparse.Namespace):
    """(function, shapes): JAX's softmax kernel, in blocks of 1024."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    names = 'block_q', 'block_kv', 'block_kv_compute', 'block_q_dkv', 'block_kv_dkv', 'block_kv_dkv_compute'
    sizes = splash_attention_kernel.BlockSizes(**dict.fromkeys(names, 1024), use_fused_bwd_kernel=True)
    whole = splash_attention_mask.FullMask((given.length, given.length))
    mask = splash_attention_mask.MultiHeadMask([whole] * given.heads)
    attend = splash_attention_kernel.make_splash_mha(mask=mask, head_shards=1, q_seq_shards=1, block_sizes=sizes)
    head = (given.heads, given.length, given.width), jnp.bfloat16
    if kernel.endswith('forward'):
        return attend, [head] * 3
    return jax.grad(lambda *arrays: attend(*arrays).astype(jnp.float32).sum(), (0, 1, 2)), [head] * 3


if __name__ == '__main__':
    sys.exit(main())
