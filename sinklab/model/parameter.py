"""Where parameters meet activations of another dtype.

A parameter is float32. What is computed with it is rounded to the dtype of the activations, and its gradient is not:
one number serves every row of a batch, and sums of so many addends in bfloat16 stop growing after 8 bits.
"""

import functools

import jax
import jax.numpy as jnp


def spread(array: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """What serves many rows, broadcast first and rounded after: gradients of the rows are added in float32."""
    return jnp.broadcast_to(array, shape).astype(dtype)


def product(equation: str, x: jax.Array, weight: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """einsum(equation, x, weight) of what is rounded to the dtype of x, given in `dtype` or that of x.

    Its gradient is rounded to the dtype of x, too, before it is multiplied; that of the weight is summed in its own.
    """
    if x.dtype == weight.dtype:
        return jnp.einsum(equation, x, weight, preferred_element_type=dtype)
    return mixed_product(equation, x, weight, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def mixed_product(equation, x, weight, dtype):
    return jnp.einsum(equation, x, weight.astype(x.dtype), preferred_element_type=dtype or x.dtype)


def forward(equation, x, weight, dtype):
    return mixed_product(equation, x, weight, dtype), (x, weight)


def backward(equation, dtype, saved, d_y):
    x, weight = saved
    of_x, of_weight, of_y = equation.replace('->', ',').split(',')
    d_y = d_y.astype(x.dtype)
    d_x = jnp.einsum(f'{of_y},{of_weight}->{of_x}', d_y, weight.astype(x.dtype))
    d_weight = jnp.einsum(f'{of_x},{of_y}->{of_weight}', x, d_y, preferred_element_type=weight.dtype)
    return d_x, d_weight


mixed_product.defvjp(forward, backward)
