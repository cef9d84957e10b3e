"""What is refused of how a run is laid on devices, before anything compiles."""

import jax
import jax.numpy as jnp
from flax import nnx

from sinklab import sharding
from sinklab.devices import AXES
from sinklab.record import Refusal
from sinklab.spec import Hardware, Spec
from sinklab.train import state

Shape = jax.sharding.Mesh | jax.sharding.AbstractMesh
FIELDS = {'embed': 'width', 'ffn': 'ffn_width'}  # of config.model, where an axis has another name


def asked(hardware: Hardware) -> jax.sharding.AbstractMesh:
    """The axes that are given, of devices that this process does not touch, for another may hold them."""
    return jax.sharding.AbstractMesh(tuple(getattr(hardware, axis) or 1 for axis in AXES), AXES)


def check(spec: Spec, hardware: Hardware, mesh: Shape) -> None:
    """Refuses a layout that a batch or a parameter cannot be divided into."""
    batch = spec.optimizer.batch_size
    micro = hardware.sequences(batch)
    ways = sharding.ways(mesh)
    if batch % micro:
        raise Refusal(f'--micro_batch={micro} does not divide config.optimizer.batch_size, which is {batch}')
    if micro % ways:
        given = (
            f'--micro_batch={micro}' if hardware.micro_batch else f'config.optimizer.batch_size, which is {micro},'
        )
        raise Refusal(
            f'{given} cannot be divided over {ways} devices (--data={mesh.shape["data"]} x '
            f'--fsdp={mesh.shape["fsdp"]}); use a multiple of {ways}, fewer devices, or more of them along --tensor'
        )
    for leaf in jax.tree.leaves(state.architecture(spec)[1], is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        check_parameter(mesh, leaf)


def check_parameter(mesh: Shape, leaf: nnx.Variable) -> None:
    for name, size in zip(sharding.logical(leaf), leaf.shape, strict=True):
        axis = sharding.RULES[name] if name else None
        if axis and size % mesh.shape[axis]:
            given = f'config.model.{FIELDS.get(name, name)} is {size}'
            raise Refusal(f'{given}, which --{axis}={mesh.shape[axis]} does not divide')


def check_memory(spec: Spec, hardware: Hardware, mesh: Shape, memory: int) -> None:
    """Refuses a batch of which a device could not even hold the stream between its layers."""
    model, micro = spec.model, hardware.sequences(spec.optimizer.batch_size)
    tokens = micro * spec.data.length // sharding.ways(mesh)
    least = tokens * model.layers * model.width * jnp.dtype(model.dtype).itemsize
    if least > memory:
        raise Refusal(
            f'a step of {micro} sequences holds at least {least / 2**30:.1f} GiB on a device of '
            f'{memory / 2**30:.1f} GiB; lower config.optimizer.batch_size, or give --micro_batch'
        )
