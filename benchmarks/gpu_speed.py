"""Speed of attention alone and of training steps, the part `speed` of benchmarks/gpu.py.

Attention: random bfloat16 arrays of a model 2048 wide with a causal mask, 16,384 tokens. Kernels take turns in one
process; a figure is the median of ROUNDS, each of ten calls, with quartiles, in TFLOP/s of the visible half of the
matrix (2 T^2 K forward, 3.5 times that with the backward pass). Steps: rows of configs/scale.py in turns, and the
same softmax model in plain JAX (jax_baseline.py); MFU is the model's operations over the peak of the chip.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import jax_baseline
from benchmarks.attention import make_arrays, make_function
from benchmarks.timing import time_in_turns
from sinklab.config.spec import Layout, Spec
from sinklab.config.validate import parse_config
from sinklab.configs import scale
from sinklab.errors import format_error
from sinklab.model import flops
from sinklab.parallel import device_mesh, sharding
from sinklab.train import device_layout, state, step

NUM_TOKENS, MODEL_WIDTH = 16_384, 2048  # of attention: sequences x length, heads x head width
ROUNDS = 10
STEP_ROUNDS = 3
NUM_CALLS = 10  # at a time
# {name: (backend, operation)}
KERNELS = {
    'cuDNN softmax': ('cudnn', ('exp', 'sum')),
    'our softmax': ('gpu', ('exp', 'sum')),
    'our sigmoid': ('gpu', ('sigmoid', 'none')),
}
TINY_KERNELS = {'chunked softmax': ('chunked', ('exp', 'sum'))}  # on any device
DIRECTIONS = {'forward': 1.0, 'forward_and_backward': 3.5}  # operations over those of the forward pass
STEP_VARIANTS = 'softmax', 'sigmoid'  # similarities of rows
PLAIN_JAX = 'plain JAX softmax'  # jax_baseline.py
BATCH_SIZES = {'60m': 32, '350m': 16, '1b': 8}  # sequences of 2048 tokens


def make_cells(is_tiny: bool) -> dict[str, dict]:
    if is_tiny:
        return {'attention T=64 K=16': dict(length=64, width=16), 'steps smoke': dict(model='60m', size='smoke')}
    cells = {f'attention T={T} K={K}': dict(length=T, width=K) for K in (64, 128) for T in (1024, 2048, 4096, 8192)}
    return cells | {f'steps {model}': dict(model=model, size='paper') for model in BATCH_SIZES}


def measure_cell(cell: dict, is_tiny: bool) -> dict:
    return time_steps(cell['model'], cell['size']) if 'model' in cell else time_attention(cell, is_tiny)


def time_attention(cell: dict, is_tiny: bool) -> dict:
    """Return {direction: {kernel: TFLOP/s as quartiles}} and the kernels that were left out."""
    length, width = cell['length'], cell['width']
    tokens, model_width = (128, 32) if is_tiny else (NUM_TOKENS, MODEL_WIDTH)
    shape = tokens // length, length, model_width // width, width
    arrays = make_arrays(shape, jnp.bfloat16)
    result: dict[str, dict] = {direction: {} for direction in (*DIRECTIONS, 'left_out')}
    for direction, factor in DIRECTIONS.items():
        num_flops = factor * 2 * shape[0] * shape[2] * length**2 * width
        programs = {}
        for name, (backend, operation) in (TINY_KERNELS if is_tiny else KERNELS).items():
            function = make_function(backend, operation, length, direction != 'forward')
            try:
                program = jax.jit(function).lower(*arrays).compile()
                jax.block_until_ready(program(*arrays))
                programs[name] = functools.partial(program, *arrays)
            except Exception as error:  # a kernel that cannot run here is a result
                result['left_out'][f'{name}, {direction}'] = format_error(error, with_type=True)
        for name, seconds in time_in_turns(programs, ROUNDS, NUM_CALLS).items():
            result[direction][name] = [num_flops / value / 1e12 for value in statistics.quantiles(seconds, n=4)]
    return result


def time_steps(model: str, size: str) -> dict:
    """Measure the steps of softmax, of sigmoid and of the plain JAX baseline, in turns."""
    mesh = device_mesh.make_mesh(Layout(), jax.devices()[:1])
    spec = make_spec(f'softmax_{model}', size, BATCH_SIZES[model])
    shape = spec.optimizer.batch_size, spec.data.length + 1
    ids_BT = np.random.default_rng(0).integers(0, spec.model.vocabulary, shape).astype(np.int32)
    runs, results = {}, {}
    with jax.set_mesh(mesh):
        shared_state = [state.create_state(spec, mesh)]  # one for all rows, whose parameters have the same shapes
        inputs = sharding.put_batch(ids_BT, mesh), sharding.make_per_device_array(0, mesh)
        for name in STEP_VARIANTS:
            row_spec = make_spec(f'{name}_{model}', size, BATCH_SIZES[model])
            layout, backend = choose_layout(row_spec, mesh)
            train_step = step.make_train_step(row_spec, layout, mesh, backend)
            compiled = train_step.lower(shared_state[0], *inputs).compile()
            runs[name] = make_run(compiled, shared_state, *inputs)
            results[name] = dict(attention=backend, remat=layout.remat, planned_bytes=count_planned_bytes(compiled))
        initial_state, train_step = jax_baseline.make_train_step(spec)
        compiled = train_step.lower(initial_state, ids_BT).compile()
        runs[PLAIN_JAX] = make_run(compiled, [initial_state], jax.device_put(ids_BT))
        results[PLAIN_JAX] = dict(remat='none', planned_bytes=count_planned_bytes(compiled))
        seconds = time_in_turns(runs, STEP_ROUNDS, NUM_CALLS)
    peak_flops = device_layout.compute_mesh_peak_flops(mesh)
    num_flops = flops.count_step_flops(spec)
    for name, values in seconds.items():
        mfu = num_flops / statistics.median(values) / peak_flops if peak_flops else None
        results[name] |= dict(seconds=values, mfu=mfu)
    return dict(batch=spec.optimizer.batch_size, length=spec.data.length, steps=results)


def make_spec(row: str, size: str, batch_size: int) -> Spec:
    """Make the spec of a row of configs/scale.py for one device."""
    config = scale.get_config(row, size)
    if size == 'paper':
        config.optimizer.batch_size = batch_size
    return parse_config(config.to_dict())


def choose_layout(spec: Spec, mesh: jax.sharding.Mesh) -> tuple[Layout, str]:
    """Choose the remat policy and the attention backend of a run on one device."""
    layout = Layout(remat='auto')
    backend = step.choose_backend(spec, layout).backend
    remat = device_layout.choose_remat_policy(spec, layout, mesh, backend, device_mesh.get_device_memory_bytes())
    return dataclasses.replace(layout, remat=remat), backend


def make_run(train_step: Callable, train_state: list, *inputs: jax.Array) -> Callable[[], object]:
    """Return a function that runs a step, and puts the new state into the list `train_state`."""

    def run() -> object:
        train_state[0] = train_step(train_state[0], *inputs)[0]
        return train_state[0]

    return run


def count_planned_bytes(compiled: jax.stages.Compiled) -> int:
    """Return the bytes of a program and its arguments, as planned by the compiler."""
    memory = compiled.memory_analysis()
    num_bytes = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return int(num_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes)
