"""A text that goes on as a trained model would have it."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from sinklab.model.streaming import CacheConfig, StreamState, init_stream, read_tokens
from sinklab.model.transformer import Transformer, compute_logits
from sinklab.record import UserError
from sinklab.spec import Spec
from sinklab.targets import strip_loss_mask
from sinklab.train.streaming import SEGMENT_TOKENS, check_streaming, jit_model_function, count_sink_tokens

MIN_TEMPERATURE = 1e-30  # float32 divides by no less


@dataclasses.dataclass(frozen=True)
class Sampler:
    """How the next token is drawn: from softmax(logits / temperature), at temperature 0 the likeliest."""

    temperature: float
    top_k: int | None  # the likeliest alone; None: all

    def __call__(self, logits_V: jax.Array, key: jax.Array) -> jax.Array:
        if self.temperature < MIN_TEMPERATURE:
            return logits_V.argmax()
        top_logit_V, id_V = jax.lax.top_k(logits_V, self.top_k or len(logits_V))
        return id_V[jax.random.categorical(key, (top_logit_V - top_logit_V[0]) / self.temperature)]


def sample_tokens(
    spec: Spec, cache: CacheConfig, params: dict, ids_T: np.ndarray, num_tokens: int, sampler: Sampler, seed: int
) -> Iterator[int]:
    """So many ids after those of a prompt, or fewer: up to the end of the document, which is not given."""
    check_streaming(spec, cache)
    if not len(ids_T):
        raise UserError('a prompt of no tokens has nothing to go on from; give one')
    bounded_cache = cache.clip(len(ids_T) + num_tokens + count_sink_tokens(spec))
    return generate_tokens(spec, bounded_cache, params, strip_loss_mask(ids_T), num_tokens, sampler, seed)


def generate_tokens(
    spec: Spec, cache: CacheConfig, params: dict, ids_T: np.ndarray, num_tokens: int, sampler: Sampler, seed: int
) -> Iterator[int]:
    def sample_next(model: Transformer, stream: StreamState, id_BT: jax.Array, key: jax.Array) -> tuple[jax.Array, StreamState]:
        hidden_BTD, stream = read_tokens(model, cache, stream, id_BT)
        return sampler(compute_logits(hidden_BTD[:, -1:], model.head[...])[0, 0], key), stream

    sample_step = jit_model_function(spec, sample_next, donate_argnums=1)
    stream = jit_model_function(spec, lambda model: init_stream(model, cache))(params)
    for segment_T in np.split(ids_T, range(SEGMENT_TOKENS, len(ids_T), SEGMENT_TOKENS)):
        segment_BT = segment_T[None].astype(np.int32)
        next_id, stream = sample_step(params, stream, segment_BT, make_key(seed, 0))
    for index in range(1, num_tokens + 1):
        if int(next_id) == spec.data.end_token:
            return
        yield int(next_id)
        if index < num_tokens:
            next_id, stream = sample_step(params, stream, next_id[None, None].astype(jnp.int32), make_key(seed, index))


def make_key(seed: int, index: int) -> jax.Array:
    return jax.random.fold_in(jax.random.key(seed), index)
