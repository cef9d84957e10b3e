"""Mixed-precision einsum and lookup on sharded parameters: gather and cast, gradients in float32.

Parameters are float32. Products with a parameter use it rounded to the dtype of the activations. Its gradient is not
rounded: every row of the batch adds to it, and sums of so many addends in bfloat16 stop growing after 8 bits.
Therefore shards are cast and then all-gathered, and gradients are summed and reduce-scattered in float32. Gathered
parameters are not saved for the backward pass, which gathers them again.
"""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint

from sinklab.chip_specs import NUM_LANES
from sinklab.parallel import collectives
from sinklab.parallel.sharding import get_logical_axes

HEAD_DIMS = 'HK'  # adjacent dimensions of a weight, and of the input or output of its product
ROW_MAJOR_DIMS = 'BTD', 'BTH'  # the residual stream, and heads that are merged into one dimension


def broadcast_and_cast(array: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Broadcast a parameter to many rows, then cast it, so that gradients of rows are added in float32."""
    return jnp.broadcast_to(array, shape).astype(dtype)


def all_gather_param(parameter: nnx.Param) -> jax.Array:
    """All-gather a small parameter without casting it."""
    return collectives.all_gather(parameter[...], *get_logical_axes(parameter))


def transpose_with_barrier(equation: str, array: jax.Array) -> jax.Array:
    """Transpose an array by einsum, between optimization barriers.

    The barriers make XLA:CPU transpose here and only once. If it moves a transpose into a product, that product is
    slow or copies its wide factor. If it moves a transpose into the consumers of the result, each of them repeats it.
    """
    barrier = jax.lax.optimization_barrier
    return barrier(jnp.einsum(equation, barrier(array)))


def param_einsum(equation: str, x: jax.Array, weight: nnx.Param) -> jax.Array:
    """Compute einsum(equation, x, weight), with the weight rounded to the dtype of x.

    The gradient of the result is also rounded to the dtype of x before it is multiplied. The gradient of the weight
    is summed in the dtype of the weight.

    Args:
        equation: Einsum equation of x and weight.
        x: Activations.
        weight: Parameter, with its logical axes. If it has the metadata `bits`, quantization is simulated: x has a
            scale for each sequence, and the weight one for each output channel.
    """
    weight_array = weight[...]
    if bits := weight.get_metadata().get('bits'):
        x = round_to_bits(x, bits, range(1, x.ndim))
        weight_array = round_to_bits(weight_array, bits, range(weight.inputs))
    return sharded_einsum(equation, get_logical_axes(weight), None, x, weight_array)


def round_to_bits(array: jax.Array, bits: int, dimensions: Iterable[int]) -> jax.Array:
    """Round to the nearest of 2^bits - 1 values from -m to m, where m is the largest |x| over `dimensions`."""
    scale = jnp.abs(array.astype(jnp.float32)).max(tuple(dimensions), keepdims=True) / (2 ** (bits - 1) - 1)
    return (jnp.round(array / jnp.where(scale > 0, scale, 1)) * scale).astype(array.dtype)


def sharded_einsum(
    equation: str, axes: tuple[str | None, ...], dtype: jnp.dtype | None, x: jax.Array, weight: jax.Array
) -> jax.Array:
    """Compute the einsum of activations and a parameter that is sharded along its logical axes.

    The dtype of the result is that of x if `dtype` is None. The dimensions of heads of a sharded weight are merged,
    so that gathered shards are tiled as the whole matrix. By the estimate of the compiler, a 1B step takes 289
    instead of 302 ms on v5e:16x16, and 484 instead of 493 ms on v5p:4x4x4.
    """
    x_dims, weight_dims, y_dims = equation.replace('->', ',').split(',')
    if HEAD_DIMS not in weight_dims or not collectives.find_sharded_dimensions(axes):
        return mixed_precision_einsum(equation, axes, dtype, x, weight)
    index = weight_dims.index(HEAD_DIMS)
    sizes = weight.shape[index : index + 2]
    y = mixed_precision_einsum(
        equation.replace(HEAD_DIMS, HEAD_DIMS[0]),
        axes[: index + 1] + axes[index + 2 :],
        dtype,
        merge_dims(x, x_dims, HEAD_DIMS),
        merge_dims(weight, weight_dims, HEAD_DIMS),
    )
    index = y_dims.find(HEAD_DIMS)
    return y if index < 0 else y.reshape(*y.shape[:index], *sizes, *y.shape[index + 1 :])


def merge_dims(array: jax.Array, dims: str, merged_dims: str) -> jax.Array:
    index = dims.find(merged_dims)
    return array if index < 0 else array.reshape(*array.shape[:index], -1, *array.shape[index + 2 :])


def constrain_row_major(array: jax.Array, dims: str) -> jax.Array:
    """Make a TPU store the residual stream and merged heads row by row, if rows fill whole lanes.

    By itself, XLA stores them with the tokens as the last dimension, and transposes heads before and after attention.
    By the estimate of the compiler, a 1B step takes 0.94 (v5p) to 0.99 (v5e) of the time. The inside of the FFN is
    left to XLA.
    """
    if dims not in ROW_MAJOR_DIMS or array.shape[-1] % NUM_LANES:
        return array
    layout = Layout(tuple(range(array.ndim)))
    return jax.lax.platform_dependent(
        array, tpu=lambda array: with_layout_constraint(array, layout), default=lambda array: array
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def mixed_precision_einsum(equation, axes, dtype, x, weight):
    x = constrain_row_major(x, equation.partition(',')[0])
    return jnp.einsum(
        equation, x, cast_and_all_gather(weight, axes, x.dtype), preferred_element_type=dtype or x.dtype
    )


def cast_and_all_gather(weight: jax.Array, axes: tuple[str | None, ...], dtype: jnp.dtype) -> jax.Array:
    """Cast a weight, then all-gather it."""
    return collectives.all_gather(weight.astype(dtype), *axes)


def einsum_forward(equation, axes, dtype, x, weight):
    return mixed_precision_einsum(equation, axes, dtype, x, weight), (x, weight)


def einsum_backward(equation, axes, dtype, residuals, d_y):
    x, weight = residuals
    x_dims, weight_dims, y_dims = equation.replace('->', ',').split(',')
    x, d_y = constrain_row_major(x, x_dims), constrain_row_major(d_y.astype(x.dtype), y_dims)
    d_x = jnp.einsum(f'{y_dims},{weight_dims}->{x_dims}', d_y, cast_and_all_gather(weight, axes, x.dtype))
    # Sharded dimensions come first, as the collective sends them. XLA:CPU has no bfloat16 product with a transpose of
    # the result.
    sharded_dims = ''.join(weight_dims[dimension] for dimension, _ in collectives.find_sharded_dimensions(axes))
    if not sharded_dims and x.dtype == weight.dtype and d_y.size + weight.size < x.size:
        # The left factor is copied to be transposed. Make that the narrow factor (d_y), and transpose the sum.
        order = ''.join(dim for dim in dict.fromkeys(y_dims + x_dims) if dim in weight_dims)
        return d_x, transpose_with_barrier(
            f'{order}->{weight_dims}', jnp.einsum(f'{y_dims},{x_dims}->{order}', d_y, x)
        )
    order = ''.join(dict.fromkeys(sharded_dims + weight_dims))
    if sharded_dims and y_dims == 'BTF' and d_y.shape[-1] % NUM_LANES == 0:
        # With two dimensions of tokens, this product takes up to 1.6 times as long on v5e by the estimate of XLA.
        # A 1B step then takes 302 instead of 289 ms on v5e:16x16, but 476 instead of 484 ms on v5p:4x4x4.
        x, d_y = merge_dims(x, x_dims, 'BT'), merge_dims(d_y, y_dims, 'BT')
        x_dims = x_dims.replace('BT', 'B')
        y_dims = y_dims.replace('BT', 'B')
    d_weight = jnp.einsum(f'{x_dims},{y_dims}->{order}', x, d_y, preferred_element_type=weight.dtype)
    return d_x, collectives.reduce_scatter(jnp.einsum(f'{order}->{weight_dims}', d_weight), *axes)


mixed_precision_einsum.defvjp(einsum_forward, einsum_backward)


def look_up(table: nnx.Param, row_BT: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Look up rows of an embedding table and cast them; gradients of a row are added in float32."""
    if not collectives.find_sharded_dimensions(get_logical_axes(table)):
        return table[...][row_BT].astype(dtype)
    return look_up_sharded(get_logical_axes(table), dtype, len(table[...]), table[...], row_BT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def look_up_sharded(axes, dtype, num_rows, table, row_BT):
    return cast_and_all_gather(table, axes, dtype)[row_BT]


def look_up_sharded_forward(axes, dtype, num_rows, table, row_BT):
    return look_up_sharded(axes, dtype, num_rows, table, row_BT), row_BT


def look_up_sharded_backward(axes, dtype, num_rows, row_BT, d_BTD):
    d_table = jnp.zeros((num_rows, d_BTD.shape[-1]), jnp.float32).at[row_BT].add(d_BTD.astype(jnp.float32))
    return collectives.reduce_scatter(d_table, *axes), None


look_up_sharded.defvjp(look_up_sharded_forward, look_up_sharded_backward)
