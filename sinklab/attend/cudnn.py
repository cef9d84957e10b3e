"""Softmax on NVIDIA GPUs by cuDNN, where it knows the mask: causal, or a causal window."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from sinklab import sharding
from sinklab.attend.dense import Attended, Rows
from sinklab.attend.mask import Mask
from sinklab.attend.normalizer import NORMALIZERS
from sinklab.attend.rule import Case, Rule
from sinklab.attend.similarity import SIMILARITIES

platform = 'gpu'


def lacks(case: Case) -> str | None:
    operation = case.rule.operation
    if (operation.similarity, operation.normalizer) != (SIMILARITIES['exp'], NORMALIZERS['sum']):
        return f'{operation.name}: it knows softmax alone'
    if case.rule.columns or case.rule.bias.curve is not None:
        return 'columns and biases: it is given queries, keys and values alone'
    if operation.scale is not None and operation.scale <= 0:
        return f'a scale of {operation.scale}, where it needs one above 0'
    if window(case.rule.mask) is None:
        return 'a mask that is neither causal nor a causal window'
    if case.dtype != 'bfloat16' or case.width % 8 or max(case.width, case.value_width) > 128:
        return f'heads of {case.width} in {case.dtype}'
    return None


def attend(query_BTHK, key_BSGK, value_BSGK, rule: Rule, measured: bool = False) -> Attended:
    """The statistic of a row is its lse."""
    before, gain = window(rule.mask), rule.operation.gain
    run = functools.partial(
        jax.nn.dot_product_attention,
        scale=rule.operation.scale,
        is_causal=True,
        local_window_size=None if before == rule.mask.length - 1 else (before, 0),
        implementation='cudnn',
        return_residual=True,
    )
    output_BTHK, lse_BTH = over_mesh(run, key_BSGK)(query_BTHK, key_BSGK, value_BSGK)
    lse_BHT = jax.lax.stop_gradient(jnp.swapaxes(lse_BTH, 1, 2))
    one = jnp.ones_like(lse_BHT)
    return Attended(gain * output_BTHK, Rows(lse_BHT, one / gain, gain * one))


def over_mesh(run: Callable, key_BSGK: jax.Array) -> Callable:
    """Run on each device's own sequences and heads; cuDNN divides neither by itself on a partly manual mesh."""
    batch, _, heads, _ = sharding.compilers(key_BSGK.shape, ('batch', None, 'heads', None))
    of_array, of_row = PartitionSpec(batch, None, heads, None), PartitionSpec(batch, None, heads)
    return sharding.on_each_part(run, sharding.compilers_axes(), (of_array,) * 3, (of_array, of_row))


def window(mask: Mask) -> int | None:
    """How many keys before its own a query sees, at most, under a causal mask or window; None under another."""
    start_T, end_T = mask.hull_2T
    query_T = np.arange(mask.length)
    before = int((query_T - start_T).max())
    causal = (end_T == query_T + 1).all() and (start_T == np.maximum(query_T - before, 0)).all()
    return before if mask.static and causal else None
