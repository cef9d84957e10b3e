"""Estimates of device memory, choice of micro-batch and remat policy, and out-of-memory errors."""

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from sinklab import chip_specs
from sinklab.config.spec import (
    SAVEABLE_ACTIVATIONS,
    Hardware,
    Spec,
    parse_saved_activations,
)
from sinklab.errors import UserError
from sinklab.parallel import device_mesh, sharding
from sinklab.train import loss, state
from sinklab.train.forward import make_hidden_states_fn


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


def estimate_memory(spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh, backend: str) -> MemoryEstimate:
    abstract_state = state.make_abstract_state(spec, mesh)
    parameter_bytes, batch_size = count_device_bytes(abstract_state['params']), spec.optimizer.batch_size
    return MemoryEstimate(
        parameters=parameter_bytes,
        moments=count_device_bytes(abstract_state['opt_state']),
        gradients=parameter_bytes * (1 if hardware.get_micro_batch_size(batch_size) == batch_size else 2),
        activations=estimate_activation_bytes(spec, hardware, hardware.remat, mesh, backend),
        layer=estimate_layer_bytes(spec, hardware, mesh, backend),
        loss_buffers=estimate_loss_bytes(spec, mesh),
    )


def count_device_bytes(tree: dict) -> int:
    """Return the bytes of a tree of arrays on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def estimate_activation_bytes(
    spec: Spec, hardware: Hardware, remat: str, mesh: jax.sharding.Mesh, backend: str
) -> int:
    """Estimate the bytes that layers save for the backward pass of a device's sequences in a micro-batch.

    Activations count as not sharded over `tensor`. This is true of the residual stream, which is most of what is
    saved if little is saved.
    """
    num_shards = sharding.count_batch_shards(mesh)
    return (
        hardware.get_micro_batch_size(spec.optimizer.batch_size)
        // num_shards
        * estimate_sequence_activation_bytes(spec, remat, backend, num_shards)
    )


@functools.lru_cache(maxsize=64)  # a layout search needs about ten for one spec, each several times
def estimate_sequence_activation_bytes(spec: Spec, remat: str, backend: str, num_shards: int) -> int:
    """Estimate the bytes that the layers save for the backward pass of one sequence."""
    bytes_of_one, bytes_of_two = (
        state.count_bytes(trace_residuals(spec, remat, backend, num_sequences))
        for num_sequences in (num_shards, 2 * num_shards)
    )
    return (bytes_of_two - bytes_of_one) // num_shards


def trace_residuals(spec: Spec, remat: str, backend: str, num_sequences: int) -> Any:
    """Trace the forward pass through the layers, and return the shapes of its residuals."""
    apply_model, params = (
        make_hidden_states_fn(spec, remat=remat, backend=backend),
        state.get_state_shapes(spec)['params'],
    )
    ids = jax.ShapeDtypeStruct((num_sequences, spec.data.length), jnp.int32)
    return jax.eval_shape(
        lambda params, ids: jax.vjp(lambda params: apply_model(params, ids)[0], params)[1], params, ids
    )


def estimate_layer_bytes(spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh, backend: str) -> int:
    """Estimate the bytes of one layer: weights, gradients, and the named values of the backward pass."""
    model, itemsize = spec.model, jnp.dtype(spec.model.dtype).itemsize
    num_weights = (
        sum(leaf.size for leaf in jax.tree.leaves(state.get_state_shapes(spec)['params']['blocks'])) // model.layers
    )
    named_bytes = (
        estimate_activation_bytes(spec, hardware, ','.join(SAVEABLE_ACTIVATIONS), mesh, backend) // model.layers
    )
    return num_weights * (3 * itemsize + 4) // mesh.shape['tensor'] + 2 * named_bytes


def estimate_loss_bytes(spec: Spec, mesh: jax.sharding.Mesh) -> int:
    """Estimate the bytes of the loss: the head and its gradient, and the logits of a chunk."""
    model, itemsize = spec.model, jnp.dtype(spec.model.dtype).itemsize
    num_rows = loss.choose_chunk_rows(model.width) * mesh.shape['tensor']
    return model.vocabulary * ((itemsize + 8) * model.width + (itemsize + 8) * num_rows) // mesh.shape['tensor']


# From no recomputation to full recomputation.
REMAT_POLICIES = ('none', 'attention,qkv,middle,ffn', 'attention,qkv,middle', 'attention,qkv', 'attention', 'full')
USABLE_MEMORY_FRACTION = 0.9  # of a device's memory; the rest is for buffers that the compiler does not share
# Tokens that a CPU computes at once; a batch of more than twice as many is divided.
CPU_MICRO_BATCH_TOKENS = 1024  # on all devices
MIN_CPU_DEVICE_TOKENS = 512  # on each device
MIN_WIDTH_TO_SAVE_PRODUCTS = 256  # on a CPU, narrower models recompute products faster than they store their results
GIB = 2**30
OOM_SIZE_PATTERNS = (
    r'Used \S+ of \S+ hbm\. Exceeded hbm capacity by \S*\w',
    r'memory required for HLO temporaries \(\S+\) exceeds available HBM \(\S+\)',
    r'allocat\w+ [\d.]+ ?\w*',
)
MEMORY_ERROR_PATTERN = r'memory|alloc|reserve|\bhbm\b'  # in XLA's message if the exhausted resource is memory


def choose_micro_batch(spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh) -> int | None:
    """Choose the micro-batch: the given one or, for `default`, that of the platform.

    On a CPU, `default` divides a large batch into parts, which takes less time (docs/results/speed.md). The gradients
    differ from those of the whole batch by the rounding of sums over sequences.

    Returns:
        The number of sequences over all devices, or None for the whole batch.
    """
    if hardware.micro_batch != 'default':
        return hardware.micro_batch
    batch_size, length, num_shards = spec.optimizer.batch_size, spec.data.length, sharding.count_batch_shards(mesh)
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
    spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh, backend: str, memory_bytes: float
) -> str:
    """Choose the remat policy: the given one or, for `auto`, the first whose estimated memory fits.

    `auto` always recomputes activations between matrix products, because compilers estimate that this is faster than
    to write and read them. `default` does not consider memory.

    Raises:
        UserError: No policy fits in `memory_bytes` of a device.
    """
    if hardware.remat == 'default':
        return get_default_remat_policy(spec.model.width, mesh.devices.flat[0].platform)
    if hardware.remat != 'auto':
        return hardware.remat
    for remat in REMAT_POLICIES[1:]:
        estimate = estimate_memory(spec, dataclasses.replace(hardware, remat=remat), mesh, backend)
        if estimate.total <= USABLE_MEMORY_FRACTION * memory_bytes:
            return remat
    suggestions = [*suggest_micro_batch(spec, hardware, mesh, backend, memory_bytes), 'more devices']
    raise UserError(
        f'{estimate.total / GIB:.1f} GiB of {memory_bytes / GIB:.1f} are needed on a device even if '
        f'all activations are recomputed ({format_gibibytes(estimate)}); {format_suggestions(suggestions)}'
    )


def get_default_remat_policy(width: int, platform: str) -> str:
    """Return the remat policy of a run that requests none.

    On a CPU it is the fastest for models of this width (measured in docs/results/speed.md), because it takes less
    time to recompute activations than to allocate, write and read them. On accelerators it is `none`.
    """
    if platform != 'cpu':
        return 'none'
    return 'attention,ffn' if width < MIN_WIDTH_TO_SAVE_PRODUCTS else 'attention,qkv,middle,ffn'


def suggest_micro_batch(
    spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh, backend: str, memory_bytes: float
) -> list[str]:
    """Suggest the largest smaller micro-batch that fits if everything is recomputed."""
    while micro_batch := halve_micro_batch(spec, hardware, mesh):
        hardware = dataclasses.replace(hardware, remat='full', micro_batch=micro_batch)
        if estimate_memory(spec, hardware, mesh, backend).total <= USABLE_MEMORY_FRACTION * memory_bytes:
            return [f'--micro_batch={micro_batch}']
    return []


@contextlib.contextmanager
def translate_oom_errors(program: str, program_args: tuple) -> Iterator[None]:
    """Translate an out-of-memory error of a program into a UserError with options that need less memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error):
            raise
        raise make_oom_error(program, program_args, error) from error


