"""What is refused of how a run is laid on devices, before anything compiles."""

import jax
import jax.numpy as jnp
from flax import nnx

from sinklab import sharding
from sinklab.record import Refusal
from sinklab.spec import Hardware, Spec
from sinklab.train import state

FIELDS = {'embed': 'width', 'ffn': 'ffn_width'}  # of config.model, where an axis has another name


def check(spec: Spec, hardware: Hardware) -> None:
    """Refuses a layout that a batch or a parameter cannot be divided into."""
    batch, micro = spec.optimizer.batch_size, hardware.micro_batch or spec.optimizer.batch_size
    ways = hardware.data * hardware.fsdp
    if batch % micro:
        raise Refusal(f'--micro_batch={micro} does not divide config.optimizer.batch_size, which is {batch}')
    if micro % ways:
        raise Refusal(
            f'a micro-batch of {micro} sequences cannot be divided over {ways} devices '
            f'(--data={hardware.data} x --fsdp={hardware.fsdp}); use a multiple of {ways}, or fewer devices'
        )
    for leaf in jax.tree.leaves(state.architecture(spec)[1], is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        check_parameter(hardware, leaf)


def check_parameter(hardware: Hardware, leaf: nnx.Variable) -> None:
    for name, size in zip(sharding.logical(leaf), leaf.shape, strict=True):
        axis = sharding.RULES[name] if name else None
        if axis and size % getattr(hardware, axis):
            given = f'config.model.{FIELDS.get(name, name)} is {size}'
            raise Refusal(f'{given}, which --{axis}={getattr(hardware, axis)} does not divide')


def check_memory(spec: Spec, hardware: Hardware, memory: int) -> None:
    """Refuses a batch of which a device could not even hold the stream between its layers."""
    model, micro = spec.model, hardware.micro_batch or spec.optimizer.batch_size
    tokens = micro * spec.data.length // (hardware.data * hardware.fsdp)
    least = tokens * model.layers * model.width * jnp.dtype(model.dtype).itemsize
    if least > memory:
        raise Refusal(
            f'a step of {micro} sequences holds at least {least / 2**30:.1f} GiB on a device of '
            f'{memory / 2**30:.1f} GiB; lower config.optimizer.batch_size, or give --micro_batch'
        )
