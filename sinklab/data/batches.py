"""Batches: the sequences of a step, a pure function of (seed, step)."""

import dataclasses

import grain
import numpy as np

from sinklab import spec
from sinklab.data.interventions import intervene
from sinklab.data.tokens import tokens
from sinklab.data.windows import Windows, first_tokens
from sinklab.spec import Refusal


class Batches:
    """batches[step] is int32_BT of T + 1 ids; each epoch is shuffled anew, and there is no last one."""

    def __init__(self, windows: Windows, data: spec.Data, batch_size: int):
        self.data = data
        self.dataset = grain.MapDataset.source(windows).seed(data.seed).shuffle().repeat().batch(batch_size)

    def __getitem__(self, step: int) -> np.ndarray:
        return intervene(self.dataset[step], self.data)


@dataclasses.dataclass(frozen=True)
class Sequences:
    """All that a run reads."""

    batches: Batches
    valid_NT: np.ndarray  # held-out windows of T + 1 ids
    probe_PT: np.ndarray
    digest: str  # of the documents, their split and their tokenizer


def sequences(spec: spec.Spec) -> Sequences:
    data = spec.data
    corpus = tokens(data, spec.model.vocabulary)
    batches = Batches(Windows(corpus.train, data.length, 'training'), data, spec.optimizer.batch_size)
    held_out = Windows(corpus.held_out, data.length, 'held-out')
    if len(held_out) < spec.valid.windows:
        raise Refusal(
            f'config.valid.windows is {spec.valid.windows} and the held-out documents have {len(held_out)} '
            f'windows of {data.length + 1} tokens; lower it, or raise config.data.held_out'
        )
    valid_NT = np.stack([held_out[i] for i in range(spec.valid.windows)])
    probe_PT = first_tokens(corpus, spec.probe.sequences, spec.probe.length)
    return Sequences(batches, intervene(valid_NT, data), intervene(probe_PT, data), corpus.digest)
