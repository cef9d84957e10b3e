"""Windows of T + 1 token ids with interventions, shuffled batches of them, and the sequences of the probe."""

import bisect
import functools
import hashlib
import itertools
from collections.abc import Iterable, Mapping

import grain
import numpy as np

from sinklab.config.spec import DataConfig, ProbeConfig
from sinklab.data.prepare import PROBE_LENGTH, PROBE_SEQUENCES
from sinklab.data.store import Store, TokenArray
from sinklab.errors import UserError
from sinklab.loss_mask import exclude_from_loss, is_in_loss, strip_loss_mask

# Positions in the sequence of training windows that `compute_order_digest` covers: those of the first batches, and
# later ones, because grain shuffles each epoch with another seed. With other positions, the digest of every run would
# change, and no run could be resumed.
ORDER_POSITIONS = (*range(64), *(2**power for power in range(6, 33)))


class Windows:
    """Disjoint blocks of T + 1 token ids, by number, after the interventions of the configuration.

    A window is the same in every epoch: its random tokens depend only on the seed, the label and its number. The loss
    mask is encoded in the ids, as `exclude_from_loss` does, if the loss is that of the assistant.

    Args:
        token_arrays: The tokens of each domain. A window does not cross domains.
        data: The data configuration.
        vocabulary: Random tokens are below this number.
        label: Name of the windows, for messages and for the seeds of random tokens.
        share: Fraction of the windows to use, chosen at random by `data.seed`.
        with_fixed_token: Set the fixed token of the configuration.

    Raises:
        UserError: The tokens are too few for one window.
    """

    def __init__(
        self,
        token_arrays: list[TokenArray],
        data: DataConfig,
        vocabulary: int,
        label: str,
        share: float = 1.0,
        with_fixed_token: bool = True,
    ):
        self.token_arrays, self.data, self.vocabulary, self.label = token_arrays, data, vocabulary, label
        self.size, self.with_fixed_token = data.length + 1, with_fixed_token
        self.ends = list(itertools.accumulate(len(tokens) // self.size for tokens in token_arrays))
        if self.num_all < 1:
            problem = f'the split {label!r} has {sum(map(len, token_arrays))} tokens, but a window needs {self.size}'
            raise UserError(f'{problem}; lower config.data.length, or give more text')
        # The numbers of the windows that are used.
        self.numbers: range | np.ndarray = range(self.num_all)
        if share < 1:
            count = max(1, round(share * self.num_all))
            self.numbers = np.random.default_rng(data.seed).permutation(self.num_all)[:count]

    @property
    def num_all(self) -> int:
        """Number of windows of the tokens, whatever the share."""
        return self.ends[-1]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: int) -> np.ndarray:
        part = bisect.bisect_right(self.ends, number)
        start = (number - (self.ends[part - 1] if part else 0)) * self.size
        tokens, end = self.token_arrays[part], start + self.size
        ids_T = tokens.read_ids(start, end).astype(np.int32)
        if self.data.loss == 'assistant':
            ids_T = np.where(tokens.read_loss_mask(start, end), ids_T, exclude_from_loss(ids_T))
        ids_T = set_random_tokens(ids_T, self.data, self.vocabulary, f'{self.label} {number}')
        return set_fixed_token(ids_T, self.data) if self.with_fixed_token else ids_T


def set_fixed_token(ids_T: np.ndarray, data: DataConfig) -> np.ndarray:
    """Set x_k to `data.fixed_token` for k = `data.fixed_position` (Table 7)."""
    if data.fixed_position is None:
        return ids_T
    ids_T = ids_T.copy()
    position = (..., data.fixed_position - 1)
    ids_T[position] = copy_loss_mask(data.fixed_token, ids_T[position])
    return ids_T


def set_random_tokens(ids_T: np.ndarray, data: DataConfig, vocabulary: int, name: str) -> np.ndarray:
    """Draw x_k uniformly from the vocabulary for k from random_first to random_last (section 5).

    Args:
        ids_T: The ids of a window.
        data: The data configuration. The ids are returned unchanged if `data.random_first` is None.
        vocabulary: Vocabulary size.
        name: Name of the window, which seeds the generator together with `data.seed`.
    """
    if data.random_first is None:
        return ids_T
    rng = np.random.default_rng([data.seed, *name.encode()])
    ids_T = ids_T.copy()
    positions = slice(data.random_first - 1, data.random_last)
    ids_T[positions] = copy_loss_mask(rng.integers(vocabulary, size=ids_T[positions].shape), ids_T[positions])
    return ids_T


def copy_loss_mask(ids: np.ndarray | int, original_ids: np.ndarray) -> np.ndarray:
    """Return new ids with the loss mask of the original ids: excluded positions stay excluded."""
    return np.where(is_in_loss(original_ids), ids, exclude_from_loss(np.asarray(ids)))


class ShuffledBatches:
    """Batches of windows, shuffled anew in each epoch; with weights, a mixture of several sets of windows.

    Args:
        windows: Sets of windows. Without weights only the first set is used.
        seed: Seed of the shuffle.
        batch_size: Rows of a batch.
        weights: Weight of each set by name.
    """

    def __init__(
        self, windows: list[Windows], seed: int, batch_size: int, weights: Mapping[str, float] | None = None
    ):
        self.windows, self.batch_size, self.weights = windows, batch_size, weights
        orders = [
            grain.MapDataset.range(len(part))
            .seed(seed)
            .shuffle()
            .repeat()
            .map(functools.partial(get_pair, number, part.numbers))
            for number, part in enumerate(windows)
        ]
        # Pairs (set, number of a window) in the order of training.
        self.order = grain.MapDataset.mix(orders, list(weights.values())) if weights else orders[0]

    def read_rows(self, step: int, rows: Iterable[int]) -> np.ndarray:
        pairs = [self.order[step * self.batch_size + row] for row in rows]
        return np.stack([self.windows[part][number] for part, number in pairs])

    def compute_digest(self, step: int) -> str:
        """Compute a digest of the ids of a batch."""
        return hashlib.sha256(self.read_rows(step, range(self.batch_size)).tobytes()).hexdigest()[:16]

    def compute_order_digest(self) -> str:
        """Compute a digest of the numbers of the windows at `ORDER_POSITIONS`, without reading any token."""
        pairs = [self.order[position] for position in ORDER_POSITIONS]
        return hashlib.sha256(repr(pairs).encode()).hexdigest()[:16]

    def count_epochs(self, step: int) -> dict[str, float]:
        """Count the epochs before a step; of a mixture, the largest number and that of each set."""
        num_read, weights = step * self.batch_size, self.weights or {'': 1.0}
        epochs = {
            name: num_read * weight / len(part)
            for (name, weight), part in zip(weights.items(), self.windows, strict=True)
        }
        set_epochs = {f'data/epoch/{name}': value for name, value in epochs.items() if self.weights}
        return {'data/epoch': max(epochs.values()), **set_epochs}


def get_pair(part: int, numbers: range | np.ndarray, index: int) -> tuple[int, int]:
    return part, int(numbers[index])


def make_natural_probe(store: Store, probe: ProbeConfig, prefix_ids: list[int]) -> np.ndarray:
    """Return the first tokens of held-out documents, in order of their keys.

    If there are too few documents, the next segments of the same documents follow.

    Args:
        store: The token store.
        probe: Number, length and domain of the sequences.
        prefix_ids: Ids that are prepended to each text. They count towards `probe.length`.

    Returns:
        int32 of shape (probe.sequences, probe.length).

    Raises:
        UserError: The held-out documents have too few segments of this length.
    """
    names = store.resolve_domains(probe.domain, 'config.probe.domain')
    text_tokens = probe.length - len(prefix_ids)
    parts = [list_held_out_texts(store, name) for name in names]
    domain_number, first, length, key = (np.concatenate(column) for column in zip(*parts, strict=True))
    if (count := int(np.sum(length // text_tokens))) < probe.sequences:
        raise UserError(
            f'config.probe needs {probe.sequences} sequences of {probe.length} tokens, but the held-out documents '
            f'have {count}; lower config.probe.sequences or length, or hold out more'
        )
    chosen, number = [], 0
    while len(chosen) < probe.sequences:
        candidates = np.flatnonzero(length >= (number + 1) * text_tokens)
        candidates = candidates[np.argsort(key[candidates])][: probe.sequences - len(chosen)]
        chosen += [(store.domains[domain_number[i]], int(first[i]) + number * text_tokens) for i in candidates]
        number += 1
    tokens_by_domain = {name: store.get_tokens('held_out', name) for name in names}
    ids = [tokens_by_domain[name].read_ids(start, start + text_tokens) for name, start in chosen]
    return np.stack([np.array([*prefix_ids, *text], np.int32) for text in ids])


def list_held_out_texts(store: Store, domain: str) -> tuple[np.ndarray, ...]:
    """Return arrays (domain number, start, length, key) of all held-out documents, without their BOS."""
    tokens = store.get_tokens('held_out', domain)
    starts, keys = tokens.read_documents()
    first = starts + int(store.has_bos)
    domain_number = np.full(len(keys), store.domains.index(domain))
    return domain_number, first, np.append(starts, len(tokens))[1:] - first, keys


def make_random_probe(store: Store, probe: ProbeConfig, prefix_ids: list[int]) -> np.ndarray:
    return prepend_ids(load_probe_ids(store, 'random_PT', probe)[:, : probe.length], prefix_ids)


def make_repeated_probe(store: Store, probe: ProbeConfig, prefix_ids: list[int]) -> np.ndarray:
    return prepend_ids(
        np.repeat(load_probe_ids(store, 'repeated_P', probe)[:, None], probe.length, axis=1), prefix_ids
    )


def load_probe_ids(store: Store, name: str, probe: ProbeConfig) -> np.ndarray:
    if probe.sequences > PROBE_SEQUENCES or probe.length > PROBE_LENGTH:
        raise UserError(
            f'config.probe needs {probe.sequences} sequences of {probe.length} tokens, but a store has '
            f'{PROBE_SEQUENCES} {probe.inputs} ones of {PROBE_LENGTH}; lower config.probe.sequences or length'
        )
    return store.load_probe_arrays()[name][: probe.sequences]


def prepend_ids(ids_PT: np.ndarray, prefix_ids: list[int]) -> np.ndarray:
    """Prepend ids to each row and drop as many ids at its end."""
    return np.insert(ids_PT, [0] * len(prefix_ids), prefix_ids, axis=1)[:, : ids_PT.shape[1]]


PROBE_INPUTS = {'natural': make_natural_probe, 'random': make_random_probe, 'repeated': make_repeated_probe}


def add_training_tokens(ids_T: np.ndarray, data: DataConfig) -> np.ndarray:
    """Add BOS and the fixed token to a prompt if training data has them; both are excluded from the loss.

    Raises:
        UserError: The prompt is too short to reach the position of the fixed token.
    """
    added_token = exclude_from_loss(data.fixed_token)
    if data.bos == 'documents':
        ids_T = np.insert(ids_T, 0, added_token)
    if data.fixed_position is None:
        return ids_T
    position = data.fixed_position - 1
    if len(ids_T) < position:
        raise UserError(
            f'the text has {len(ids_T)} tokens, but training had token {data.fixed_token} at position '
            f'{data.fixed_position}; give at least {position}'
        )
    if strip_loss_mask(ids_T[position : position + 1]).tolist() == [data.fixed_token]:
        return ids_T
    return np.insert(ids_T, position, added_token)
