"""Compare attention backends with the definition, for each operation, mask, head width and dtype.

    PYTHONPATH=. python benchmarks/gpu_kernels.py [--backends=gpu,cudnn] [--processes=8] [--json=FILE]

Each cell computes the output, the row sums and the gradients of queries, keys and values from random arrays, and
compares them with the dense definition in float32. An error is the largest absolute difference over the largest
entry. `definition` is the same error of the dense definition in the dtype of the cell: what rounding alone costs.
Needs jax with its CUDA plugin. Cells run in several processes, because compilation takes most of the time.
"""

import argparse
import concurrent.futures
import itertools
import json
import multiprocessing
import os
import sys

from argument_types import parse_count

OUTPUTS = 'output', 'mass', 'd_query', 'd_key', 'd_value'
MASKS = 'causal', 'prefix', 'window', 'block', 'document', 'alibi'
SOME = ('exp', 'sum'), ('exp', 'p_norm'), ('sigmoid', 'none'), ('sigmoid', 'sum'), ('relu', 'none')
HEADS = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--backends', default='gpu,cudnn')
    parser.add_argument('--processes', type=parse_count, default=8)
    parser.add_argument('--json', metavar='FILE', help='write the errors of all cells to a file')
    args = parser.parse_args()
    # All processes share one GPU, and compiled programs run only once.
    os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')
    os.environ.setdefault('XLA_FLAGS', '--xla_gpu_autotune_level=0')
    import jax

    from sinklab.attn.backends import BACKENDS
    from sinklab.environment import get_package_versions
    from sinklab.machine import describe_machine

    backends = args.backends.split(',')
    if unknown := [name for name in backends if name not in BACKENDS]:
        parser.error(f'--backends: {unknown[0]} is unknown; give some of {", ".join(BACKENDS)}')
    cells = make_cells(backends)
    start = multiprocessing.get_context('spawn')
    with concurrent.futures.ProcessPoolExecutor(args.processes, start) as pool:
        results = [result for result in pool.map(compare_cell, cells) if result]
    if args.json:
        with open(args.json, 'w') as file:
            json.dump(results, file, indent=1)
    print(f'{jax.devices()[0].device_kind}, {describe_machine()}')
    print(json.dumps(get_package_versions(('jax', 'jaxlib', 'numpy'))))
    failed = [result for result in results if 'failed' in result]
    for result in failed:
        print(describe(result), result['failed'])
    compared = [result for result in results if 'failed' not in result]
    for result in sorted(compared, key=get_largest_error, reverse=True)[:10]:
        print(describe(result), *(f'{name} {result[name]:.1e}' for name in (*OUTPUTS, 'definition')))
    print(f'{len(compared)} cells compared, largest error {max(map(get_largest_error, compared), default=0):.1e}')
    print(f'{len(failed)} cells failed, {len(cells) - len(results)} are not supported by their backend')
    if not compared:
        print('gpu_kernels: no cell was compared', file=sys.stderr)
    return 1 if failed or not compared else 0


def make_cells(backends: list[str]) -> list[dict]:
    """Return all cells: every operation and mask at one shape, some at other widths, lengths and dtypes."""
    from sinklab.attn.example_specs import make_operations

    shape = dict(length=1024, width=64, dtype='bfloat16')
    cells = [dict(operation=each, mask=mask, **shape) for each, mask in itertools.product(make_operations(), MASKS)]
    for each in SOME:
        for width, mask in itertools.product((96, 128), ('causal', 'document', 'alibi')):
            cells.append(dict(operation=each, mask=mask, **shape | dict(width=width)))
        for more in (dict(length=4096), dict(length=4096, width=128), dict(dtype='float16')):
            cells.append(dict(operation=each, mask='causal', **shape | more))
    return [dict(backend=backend, **cell) for backend in backends for cell in cells]


def compare_cell(cell: dict) -> dict | None:
    """Return a cell with its errors, or with the reason why it failed; None if the backend does not cover it."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from sinklab.attn.backends import BACKENDS, explain_unsupported
    from sinklab.attn.example_specs import make_operations, make_specs
    from sinklab.attn.spec import AttentionProblem
    from sinklab.errors import format_error

    length, width, dtype = cell['length'], cell['width'], cell['dtype']
    spec = make_specs(make_operations()[cell['operation']], HEADS, length)[cell['mask']]
    problem = AttentionProblem(spec, HEADS, width, width, dtype)
    if explain_unsupported(cell['backend'], jax.default_backend(), problem):
        return None
    rng = np.random.default_rng(0)
    shape = 1, length, HEADS, width
    arrays = [jnp.asarray(rng.uniform(size=shape) - shift, dtype) for shift in (0, 0, 0.5)]
    cotangent = jnp.asarray(rng.normal(size=shape), jnp.float32)

    def run(arrays, backend):
        def total(arrays):
            output, rows, _ = BACKENDS[backend].attend(*arrays, spec, needs_abs_weight_sum=True)
            return jnp.sum(cotangent * output.astype(jnp.float32)), (output, rows.abs_weight_sum_BHT)

        gradients, outputs = jax.jit(jax.grad(total, has_aux=True))(arrays)
        return [np.asarray(array, np.float64) for array in (*outputs, *gradients)]

    with jax.default_matmul_precision('highest'):
        expected = run([array.astype(jnp.float32) for array in arrays], 'dense')

    def compute_errors(backend):
        return [
            float(np.abs(x - y).max() / max(np.abs(x).max(), 1e-9))
            for x, y in zip(expected, run(arrays, backend), strict=True)
        ]

    try:
        result = dict(zip(OUTPUTS, compute_errors(cell['backend']), strict=True)) | dict(
            definition=max(compute_errors('dense'))
        )
    except Exception as error:  # a cell that fails is a result
        result = dict(failed=format_error(error, with_type=True))
    return cell | result


def get_largest_error(result: dict) -> float:
    return max(result[name] for name in OUTPUTS)


def describe(result: dict) -> str:
    similarity, normalizer = result['operation']
    shape = f'T={result["length"]} K={result["width"]} {result["dtype"]}'
    return f'{result["backend"]} {similarity}/{normalizer} {result["mask"]} {shape}:'


if __name__ == '__main__':
    sys.exit(main())
