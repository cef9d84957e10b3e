"""A text that goes on as a trained model would have it."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from sinklab.model.streaming import Cache, Stream, begin, read
from sinklab.model.transformer import Transformer, logits
from sinklab.record import Refusal
from sinklab.spec import Spec
from sinklab.targets import readable
from sinklab.train.streaming import SEGMENT, check, compiled, sinks

COLDEST = 1e-30  # float32 divides by no less


@dataclasses.dataclass(frozen=True)
class Choice:
    """How the next token is drawn: from softmax(logits / temperature), at temperature 0 the likeliest."""

    temperature: float
    top_k: int | None  # the likeliest alone; None: all

    def __call__(self, logits_V: jax.Array, key: jax.Array) -> jax.Array:
        if self.temperature < COLDEST:
            return logits_V.argmax()
        likeliest_V, id_V = jax.lax.top_k(logits_V, self.top_k or len(logits_V))
        return id_V[jax.random.categorical(key, (likeliest_V - likeliest_V[0]) / self.temperature)]


def sample(
    spec: Spec, cache: Cache, params: dict, ids_T: np.ndarray, tokens: int, choice: Choice, seed: int
) -> Iterator[int]:
    """So many ids after those of a prompt, or fewer: up to the end of the document, which is not given."""
    check(spec, cache)
    if not len(ids_T):
        raise Refusal('a prompt of no tokens has nothing to go on from; give one')
    kept = cache.within(len(ids_T) + tokens + sinks(spec))
    return continued(spec, kept, params, readable(ids_T), tokens, choice, seed)


def continued(
    spec: Spec, cache: Cache, params: dict, ids_T: np.ndarray, tokens: int, choice: Choice, seed: int
) -> Iterator[int]:
    def following(model: Transformer, stream: Stream, id_BT: jax.Array, key: jax.Array) -> tuple[jax.Array, Stream]:
        hidden_BTD, stream = read(model, cache, stream, id_BT)
        return choice(logits(hidden_BTD[:, -1:], model.head[...])[0, 0], key), stream

    step = compiled(spec, following, donate_argnums=1)
    stream = compiled(spec, lambda model: begin(model, cache))(params)
    for part_T in np.split(ids_T, range(SEGMENT, len(ids_T), SEGMENT)):
        given_BT = part_T[None].astype(np.int32)
        found, stream = step(params, stream, given_BT, key_of(seed, 0))
    for number in range(1, tokens + 1):
        if int(found) == spec.data.end_token:
            return
        yield int(found)
        if number < tokens:
            found, stream = step(params, stream, found[None, None].astype(jnp.int32), key_of(seed, number))


def key_of(seed: int, number: int) -> jax.Array:
    return jax.random.fold_in(jax.random.key(seed), number)
