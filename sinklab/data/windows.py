"""Windows of T + 1 token ids, interventions on them, shuffled batches, and the sequences of the probe."""

import bisect
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

import grain
import numpy as np

from sinklab.config import spec
from sinklab.data.store import Store, TokenArray
from sinklab.data.store_files import PROBE_LENGTH, PROBE_SEQUENCES
from sinklab.errors import UserError
from sinklab.loss_mask import exclude_from_loss, is_in_loss, strip_loss_mask

MAX_WINDOWS_PER_READ = 64  # consecutive windows that one request reads
# Positions in the sequence of training windows that `compute_order_digest` covers: those of the first batches, and
# later ones, because grain shuffles each epoch with another seed. With other positions, the digest of every run would
# change, and no run could be resumed.
ORDER_POSITIONS = (*range(64), *(2**power for power in range(6, 33)))


class Windows:
    """Disjoint blocks of T + 1 token ids of one or several domains, by index.

    Args:
        token_arrays: The tokens of each domain. A window does not cross domains.
        length: T, the tokens per sequence.
        label: Name of the windows, for messages and for the seeds of random tokens.
        share: Fraction of the windows to use, chosen at random by the seed.
        seed: Seed of the choice.
        masked: Encode the loss mask in the ids, as `exclude_from_loss` does.

    Raises:
        UserError: The tokens are too few for one window.
    """

    def __init__(
        self,
        token_arrays: list[TokenArray],
        length: int,
        label: str,
        share: float = 1,
        seed: int = 0,
        masked: bool = False,
    ):
        self.token_arrays, self.size, self.label, self.masked = token_arrays, length + 1, label, masked
        self.ends = list(itertools.accumulate(len(tokens) // self.size for tokens in token_arrays))
        count = self.ends[-1]
        if count < 1:
            problem = f'the split {label!r} has {sum(map(len, token_arrays))} tokens, but a window needs {self.size}'
            raise UserError(f'{problem}; lower config.data.length, or give more text')
        self.count = max(1, round(share * count))
        self.numbers = np.random.default_rng(seed).permutation(count)[: self.count] if share < 1 else range(count)

    def __len__(self) -> int:
        return self.count

    def get_number(self, index: int) -> int:
        """Return the number of a window among all windows of the split."""
        return int(self.numbers[index])

    def __getitem__(self, index: int) -> np.ndarray:
        return self.read(self.get_number(index))

    def read(self, number: int, count: int = 1) -> np.ndarray:
        """Read the ids of `count` consecutive windows of one domain, starting with a window number."""
        part = bisect.bisect_right(self.ends, number)
        start = (number - (self.ends[part - 1] if part else 0)) * self.size
        tokens, end = self.token_arrays[part], start + count * self.size
        ids_T = tokens.read_ids(start, end).astype(np.int32)
        return np.where(tokens.read_loss_mask(start, end), ids_T, exclude_from_loss(ids_T)) if self.masked else ids_T

    def group_consecutive(self, numbers: Iterable[int]) -> list[tuple[int, int]]:
        """Group window numbers to runs (first, count) of consecutive windows that one request can read."""
        runs = []
        for number in sorted(set(numbers)):
            first, count = runs[-1] if runs else (number, 0)
            if first + count == number and count < MAX_WINDOWS_PER_READ and (not count or number not in self.ends):
                runs[-1:] = [(first, count + 1)]
            else:
                runs.append((number, 1))
        return runs


class TransformedWindows:
    """Windows after the interventions of the configuration, the same in every epoch.

    Random tokens depend only on the seed and the window.
    """

    def __init__(self, windows: Windows, data: spec.DataConfig, vocabulary: int, with_fixed_token: bool):
        self.windows, self.data, self.vocabulary, self.with_fixed_token = windows, data, vocabulary, with_fixed_token

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.apply_interventions(index, self.windows[index])

    def apply_interventions(self, index: int, ids_T: np.ndarray) -> np.ndarray:
        """Set the random tokens and the fixed token in the ids of a window."""
        name = f'{self.windows.label} {self.windows.get_number(index)}'
        ids_T = set_random_tokens(ids_T, self.data, self.vocabulary, name)
        return set_fixed_token(ids_T, self.data) if self.with_fixed_token else ids_T


def set_fixed_token(ids_T: np.ndarray, data: spec.DataConfig) -> np.ndarray:
    """Set x_k to `data.fixed_token` for k = `data.fixed_position` (Table 7)."""
    if data.fixed_position is None:
        return ids_T
    ids_T = ids_T.copy()
    position = (..., data.fixed_position - 1)
    ids_T[position] = copy_loss_mask(data.fixed_token, ids_T[position])
    return ids_T


def set_random_tokens(ids_T: np.ndarray, data: spec.DataConfig, vocabulary: int, name: str) -> np.ndarray:
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


WindowIndex = tuple[int, int]  # (which set of windows, index in it)


class WindowIndices:
    """Sequence of the (set, index) pairs of one set of windows, the data source that grain shuffles."""

    def __init__(self, part: int, count: int):
        self.part, self.count = part, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> WindowIndex:
        return self.part, index


class ShuffledBatches:
    """Batches of windows, shuffled anew in each epoch; with weights, a mixture of several sets of windows.

    For a remote store, consecutive windows are read by one request, and the digest of a batch is computed from
    window indices instead of ids.

    Args:
        windows: Sets of windows. Without weights only the first set is used.
        seed: Seed of the shuffle.
        batch_size: Rows of a batch.
        weights: Weight of each set by name.
        map_reads: `Store.map_reads` of a remote store; None for a local store.
        store_version: `Store.remote_version` of a remote store.
    """

    def __init__(
        self,
        windows: list[TransformedWindows],
        seed: int,
        batch_size: int,
        weights: Mapping[str, float] | None = None,
        map_reads: Callable | None = None,
        store_version: str = '',
    ):
        self.windows, self.batch_size, self.weights = windows, batch_size, weights
        self.map_reads, self.store_version = map_reads, store_version
        sets = [WindowIndices(part, len(window_set)) for part, window_set in enumerate(windows)]
        orders = [grain.MapDataset.source(indices).seed(seed).shuffle().repeat() for indices in sets]
        self.dataset = grain.MapDataset.mix(orders, list(weights.values())) if weights else orders[0]

    def get_indices(self, step: int, rows: Iterable[int]) -> list[WindowIndex]:
        return [self.dataset[step * self.batch_size + row] for row in rows]

    def read_rows(self, step: int, rows: Iterable[int]) -> np.ndarray:
        indices = self.get_indices(step, rows)
        return np.stack(
            self.read_windows(indices) if self.map_reads else [self.windows[part][index] for part, index in indices]
        )

    def read_windows(self, indices: list[WindowIndex]) -> list[np.ndarray]:
        """Read the windows at some indices in parallel, consecutive windows by one request."""
        numbers = [(part, self.windows[part].windows.get_number(index)) for part, index in indices]
        ids_by_number = {}
        for run_ids in self.map_reads(lambda run: dict(self.read_run(*run)), self.group_consecutive(numbers)):
            ids_by_number |= run_ids
        return [
            self.windows[part].apply_interventions(index, ids_by_number[number])
            for (part, index), number in zip(indices, numbers, strict=True)
        ]

    def group_consecutive(self, numbers: list[WindowIndex]) -> list[tuple[int, int, int]]:
        """Group pairs (set, window number) to runs (set, first, count) of consecutive windows."""
        return [
            (part, *run)
            for part in sorted({part for part, _ in numbers})
            for run in self.windows[part].windows.group_consecutive(
                number for other, number in numbers if other == part
            )
        ]

    def read_run(self, part: int, first: int, count: int) -> Iterator[tuple[WindowIndex, np.ndarray]]:
        ids = self.windows[part].windows.read(first, count).reshape(count, -1)
        return (((part, first + i), ids_T) for i, ids_T in enumerate(ids))

    def compute_digest(self, step: int) -> str:
        """Compute a digest of the ids of a batch; for a remote store, of its indices and the store version."""
        all_rows = range(self.batch_size)
        indices = (self.store_version, self.get_indices(step, all_rows)) if self.map_reads else None
        content = repr(indices).encode() if indices else self.read_rows(step, all_rows).tobytes()
        return hashlib.sha256(content).hexdigest()[:16]

    def compute_order_digest(self) -> str:
        """Compute a digest of the numbers of the windows at `ORDER_POSITIONS`, without reading any token."""
        indices = [self.dataset[position] for position in ORDER_POSITIONS]
        numbers = [(part, self.windows[part].windows.get_number(index)) for part, index in indices]
        return hashlib.sha256(repr(numbers).encode()).hexdigest()[:16]

    def count_epochs(self, step: int) -> dict[str, float]:
        epochs = self.count_epochs_per_set(step)
        if not self.weights:
            return {'data/epoch': epochs[0]}
        set_epochs = {f'data/epoch/{name}': value for name, value in zip(self.weights, epochs, strict=True)}
        return {'data/epoch': max(epochs), **set_epochs}

    def count_epochs_per_set(self, step: int) -> list[float]:
        """Count the epochs of each set of windows that are read before a step."""
        num_read, shares = step * self.batch_size, self.weights.values() if self.weights else [1]
        return [num_read * share / len(part) for share, part in zip(shares, self.windows, strict=True)]


class HeldOutWindows:
    """Held-out windows as an array whose rows are read on first access and then kept in memory."""

    def __init__(self, batches: ShuffledBatches, length: int):
        self.batches, self.shape, self.loaded_rows = batches, (batches.batch_size, length + 1), {}

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: slice) -> np.ndarray:
        rows = range(*index.indices(len(self)))
        if missing := [row for row in rows if row not in self.loaded_rows]:
            self.loaded_rows |= zip(missing, self.batches.read_rows(0, missing), strict=True)
        return np.stack([self.loaded_rows[row] for row in rows]) if rows else np.zeros((0, self.shape[1]), np.int32)


def make_natural_probe(store: Store, probe: spec.ProbeConfig, prefix_ids: list[int]) -> np.ndarray:
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
    ids = store.map_reads(lambda text: tokens_by_domain[text[0]].read_ids(text[1], text[1] + text_tokens), chosen)
    return np.stack([np.array([*prefix_ids, *text], np.int32) for text in ids])


def list_held_out_texts(store: Store, domain: str) -> tuple[np.ndarray, ...]:
    """Return arrays (domain number, start, length, key) of all held-out documents, without their BOS."""
    tokens = store.get_tokens('held_out', domain)
    starts, keys = tokens.read_documents()
    first = starts + int(store.has_bos)
    domain_number = np.full(len(keys), store.domains.index(domain))
    return domain_number, first, np.append(starts, len(tokens))[1:] - first, keys


def make_random_probe(store: Store, probe: spec.ProbeConfig, prefix_ids: list[int]) -> np.ndarray:
    return prepend_ids(load_probe_ids(store, 'random_PT', probe)[:, : probe.length], prefix_ids)


def make_repeated_probe(store: Store, probe: spec.ProbeConfig, prefix_ids: list[int]) -> np.ndarray:
    return prepend_ids(
        np.repeat(load_probe_ids(store, 'repeated_P', probe)[:, None], probe.length, axis=1), prefix_ids
    )


def load_probe_ids(store: Store, name: str, probe: spec.ProbeConfig) -> np.ndarray:
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


def add_training_tokens(ids_T: np.ndarray, data: spec.DataConfig) -> np.ndarray:
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
