"""A trained model that reads a text of any length: what it can be asked, and the perplexity that it has."""

import dataclasses
import time
from collections.abc import Callable

import jax
import numpy as np
from flax import nnx

from sinklab import devices
from sinklab.model.columns import COLUMNS
from sinklab.model.streaming import Cache, Stream, begin, read
from sinklab.record import Refusal
from sinklab.spec import Hardware, Spec
from sinklab.targets import is_predicted, readable, unpredicted
from sinklab.train import state
from sinklab.train.loss import sums

SEGMENT = 1024  # tokens that are read at once, at most


@dataclasses.dataclass(frozen=True)
class Read:
    """What came of reading a text."""

    loss: float  # mean over what is predicted, nats
    predicted: int
    seconds: float  # without what was compiled

    @property
    def perplexity(self) -> float:
        with np.errstate(over='ignore'):
            return float(np.exp(self.loss))


def check(spec: Spec, cache: Cache) -> None:
    """Refuses a model that does not read token by token, or has no positions for such a cache."""
    mask, at = spec.model.mask, f'--cache={cache}'
    if spec.data.task != 'text':
        raise Refusal(f'a run of config.data.task={spec.data.task} has read no text; give one of task=text')
    if mask.prefix:
        raise Refusal(
            f'config.model.mask.prefix={mask.prefix} shows the first tokens what comes after them, which is not yet '
            'there when a text is read token by token; give a run without'
        )
    if mask.block:
        raise Refusal(
            f'config.model.mask.block={mask.block} cuts windows, and {at} has no blocks; give a run without'
        )
    last = spec.data.length + sinks(spec) - 1
    if spec.model.position == 'learned' and cache.size > last:
        raise Refusal(f'{at} asks at position {cache.size}, and the model has learned 0 to {last}; lower x + y')


def sinks(spec: Spec) -> int:
    """How many tokens the model puts before a text."""
    return COLUMNS[spec.model.columns.kind].token.count


def device() -> jax.sharding.Mesh:
    """One device: a text is a single sequence."""
    return devices.mesh(Hardware(), devices.found()[:1])


def parameters(spec: Spec) -> dict:
    """What parameters are to be there, as arrays without memory."""
    return state.abstract(spec, device())['params']


def compiled(spec: Spec, function: Callable, **options) -> Callable:
    """function(model, ...) as a program of (params, ...)."""
    graph, _ = state.architecture(spec)

    def of_parameters(params: dict, *given) -> tuple:
        return function(nnx.merge(graph, params), *given)

    return jax.jit(of_parameters, compiler_options=state.compiler_options(spec, device()), **options)


def read_text(spec: Spec, cache: Cache, params: dict, ids_T: np.ndarray, segment: int = SEGMENT) -> Read:
    """Reads all of a text, so many tokens at once, each predicted from what the cache has of those before it.

    An id that is read and not predicted stands as its complement.
    """
    check(spec, cache)
    predicted = int(is_predicted(ids_T[1:]).sum())
    if not predicted:
        raise Refusal(f'a text of {len(ids_T)} tokens has none to predict; give a longer one')
    kept = cache.within(len(ids_T) + sinks(spec))

    def losses(model: nnx.Module, stream: Stream, id_BT: jax.Array, target_BT: jax.Array) -> tuple:
        hidden_BTD, stream = read(model, kept, stream, id_BT)
        return sums(hidden_BTD, model.head[...], target_BT, gradient=False)[0], stream

    ids_NBT, targets_NBT = segments(readable(ids_T[:-1]), 0, segment), segments(ids_T[1:], unpredicted(0), segment)
    stream = compiled(spec, lambda model: begin(model, kept))(params)
    program = compiled(spec, losses, donate_argnums=1).lower(params, stream, ids_NBT[0], targets_NBT[0]).compile()
    start, totals = time.perf_counter(), []
    for id_BT, target_BT in zip(ids_NBT, targets_NBT, strict=True):
        total, stream = program(params, stream, id_BT, target_BT)
        totals.append(total)
    total = sum(map(float, jax.device_get(totals)))
    return Read(total / predicted, predicted, time.perf_counter() - start)


def segments(ids_T: np.ndarray, filler: int, most: int) -> np.ndarray:
    """N equal parts of at most so many, with a filler in the last; B is 1."""
    number = -(-len(ids_T) // most)
    each = -(-len(ids_T) // number)
    filled_T = np.pad(ids_T.astype(np.int32), (0, number * each - len(ids_T)), constant_values=filler)
    return filled_T.reshape(number, 1, each)
