"""Comparison of attention backends with the definition, the part `kernels` of benchmarks/gpu.py.

Each cell computes the output, the row sums and the gradients of queries, keys and values, and compares them with the
dense definition in float32. An error is the largest absolute difference over the largest entry. `definition` is the
same error of the dense definition in the dtype of the cell: what rounding alone costs. Some inputs and masks are
those of faults that were reported of other kernels (`SPECIAL_SCORES`, `SPECIAL_MASKS`).
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.example_specs import make_operations, make_specs
from sinklab.attn import backends, mask
from sinklab.attn.spec import AttentionProblem, AttentionSpec

BACKENDS = 'gpu', 'cudnn'
OUTPUTS = 'output', 'mass', 'd_query', 'd_key', 'd_value'
MASKS = 'causal', 'prefix', 'window', 'block', 'document', 'alibi'
SOME = ('exp', 'sum'), ('exp', 'p_norm'), ('sigmoid', 'none'), ('sigmoid', 'sum'), ('relu', 'none')
HEADS = 2
LOW_QUERY = 200  # the query of the scores `one_low_row`
# 1088 leaves 64 modulo 128. For such lengths, cuDNN's gradient of queries was reported wrong in rows whose
# log-sum-exp is below -88.7, where e^-lse is no float32 number.
SPECIAL_SCORES = [dict(scores=scores, length=length) for scores in ('low', 'one_low_row') for length in (1024, 1088)]
SPECIAL_MASKS: list[dict] = [dict(mask='window_not_causal'), dict(mask='blind_queries'), dict(learned_kv=1)]


def make_cells(is_tiny: bool) -> dict[str, dict]:
    """Make all cells: every operation and mask at one shape, some at other widths, lengths, dtypes and scores."""
    shape = dict(mask='causal', scores='uniform', length=1024, width=64, dtype='bfloat16', learned_kv=0)
    softmax = shape | dict(operation=SOME[0])
    if is_tiny:
        special = [
            softmax | more | dict(length=256) for more in (dict(mask='document'), *SPECIAL_SCORES, *SPECIAL_MASKS)
        ]
        return {describe(cell): cell for cell in (cell | dict(backend='chunked') for cell in special)}
    cells = [
        shape | dict(operation=operation, mask=mask)
        for operation, mask in itertools.product(make_operations(), MASKS)
    ]
    cells += [softmax | more for more in SPECIAL_SCORES]
    for operation in SOME:
        some: list[dict] = [
            dict(width=width, mask=mask) for width in (96, 128) for mask in ('causal', 'document', 'alibi')
        ]
        some += [dict(length=4096), dict(length=4096, width=128), dict(dtype='float16'), *SPECIAL_MASKS]
        cells += [shape | dict(operation=operation) | more for more in some]
    cells = [cell | dict(backend='gpu') for cell in cells] + [
        cell | dict(backend='cudnn') for cell in cells if cell['operation'] == SOME[0]
    ]
    return {describe(cell): cell for cell in cells}


def is_special(cell: dict) -> bool:
    return cell['mask'] not in MASKS or cell['scores'] != 'uniform' or cell['learned_kv'] > 0


def describe(cell: dict) -> str:
    similarity, normalizer = cell['operation']
    scores = '' if cell['scores'] == 'uniform' else f' {cell["scores"]}'
    learned_kv = f' {cell["learned_kv"]} learned' if cell['learned_kv'] else ''
    shape = f'T={cell["length"]} K={cell["width"]} {cell["dtype"]}'
    return f'{cell["backend"]} {similarity}/{normalizer} {cell["mask"]}{scores}{learned_kv} {shape}'


def make_spec(cell: dict) -> AttentionSpec:
    length, name = cell['length'], cell['mask']
    specs = make_specs(make_operations()[tuple(cell['operation'])], HEADS, length)
    causal = specs['causal'].mask
    masks = dict(
        window_not_causal=mask.make_window_mask(length, length // 3),
        blind_queries=mask.make_static_mask(
            causal.bounds_2T[0], np.where(np.arange(length) % 5, causal.bounds_2T[1], 0)
        ),
    )
    spec = dataclasses.replace(specs['causal'], mask=masks[name]) if name in masks else specs[name]
    return dataclasses.replace(spec, num_learned_kv=cell['learned_kv'])


def make_inputs(cell: dict) -> list:
    """Make queries, keys and values in float64."""
    length, width, rng = cell['length'], cell['width'], np.random.default_rng(0)
    num_keys = length + cell['learned_kv']
    query, key = rng.uniform(size=(1, length, HEADS, width)), rng.uniform(size=(1, num_keys, HEADS, width))
    value = rng.uniform(size=key.shape) - 0.5
    if cell['scores'] == 'low':  # all scores are near -100
        offset = (100 / width**0.5) ** 0.5
        query, key = query - 0.5 + offset, key - 0.5 - offset
    elif cell['scores'] == 'one_low_row':  # those of one query are near -122
        query, key = query - 0.5, key - 0.5 - 3
        query[:, LOW_QUERY] = 122 / 3 / width**0.5
    return [query, key, value]


def measure_cell(cell: dict, is_tiny: bool) -> dict:
    """Return the errors of a cell, or why its backend does not support it."""
    spec, dtype = make_spec(cell), cell['dtype']
    problem = AttentionProblem(spec, HEADS, cell['width'], cell['width'], dtype)
    if reason := backends.explain_unsupported(cell['backend'], jax.default_backend(), problem):
        return dict(unsupported=reason)
    arrays = [jnp.asarray(array, dtype) for array in make_inputs(cell)]
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=arrays[0].shape), jnp.float32)

    def make_run(backend):
        def total(arrays):
            output, rows, _ = backends.BACKENDS[backend].attend(*arrays, spec)
            return jnp.sum(cotangent * output.astype(jnp.float32)), (output, rows.abs_weight_sum_BHT)

        differentiate = jax.jit(jax.grad(total, has_aux=True))

        def run(arrays):
            gradients, outputs = differentiate(arrays)
            return dict(
                zip(OUTPUTS, (np.asarray(array, np.float64) for array in (*outputs, *gradients)), strict=True)
            )

        return run

    run_dense, run_backend = make_run('dense'), make_run(cell['backend'])
    with jax.default_matmul_precision('highest'):
        expected = run_dense([array.astype(jnp.float32) for array in arrays])
    found = run_backend(arrays)
    definition = run_dense(arrays)
    result = {name: compute_error(expected[name], found[name]) for name in OUTPUTS}
    result['definition'] = max(compute_error(expected[name], definition[name]) for name in OUTPUTS)
    if cell['learned_kv']:
        for name in ('d_key', 'd_value'):
            result[f'learned {name}'] = compute_error(expected[name][:, 0], found[name][:, 0])
    if cell['scores'] == 'one_low_row':
        for name in ('output', 'd_query'):
            result[f'low {name}'] = compute_error(expected[name][:, LOW_QUERY], found[name][:, LOW_QUERY])
    if cell['mask'] == 'document':
        end = int(spec.mask.start_BT[0, -1])  # of the documents before the last
        changed = [array.at[:, :end].set(array[:, :end][:, ::-1]) for array in arrays]
        result['leak'] = float(np.abs(run_backend(changed)['output'] - found['output'])[:, end:].max())
    return result


def compute_error(expected: np.ndarray, found: np.ndarray) -> float:
    error = float(np.abs(expected - found).max() / max(np.abs(expected).max(), 1e-9))
    return error if np.isfinite(error) else 1e9


def get_largest_error(result: dict) -> float:
    """Return the largest error of a cell; a leak between documents counts fully."""
    return max((value for name, value in result.items() if name.split()[-1] in (*OUTPUTS, 'leak')), default=0.0)
