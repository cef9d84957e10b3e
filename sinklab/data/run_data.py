"""Training batches as a pure function of (seed, step), and the data that a run reads."""

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

from sinklab.config.spec import DataConfig, Spec
from sinklab.data import bigram_backcopy, windows
from sinklab.data.prepare import open_corpus
from sinklab.data.sources import read_texts
from sinklab.data.windows import ShuffledBatches, Windows, set_fixed_token
from sinklab.errors import UserError


class Batches(Protocol):
    """Training batches of int32 token ids of shape (B, T + 1), by step from 0 without an upper bound."""

    def read_rows(self, step: int, rows: Iterable[int]) -> np.ndarray:
        """Return some rows of the batch of a step, int32 of shape (rows, T + 1)."""

    def compute_digest(self, step: int) -> str:
        """Return a digest of a batch, which processes compare to check that they read the same batch."""

    def compute_order_digest(self) -> str:
        """Return a digest of the order of the data; it is computed at each start, and must be cheap."""

    def count_epochs(self, step: int) -> dict[str, float]:
        """Count the epochs that are read before a step, by name in metrics.jsonl; {} for generated data."""


class SyntheticBatches:
    """Batches sampled from the Markov chain of the Bigram-Backcopy task."""

    def __init__(self, chain: bigram_backcopy.MarkovChain, seed: int, batch_size: int, length: int):
        self.chain, self.seed, self.shape = chain, seed, (batch_size, length)

    def read_rows(self, step: int, rows: range) -> np.ndarray:
        rng = np.random.default_rng([self.seed, TRAINING_STREAM, step])
        return bigram_backcopy.sample_sequences(self.chain, *self.shape, rng, rows)

    def compute_digest(self, step: int) -> str:
        return hashlib.sha256(self.read_rows(step, range(self.shape[0])).tobytes()).hexdigest()[:16]

    def compute_order_digest(self) -> str:
        return self.compute_digest(0)

    def count_epochs(self, step: int) -> dict[str, float]:
        return {}


@dataclasses.dataclass(frozen=True)
class RunData:
    """Training batches, held-out windows and probe sequences of a run."""

    batches: Batches
    valid_NT: np.ndarray  # held-out windows of T + 1 ids
    probe_PT: np.ndarray
    fingerprint: dict[str, str | int]  # digests and settings that determine the batches
    triggers: int | None = None  # ids below this number are trigger tokens of Bigram-Backcopy
    tokenizer: str | None = None  # contents of tokenizer.json
    messages: tuple[str, ...] = ()  # status lines for the user

    def is_trigger(self, ids_NT: np.ndarray) -> np.ndarray | None:
        """Return the mask of trigger tokens, or None if the task has no triggers."""
        return None if self.triggers is None else ids_NT < self.triggers

    def find_valid_triggers(self) -> np.ndarray | None:
        """Return the mask of trigger tokens in the inputs of the held-out windows, or None without triggers."""
        return None if self.triggers is None else self.is_trigger(self.valid_NT[:, :-1])


TRAINING_STREAM, VALIDATION_STREAM, PROBE_STREAM = range(3)  # seeds of independent random streams


def load_run_data(spec: Spec) -> RunData:
    """Load the training batches, held-out windows and probe sequences of a run.

    Raises:
        UserError: The source cannot be read or does not match the configuration, or it has too few windows.
    """
    return TASKS[spec.data.task](spec)


def make_fingerprint(spec: Spec, batches: Batches, **digests: str) -> dict[str, str | int]:
    settings = dict(seed=spec.data.seed, batch_size=spec.optimizer.batch_size, length=spec.data.length)
    return dict(**digests, **settings, order=batches.compute_order_digest())


