"""What a run is: frozen records, parsed once from a config and checked before anything compiles.

A field's type is its whole rule: a `Literal` is a menu, an `Annotated` carries its domain. Rules between
fields stand in `refusals`. No field has a default here; those are written once, in configs/default.py.
"""

import dataclasses
import difflib
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints


class Refusal(ValueError):
    """What was asked cannot be done. The message says what was given, what is allowed and what to do."""


@dataclasses.dataclass(frozen=True)
class Domain:
    words: str
    holds: Callable[[Any], bool]


Count = Annotated[int, Domain('a whole number of at least 1', lambda x: x >= 1)]
Natural = Annotated[int, Domain('a whole number of at least 0', lambda x: x >= 0)]
Positive = Annotated[float, Domain('a finite number above 0', lambda x: 0 < x < math.inf)]
Nonnegative = Annotated[float, Domain('a finite number of at least 0', lambda x: 0 <= x < math.inf)]
Fraction = Annotated[float, Domain('a number between 0 and 1, both excluded', lambda x: 0 < x < 1)]
Momentum = Annotated[float, Domain('a number from 0 up to, but not, 1', lambda x: 0 <= x < 1)]
Seed = Annotated[int, Domain('a whole number from 0 to 2^32 - 1', lambda x: 0 <= x < 2**32)]
Text = Annotated[str, Domain('a text that is not empty', bool)]

Similarity = Literal['exp', 'sigmoid']
Normalizer = Literal['sum', 'none']
PAIRS: dict[str, tuple[str, ...]] = {'exp': ('sum',), 'sigmoid': ('none', 'sum')}

SMALLEST_TRAINED = 258


@dataclasses.dataclass(frozen=True)
class Attention:
    similarity: Similarity
    normalizer: Normalizer


@dataclasses.dataclass(frozen=True)
class Model:
    layers: Count
    width: Count
    heads: Count
    head_width: Count
    ffn_width: Count
    vocabulary: Count
    position: Literal['none', 'rotary']
    norm_epsilon: Positive
    initialization: Literal['released', 'gpt2']
    dtype: Literal['bfloat16', 'float32']  # of the computation; parameters and statistics are float32
    attention: Attention


@dataclasses.dataclass(frozen=True)
class Optimizer:
    name: Literal['adamw']
    peak_learning_rate: Positive
    final_learning_rate: Positive | None  # where the cosine ends
    schedule: Literal['constant', 'cosine']
    warmup_steps: Natural
    steps: Count
    batch_size: Count
    weight_decay: Nonnegative
    clip_norm: Positive
    beta1: Momentum
    beta2: Momentum
    epsilon: Positive


@dataclasses.dataclass(frozen=True)
class Data:
    source: Text  # stdlib | text:GLOB
    tokenizer: Text  # train | path of a tokenizer.json
    length: Count
    held_out: Fraction
    fixed_position: Count | None  # this place of every sequence holds the token FIXED_TOKEN
    seed: Seed


@dataclasses.dataclass(frozen=True)
class Valid:
    every_steps: Natural  # 0: only at the start and the end, here and in Probe
    windows: Count


@dataclasses.dataclass(frozen=True)
class Probe:
    every_steps: Natural
    sequences: Count
    length: Annotated[int, Domain('at least 2', lambda x: x >= 2)]
    keys: Count  # importance is reported for keys 1..keys


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    every_steps: Natural  # 0: only at the end
    keep: Annotated[int, Domain('at least 2, so that there is one before the newest', lambda x: x >= 2)]


@dataclasses.dataclass(frozen=True)
class Log:
    every_steps: Count


@dataclasses.dataclass(frozen=True)
class Spec:
    model: Model
    optimizer: Optimizer
    data: Data
    valid: Valid
    probe: Probe
    checkpoint: Checkpoint
    log: Log
    seed: Seed


@dataclasses.dataclass(frozen=True)
class Hardware:
    """How a run is laid on devices. Never part of a row: the result is the same on all of them."""

    data: Count = 1
    fsdp: Count = 1
    tensor: Count = 1
    micro_batch: Count | None = None  # sequences at once, over all devices; None: the whole batch
    remat: bool = False


