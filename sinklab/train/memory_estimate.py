"""Checks of a layout, estimates of device memory, choice of micro-batch and remat policy, out-of-memory errors."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sinklab import chip_specs
from sinklab.config.spec import SAVEABLE_ACTIVATIONS, Layout, Spec
from sinklab.errors import UserError, format_error
from sinklab.parallel import sharding
from sinklab.train import loss, state
from sinklab.train.step import make_hidden_states_fn

AnyMesh = jax.sharding.Mesh | jax.sharding.AbstractMesh
GIB = 2**30
ID_BYTES = 4  # ids are int32
FIELD_OF_AXIS = {'embed': 'width', 'ffn': 'ffn_width'}  # config.model field of a logical axis, where the names differ
# From no recomputation to full recomputation.
REMAT_POLICIES = ('none', 'attention,qkv,middle,ffn', 'attention,qkv,middle', 'attention,qkv', 'attention', 'full')
USABLE_MEMORY_FRACTION = 0.9  # of a device's memory; the rest is for buffers that the compiler does not share
# Tokens that a CPU computes at once; a batch of more than twice as many is divided.
CPU_MICRO_BATCH_TOKENS = 1024  # on all devices
MIN_CPU_DEVICE_TOKENS = 512  # on each device
LESS_MEMORY_HINT = 'a smaller --micro_batch, or more devices'
MIN_WIDTH_TO_SAVE_PRODUCTS = 256  # on a CPU, narrower models recompute products faster than they store their results


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
        option = (
            f'--micro_batch={micro_batch_size}'
            if isinstance(layout.micro_batch, int)
            else f'config.optimizer.batch_size, which is {micro_batch_size},'
        )
        raise UserError(
            f'{option} cannot be divided over {num_shards} devices (--data={mesh.shape["data"]} x '
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


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Estimate of the bytes on one device."""

    parameters: int
    moments: int
    gradients: int  # with micro-batches: of one, and the sum over previous ones
    activations: int  # saved by all layers for the backward pass of a micro-batch
    layer: int  # of the running layer: gathered weights, their gradients, recomputed activations
    loss_buffers: int  # of the loss: gathered head, its gradient, and logits

    @property
    def total(self) -> int:
        resident_bytes = self.parameters + self.moments + self.gradients + self.activations
        return resident_bytes + max(self.layer, self.loss_buffers)

    def __str__(self) -> str:
        return ', '.join(f'{name} {size / GIB:.2f}' for name, size in dataclasses.asdict(self).items())


def estimate_memory(spec: Spec, layout: Layout, mesh: jax.sharding.Mesh, backend: str) -> MemoryEstimate:
    """Estimate the memory of the train step on one device, by shapes."""
    abstract_state = state.make_abstract_state(spec, mesh)
    parameter_bytes = count_device_bytes(abstract_state['params'])
    batch_size = spec.optimizer.batch_size
    return MemoryEstimate(
        parameters=parameter_bytes,
        moments=count_device_bytes(abstract_state['opt_state']),
        gradients=parameter_bytes * (1 if layout.get_micro_batch_size(batch_size) == batch_size else 2),
        activations=estimate_activation_bytes(spec, layout, layout.remat, mesh, backend),
        layer=estimate_layer_bytes(spec, layout, mesh, backend),
        loss_buffers=estimate_loss_bytes(spec, mesh),
    )


