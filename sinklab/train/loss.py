"""Next-token cross-entropy without the logits of a whole batch."""

import jax
import jax.numpy as jnp
import optax

from sinklab.model.transformer import logits

CHUNK_ROWS = 512  # rows of logits alive at once, on each device


def total(hidden_BTD: jax.Array, head_VD: jax.Array, target_BT: jax.Array, weight_BT: jax.Array) -> jax.Array:
    """Summed cross-entropy of a chunk, through its logits in float32."""
    logits_BTV = logits(hidden_BTD, head_VD)
    losses_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, jnp.maximum(target_BT, 0))
    return jnp.sum(weight_BT * losses_BT)


@jax.custom_vjp
def cross_entropy(hidden_BTD: jax.Array, head_VD: jax.Array, target_BT: jax.Array) -> jax.Array:
    """Mean of -log softmax(hidden head^T)[target], 0 where the target is below 0, chunk by chunk along T."""
    losses = jax.lax.map(lambda chunk: total(chunk[0], head_VD, *chunk[1:]), chunks(hidden_BTD, target_BT))
    return jnp.sum(losses) / target_BT.size


def forward(hidden_BTD, head_VD, target_BT):
    """Takes each chunk's gradient while its logits are at hand, so that the backward pass needs none."""

    def body(d_head_VD, chunk):
        hidden, target, weight = chunk
        loss, (d_hidden, d_head) = jax.value_and_grad(total, (0, 1))(hidden, head_VD, target, weight)
        return d_head_VD + d_head, (loss, d_hidden)

    d_head_VD, (loss, d_hidden) = jax.lax.scan(body, jnp.zeros_like(head_VD), chunks(hidden_BTD, target_BT))
    d_hidden_BTD = jnp.moveaxis(d_hidden, 0, 1).reshape(len(hidden_BTD), -1, hidden_BTD.shape[-1])
    return jnp.sum(loss) / target_BT.size, (d_hidden_BTD[:, : target_BT.shape[1]], d_head_VD, target_BT.size)


def backward(residuals, d_loss):
    d_hidden_BTD, d_head_VD, size = residuals
    scale = d_loss / size
    return (d_hidden_BTD * scale).astype(d_hidden_BTD.dtype), d_head_VD * scale, None


cross_entropy.defvjp(forward, backward)


def chunks(hidden_BTD: jax.Array, target_BT: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(hidden, target, weight), each cut along T into a leading axis; what pads the last chunk weighs 0."""
    batch, length = target_BT.shape
    positions = min(length, max(1, CHUNK_ROWS * max(1, jax.sharding.get_abstract_mesh().size) // batch))
    padding = -length % positions

    def cut(array):
        padded = jnp.pad(array, [(0, 0), (0, padding)] + [(0, 0)] * (array.ndim - 2))
        return jnp.moveaxis(padded.reshape(batch, -1, positions, *array.shape[2:]), 1, 0)

    return cut(hidden_BTD), cut(target_BT), cut((target_BT >= 0).astype(jnp.float32))
