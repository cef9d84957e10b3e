"""Token-by-token sampling, and perplexity of long texts, with a KV cache."""

import dataclasses
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sinklab.config.spec import Spec
from sinklab.errors import UserError
from sinklab.loss_mask import exclude_from_loss, is_in_loss, strip_loss_mask
from sinklab.model.learned_kv import LEARNED_KV_KINDS
from sinklab.model.streaming import CacheConfig, StreamState, init_stream, read_tokens
from sinklab.model.transformer import Transformer, compute_logits
from sinklab.parallel.device_mesh import make_one_device_mesh
from sinklab.train import state
from sinklab.train.loss import sum_losses

MIN_TEMPERATURE = 1e-30  # float32 cannot divide by less
SEGMENT_TOKENS = 1024  # maximum number of tokens that are read at once


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Sampler of the next token from softmax(logits / temperature); at temperature 0, the most likely."""

    temperature: float
    top_k: int | None  # sample from this many most likely tokens only; None: from all

    def __call__(self, logits_V: jax.Array, key: jax.Array) -> jax.Array:
        if self.temperature < MIN_TEMPERATURE:
            return logits_V.argmax()
        top_logit_V, id_V = jax.lax.top_k(logits_V, self.top_k or len(logits_V))
        return id_V[jax.random.categorical(key, (top_logit_V - top_logit_V[0]) / self.temperature)]


def sample_tokens(
    spec: Spec, cache: CacheConfig, params: dict, ids_T: np.ndarray, num_tokens: int, sampler: Sampler, seed: int
) -> Iterator[int]:
    """Sample up to `num_tokens` ids after those of a prompt, until the end of the document."""
    check_streaming(spec, cache)
    if not len(ids_T):
        raise UserError('the prompt has no tokens; give at least one token')
    bounded_cache = cache.clip(len(ids_T) + num_tokens + count_sink_tokens(spec))

    def sample_next(
        model: Transformer, stream: StreamState, id_BT: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, StreamState]:
        hidden_BTD, stream = read_tokens(model, bounded_cache, stream, id_BT)
        return sampler(compute_logits(hidden_BTD[:, -1:], model.head[...])[0, 0], key), stream

    sample_step = jit_model_function(spec, sample_next, donate_argnums=1)
    stream = jit_model_function(spec, lambda model: init_stream(model, bounded_cache))(params)
    seed_key = jax.random.key(seed)
    for segment_T in np.split(strip_loss_mask(ids_T), range(SEGMENT_TOKENS, len(ids_T), SEGMENT_TOKENS)):
        id_BT = segment_T[None].astype(np.int32)
        next_id, stream = sample_step(params, stream, id_BT, jax.random.fold_in(seed_key, 0))
    for index in range(1, num_tokens + 1):
        if int(next_id) == spec.data.end_token:
            return
        yield int(next_id)
        if index < num_tokens:
            id_BT = next_id[None, None].astype(jnp.int32)
            next_id, stream = sample_step(params, stream, id_BT, jax.random.fold_in(seed_key, index))


@dataclasses.dataclass(frozen=True)
class StreamingLoss:
    """Loss of a text that was read with a KV cache."""

    loss: float  # mean over predicted tokens, in nats
    num_predicted: int
    seconds: float  # without compilation

    @property
    def perplexity(self) -> float:
        with np.errstate(over='ignore'):
            return float(np.exp(self.loss))


def check_streaming(spec: Spec, cache: CacheConfig) -> None:
    """Raise UserError if a model cannot read token by token, or lacks positions for a cache."""
    mask = spec.model.mask
    if spec.data.task != 'text':
        raise UserError(f'the run has config.data.task={spec.data.task}, which is not text; give a run of task=text')
    if mask.prefix:
        raise UserError(
            f'config.model.mask.prefix={mask.prefix} lets the first tokens see later tokens, which are not available '
            'when a text is read token by token; give a run without prefix'
        )
    if mask.block:
        raise UserError(f'config.model.mask.block={mask.block} has no KV cache; give a run without block')
    if spec.model.forget_gate:
        raise UserError('config.model.forget_gate=True has no KV cache; give a run without forget_gate')
    feature_map = spec.model.attention.feature_map
    if feature_map != 'identity' and any(layer_type.position == 'rotary' for layer_type in spec.model.layer_types):
        raise UserError(
            f'config.model.attention.feature_map={feature_map} of rotated keys has no KV cache; give a run with '
            'feature_map=identity, or with another position'
        )
    last_position = spec.data.length + count_sink_tokens(spec) - 1
    if spec.model.position == 'learned' and cache.size > last_position:
        raise UserError(
            f'--cache={cache} needs position {cache.size}, and the model has 0 to {last_position}; lower x + y'
        )


def count_sink_tokens(spec: Spec) -> int:
    """Return the number of sink tokens that the model prepends to a text."""
    return LEARNED_KV_KINDS[spec.model.learned_kv.kind].tokens_class.num_tokens


def jit_model_function(spec: Spec, function: Callable, **options) -> Callable:
    """Compile function(model, ...) as a program of (params, ...)."""
    graphdef, _ = state.make_abstract_model(spec)

    def apply_function(params: dict, *arguments) -> tuple:
        return function(nnx.merge(graphdef, params), *arguments)

    return jax.jit(
        apply_function, compiler_options=state.get_compiler_options(spec, make_one_device_mesh()), **options
    )


def measure_perplexity(
    spec: Spec, cache: CacheConfig, params: dict, ids_T: np.ndarray, segment_tokens: int = SEGMENT_TOKENS
) -> StreamingLoss:
    """Read a text in segments and predict each token from the cached keys before it.

    An id that is read but not predicted is given as its complement (see `sinklab.loss_mask`).
    """
    check_streaming(spec, cache)
    num_predicted = int(is_in_loss(ids_T[1:]).sum())
    if not num_predicted:
        raise UserError(f'a text of {len(ids_T)} tokens has no token to predict; give a longer text')
    bounded_cache = cache.clip(len(ids_T) + count_sink_tokens(spec))

    def sum_segment_loss(model: nnx.Module, stream: StreamState, id_BT: jax.Array, target_BT: jax.Array) -> tuple:
        hidden_BTD, stream = read_tokens(model, bounded_cache, stream, id_BT)
        return sum_losses(hidden_BTD, model.head[...], target_BT, gradient=False)[0], stream

    ids_NBT = split_into_segments(strip_loss_mask(ids_T[:-1]), 0, segment_tokens)
    targets_NBT = split_into_segments(ids_T[1:], exclude_from_loss(0), segment_tokens)
    stream = jit_model_function(spec, lambda model: init_stream(model, bounded_cache))(params)
    compiled_loss = (
        jit_model_function(spec, sum_segment_loss, donate_argnums=1)
        .lower(params, stream, ids_NBT[0], targets_NBT[0])
        .compile()
    )
    start_time = time.perf_counter()
    segment_losses = []
    for id_BT, target_BT in zip(ids_NBT, targets_NBT, strict=True):
        total_loss, stream = compiled_loss(params, stream, id_BT, target_BT)
        segment_losses.append(total_loss)
    total_loss = sum(map(float, jax.device_get(segment_losses)))
    return StreamingLoss(total_loss / num_predicted, num_predicted, time.perf_counter() - start_time)


def split_into_segments(ids_T: np.ndarray, fill_id: int, max_tokens: int) -> np.ndarray:
    """Split a text into N equal segments of at most `max_tokens`, the last one filled; B is 1."""
    num_segments = -(-len(ids_T) // max_tokens)
    segment_tokens = -(-len(ids_T) // num_segments)
    filled_T = np.pad(
        ids_T.astype(np.int32), (0, num_segments * segment_tokens - len(ids_T)), constant_values=fill_id
    )
    return filled_T.reshape(num_segments, 1, segment_tokens)
