"""Checks of a layout, choice of the micro-batch and the remat policy, and out-of-memory errors."""

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx

from sinklab import chip_specs
from sinklab.attn.backends import BackendChoice
from sinklab.config.spec import Layout, Spec
from sinklab.errors import UserError, format_error
from sinklab.parallel import sharding
from sinklab.train import state, step

AnyMesh = jax.sharding.Mesh | jax.sharding.AbstractMesh
GIB = 2**30
ID_BYTES = 4  # ids are int32
FIELD_OF_AXIS = {'embed': 'width', 'ffn': 'ffn_width'}  # config.model field of a logical axis, where the names differ
# Those that `auto` tries, up to full recomputation.
REMAT_POLICIES = ('attention,qkv,middle,ffn', 'attention,qkv,middle', 'attention,qkv', 'attention', 'full')
USABLE_MEMORY_FRACTION = 0.9  # of a device's memory; the rest is for arrays outside of the step
# Tokens that a CPU computes at once; a batch of more than twice as many is divided.
CPU_MICRO_BATCH_TOKENS = 1024  # on all devices
MIN_CPU_DEVICE_TOKENS = 512  # on each device
LESS_MEMORY_HINT = 'a smaller --micro_batch, or more devices'
MIN_WIDTH_TO_SAVE_PRODUCTS = 256  # on a CPU, narrower models recompute products faster than they store their results


class OutOfMemoryError(UserError):
    """A program does not fit on a device."""


def choose_layout(
    spec: Spec, layout: Layout, mesh: jax.sharding.Mesh, memory_bytes: float, absent_platform: str | None = None
) -> tuple[Layout, BackendChoice]:
    """Choose what a layout leaves open: micro-batch, attention backend and remat policy.

    With `absent_platform`, the devices are not attached, so that the backend is not verified.

    Raises:
        UserError: The layout does not fit the batch, the parameters or the memory.
    """
    check_layout(spec, layout, mesh)
    layout = dataclasses.replace(layout, micro_batch=choose_micro_batch(spec, layout, mesh))
    check_batch_memory(spec, layout, mesh, memory_bytes)
    backend_choice = step.choose_backend(spec, layout, absent_platform)
    remat = choose_remat_policy(spec, layout, mesh, backend_choice.backend, memory_bytes)
    return dataclasses.replace(layout, remat=remat), backend_choice


