"""Instructions of the compiled GPU kernels, counted without a GPU.

    JAX_PLATFORMS=cpu PYTHONPATH=. python benchmarks/gpu_instructions.py [--widths=64,128] [--json=FILE]

It needs jax 0.11 with its CUDA plugin, and flax. It compiles softmax and both forms of sigmoid (SINKLAB_GPU_SIGMOID)
for an H100, with a causal mask. For the inner loop over blocks without a mask, it prints the instructions for each
score, and the cycles that each unit of a multiprocessor needs for 128 x 128 scores, at the rates of `LANES`. Then it
prints the instructions for each score of a masked block. These are static counts, without latencies.
"""

import argparse
import collections
import importlib.metadata
import json
import os
import re
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
from argument_types import parse_counts
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from sinklab.attn import kernel_attention
from sinklab.attn.example_specs import make_operations
from sinklab.attn.mask import make_causal_mask
from sinklab.attn.pallas import gpu
from sinklab.attn.pallas.gpu_lowering import SIGMOID_VARIABLE, SIGMOIDS
from sinklab.attn.pallas.kernel_interface import KernelSpec, ScoreSpec, SoftmaxReduction
from sinklab.planning import topology

PACKAGES = 'jax', 'jax-cuda13-plugin', 'nvidia-cuda-nvcc'
LENGTH, HEADS = 4096, 4
BLOCK = 128 * 128  # scores for which cycles are given
VARIANTS = {'softmax': ('exp', 'sum', 'rsqrt')} | {f'sigmoid {name}': ('sigmoid', 'none', name) for name in SIGMOIDS}
UNITS = {  # beginnings of the instructions of each unit; all others only take an issue slot
    'special': 'MUFU',
    'multiply-add': 'FFMA|FMUL|FADD|IMAD',
    'integer': 'FMNMX|FSEL|FSETP|SEL|ISETP|IADD|VIADD|LOP3|PRMT|SHF|LEA|MOV|P2R|PLOP3',
    'convert': 'F2F',
}
LANES = dict(zip((*UNITS, 'issue'), (16, 128, 64, 64, 128), strict=True))  # of a multiprocessor and a clock
TENSOR_FLOPS = 4096  # of a multiprocessor and a clock, dense bfloat16
PRODUCTS = {'forward': 2, 'backward_key': 4, 'backward_query': 3}  # matrix products of each block
DUMP_VARIABLES = dict(MOSAIC_GPU_DUMP_SASS='1', MOSAIC_GPU_DUMP_SASS_CTRL='1', MOSAIC_GPU_DUMP_PTXAS='1')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--widths', type=parse_counts, default='64,128', metavar='N,...')
    parser.add_argument('--json', metavar='FILE', help='write all figures there too')
    args = parser.parse_args()
    versions, records = {name: importlib.metadata.version(name) for name in PACKAGES}, []
    print(f'{versions}; instructions for each score, then cycles for 128 x 128 scores')
    for width in args.widths:
        for name in VARIANTS:
            for kernel, folder in compile_variant(name, width):
                record = dict(name=name, kernel=kernel, width=width) | measure_kernel(kernel, folder, width)
                records.append(record)
                counts = ' '.join(f'{unit} {count:.2f}' for unit, count in record['per_score'].items())
                cycles = ' '.join(f'{unit} {count:.0f}' for unit, count in record['cycles'].items())
                rest = ', '.join(f'{key} {record[key]:g}' for key in ('masked', 'registers', 'spill_bytes'))
                print(f'K={width:4} {name:14} {kernel:15} {counts} | {cycles} | {rest}', flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(dict(versions=versions, kernels=records), indent=1) + '\n')


def compile_variant(name: str, width: int):
    """Compile the kernels of a variant, and yield (kernel, folder with its dump)."""
    similarity, normalizer, os.environ[SIGMOID_VARIABLE] = VARIANTS[name]
    (device,) = topology.make_gpu_devices('h100:1', 'h100')
    abstract = AbstractDevice(device_kind=device.device_kind, num_cores=None, platform='cuda')
    reduction = kernel_attention.choose_reduction(make_operations()[similarity, normalizer])
    num_rows = reduction.num_statistics + (reduction == SoftmaxReduction())

    def make_array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    def run(parameter_HP, query, key, value, *rows):
        spec = KernelSpec(ScoreSpec(width**-0.5), make_causal_mask(LENGTH), None, parameter_HP)
        output, statistics = gpu.forward(reduction, spec, query, key, value)
        return output, statistics, gpu.backward(reduction, spec, query, key, value, query, rows)

    head = make_array(jnp.bfloat16, 1, HEADS, LENGTH, width)
    rows = [make_array(jnp.float32, 1, HEADS, LENGTH)] * num_rows
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(DUMP_VARIABLES, MOSAIC_GPU_DUMP_TO=folder)
        with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ('x',), abstract_device=abstract)):
            jax.jit(run).lower(make_array(jnp.float32, HEADS, 0), *[head] * 3, *rows).compile()
        for kernel in PRODUCTS:
            yield kernel, Path(folder)


def measure_kernel(kernel: str, folder: Path, width: int) -> dict:
    """Count the instructions of a kernel's loops over blocks, from its dump."""
    (assembly,), (log,) = ([*folder.glob(f'*_{kernel}_*.{suffix}')] for suffix in ('sass_ctrl', 'ptxas'))
    plain, masked = sorted(find_block_loops(assembly.read_text()), key=len)
    inner_block = gpu.choose_inner_block(kernel.removeprefix('backward_'), False, width)
    scores = gpu.WARPGROUP_ROWS * inner_block / 128  # of a thread and a block
    per_score = {unit: sum(bool(re.match(UNITS[unit], op)) for op in plain) / scores for unit in UNITS}
    per_score['issue'] = len(plain) / scores
    cycles = {unit: BLOCK * count / LANES[unit] for unit, count in per_score.items()}
    cycles['tensor'] = PRODUCTS[kernel] * 2 * BLOCK * width / TENSOR_FLOPS
    return dict(
        per_score=per_score,
        cycles=cycles,
        masked=len(masked) / scores,
        instructions=dict(collections.Counter(op.split('.')[0] for op in plain).most_common()),
        registers=int(re.search(r'Used (\d+) registers', log.read_text())[1]),
        spill_bytes=int(re.search(r'(\d+) bytes spill stores', log.read_text())[1]),
    )


def find_block_loops(assembly: str) -> list[list[str]]:
    """Return the operations of each loop with matrix products; jumps back from behind the exit are no loops."""
    operations, starts, loops = [], {}, []
    for line in assembly.splitlines():
        if label := re.match(r'(\.L_x_\d+):', line):
            starts[label[1]] = len(operations)
        elif instruction := re.search(r'/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][\w.]*)(.*)', line):
            operations.append(instruction[1])
            target = re.search(r'\.L_x_\d+', instruction[2])
            if instruction[1].startswith('BRA') and target and target[0] in starts:
                loops.append(operations[starts[target[0]] :])
    return [loop for loop in loops if 'EXIT' not in loop and any(op.startswith('HGMMA') for op in loop)]


if __name__ == '__main__':
    main()
