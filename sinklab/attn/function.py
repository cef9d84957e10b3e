"""The public function `attention`, with any similarity and normalizer, without a config."""

import math
import reprlib
from collections.abc import Mapping
from typing import Any, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from sinklab.attn import backends, reference
from sinklab.attn import mask as masks
from sinklab.attn.backends import BACKENDS
from sinklab.attn.mask import Mask
from sinklab.attn.operations import (
    NORMALIZERS,
    SIMILARITIES,
    Normalizer,
    Operation,
    Similarity,
)
from sinklab.attn.reference import AttentionOutput
from sinklab.attn.spec import AttentionProblem, AttentionSpec
from sinklab.config.spec import NORMALIZERS_BY_SIMILARITY, BackendName
from sinklab.errors import UserError, format_unknown_name

Window = int | tuple[int, int]
Entry = TypeVar('Entry')


def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    similarity: str | Similarity = 'exp',
    normalizer: str | Normalizer = 'sum',
    scale: ArrayLike | None = None,
    score_offset: float = 0.0,
    gain: float = 1.0,
    power: float | None = None,
    is_causal: bool = False,
    local_window_size: Window | None = None,
    return_weights: bool = False,
    implementation: BackendName = 'auto',
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Compute attention with a similarity and a normalizer of your choice; the default is softmax.

    `A_ij = gain * weight(s_ij) / Z(sum_l mass(s_il))` and `o_i = sum_j A_ij v_j`, with the scores
    `s_ij = scale * <q_i, k_j> + bias_ij + score_offset`. The similarity gives the functions weight and mass (for most
    similarities they are the same function), the normalizer gives Z. The function takes `query`, `key`, `value`,
    `bias`, `mask`, `scale`, `is_causal` and `local_window_size` as `jax.nn.dot_product_attention` does. It has no
    `query_seq_lengths` and no `key_value_seq_lengths` (a `mask` hides the keys of padding), and its
    `implementation` has other values. The function can be used under `jax.jit`, `jax.grad` and `jax.vmap`.

    | similarity | weight(s) | normalizers |
    |---|---|---|
    | `exp` | e^s | `sum` (softmax), `p_norm`, `plus_one` (softmax with a sink logit of 0) |
    | `softpick` | max(e^s - 1, 0), with a mass of abs(e^s - 1) | `sum` |
    | `sigmoid` | 1 / (1 + e^-s) | `none`, `sum`, `p_norm`, `count` |
    | `elu1` | elu(s) + 1 | `none`, `sum`, `p_norm`, `count` |
    | `relu` | max(s, 0) | `count`, `none`, `sum` |
    | `identity` | s | `none`, `clamped`, `count`, `sum` |

    | normalizer | Z |
    |---|---|
    | `sum` | the sum of the masses (1e-8 is added, as in the paper's code) |
    | `p_norm` | (sum of mass^p)^(1/p), with p = `power` |
    | `plus_one` | 1 + the sum |
    | `clamped` | max(abs(sum), 1) |
    | `count` | the number of keys that the query sees |
    | `none` | 1 |

    Scores, weights and their sums are computed in float32, whatever the dtype of the arrays.

    Args:
        query: Array of shape BTNH (batch, queries, heads, width of a head), or TNH.
        key: Array of shape BSKH, or SKH. N is a multiple of K: each key head serves N / K query heads.
        value: Array of shape BSKV, or SKV; V may differ from H.
        bias: Array that is added to the scores, of a shape that can be broadcast to BNTS (NTS without a batch).
        mask: Boolean array of such a shape. A query attends to a key where it is True.
        similarity: A name of the table above, or a `Similarity` of your own.
        normalizer: A name of the table above, or a `Normalizer` of your own.
        scale: Factor of the products of queries and keys, which is applied in float32; 1 / sqrt(H) if it is None.
            A scale that jax traces, such as a learned one, needs `auto`, `dense` or `chunked`.
        score_offset: Number that is added to every score. The config's `model.attention.offset` is in units of
            log T, so that `score_offset` is that offset * log(T), with T the tokens of a training window. Apple's
            sigmoid attention (2409.04431) has -log(T), which is an offset of -1.
        gain: Factor of all weights, above 0.
        power: The p of the normalizer `p_norm`, above 0; it must be None with any other normalizer.
        is_causal: Query i attends only to the keys j <= i.
        local_window_size: (left, right): query i attends only to the keys i - left <= j <= i + right. A single
            number is used for both.
        return_weights: Also return A. The implementation must then be `auto` or `dense`.
        implementation: `dense` builds the matrix A; `chunked` builds the rows of 128 queries at a time, so that
            memory grows with T and not with its square; `tpu`, `gpu` and `cudnn` are kernels. `auto` is `dense` if
            `bias`, `mask` or `return_weights` need the matrix, and `chunked` otherwise. A kernel that cannot compute
            the call raises UserError. Kernels are not verified on your device here.

    Returns:
        The output, of shape BTNV (or TNV), in the dtype of the values. With `return_weights` a pair of the output
        and the weights A, of shape BNTS (or NTS), in float32. A query that attends to no key has an output of 0.

    Raises:
        UserError: An argument is not allowed, or shapes do not fit. It is a `ValueError` of one line, raised while
            the function is traced.
    """
    query, key, value = convert_arrays(query, key, value)
    is_batched = query.ndim == 4
    if not is_batched:
        query, key, value = (array[None] for array in (query, key, value))
    operation = make_operation(similarity, normalizer, gain, power, score_offset, scale)
    spec = AttentionSpec(operation, make_mask(query.shape[1], key.shape[1], is_causal, local_window_size))
    matrices = {name: array for name, array in (('bias', bias), ('mask', mask)) if array is not None}
    needs = [*matrices, *(['return_weights'] if return_weights else [])]
    name = resolve_implementation(implementation, spec, query, key, value, needs)
    result = attend_on_backend(name, query, key, value, spec, matrices)
    output = result.output_BTHK if is_batched else result.output_BTHK[0]
    if not return_weights:
        return output
    weights = result.attention_BHTS
    assert weights is not None  # `resolve_implementation` has chosen a backend that returns them
    return output, weights if is_batched else weights[0]


def attend_on_backend(
    backend: str,
    query_BTHK: jax.Array,
    key_BSGK: jax.Array,
    value_BSGK: jax.Array,
    spec: AttentionSpec,
    matrices: Mapping[str, ArrayLike],
) -> AttentionOutput:
    """Compute attention with a backend, or with the reference if there are `bias` or `mask` arrays."""
    if not matrices:
        return BACKENDS[backend].attend(query_BTHK, key_BSGK, value_BSGK, spec)
    num_keys = key_BSGK.shape[1]
    shape = query_BTHK.shape[0], query_BTHK.shape[2], query_BTHK.shape[1], num_keys
    arrays = {name: convert_matrix(name, array, shape) for name, array in matrices.items()}
    bias_BHTS = spec.materialize_bias(num_keys) + arrays.get('bias', 0.0)
    visible_BHTS = spec.materialize_mask(num_keys) & arrays.get('mask', True)
    return reference.attend_with_matrices(query_BTHK, key_BSGK, value_BSGK, bias_BHTS, visible_BHTS, spec.operation)


def convert_arrays(query: ArrayLike, key: ArrayLike, value: ArrayLike) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return queries, keys and values as floating-point arrays with matching shapes, or raise UserError."""
    arrays = dict(query=jnp.asarray(query), key=jnp.asarray(key), value=jnp.asarray(value))
    shapes = ', '.join(f'{name} {array.shape}' for name, array in arrays.items())
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise UserError(f'{name} has the dtype {array.dtype}; give floating-point numbers')
        if array.ndim not in (3, 4) or 0 in array.shape:
            raise UserError(f'{name} has the shape {array.shape}; give BTNH or TNH, without an axis of size 0')
    (*batch, _, num_heads, width), (*key_batch, num_keys, num_kv_heads, key_width) = (
        arrays['query'].shape,
        arrays['key'].shape,
    )
    if batch != key_batch or (*batch, num_keys, num_kv_heads) != arrays['value'].shape[:-1] or width != key_width:
        raise UserError(f'shapes do not fit: {shapes}; give query BTNH, key BSKH and value BSKV')
    if num_heads % num_kv_heads:
        raise UserError(f'{num_heads} query heads are not a multiple of {num_kv_heads} key heads: {shapes}')
    return arrays['query'], arrays['key'], arrays['value']


def convert_matrix(name: str, array_like: ArrayLike, shape: tuple[int, ...]) -> jax.Array:
    """Return `bias` or `mask` as a 4D array that broadcasts to the scores, or raise UserError."""
    array = jnp.asarray(array_like)
    dtype_class, dtype_name = (jnp.bool_, 'booleans') if name == 'mask' else (jnp.floating, 'floating-point numbers')
    if not jnp.issubdtype(array.dtype, dtype_class):
        raise UserError(f'{name} has the dtype {array.dtype}; give {dtype_name}')
    array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    if array.ndim != 4 or any(size not in (1, full_size) for size, full_size in zip(array.shape, shape, strict=True)):
        raise UserError(f'{name} has the shape {jnp.shape(array_like)}, which cannot be broadcast to {shape} (BNTS)')
    return array


def make_operation(
    similarity: str | Similarity,
    normalizer: str | Normalizer,
    gain: float = 1.0,
    power: float | None = None,
    score_offset: float = 0.0,
    scale: ArrayLike | None = None,
) -> Operation:
    """Return the operation of a similarity and a normalizer; raise UserError if they cannot be combined."""
    similarity_entry = find_entry('similarity', similarity, SIMILARITIES, Similarity)
    normalizer_entry = find_entry('normalizer', normalizer, NORMALIZERS, Normalizer)
    if (
        isinstance(similarity, str)
        and isinstance(normalizer, str)
        and normalizer not in NORMALIZERS_BY_SIMILARITY[similarity]
    ):
        raise UserError(
            f'{similarity} has no normalizer {normalizer!r}; use {", ".join(NORMALIZERS_BY_SIMILARITY[similarity])}'
        )
    if similarity_entry.is_shifted and not normalizer_entry.uses_total:
        raise UserError('a shifted similarity needs a normalizer that reads the sum, or the shift would not cancel')
    if (normalizer_entry is NORMALIZERS['p_norm']) != (power is not None):
        raise UserError(f'power={power} with {normalizer!r}; p_norm needs a power, and other normalizers need None')
    names = [entry if isinstance(entry, str) else 'your own' for entry in (similarity, normalizer)]
    return Operation(
        ' with '.join(names),
        similarity_entry,
        normalizer_entry,
        gain=convert_number('gain', gain, exclusive_min=0),
        power=None if power is None else convert_number('power', power, exclusive_min=0),
        offset=convert_number('score_offset', score_offset),
        scale=None if scale is None else convert_scale(scale),
    )


def convert_scale(scale: ArrayLike) -> float | jax.Array:
    """Return a scale as a float, or as a float32 array if jax traces it; raise UserError if it is invalid."""
    if not isinstance(scale, jax.core.Tracer):
        return convert_number('scale', scale)
    if scale.ndim or scale.dtype == bool or jnp.iscomplexobj(scale):
        raise UserError(f'scale is an array of dtype {scale.dtype} and shape {scale.shape}; give one number')
    return scale.astype(jnp.float32)


def convert_number(name: str, value: Any, exclusive_min: float = -math.inf) -> float:
    """Return a number as a float, or raise UserError unless it is finite and above `exclusive_min`."""
    try:
        number = float(value)
    except (TypeError, ValueError):  # such as an array of several numbers, or one that jax traces
        number = math.nan
    if not exclusive_min < number < math.inf:
        text = ' '.join(reprlib.repr(value).split())
        bound = '' if exclusive_min == -math.inf else f' above {exclusive_min}'
        raise UserError(f'{name}={text} is not allowed; give one finite number{bound}')
    return number


def find_entry(kind: str, value: Any, table: Mapping[str, Entry], entry_class: type[Entry]) -> Entry:
    """Return the table entry of a name, or the given entry itself; raise UserError for an unknown name."""
    if isinstance(value, entry_class):
        return value
    if not isinstance(value, str) or value not in table:
        raise UserError(format_unknown_name(f'{kind}={value!r}', str(value), table, 'allowed'))
    return table[value]


def make_mask(num_queries: int, num_keys: int, is_causal: bool, local_window_size: Window | None) -> Mask:
    """Make the mask of `is_causal` and `local_window_size`; query i has the position of key i."""
    query_T = np.arange(num_queries, dtype=np.int32)
    start_T = np.zeros_like(query_T)
    end_T = np.full_like(query_T, num_keys)
    if is_causal:
        end_T = np.minimum(end_T, query_T + 1)
    if local_window_size is not None:
        left, right = convert_window(local_window_size)
        start_T = np.maximum(start_T, query_T - min(left, num_queries))
        end_T = np.minimum(end_T, query_T + min(right, num_keys) + 1)
    return masks.make_static_mask(np.minimum(start_T, num_keys), end_T)


def convert_window(window: Window) -> tuple[int, int]:
    """Return (left, right) of a window, or raise UserError."""
    sides = window if isinstance(window, tuple | list) else (window, window)
    if len(sides) != 2 or not all(isinstance(side, int | np.integer) and side >= 0 for side in sides):
        raise UserError(f'local_window_size={window!r} is not allowed; give a number of at least 0, or (left, right)')
    return int(sides[0]), int(sides[1])


def resolve_implementation(
    implementation: str, spec: AttentionSpec, query: jax.Array, key: jax.Array, value: jax.Array, needs: list[str]
) -> str:
    """Return the name of the backend, or raise UserError if it cannot compute attention as requested."""
    if implementation not in get_args(BackendName):
        raise UserError(
            format_unknown_name(
                f'implementation={implementation!r}', str(implementation), get_args(BackendName), 'allowed'
            )
        )
    if implementation == 'auto':
        return 'dense' if needs else 'chunked'
    if needs and implementation != 'dense':
        raise UserError(
            f'implementation={implementation!r} computes no attention matrix, which '
            f'{" and ".join(needs)} need; give auto or dense'
        )
    if BACKENDS[implementation].platform is not None:
        need = explain_kernel_need(spec, query, key, value)
        if need:
            raise UserError(f'implementation={implementation!r} needs {need}; give auto, dense or chunked')
    heads, width = query.shape[2:]
    kv_heads, value_width = value.shape[2:]
    problem = AttentionProblem(spec, heads, width, value_width, str(query.dtype), kv_heads)
    reason = backends.explain_unsupported(implementation, jax.default_backend(), problem)
    if reason:
        raise UserError(f'implementation={implementation!r} cannot be used: {reason}; give auto, dense or chunked')
    return implementation


def explain_kernel_need(spec: AttentionSpec, query: jax.Array, key: jax.Array, value: jax.Array) -> str | None:
    """Return what kernels need and the arguments do not have, or None."""
    if isinstance(spec.operation.scale, jax.Array):
        return 'a scale that jax does not trace'
    if key.shape[1] != query.shape[1]:
        return 'as many keys as queries'
    if not query.dtype == key.dtype == value.dtype:
        return f'queries, keys and values of one dtype, not {query.dtype}, {key.dtype} and {value.dtype}'
    return None
