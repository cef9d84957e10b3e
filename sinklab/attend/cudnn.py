"""Softmax on NVIDIA GPUs by cuDNN, where it knows the mask: causal, or a causal window."""

import jax
import jax.numpy as jnp
import numpy as np

from sinklab.attend import dense
from sinklab.attend.mask import Mask


def lacks(case) -> str | None:
    if (case.attention.similarity, case.attention.normalizer) != ('exp', 'sum'):
        return f'{case.attention.similarity} with {case.attention.normalizer}: it knows softmax alone'
    if case.columns or case.curve:
        return 'columns and biases: it is given queries, keys and values alone'
    if case.mask not in ('causal', 'window'):
        return f'a mask of {case.mask}'
    if case.dtype != 'bfloat16' or case.width % 8 or max(case.width, case.value_width) > 128:
        return f'heads of {case.width} in {case.dtype}'
    return None


def attend(query_BTHK, key_BSGK, value_BSGK, attention, mask: Mask, columns, bias, measured):
    """(output_BTHK, Rows): the statistic of a row is its lse."""
    output_BTHK, lse_BTH = jax.nn.dot_product_attention(
        query_BTHK,
        key_BSGK,
        value_BSGK,
        is_causal=True,
        local_window_size=window(mask),
        implementation='cudnn',
        return_residual=True,
    )
    lse_BHT = jax.lax.stop_gradient(jnp.swapaxes(lse_BTH, 1, 2))
    one = jnp.ones_like(lse_BHT)
    return attention.gain * output_BTHK, dense.Rows(lse_BHT, one / attention.gain, attention.gain * one)


def window(mask: Mask) -> tuple[int, int] | None:
    """(keys before the query's own, 0) of a mask that ends at the query; None if nothing before it is hidden."""
    start_T, end_T = mask.hull_2T
    query_T = np.arange(mask.length)
    before = int((query_T - start_T).max())
    assert mask.static, 'cuDNN is given no interval that is known at run time only'
    assert (end_T == query_T + 1).all()
    assert (start_T == np.maximum(query_T - before, 0)).all()
    return None if before == mask.length - 1 else (before, 0)
