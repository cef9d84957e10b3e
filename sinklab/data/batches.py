"""Batches: the sequences of a step, a pure function of (seed, step), whole or the rows that a process needs."""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import numpy as np

from sinklab import spec
from sinklab.data.corpus import corpus
from sinklab.data.documents.sources import texts
from sinklab.data.sequences import backcopy, probes
from sinklab.data.sequences.interventions import Intervened, with_fixed_token
from sinklab.data.sequences.shuffled import Held, Shuffled
from sinklab.data.sequences.windows import Windows
from sinklab.data.store.shard import IDS, PREDICTED
from sinklab.data.store.shelf import covered
from sinklab.data.store.store import Store
from sinklab.record import Refusal


class Batches(Protocol):
    """Batches of int32_BT of T + 1 ids, by step from 0; there is no last one."""

    def rows(self, step: int, rows: Iterable[int]) -> np.ndarray: ...

    def mark(self, step: int) -> str:
        """What processes compare, to see that theirs is one batch."""
        ...

    def epochs(self, step: int) -> dict[str, float]:
        """How often the data has been read before a step; of a mixture, what is read most, and each domain."""
        ...


class Drawn:
    """Batches drawn from a chain."""

    def __init__(self, chain: backcopy.Chain, seed: int, batch_size: int, length: int):
        self.chain, self.seed, self.shape = chain, seed, (batch_size, length)

    def rows(self, step: int, rows: range) -> np.ndarray:
        rng = np.random.default_rng([self.seed, TRAINING, step])
        return backcopy.sample(self.chain, *self.shape, rng, rows)

    def mark(self, step: int) -> str:
        return hashlib.sha256(self.rows(step, range(self.shape[0])).tobytes()).hexdigest()[:16]

    def epochs(self, step: int) -> dict[str, float]:
        return {}


@dataclasses.dataclass(frozen=True)
class Sequences:
    """All that a run reads."""

    batches: Batches
    valid_NT: np.ndarray | Held  # held-out windows of T + 1 ids
    probe_PT: np.ndarray
    fingerprint: dict[str, str | int]  # of what decides the batches
    triggers: int | None = None  # the ids below it are triggers of Bigram-Backcopy
    tokenizer: str | None = None  # the text of its tokenizer.json
    expect: Callable[[int], None] = lambda first: None  # is told the step after which batches are read
    told: tuple[str, ...] = ()  # lines for whoever follows the run

    def is_trigger(self, ids_NT: np.ndarray) -> np.ndarray | None:
        return None if self.triggers is None else ids_NT < self.triggers

    def valid_triggers(self) -> np.ndarray | None:
        return None if self.triggers is None else self.is_trigger(self.valid_NT[:, :-1])


TRAINING, VALIDATION, PROBE = range(3)  # streams of random numbers


def sequences(spec: spec.Spec, share: float = 1.0) -> Sequences:
    """What a run reads; `share` is how much of each batch this process does."""
    return TASKS[spec.data.task](spec, share)


def fingerprint(spec: spec.Spec, **more: str) -> dict[str, str | int]:
    return dict(**more, seed=spec.data.seed, batch_size=spec.optimizer.batch_size, length=spec.data.length)


