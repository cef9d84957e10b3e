"""The cuDNN backend: softmax attention on NVIDIA GPUs with a causal mask or causal window."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from sinklab.attn.mask import Mask
from sinklab.attn.operations import NORMALIZERS, SIMILARITIES
from sinklab.attn.reference import AttentionOutput, RowStats
from sinklab.attn.spec import AttentionProblem, AttentionSpec
from sinklab.parallel import sharding


def explain_unsupported(problem: AttentionProblem) -> str | None:
    operation = problem.spec.operation
    if (operation.similarity, operation.normalizer) != (SIMILARITIES['exp'], NORMALIZERS['sum']):
        return f'{operation.name}: it supports only softmax'
    if operation.clip_ends is not None:
        return 'clipped weights: it supports only softmax'
    if problem.spec.num_learned_kv or problem.spec.bias.relative is not None:
        return 'learned keys and biases: it supports only queries, keys and values'
    if operation.scale is not None and operation.scale <= 0:
        return f'a scale of {operation.scale}: it needs a scale above 0'
    if find_causal_window(problem.spec.mask) is None:
        return 'a mask that is neither causal nor a causal window'
    if problem.value_width != problem.width:
        return f'values of width {problem.value_width} with keys of width {problem.width}: it needs equal widths'
    if problem.dtype != 'bfloat16' or problem.width % 8 or problem.width > 128:
        return f'heads of width {problem.width} in {problem.dtype}: it needs bfloat16 and a multiple of 8 up to 128'
    return None


def attend(query_BTHK, key_BSGK, value_BSGK, spec: AttentionSpec) -> AttentionOutput:
    """Compute softmax attention; the shift of a row is its log-sum-exp, so that its Z is 1 / gain.

    jax rounds the log-sum-exp to the dtype of the output, so that weights that are recomputed from the row statistics
    have a relative error of up to 3 % in bfloat16.
    """
    num_previous_keys = find_causal_window(spec.mask)
    gain = spec.operation.gain
    attend_on_device = functools.partial(
        jax.nn.dot_product_attention,
        scale=spec.operation.scale,
        is_causal=True,
        local_window_size=None if num_previous_keys == spec.mask.num_queries - 1 else (num_previous_keys, 0),
        implementation='cudnn',
        return_residual=True,
    )
    output_BTHK, lse_BTH = shard_over_mesh(attend_on_device, key_BSGK)(query_BTHK, key_BSGK, value_BSGK)
    lse_BHT = jax.lax.stop_gradient(jnp.swapaxes(lse_BTH, 1, 2).astype(jnp.float32))
    ones_BHT = jnp.ones_like(lse_BHT)
    return AttentionOutput(gain * output_BTHK, RowStats(lse_BHT, ones_BHT / gain, gain * ones_BHT))


def shard_over_mesh(function: Callable, key_BSGK: jax.Array) -> Callable:
    """Shard over sequences and heads with shard_map: cuDNN does not do so on a partly manual mesh."""
    batch, _, heads, _ = sharding.make_auto_partition_spec(key_BSGK.shape, ('batch', None, 'heads', None))
    array_spec, row_spec = PartitionSpec(batch, None, heads, None), PartitionSpec(batch, None, heads)
    return sharding.shard_map_auto_axes(function, sharding.get_auto_axes(), (array_spec,) * 3, (array_spec, row_spec))


def find_causal_window(mask: Mask) -> int | None:
    """Return the most keys before its own that a query sees; None if the mask is no causal window."""
    start_T, end_T = mask.bounds_2T
    query_T = np.arange(mask.num_queries)
    num_previous_keys = int((query_T - start_T).max())
    is_causal = (end_T == query_T + 1).all() and (start_T == np.maximum(query_T - num_previous_keys, 0)).all()
    return num_previous_keys if mask.is_static and is_causal else None