def check_layout(spec: Spec, layout: Layout, mesh: AnyMesh) -> None:
    """Raise UserError for a layout that cannot divide the batch or a parameter."""
    batch_size = spec.optimizer.batch_size
    micro_batch_size = batch_size if layout.micro_batch == 'default' else layout.get_micro_batch_size(batch_size)
    num_shards = sharding.count_batch_shards(mesh)
    if batch_size % micro_batch_size:
        raise UserError(
            f'--micro_batch={micro_batch_size} does not divide config.optimizer.batch_size, which is {batch_size}'
        )
    if micro_batch_size % num_shards:
        option = '--micro_batch' if isinstance(layout.micro_batch, int) else 'config.optimizer.batch_size'
        raise UserError(
            f'{option}={micro_batch_size} cannot be divided over {num_shards} devices (--data={mesh.shape["data"]} x '
            f'--fsdp={mesh.shape["fsdp"]}); use a multiple of {num_shards}, fewer devices, or more of them '
            'along --tensor'
        )
    parameters = state.make_abstract_model(spec)[1]
    for parameter in jax.tree.leaves(parameters, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        for name, size in zip(sharding.get_logical_axes(parameter), parameter.shape, strict=True):
            axis = sharding.RULES[name] if name else None
            if axis and size % mesh.shape[axis]:
                raise UserError(
                    f'config.model.{FIELD_OF_AXIS.get(name, name)} is {size}, which --{axis}={mesh.shape[axis]} does '
                    'not divide'
                )


def check_batch_memory(spec: Spec, layout: Layout, mesh: AnyMesh, memory_bytes: float) -> None:
    """Raise UserError if the residual stream of a micro-batch, or the ids of a batch, do not fit on a device."""
    model = spec.model
    batch_size = spec.optimizer.batch_size
    num_shards = sharding.count_batch_shards(mesh)
    micro_batch_size = layout.get_micro_batch_size(batch_size)
    tokens_per_device = micro_batch_size * spec.data.length // num_shards
    step_bytes = tokens_per_device * model.layers * model.width * jnp.dtype(model.dtype).itemsize
    ids_bytes = batch_size * (spec.data.length + 1) * ID_BYTES // num_shards
    if max(step_bytes, ids_bytes) > memory_bytes:
        raise UserError(
            f'a batch of {batch_size} sequences, {micro_batch_size} at once, needs at least '
            f'{max(step_bytes, ids_bytes) / GIB:.1f} GiB on a device of {memory_bytes / GIB:.1f} GiB; lower '
            'config.optimizer.batch_size, --micro_batch or config.data.length'
        )


def choose_micro_batch(spec: Spec, layout: Layout, mesh: jax.sharding.Mesh) -> int | None:
    """Choose the micro-batch: the given one or, for `default`, that of the platform.

    On a CPU, `default` divides a large batch into parts, which takes less time (docs/results/speed.md). The gradients
    differ from those of the whole batch by the rounding of sums over sequences.

    Returns:
        The number of sequences over all devices, or None for the whole batch.
    """
    if layout.micro_batch != 'default':
        return layout.micro_batch
    batch_size = spec.optimizer.batch_size
    length = spec.data.length
    num_shards = sharding.count_batch_shards(mesh)
    target_tokens = max(CPU_MICRO_BATCH_TOKENS, MIN_CPU_DEVICE_TOKENS * num_shards)
    is_large = batch_size * length > 2 * target_tokens
    # Along `fsdp`, parameters are gathered in each micro-batch.
    if mesh.devices.flat[0].platform != 'cpu' or not is_large or mesh.shape['fsdp'] > 1:
        return None
    sizes = range(num_shards, max(num_shards, 2 * target_tokens // length) + 1, num_shards)
    divisors = [size for size in sizes if batch_size % size == 0]
    micro_batch = min(divisors, key=lambda size: abs(math.log(size * length / target_tokens)))
    is_small = micro_batch * length < target_tokens / 2  # the batch size has no divisor near the target
    return None if is_small else micro_batch


def choose_remat_policy(
    spec: Spec, layout: Layout, mesh: jax.sharding.Mesh, backend: str, memory_bytes: float
) -> str:
    """Choose the remat policy: the given one or, for `auto`, the first whose compiled step fits on a device.

    `auto` always recomputes activations between matrix products, because compilers estimate that this is faster than
    to write and read them. `default` does not consider memory.

    Raises:
        UserError: No policy fits in `memory_bytes` of a device.
    """
    if layout.remat == 'default':
        return get_default_remat_policy(spec.model.width, mesh.devices.flat[0].platform)
    if layout.remat != 'auto':
        return layout.remat
    for remat in REMAT_POLICIES:
        with contextlib.suppress(OutOfMemoryError), translate_oom_errors(), jax.set_mesh(mesh):
            compiled_step = step.compile_train_step(spec, dataclasses.replace(layout, remat=remat), mesh, backend)
            if count_peak_bytes(compiled_step) <= USABLE_MEMORY_FRACTION * memory_bytes:
                return remat
    raise UserError(
        f'the step does not fit on a device of {memory_bytes / GIB:.1f} GiB even if all activations are recomputed; '
        f'give {LESS_MEMORY_HINT}'
    )


def count_peak_bytes(compiled: jax.stages.Compiled) -> int:
    """Return the bytes of a program and its arguments on a device, as planned by the compiler."""
    memory = compiled.memory_analysis()
    num_bytes = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    # Aliased outputs reuse the memory of arguments.
    return num_bytes + memory.generated_code_size_in_bytes - memory.alias_size_in_bytes


def get_default_remat_policy(width: int, platform: str) -> str:
    """Return the remat policy of a run that requests none.

    On a CPU it is the fastest for models of this width (measured in docs/results/speed.md), because it takes less
    time to recompute activations than to allocate, write and read them. On accelerators it is `none`.
    """
    if platform != 'cpu':
        return 'none'
    return 'attention,ffn' if width < MIN_WIDTH_TO_SAVE_PRODUCTS else 'attention,qkv,middle,ffn'


@contextlib.contextmanager
def translate_oom_errors() -> Iterator[None]:
    """Translate an out-of-memory error of a device into OutOfMemoryError, which says what needs less memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error) or not re.search('memory|allocat', str(error)):
            raise
        raise OutOfMemoryError(
            f'the run does not fit on a device ({format_error(error)}); give --remat=full, {LESS_MEMORY_HINT}'
        ) from error


def compute_mesh_peak_flops(mesh: jax.sharding.Mesh) -> float | None:
    """Return the peak FLOP/s of all devices together; None if it is not published."""
    device_peak = chip_specs.get_peak_flops(mesh.devices.flat[0].device_kind)
    return device_peak and device_peak * mesh.size


def format_device_layout(layout: Layout, mesh: jax.sharding.Mesh) -> list[str]:
    """Describe the device layout of a run in one line; return [] for one device of an unknown kind."""
    if mesh.size == 1 and not compute_mesh_peak_flops(mesh):
        return []
    axes = ', '.join(f'{axis} {size}' for axis, size in mesh.shape.items() if size > 1)
    return [f'{mesh.size} devices ({axes or "not sharded"}); remat {layout.remat}']