def parse(config: Mapping[str, Any]) -> Spec:
    """The spec that a config (nested mapping) describes; `Refusal` names the first thing wrong with it."""
    spec = record(Spec, config, 'config')
    for refusal in refusals(spec):
        raise Refusal(refusal)
    return spec


def record(kind: type, given: Any, at: str) -> Any:
    if not isinstance(given, Mapping):
        raise Refusal(f'{at} is {given!r}; it must hold the fields {", ".join(names(kind))}')
    for name in given:
        if name not in names(kind):
            raise Refusal(unknown(f'{at}.{name}', name, names(kind)))
    if missing := [name for name in names(kind) if name not in given]:
        raise Refusal(f'{at}.{missing[0]} is missing; start from configs/default.py, which has every field')
    hints = get_type_hints(kind, include_extras=True)
    return kind(**{name: field(hints[name], given[name], f'{at}.{name}') for name in names(kind)})


def field(hint: Any, given: Any, at: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return record(hint, given, at)
    if isinstance(hint, types.UnionType) or get_origin(hint) is Union:
        return None if given is None else field(get_args(hint)[0], given, at)
    if get_origin(hint) is Literal:
        if given not in get_args(hint):
            raise Refusal(unknown(f'{at} = {given!r}', str(given), get_args(hint), 'allowed'))
        return given
    kind, domain = get_args(hint)
    value = float(given) if kind is float and type(given) is int else given
    if type(value) is not kind or not domain.holds(value):
        raise Refusal(f'{at} is {given!r}; it must be {domain.words}')
    return value


def names(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def unknown(what: str, name: str, allowed: Iterable[str], label: str = 'fields here') -> str:
    allowed = list(allowed)
    near = difflib.get_close_matches(name, allowed, 1)
    return f'{what} is unknown{f"; did you mean {near[0]}?" if near else ""} ({label}: {", ".join(allowed)})'


def refusals(spec: Spec) -> Iterator[str]:
    """What each field allows and the fields together do not."""
    attention, optimizer, data, probe = spec.model.attention, spec.optimizer, spec.data, spec.probe
    if attention.normalizer not in PAIRS[attention.similarity]:
        yield (
            f'config.model.attention pairs similarity {attention.similarity} with normalizer '
            f'{attention.normalizer}, which means nothing; {attention.similarity} goes with: '
            f'{", ".join(PAIRS[attention.similarity])}'
        )
    if spec.model.position == 'rotary' and spec.model.head_width % 2:
        yield f'config.model.head_width is {spec.model.head_width}; rotary positions need an even one'
    if data.tokenizer == 'train' and spec.model.vocabulary < SMALLEST_TRAINED:
        yield (
            f'config.model.vocabulary is {spec.model.vocabulary}; a tokenizer trained here has at least '
            f'{SMALLEST_TRAINED} ids, two special ones and the bytes'
        )
    if optimizer.warmup_steps >= optimizer.steps:
        yield (
            f'config.optimizer.warmup_steps is {optimizer.warmup_steps}, but the run has {optimizer.steps} '
            'steps; warm up for fewer, or raise config.optimizer.steps'
        )
    if (optimizer.schedule == 'cosine') != (optimizer.final_learning_rate is not None):
        yield (
            f'config.optimizer.final_learning_rate is {optimizer.final_learning_rate} with the schedule '
            f'{optimizer.schedule}; cosine needs one, constant has no use for it (None)'
        )
    if optimizer.final_learning_rate and optimizer.final_learning_rate > optimizer.peak_learning_rate:
        yield (
            f'config.optimizer.final_learning_rate is {optimizer.final_learning_rate}; it must be at most the '
            f'peak, {optimizer.peak_learning_rate}'
        )
    if data.fixed_position and data.fixed_position > data.length:
        yield f'config.data.fixed_position is {data.fixed_position}; windows have {data.length} places'
    if probe.length > data.length:
        yield (
            f'config.probe.length is {probe.length}, longer than a window (config.data.length is '
            f'{data.length}); probe at most that many tokens'
        )
    if probe.keys > probe.length:
        yield f'config.probe.keys is {probe.keys}; a probe sequence has {probe.length} keys'
