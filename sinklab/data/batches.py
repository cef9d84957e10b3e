"""Batches: the sequences of a step, a pure function of (seed, step), whole or the rows that a process needs."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Protocol

import grain
import numpy as np

from sinklab import spec
from sinklab.data.corpus import corpus
from sinklab.data.documents.sources import texts
from sinklab.data.sequences import backcopy, probes
from sinklab.data.sequences.interventions import Intervened, with_fixed_token
from sinklab.data.sequences.windows import Windows
from sinklab.record import Refusal


class Batches(Protocol):
    """Batches of int32_BT of T + 1 ids, by step from 0; there is no last one."""

    def rows(self, step: int, rows: range) -> np.ndarray: ...

    def epochs(self, step: int) -> dict[str, float]:
        """How often the data has been read before a step; of a mixture, what is read most, and each domain."""
        ...


class Shuffled:
    """Batches of windows, each epoch shuffled anew; with weights, of several sets of windows in those shares."""

    def __init__(
        self, windows: list[Intervened], seed: int, batch_size: int, weights: Mapping[str, float] | None = None
    ):
        self.windows, self.batch_size, self.weights = windows, batch_size, weights
        orders = [grain.MapDataset.source(part).seed(seed).shuffle().repeat() for part in windows]
        self.dataset = grain.MapDataset.mix(orders, list(weights.values())) if weights else orders[0]

    def rows(self, step: int, rows: range) -> np.ndarray:
        return np.stack([self.dataset[step * self.batch_size + row] for row in rows])

    def epochs(self, step: int) -> dict[str, float]:
        read = step * self.batch_size
        if not self.weights:
            return {'data/epoch': read / len(self.windows[0])}
        shares = zip(self.weights.items(), self.windows, strict=True)
        epochs = {name: read * share / len(part) for (name, share), part in shares}
        return {'data/epoch': max(epochs.values()), **{f'data/epoch/{name}': of for name, of in epochs.items()}}


class Drawn:
    """Batches drawn from a chain."""

    def __init__(self, chain: backcopy.Chain, seed: int, batch_size: int, length: int):
        self.chain, self.seed, self.shape = chain, seed, (batch_size, length)

    def rows(self, step: int, rows: range) -> np.ndarray:
        rng = np.random.default_rng([self.seed, TRAINING, step])
        return backcopy.sample(self.chain, *self.shape, rng)[rows.start : rows.stop]

    def epochs(self, step: int) -> dict[str, float]:
        return {}


@dataclasses.dataclass(frozen=True)
class Sequences:
    """All that a run reads."""

    batches: Batches
    valid_NT: np.ndarray  # held-out windows of T + 1 ids
    probe_PT: np.ndarray
    fingerprint: dict[str, str | int]  # of what decides the batches
    triggers: int | None = None  # the ids below it are triggers of Bigram-Backcopy

    def is_trigger(self, ids_NT: np.ndarray) -> np.ndarray | None:
        return None if self.triggers is None else ids_NT < self.triggers


TRAINING, VALIDATION, PROBE = range(3)  # streams of random numbers


def sequences(spec: spec.Spec) -> Sequences:
    return TASKS[spec.data.task](spec)


def fingerprint(spec: spec.Spec, **more: str) -> dict[str, str | int]:
    return dict(**more, seed=spec.data.seed, batch_size=spec.optimizer.batch_size, length=spec.data.length)


def text(spec: spec.Spec) -> Sequences:
    data, vocabulary = spec.data, spec.model.vocabulary
    store = corpus(data, vocabulary)
    weights, masked = store.meta['weights'], data.loss == 'assistant'
    parts = {name: [name] for name in weights} or {'': store.domains}  # mixed by weight, or shuffled together

    def windows(side: str, share: float, fix: bool) -> list[Intervened]:
        found = []
        for name, domains in parts.items():
            rows, label = [store.row(side, domain) for domain in domains], f'{side} {name}'.strip()
            part = Windows(rows, data.length, label, share, data.seed, masked)
            found.append(Intervened(part, data, vocabulary, fix))
        return found

    held_out = windows('held_out', 1.0, data.fixed_held_out)
    enough(spec, held_out, weights)
    probe_PT = probes.INPUTS[spec.probe.inputs](store, spec.probe, PREPENDED[spec.probe.prepend](data))
    return Sequences(
        Shuffled(windows('train', data.share, True), data.seed, spec.optimizer.batch_size, weights),
        valid_NT=Shuffled(held_out, 0, spec.valid.windows, weights).rows(0, range(spec.valid.windows)),
        probe_PT=with_fixed_token(probe_PT, data) if data.fixed_held_out else probe_PT,
        fingerprint=fingerprint(spec, store=store.digest, tokenizer=store.meta['tokenizer'][:16]),
    )


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


def bigrams(spec: spec.Spec) -> Sequences:
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
