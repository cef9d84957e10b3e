"""Speed of attention alone and of training steps, the part `speed` of benchmarks/gpu.py.

Attention: random bfloat16 arrays of a model 2048 wide with a causal mask, 16,384 tokens. Kernels take turns in one
process; a figure is the median of ROUNDS, each of ten calls, with quartiles, in TFLOP/s of the visible half of the
matrix (2 T^2 K forward, 3.5 times that with the backward pass). Steps: rows of configs/scale.py in turns, and the
same softmax model in plain JAX (jax_baseline.py); MFU is the model's operations over the peak of the chip.
"""

import argparse
import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable

NUM_TOKENS, MODEL_WIDTH = 16_384, 2048  # of attention: sequences x length, heads x head width
ROUNDS, WARMUP_STEPS, NUM_STEPS, STEP_ROUNDS = 10, 3, 10, 3
# {name: (backend, similarity, normalizer)}.
KERNELS = {
    'cuDNN softmax': ('cudnn', 'exp', 'sum'),
    'our softmax': ('gpu', 'exp', 'sum'),
    'our sigmoid': ('gpu', 'sigmoid', 'none'),
    'tokamax softmax': ('tokamax', 'exp', 'sum'),
}
# These take turns. Kernels that have never run come last, because one that fails can leave the GPU unusable.
GROUPS = (
    ('cuDNN softmax', 'our softmax'),
    ('our softmax', 'our sigmoid'),
    ('tokamax softmax',),
)
DIRECTIONS = {'forward': 1.0, 'forward_and_backward': 3.5}  # operations over those of the forward pass
STEP_VARIANTS = 'softmax', 'sigmoid'  # similarities of rows
PLAIN_JAX = 'plain JAX softmax'  # jax_baseline.py
BATCH_SIZES = {'60m': 32, '350m': 16, '1b': 8}  # sequences of 2048 tokens


def make_cells(part: str, is_tiny: bool) -> dict[str, dict]:
    if is_tiny:
        return {'attention T=64 K=16': dict(length=64, width=16), 'steps smoke': dict(model='60m', size='smoke')}
    cells = {f'attention T={T} K={K}': dict(length=T, width=K) for K in (64, 128) for T in (1024, 2048, 4096, 8192)}
    return cells | {f'steps {model}': dict(model=model, size='paper') for model in BATCH_SIZES}


def measure_cell(cell: dict, args: argparse.Namespace) -> dict:
    return time_steps(cell['model'], cell['size']) if 'model' in cell else time_attention(cell, args.tiny)