def count_device_bytes(tree: dict) -> int:
    """Return the bytes of a tree of arrays on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def estimate_activation_bytes(spec: Spec, layout: Layout, remat: str, mesh: jax.sharding.Mesh, backend: str) -> int:
    """Estimate the bytes that layers save for the backward pass of a device's sequences in a micro-batch.

    Activations count as not sharded over `tensor`. This is true of the residual stream, which is most of what is
    saved if little is saved.
    """
    num_shards = sharding.count_batch_shards(mesh)
    num_sequences = layout.get_micro_batch_size(spec.optimizer.batch_size) // num_shards
    return num_sequences * estimate_sequence_activation_bytes(spec, remat, backend, num_shards)


@functools.lru_cache(maxsize=16)  # `auto` needs some of them several times
def estimate_sequence_activation_bytes(spec: Spec, remat: str, backend: str, num_shards: int) -> int:
    """Estimate the bytes that the layers save for the backward pass of one sequence."""
    apply_model = make_hidden_states_fn(spec, remat=remat, backend=backend)
    params = state.get_state_shapes(spec)['params']

    def count_residual_bytes(num_sequences: int) -> int:
        ids = jax.ShapeDtypeStruct((num_sequences, spec.data.length), jnp.int32)
        return state.count_bytes(
            jax.eval_shape(
                lambda params, ids: jax.vjp(lambda params: apply_model(params, ids)[0], params)[1], params, ids
            )
        )

    return (count_residual_bytes(2 * num_shards) - count_residual_bytes(num_shards)) // num_shards


def estimate_layer_bytes(spec: Spec, layout: Layout, mesh: jax.sharding.Mesh, backend: str) -> int:
    """Estimate the bytes of one layer: weights, gradients, and the named values of the backward pass."""
    blocks = state.get_state_shapes(spec)['params']['blocks']
    num_weights = sum(leaf.size for leaf in jax.tree.leaves(blocks)) // spec.model.layers
    all_names = ','.join(SAVEABLE_ACTIVATIONS)
    named_bytes = estimate_activation_bytes(spec, layout, all_names, mesh, backend) // spec.model.layers
    itemsize = jnp.dtype(spec.model.dtype).itemsize
    return num_weights * (3 * itemsize + 4) // mesh.shape['tensor'] + 2 * named_bytes


def estimate_loss_bytes(spec: Spec, mesh: jax.sharding.Mesh) -> int:
    """Estimate the bytes of the loss: the head and its gradient, and the logits of a chunk."""
    model = spec.model
    num_rows = loss.choose_chunk_rows(model.width) * mesh.shape['tensor']
    value_bytes = jnp.dtype(model.dtype).itemsize + 8
    return model.vocabulary * value_bytes * (model.width + num_rows) // mesh.shape['tensor']


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
    """Choose the remat policy: the given one or, for `auto`, the first whose estimated memory fits.

    `auto` always recomputes activations between matrix products, because compilers estimate that this is faster than
    to write and read them. `default` does not consider memory.

    Raises:
        UserError: No policy fits in `memory_bytes` of a device.
    """
    if layout.remat == 'default':
        return get_default_remat_policy(spec.model.width, mesh.devices.flat[0].platform)
    if layout.remat != 'auto':
        return layout.remat
    for remat in REMAT_POLICIES[1:]:
        tried = dataclasses.replace(layout, remat=remat)
        if estimate_memory(spec, tried, mesh, backend).total <= USABLE_MEMORY_FRACTION * memory_bytes:
            return remat
    estimate = estimate_memory(spec, tried, mesh, backend)
    raise UserError(
        f'the step does not fit on a device of {memory_bytes / GIB:.1f} GiB even if all activations are recomputed; '
        f'it needs, in GiB: {estimate}; give {LESS_MEMORY_HINT}'
    )


def get_default_remat_policy(width: int, platform: str) -> str:
    """Return the remat policy of a run that requests none.

    On a CPU it is the fastest for models of this width (measured in docs/results/speed.md), because it takes less
    time to recompute activations than to allocate, write and read them. On accelerators it is `none`.
    """
    if platform != 'cpu':
        return 'none'
    return 'attention,ffn' if width < MIN_WIDTH_TO_SAVE_PRODUCTS else 'attention,qkv,middle,ffn'


@contextlib.contextmanager
def translate_oom_errors(program: str) -> Iterator[None]:
    """Translate an out-of-memory error of a program into a UserError with options that need less memory.

    Use this only where a program is compiled and runs once. Later in a run, messages between processes may exhaust
    other resources, and a restart can help.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error):
            raise
        raise UserError(
            f'{program} does not fit on a device ({format_error(error)}); give --remat=full, {LESS_MEMORY_HINT}'
        ) from error


def translate_oom_error_of_first_call(function: Callable, program: str) -> Callable:
    """Wrap a function so that its first call waits for the results, and translates an out-of-memory error."""
    has_run = False

    def call(*args: Any) -> Any:
        nonlocal has_run
        if has_run:
            return function(*args)
        has_run = True
        with translate_oom_errors(program):
            return jax.block_until_ready(function(*args))

    return call


def compute_mesh_peak_flops(mesh: jax.sharding.Mesh) -> float | None:
    """Return the peak FLOP/s of all devices together; None if it is not published."""
    device_peak = chip_specs.get_peak_flops(mesh.devices.flat[0].device_kind)
    return device_peak and device_peak * mesh.size


def format_device_layout(spec: Spec, layout: Layout, mesh: jax.sharding.Mesh, backend: str) -> list[str]:
    """Describe the device layout of a run in one line; return [] for one device of an unknown kind."""
    if mesh.size == 1 and not compute_mesh_peak_flops(mesh):
        return []
    axes = ', '.join(f'{axis} {size}' for axis, size in mesh.shape.items() if size > 1)
    estimate = estimate_memory(spec, layout, mesh, backend)
    sizes = (f'{getattr(estimate, name) / 1e9:.3g} GB of {name}' for name in ('parameters', 'moments', 'activations'))
    return [f'{mesh.size} devices ({axes or "not sharded"}), each with {", ".join(sizes)}; remat {layout.remat}']
