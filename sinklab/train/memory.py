"""What a device has to hold, by shapes and without compiling."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from sinklab import sharding
from sinklab.spec import KEPT, Hardware, Spec
from sinklab.train import loss, state
from sinklab.train.forward import forward


@dataclasses.dataclass(frozen=True)
class Held:
    """Bytes on a device."""

    parameters: int
    moments: int
    gradients: int  # with micro-batches, of one and of all before it
    activations: int  # of a micro-batch, that all layers keep between its forward and backward pass
    layer: int  # while one is at work: its weights whole, their gradients, and what it has computed again
    tables: int  # while the loss is: the head whole, its gradient, and logits

    @property
    def total(self) -> int:
        lasting = self.parameters + self.moments + self.gradients + self.activations
        return lasting + max(self.layer, self.tables)


def held(spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh, backend: str) -> Held:
    abstract = state.abstract(spec, mesh)
    parameters, batch = of_a_device(abstract['params']), spec.optimizer.batch_size
    return Held(
        parameters=parameters,
        moments=of_a_device(abstract['opt_state']),
        gradients=parameters * (1 if hardware.sequences(batch) == batch else 2),
        activations=activations(spec, hardware, hardware.remat, mesh, backend),
        layer=layer(spec, hardware, mesh, backend),
        tables=tables(spec, mesh),
    )


def of_a_device(tree: dict) -> int:
    """Bytes of what one device has of a tree."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def activations(spec: Spec, hardware: Hardware, remat: str, mesh: jax.sharding.Mesh, backend: str) -> int:
    """What the layers keep of a device's sequences, by what two on each make more than one.

    Along `tensor` it is taken for whole: the stream, most of what is kept if little is, is.
    """
    ways = sharding.ways(mesh)
    return hardware.sequences(spec.optimizer.batch_size) // ways * of_sequence(spec, remat, backend, ways)


@functools.lru_cache(maxsize=64)  # a ranking of layouts asks for some ten of one spec, each several times
def of_sequence(spec: Spec, remat: str, backend: str, ways: int) -> int:
    """Bytes that the layers keep of one sequence."""
    one, two = (state.size(backward(spec, remat, backend, rows)) for rows in (ways, 2 * ways))
    return (two - one) // ways


def backward(spec: Spec, remat: str, backend: str, rows: int) -> Any:
    """The backward pass of so many sequences through the layers, with all that it reads, as shapes."""
    run, params = forward(spec, remat=remat, backend=backend), state.shapes(spec)['params']
    ids = jax.ShapeDtypeStruct((rows, spec.data.length), jnp.int32)
    return jax.eval_shape(lambda params, ids: jax.vjp(lambda params: run(params, ids)[0], params)[1], params, ids)


def layer(spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh, backend: str) -> int:
    """Its weights, and those of the next, with their gradients; all that has a name in it, with the cotangents."""
    model, item = spec.model, jnp.dtype(spec.model.dtype).itemsize
    weights = sum(leaf.size for leaf in jax.tree.leaves(state.shapes(spec)['params']['blocks'])) // model.layers
    named = activations(spec, hardware, ','.join(KEPT), mesh, backend) // model.layers
    return weights * (3 * item + 4) // mesh.shape['tensor'] + 2 * named


def tables(spec: Spec, mesh: jax.sharding.Mesh) -> int:
    """A table as the computation has it, the head's gradient as a sum and transposed, a chunk's logits and theirs."""
    model, item = spec.model, jnp.dtype(spec.model.dtype).itemsize
    rows = loss.chunk_rows(model.width) * mesh.shape['tensor']
    return model.vocabulary * ((item + 8) * model.width + (item + 8) * rows) // mesh.shape['tensor']