def time_attention(cell: dict, is_tiny: bool) -> dict:
    """Return {direction: {kernel: TFLOP/s as quartiles}} and the kernels that were left out."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from sinklab.errors import format_error

    length, width = cell['length'], cell['width']
    tokens, model_width = (128, 32) if is_tiny else (NUM_TOKENS, MODEL_WIDTH)
    shape = tokens // length, length, model_width // width, width
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for _ in range(4)]
    result: dict[str, dict] = {direction: {} for direction in (*DIRECTIONS, 'left_out')}
    groups = [['chunked']] if is_tiny else GROUPS
    for group, (direction, factor) in itertools.product(groups, DIRECTIONS.items()):
        flops = factor * 2 * shape[0] * shape[2] * length**2 * width
        runs = {}
        for name in group:
            kernel = KERNELS.get(name, ('chunked', 'exp', 'sum', 'rsqrt'))
            try:
                run = jax.jit(make_function(direction, kernel, shape)).lower(*arrays).compile()
                jax.block_until_ready(run(*arrays))
                runs[name] = run
            except Exception as error:  # for example, tokamax is not installed
                result['left_out'][f'{name}, {direction}'] = format_error(error, with_type=True)
        for name, seconds in time_in_turns(runs, arrays).items():
            result[direction].setdefault(
                name, [flops / second / 1e12 for second in statistics.quantiles(seconds, n=4)]
            )
    return result


def make_function(direction: str, kernel: tuple[str, str, str], shape: tuple[int, ...]) -> Callable:
    """Return the function (query, key, value, cotangent) of a kernel, forward or with the gradients."""
    import jax
    import jax.numpy as jnp

    from sinklab.attn.backends import BACKENDS, explain_unsupported
    from sinklab.attn.example_specs import make_operations
    from sinklab.attn.mask import make_causal_mask
    from sinklab.attn.spec import AttentionProblem, AttentionSpec

    backend, similarity, normalizer = kernel
    _, length, heads, width = shape
    if backend == 'tokamax':
        import tokamax

        def attend(query, key, value):
            return tokamax.dot_product_attention(query, key, value, is_causal=True, implementation='mosaic')
    else:
        spec = AttentionSpec(make_operations()[similarity, normalizer], make_causal_mask(length))
        problem = AttentionProblem(spec, heads, width, width, 'bfloat16')
        if reason := explain_unsupported(backend, jax.default_backend(), problem):
            raise ValueError(reason)

        def attend(query, key, value):
            return BACKENDS[backend].attend(query, key, value, spec)[0]

    def compute_weighted_sum(query, key, value, cotangent):
        return jnp.sum(attend(query, key, value).astype(jnp.float32) * cotangent.astype(jnp.float32))

    if direction == 'forward':
        return lambda query, key, value, cotangent: attend(query, key, value)
    return jax.grad(compute_weighted_sum, (0, 1, 2))


def time_in_turns(runs: dict[str, Callable], arrays: list) -> dict[str, list[float]]:
    """Return seconds per call, over ten calls at a time so that launch overhead does not count."""
    import jax

    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, function in runs.items():
            start = time.perf_counter()
            for _ in range(10):
                result = function(*arrays)
            jax.block_until_ready(result)
            seconds[name].append((time.perf_counter() - start) / 10)
    return seconds


def time_steps(model: str, size: str) -> dict:
    """Measure the steps of softmax, of sigmoid and of the plain JAX baseline, in turns."""
    import jax

    from sinklab.model import flops
    from sinklab.parallel import sharding
    from sinklab.train import memory_estimate, state, step

    runs, results, shared_state = {}, {}, None
    for name in STEP_VARIANTS:
        spec, hardware, mesh, backend = load_run(f'{name}_{model}', size, BATCH_SIZES[model])
        with jax.set_mesh(mesh):
            if shared_state is None:  # one for all rows, whose parameters have the same shapes
                shared_state = [state.create_state(spec, mesh)]
                batch, no_request = sharding.put_batch(make_ids(spec), mesh), sharding.make_per_device_array(0, mesh)
            train_step = step.make_train_step(spec, hardware, mesh, backend)
            compiled = train_step.lower(shared_state[0], batch, no_request).compile()
            runs[name] = make_timed_run(compiled, shared_state, batch, no_request)
        results[name] = dict(attention=backend, remat=hardware.remat, planned_bytes=count_planned_bytes(compiled))
    results[PLAIN_JAX], runs[PLAIN_JAX] = make_baseline_run(spec)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for name in [*runs] * STEP_ROUNDS:
        with jax.set_mesh(mesh) if name in STEP_VARIANTS else contextlib.nullcontext():
            seconds[name].append(runs[name]())
    peak_flops, num_flops = memory_estimate.compute_mesh_peak_flops(mesh), flops.count_step_flops(spec)
    for name, values in seconds.items():
        mfu = num_flops / statistics.median(values) / peak_flops if peak_flops else None
        results[name] |= dict(seconds=values, mfu=mfu)
    return dict(batch=spec.optimizer.batch_size, length=spec.data.length, steps=results)


def load_run(row: str, size: str, batch_size: int) -> tuple:
    """Return the spec, hardware, mesh and attention backend of a row of configs/scale.py on one device."""
    import jax

    from sinklab.config.spec import Hardware
    from sinklab.config.validate import parse_config
    from sinklab.configs import scale
    from sinklab.parallel import device_mesh
    from sinklab.train import memory_estimate, step

    config = scale.get_config(row, size)
    if size == 'paper':
        config.optimizer.batch_size = batch_size
    spec, hardware = parse_config(config.to_dict()), Hardware(remat='auto')
    backend = step.choose_verified_backend(spec, hardware).backend
    mesh = device_mesh.make_mesh(hardware, jax.devices()[:1])
    remat = memory_estimate.choose_remat_policy(spec, hardware, mesh, backend, device_mesh.get_device_memory_bytes())
    return spec, dataclasses.replace(hardware, remat=remat), mesh, backend


def make_baseline_run(spec) -> tuple[dict, Callable]:
    """Return the remat policy of a plain JAX step and its timed run: `none` if it fits into memory, else `full`."""
    import jax

    from benchmarks import jax_baseline

    ids_BT = jax.device_put(make_ids(spec))
    for remat in ('none', 'full'):
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # out of memory
            initial_state, step = jax_baseline.make_train_step(spec, remat)
            compiled = step.lower(initial_state, ids_BT).compile()
            run = make_timed_run(compiled, [initial_state], ids_BT)
            return dict(remat=remat, planned_bytes=count_planned_bytes(compiled)), run
    raise MemoryError('the plain JAX step does not fit into memory')


def make_ids(spec):
    import numpy as np

    shape = spec.optimizer.batch_size, spec.data.length + 1
    return np.random.default_rng(0).integers(0, spec.model.vocabulary, shape).astype(np.int32)


def make_timed_run(step: Callable, train_state: list, *inputs) -> Callable[[], float]:
    """Run warm-up steps, and return run(), which returns seconds per step; `train_state` holds the state."""
    import jax

    def run(count: int = NUM_STEPS) -> float:
        start = time.perf_counter()
        for _ in range(count):
            train_state[0] = step(train_state[0], *inputs)[0]
        jax.block_until_ready(train_state[0])
        return (time.perf_counter() - start) / count

    run(WARMUP_STEPS)
    return run


def count_planned_bytes(compiled) -> int:
    """Return the bytes of a program and its arguments, as planned by the compiler."""
    memory = compiled.memory_analysis()
    num_bytes = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return int(num_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes)