def load_text_data(spec: Spec) -> RunData:
    data, vocabulary = spec.data, spec.model.vocabulary
    store = open_corpus(data, vocabulary)
    # A mixture with weights has one set of windows per domain. Without weights all domains are shuffled together.
    weights = valid_weights = store.meta['weights']
    parts = valid_parts = {name: [name] for name in weights} or {'': store.domains}
    if spec.valid.domain:
        [name] = store.resolve_domains(spec.valid.domain, 'config.valid.domain')
        valid_parts, valid_weights = {name: [name]}, {name: 1.0}

    def make_windows(split: str, parts: dict[str, list[str]], share: float, fix: bool) -> list[Windows]:
        return [
            Windows(
                [store.get_tokens(split, domain) for domain in domains],
                data,
                vocabulary,
                f'{split} {name}'.strip(),
                share,
                fix,
            )
            for name, domains in parts.items()
        ]

    held_out = make_windows('held_out', valid_parts, 1.0, data.fixed_held_out)
    check_enough_windows(spec, held_out, valid_weights)
    probe_PT = windows.PROBE_INPUTS[spec.probe.inputs](store, spec.probe, PREPENDED_IDS[spec.probe.prepend](data))
    train = make_windows('train', parts, data.share, True)
    batches = ShuffledBatches(train, data.seed, spec.optimizer.batch_size, weights)
    valid = ShuffledBatches(held_out, 0, spec.valid.windows, valid_weights)
    return RunData(
        batches,
        valid_NT=valid.read_rows(0, range(spec.valid.windows)),
        probe_PT=set_fixed_token(probe_PT, data) if data.fixed_held_out else probe_PT,
        fingerprint=make_fingerprint(spec, batches, store=store.digest, tokenizer=store.meta['tokenizer'][:16]),
        tokenizer=store.read_tokenizer_json(),
        messages=format_share(data, train),
    )


def format_share(data: DataConfig, train: list[Windows]) -> tuple[str, ...]:
    """Format `data.share` in training tokens, the unit of the paper's tables; nothing for a share of 1."""
    if data.share == 1:
        return ()
    used_windows, all_windows = sum(map(len, train)), sum(part.num_all for part in train)
    used_tokens, all_tokens = (count * (data.length + 1) for count in (used_windows, all_windows))
    return (
        f'data.share {data.share:g} is {used_tokens:,} of {all_tokens:,} training tokens; '
        'in the paper, of 5,000,000,000',
    )


def check_enough_windows(spec: Spec, held_out: list[Windows], weights: Mapping[str, float]) -> None:
    """Raise UserError if validation would read a held-out window twice."""
    for part, name in zip(held_out, weights or [''], strict=True):
        num_needed = math.ceil(spec.valid.windows * weights.get(name, 1.0))
        if len(part) < num_needed:
            documents = f'documents of {name}' if name else 'documents'
            raise UserError(
                f'config.valid.windows is {spec.valid.windows} but the held-out {documents} have {len(part)} '
                f'windows of {spec.data.length + 1} tokens, of which it needs {num_needed}; lower it, lower '
                'config.data.length, hold out more, or give a smaller --size'
            )


def load_backcopy_data(spec: Spec) -> RunData:
    data, valid, probe = spec.data, spec.valid, spec.probe
    chain = bigram_backcopy.fit_chain(read_texts(data.source), spec.model.vocabulary, data.triggers)

    def draw(stream: int, *shape: int) -> np.ndarray:
        return bigram_backcopy.sample_sequences(chain, *shape, np.random.default_rng([data.seed, stream]))

    batches = SyntheticBatches(chain, data.seed, spec.optimizer.batch_size, data.length + 1)
    return RunData(
        batches,
        valid_NT=draw(VALIDATION_STREAM, valid.windows, data.length + 1),
        probe_PT=draw(PROBE_STREAM, probe.sequences, probe.length),
        fingerprint=make_fingerprint(spec, batches, bigrams=chain.digest),
        triggers=chain.triggers,
    )


TASKS = {'text': load_text_data, 'backcopy': load_backcopy_data}
PREPENDED_IDS = {
    'none': lambda data: [],
    'bos': lambda data: [data.fixed_token],
    'eos': lambda data: [data.end_token],
}
