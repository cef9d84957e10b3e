"""Where parameters meet activations of another dtype, on devices of which each has a part of a parameter.

A parameter is float32. What is computed with it is rounded to the dtype of the activations, and its gradient is not:
one number serves every row of a batch, and sums of so many addends in bfloat16 stop growing after 8 bits. So parts
are gathered as they are computed with, rounded, and gradients are added and parted in float32. What was gathered is
not kept for the backward pass, but gathered again.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from sinklab import exchange

HEADS = 'HK'  # dimensions that stand together in a weight and in what it meets or gives


def spread(array: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """What serves many rows, broadcast first and rounded after: gradients of the rows are added in float32."""
    return jnp.broadcast_to(array, shape).astype(dtype)


def whole(parameter: nnx.Param) -> jax.Array:
    """All of a small parameter, as it is."""
    return exchange.whole(parameter[...], *axes(parameter))


def axes(parameter: nnx.Param) -> tuple[str | None, ...]:
    return parameter.get_metadata()['axes']


def transposed(equation: str, array: jax.Array) -> jax.Array:
    """einsum(equation, array), made here and once.

    A transpose that XLA:CPU moves into a product makes that slow, or has its wide factor copied; one that it moves
    into what reads it is made again by each.
    """
    barrier = jax.lax.optimization_barrier
    return barrier(jnp.einsum(equation, barrier(array)))


def product(equation: str, x: jax.Array, weight: nnx.Param, dtype: jnp.dtype | None = None) -> jax.Array:
    """einsum(equation, x, weight) of what is rounded to the dtype of x, given in `dtype` or that of x.

    Its gradient is rounded to the dtype of x, too, before it is multiplied; that of the weight is summed in its own.
    """
    return multiply(equation, axes(weight), dtype, x, weight[...])


def multiply(
    equation: str, axes: tuple[str | None, ...], dtype: jnp.dtype | None, x: jax.Array, weight: jax.Array
) -> jax.Array:
    """The product with an array whose dimensions have these names."""
    if not exchange.parts(axes):
        return mixed_product(equation, axes, dtype, x, weight)
    return with_matrix(HEADS, equation, axes, dtype, x, weight)


def with_matrix(pair: str, equation: str, axes: tuple, dtype: jnp.dtype | None, x: jax.Array, weight: jax.Array):
    """The product with a pair of dimensions as one: parts of a matrix are gathered in the tiles of the whole."""
    of_x, of_weight, of_y = equation.replace('->', ',').split(',')
    if pair not in of_weight:
        return mixed_product(equation, axes, dtype, x, weight)
    at = of_weight.index(pair)
    sizes = weight.shape[at : at + 2]
    y = mixed_product(
        equation.replace(pair, pair[0]),
        axes[: at + 1] + axes[at + 2 :],
        dtype,
        merged(x, of_x, pair),
        merged(weight, of_weight, pair),
    )
    at = of_y.find(pair)
    return y if at < 0 else y.reshape(*y.shape[:at], *sizes, *y.shape[at + 1 :])


def merged(array: jax.Array, letters: str, pair: str) -> jax.Array:
    at = letters.find(pair)
    return array if at < 0 else array.reshape(*array.shape[:at], -1, *array.shape[at + 2 :])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def mixed_product(equation, axes, dtype, x, weight):
    return jnp.einsum(equation, x, gathered(weight, axes, x.dtype), preferred_element_type=dtype or x.dtype)


def gathered(weight: jax.Array, axes: tuple[str | None, ...], dtype: jnp.dtype) -> jax.Array:
    """All of a weight, rounded before it travels."""
    return exchange.whole(weight.astype(dtype), *axes)


def forward(equation, axes, dtype, x, weight):
    return mixed_product(equation, axes, dtype, x, weight), (x, weight)


def backward(equation, axes, dtype, saved, d_y):
    x, weight = saved
    of_x, of_weight, of_y = equation.replace('->', ',').split(',')
    d_y = d_y.astype(x.dtype)
    d_x = jnp.einsum(f'{of_y},{of_weight}->{of_x}', d_y, gathered(weight, axes, x.dtype))
    # What is divided comes first, as it travels. XLA:CPU has no product in bfloat16 that it transposes afterwards.
    divided = ''.join(of_weight[dimension] for dimension, _ in exchange.parts(axes))
    if not divided and x.dtype == weight.dtype and d_y.size + weight.size < x.size:
        # The left factor is copied, to transpose it: of a wide one and a narrow one the narrow one, and then the sum.
        order = ''.join(letter for letter in dict.fromkeys(of_y + of_x) if letter in of_weight)
        return d_x, transposed(f'{order}->{of_weight}', jnp.einsum(f'{of_y},{of_x}->{order}', d_y, x))
    order = ''.join(dict.fromkeys(divided + of_weight))
    d_weight = jnp.einsum(f'{of_x},{of_y}->{order}', x, d_y, preferred_element_type=weight.dtype)
    return d_x, exchange.part(jnp.einsum(f'{order}->{of_weight}', d_weight), *axes)


mixed_product.defvjp(forward, backward)


def look_up(table: nnx.Param, row_BT: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows of a table of vectors, rounded; the gradients of a row are added in float32, where their tokens are."""
    if not exchange.parts(axes(table)):
        return table[...][row_BT].astype(dtype)
    return parted_look_up(axes(table), dtype, len(table[...]), table[...], row_BT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def parted_look_up(axes, dtype, rows, table, row_BT):
    return gathered(table, axes, dtype)[row_BT]


def look_up_forward(axes, dtype, rows, table, row_BT):
    return parted_look_up(axes, dtype, rows, table, row_BT), row_BT


def look_up_backward(axes, dtype, rows, row_BT, d_BTD):
    d_table = jnp.zeros((rows, d_BTD.shape[-1]), jnp.float32).at[row_BT].add(d_BTD.astype(jnp.float32))
    return exchange.part(d_table, *axes), None


parted_look_up.defvjp(look_up_forward, look_up_backward)