def text(spec: spec.Spec, share: float) -> Sequences:
    data, vocabulary = spec.data, spec.model.vocabulary
    store = corpus(data, vocabulary)
    weights, masked = store.meta['weights'], data.loss == 'assistant'
    parts = {name: [name] for name in weights} or {'': store.domains}  # mixed by weight, or shuffled together
    held_parts, held_weights = of_one(store, spec.valid.domain) if spec.valid.domain else (parts, weights)

    def windows(side: str, parts: dict[str, list[str]], share: float, fix: bool) -> list[Intervened]:
        found = []
        for name, domains in parts.items():
            rows, label = [store.row(side, domain) for domain in domains], f'{side} {name}'.strip()
            part = Windows(rows, data.length, label, share, data.seed, masked)
            found.append(Intervened(part, data, vocabulary, fix))
        return found

    held_out = windows('held_out', held_parts, 1.0, data.fixed_held_out)
    enough(spec, held_out, held_weights)
    probe_PT = probes.INPUTS[spec.probe.inputs](store, spec.probe, PREPENDED[spec.probe.prepend](data))
    far = dict(each=store.each, store=store.mark) if store.remote else {}
    train = windows('train', parts, data.share, True)
    batches = Shuffled(train, data.seed, spec.optimizer.batch_size, weights, **far)
    valid = Shuffled(held_out, 0, spec.valid.windows, held_weights, **far)
    return Sequences(
        batches,
        valid_NT=Held(valid, data.length) if far else valid.rows(0, range(spec.valid.windows)),
        probe_PT=with_fixed_token(probe_PT, data) if data.fixed_held_out else probe_PT,
        fingerprint=fingerprint(spec, store=store.digest, tokenizer=store.meta['tokenizer'][:16]),
        expect=functools.partial(expect, store, batches, spec, share),
        tokenizer=store.tokenizer_json(),
        told=share_told(data, train),
    )


def share_told(data: spec.Data, train: list[Intervened]) -> tuple[str, ...]:
    """How much data.share is, which the tables of the paper say in tokens."""
    if data.share == 1:
        return ()
    chosen, there = sum(map(len, train)), sum(part.windows.ends[-1] for part in train)
    read, whole = (count * (data.length + 1) for count in (chosen, there))
    return (f'data.share {data.share:g} is {read:,} of {whole:,} training tokens; in the paper, of 5,000,000,000',)


def of_one(store: Store, domain: str) -> tuple[dict[str, list[str]], dict[str, float]]:
    """A mixture of nothing else: (the domains of each part, weights)."""
    [name] = store.named(domain, 'config.valid.domain')
    return {name: [name]}, {name: 1.0}


def expect(store: Store, batches: Shuffled, spec: spec.Spec, share: float, first: int) -> None:
    """Tells a store how much of it is read after a step by a process that reads this share of a run's rows."""
    ends = batches.epochs_of_each(spec.optimizer.steps), batches.epochs_of_each(first)
    epochs = [end - begin for end, begin in zip(*ends, strict=True)]
    read = sum(len(part) * covered(share, of) for part, of in zip(batches.windows, epochs, strict=True))
    there = sum(part.windows.ends[-1] for part in batches.windows)
    store.expect(read / there, (IDS, PREDICTED) if spec.data.loss == 'assistant' else (IDS,))


def enough(spec: spec.Spec, held_out: list[Intervened], weights: Mapping[str, float]) -> None:
    """Refuses validation that would read a window twice."""
    for part, name in zip(held_out, weights or [''], strict=True):
        wanted = math.ceil(spec.valid.windows * weights.get(name, 1.0))
        if len(part) < wanted:
            documents = f'documents of {name}' if name else 'documents'
            raise Refusal(
                f'config.valid.windows is {spec.valid.windows} and the held-out {documents} have {len(part)} '
                f'windows of {spec.data.length + 1} tokens, of which it takes {wanted}; lower it, lower '
                'config.data.length, or hold out more'
            )


def bigrams(spec: spec.Spec, _: float) -> Sequences:
    data, valid, probe = spec.data, spec.valid, spec.probe
    chain = backcopy.chain(texts(data.source), spec.model.vocabulary, data.triggers)

    def draw(stream: int, *shape: int) -> np.ndarray:
        return backcopy.sample(chain, *shape, np.random.default_rng([data.seed, stream]))

    return Sequences(
        batches=Drawn(chain, data.seed, spec.optimizer.batch_size, data.length + 1),
        valid_NT=draw(VALIDATION, valid.windows, data.length + 1),
        probe_PT=draw(PROBE, probe.sequences, probe.length),
        fingerprint=fingerprint(spec, bigrams=chain.digest),
        triggers=chain.triggers,
    )


TASKS = {'text': text, 'backcopy': bigrams}
PREPENDED = {'none': lambda data: [], 'bos': lambda data: [data.fixed_token], 'eos': lambda data: [data.end_token]}