@contextlib.contextmanager
def translate_async_oom_errors(program_args: tuple) -> Iterator[None]:
    """Translate out-of-memory errors, wherever a run notices them, into a UserError.

    Programs are dispatched asynchronously: an error on a device is raised by the first call that waits for results,
    such as `jax.device_get` or a save, and not by the call of the program, which `translate_oom_errors` covers.
    Restarting the same command would not help. RESOURCE_EXHAUSTED alone is not sufficient here: messages between
    processes can also fail with it, and in that case a restart can help.

    Args:
        program_args: (spec, hardware, mesh, backend), to suggest options that need less memory.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error) or not re.search(MEMORY_ERROR_PATTERN, str(error), re.IGNORECASE):
            raise
        raise make_oom_error('the run', program_args, error) from error


def make_oom_error(program: str, program_args: tuple, error: Exception) -> UserError:
    return UserError(
        f'{program} does not fit on a device ({extract_oom_size(str(error))}); {suggest_less_memory(*program_args)}'
    )


def extract_oom_size(message: str) -> str:
    """Extract the number of bytes from an out-of-memory message of a compiler or an allocator."""
    match = next(filter(None, (re.search(pattern, message) for pattern in OOM_SIZE_PATTERNS)), None)
    return match[0] if match else ' '.join(message.split())[:120]


def suggest_less_memory(spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh, backend: str) -> str:
    """Suggest options that need less memory."""
    saves_all = hardware.remat == 'none'
    smaller_policies = (
        policy
        for policy in REMAT_POLICIES[1:]
        if saves_all or parse_saved_activations(policy) < parse_saved_activations(hardware.remat)
    )
    options = [f'--remat={remat}' for remat in [*smaller_policies][:1]]
    if micro_batch := halve_micro_batch(spec, hardware, mesh):
        options.append(f'--micro_batch={micro_batch}')
    suggestions = format_suggestions([*options, 'more devices'])
    return (
        f'by shapes it needs, in GiB: {format_gibibytes(estimate_memory(spec, hardware, mesh, backend))}; '
        f'{suggestions}'
    )


def halve_micro_batch(spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh) -> int | None:
    """Return half of the micro-batch; None if it does not divide the batch or the shards do not divide it."""
    batch_size = spec.optimizer.batch_size
    micro_batch = hardware.get_micro_batch_size(batch_size) // 2
    is_even = micro_batch and batch_size % micro_batch == 0 == micro_batch % sharding.count_batch_shards(mesh)
    return micro_batch if is_even else None


def format_suggestions(options: list[str]) -> str:
    return 'give ' + ' or '.join(options)


def format_gibibytes(estimate: MemoryEstimate) -> str:
    return ', '.join(f'{name} {size / GIB:.2f}' for name, size in dataclasses.asdict(estimate).items())


def compute_mesh_peak_flops(mesh: jax.sharding.Mesh) -> float | None:
    """Return the peak FLOP/s of all devices together; None if it is not published."""
    device_peak = chip_specs.get_peak_flops(mesh.devices.flat[0].device_kind)
    return device_peak and device_peak * mesh.size


def format_device_layout(spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh, backend: str) -> list[str]:
    """Describe the device layout of a run in one line; return [] for one device of an unknown kind."""
    if mesh.size == 1 and not compute_mesh_peak_flops(mesh):
        return []
    crossings = device_mesh.find_crossed_boundaries(mesh)
    axes = ', '.join(f'{axis} {size} across {crossings[axis]}' for axis, size in mesh.shape.items() if size > 1)
    estimate = estimate_memory(spec, hardware, mesh, backend)
    sizes = (f'{getattr(estimate, name) / 1e9:.3g} GB of {name}' for name in ('parameters', 'moments', 'activations'))
    return [f'{mesh.size} devices ({axes or "not sharded"}), each with {", ".join(sizes)}; remat {hardware.remat}']
