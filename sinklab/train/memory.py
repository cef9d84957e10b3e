"""What a device has to hold, by shapes and without compiling."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from sinklab import sharding
from sinklab.spec import SAVEABLE_ACTIVATIONS, Hardware, Spec
from sinklab.train import loss, state
from sinklab.train.forward import make_forward


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on a device."""

    parameters: int
    moments: int
    gradients: int  # with micro-batches, of one and of all before it
    activations: int  # of a micro-batch, that all layers keep between its forward and backward pass
    layer: int  # while one is at work: its weights whole, their gradients, and what it has computed again
    loss_buffers: int  # while the loss is: the head whole, its gradient, and logits

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
    """Bytes of what one device has of a tree."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def estimate_activation_bytes(spec: Spec, hardware: Hardware, remat: str, mesh: jax.sharding.Mesh, backend: str) -> int:
    """What the layers keep of a device's sequences, by what two on each make more than one.

    Along `tensor` it is taken for whole: the stream, most of what is kept if little is, is.
    """
    num_shards = sharding.count_shards(mesh)
    return hardware.get_micro_batch_size(spec.optimizer.batch_size) // num_shards * estimate_sequence_activation_bytes(spec, remat, backend, num_shards)


@functools.lru_cache(maxsize=64)  # a ranking of layouts asks for some ten of one spec, each several times
def estimate_sequence_activation_bytes(spec: Spec, remat: str, backend: str, num_shards: int) -> int:
    """Bytes that the layers keep of one sequence."""
    bytes_of_one, bytes_of_two = (state.count_bytes(trace_backward(spec, remat, backend, num_sequences)) for num_sequences in (num_shards, 2 * num_shards))
    return (bytes_of_two - bytes_of_one) // num_shards


def trace_backward(spec: Spec, remat: str, backend: str, num_sequences: int) -> Any:
    """The backward pass of so many sequences through the layers, with all that it reads, as shapes."""
    apply_model, params = make_forward(spec, remat=remat, backend=backend), state.get_state_shapes(spec)['params']
    ids = jax.ShapeDtypeStruct((num_sequences, spec.data.length), jnp.int32)
    return jax.eval_shape(lambda params, ids: jax.vjp(lambda params: apply_model(params, ids)[0], params)[1], params, ids)


def estimate_layer_bytes(spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh, backend: str) -> int:
    """Its weights, and those of the next, with their gradients; all that has a name in it, with the cotangents."""
    model, itemsize = spec.model, jnp.dtype(spec.model.dtype).itemsize
    num_weights = sum(leaf.size for leaf in jax.tree.leaves(state.get_state_shapes(spec)['params']['blocks'])) // model.layers
    named_bytes = estimate_activation_bytes(spec, hardware, ','.join(SAVEABLE_ACTIVATIONS), mesh, backend) // model.layers
    return num_weights * (3 * itemsize + 4) // mesh.shape['tensor'] + 2 * named_bytes


def estimate_loss_bytes(spec: Spec, mesh: jax.sharding.Mesh) -> int:
    """A table as the computation has it, the head's gradient as a sum and transposed, a chunk's logits and theirs."""
    model, itemsize = spec.model, jnp.dtype(spec.model.dtype).itemsize
    num_rows = loss.choose_chunk_rows(model.width) * mesh.shape['tensor']
    return model.vocabulary * ((itemsize + 8) * model.width + (itemsize + 8) * num_rows) // mesh.shape['tensor']
