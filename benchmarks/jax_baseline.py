"""Baseline: a LLaMA-style training step in plain JAX."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from sinklab.config.spec import Spec

LEARNING_RATE = 4e-4


def init_parameters(spec: Spec) -> dict:
    """Initialize float32 parameters, with the layers stacked along the first axis."""
    model, keys = spec.model, iter(jax.random.split(jax.random.key(0), 9))
    width, inner_width, layers = model.width, model.heads * model.head_width, model.layers

    def normal(*shape: int) -> jax.Array:
        return 0.02 * jax.random.normal(next(keys), shape)

    blocks = {name: normal(layers, width, inner_width) for name in 'qkv'}
    blocks |= dict(out=normal(layers, inner_width, width), gate=normal(layers, width, model.ffn_width))
    blocks |= dict(up=normal(layers, width, model.ffn_width), down=normal(layers, model.ffn_width, width))
    blocks |= {name: jnp.ones((layers, width)) for name in ('norm_1', 'norm_2')}
    tables = {name: normal(model.vocabulary, width) for name in ('embedding', 'head')}
    return dict(blocks=blocks, norm=jnp.ones(width), **tables)


def rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    square = jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True)
    return (x * jax.lax.rsqrt(square + 1e-5) * gain).astype(x.dtype)


def apply_rotary(x_BTHK: jax.Array) -> jax.Array:
    half = x_BTHK.shape[-1] // 2
    angle_TK = jnp.arange(x_BTHK.shape[1])[:, None] * 1e4 ** (-jnp.arange(half) / half)
    cos, sin = (function(angle_TK)[:, None].astype(x_BTHK.dtype) for function in (jnp.cos, jnp.sin))
    left, right = jnp.split(x_BTHK, 2, -1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


def compute_loss(params: dict, ids_BT: jax.Array, spec: Spec) -> jax.Array:
    model, dtype = spec.model, jnp.dtype(spec.model.dtype)
    shape = (*ids_BT[:, :-1].shape, model.heads, model.head_width)

    def layer(x_BTD: jax.Array, block: dict) -> tuple[jax.Array, None]:
        block = jax.tree.map(lambda weight: weight.astype(dtype), block)
        y_BTD = rms_norm(x_BTD, block['norm_1'])
        query, key, value = ((y_BTD @ block[name]).reshape(shape) for name in 'qkv')
        attended = compute_attention(apply_rotary(query), apply_rotary(key), value)
        x_BTD += attended.reshape(*shape[:2], -1) @ block['out']
        y_BTD = rms_norm(x_BTD, block['norm_2'])
        return x_BTD + (jax.nn.silu(y_BTD @ block['gate']) * (y_BTD @ block['up'])) @ block['down'], None

    x_BTD = params['embedding'].astype(dtype)[ids_BT[:, :-1]]
    x_BTD, _ = jax.lax.scan(layer, x_BTD, params['blocks'])
    logits_BTV = jnp.einsum(
        'BTD,VD->BTV',
        rms_norm(x_BTD, params['norm']),
        params['head'].astype(dtype),
        preferred_element_type=jnp.float32,
    )
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, ids_BT[:, 1:]).mean()


def compute_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Compute causal attention with cuDNN on a GPU, else with the default implementation of jax."""
    kind = 'cudnn' if jax.default_backend() == 'gpu' else None
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=kind)


def make_train_step(spec: Spec) -> tuple[tuple, Callable]:
    """Make the initial state and the jitted train step.

    Args:
        spec: the spec of the model and of the batch.

    Returns:
        The state (params, optimizer state), and step(state, ids_BT) -> (state, loss), which donates the state.
    """
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(LEARNING_RATE, b2=0.95, weight_decay=0.1))
    params = init_parameters(spec)

    def step(state: tuple, ids_BT: jax.Array) -> tuple[tuple, jax.Array]:
        params, moments = state
        loss_value, gradient = jax.value_and_grad(compute_loss)(params, ids_BT, spec)
        updates, moments = optimizer.update(gradient, moments, params)
        return (optax.apply_updates(params, updates), moments), loss_value

    return (params, optimizer.init(params)), jax.jit(step, donate_argnums=0)
