"""Batches: the sequences of a step, a pure function of (seed, step)."""

import dataclasses
from typing import Protocol

import grain
import numpy as np

from sinklab import spec
from sinklab.data import backcopy
from sinklab.data.documents import read
from sinklab.data.interventions import Intervened, fixed
from sinklab.data.tokens import BEGIN, END_OF_TEXT, tokens
from sinklab.data.windows import Windows, first_tokens
from sinklab.record import Refusal

PREPENDED = {'none': None, 'bos': BEGIN, 'eos': END_OF_TEXT}


class Batches(Protocol):
    """batches[step] is int32_BT of T + 1 ids; there is no last one."""

    def __getitem__(self, step: int) -> np.ndarray: ...


class Shuffled:
    """Batches of windows, each epoch shuffled anew."""

    def __init__(self, windows: Intervened, seed: int, batch_size: int):
        self.dataset = grain.MapDataset.source(windows).seed(seed).shuffle().repeat().batch(batch_size)

    def __getitem__(self, step: int) -> np.ndarray:
        return self.dataset[step]


class Drawn:
    """Batches drawn from a chain."""

    def __init__(self, chain: backcopy.Chain, seed: int, batch_size: int, length: int):
        self.chain, self.seed, self.shape = chain, seed, (batch_size, length)

    def __getitem__(self, step: int) -> np.ndarray:
        return backcopy.sample(self.chain, *self.shape, np.random.default_rng([self.seed, TRAINING, step]))


@dataclasses.dataclass(frozen=True)
class Sequences:
    """All that a run reads."""

    batches: Batches
    valid_NT: np.ndarray  # held-out windows of T + 1 ids
    probe_PT: np.ndarray
    digest: str  # of the documents, their split and their tokenizer
    triggers: int | None = None  # the ids below it are triggers of Bigram-Backcopy

    def triggered(self, ids_NT: np.ndarray) -> np.ndarray | None:
        return None if self.triggers is None else ids_NT < self.triggers


TRAINING, VALIDATION, PROBE = range(3)  # streams of random numbers


def sequences(spec: spec.Spec) -> Sequences:
    return TASKS[spec.data.task](spec)


def text(spec: spec.Spec) -> Sequences:
    data, vocabulary = spec.data, spec.model.vocabulary
    corpus = tokens(data, vocabulary)
    training = Windows(corpus.train, data.length, 'training', data.share, data.seed)
    batches = Shuffled(Intervened(training, data, vocabulary, fix=True), data.seed, spec.optimizer.batch_size)
    held_out = Windows(corpus.held_out, data.length, 'held-out')
    if len(held_out) < spec.valid.windows:
        raise Refusal(
            f'config.valid.windows is {spec.valid.windows} and the held-out documents have {len(held_out)} '
            f'windows of {data.length + 1} tokens; lower it, or raise config.data.held_out'
        )
    valid = Intervened(held_out, data, vocabulary, data.fixed_held_out)
    valid_NT = np.stack([valid[i] for i in range(spec.valid.windows)])
    probe_PT = first_tokens(corpus, spec.probe.sequences, spec.probe.length, PREPENDED[spec.probe.prepend])
    return Sequences(batches, valid_NT, fixed(probe_PT, data) if data.fixed_held_out else probe_PT, corpus.digest)


def bigrams(spec: spec.Spec) -> Sequences:
    data, valid, probe = spec.data, spec.valid, spec.probe
    chain = backcopy.chain(read(data.source), spec.model.vocabulary, data.triggers)
    draw = lambda stream, *shape: backcopy.sample(chain, *shape, np.random.default_rng([data.seed, stream]))  # noqa: E731
    return Sequences(
        batches=Drawn(chain, data.seed, spec.optimizer.batch_size, data.length + 1),
        valid_NT=draw(VALIDATION, valid.windows, data.length + 1),
        probe_PT=draw(PROBE, probe.sequences, probe.length),
        digest=chain.digest,
        triggers=chain.triggers,
    )


TASKS = {'text': text, 'backcopy': bigrams}
