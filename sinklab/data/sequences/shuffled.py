"""Windows in the order in which a run reads them, and held-out ones when they are wanted; both wherever they lie."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import grain
import numpy as np

from sinklab.data.sequences.interventions import TransformedWindows

WindowIndex = tuple[int, int]  # (which set of windows, index in it)


class WindowIndices:
    """The places of a set of windows, for an order of them."""

    def __init__(self, part: int, count: int):
        self.part, self.count = part, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> WindowIndex:
        return self.part, index


class ShuffledBatches:
    """Batches of windows, each epoch shuffled anew; with weights, of several sets of windows in those shares.

    From a bucket, whose store reads `each` of several at once, windows that follow each other are read as one, and a
    batch is known by its places.
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
        return np.stack(self.read_windows(indices) if self.map_reads else [self.windows[part][index] for part, index in indices])

    def read_windows(self, indices: list[WindowIndex]) -> list[np.ndarray]:
        """What stands at these places, read at once."""
        numbers = [(part, self.windows[part].windows.get_number(index)) for part, index in indices]
        ids_by_number = {}
        for run_ids in self.map_reads(lambda run: dict(self.read_run(*run)), self.group_consecutive(numbers)):
            ids_by_number |= run_ids
        return [
            self.windows[part].apply_interventions(index, ids_by_number[number]) for (part, index), number in zip(indices, numbers, strict=True)
        ]

    def group_consecutive(self, numbers: list[WindowIndex]) -> list[tuple[int, int, int]]:
        """(set, first, count) of windows, by their numbers, that follow each other."""
        return [
            (part, *run)
            for part in sorted({part for part, _ in numbers})
            for run in self.windows[part].windows.group_consecutive(number for other, number in numbers if other == part)
        ]

    def read_run(self, part: int, first: int, count: int) -> Iterator[tuple[WindowIndex, np.ndarray]]:
        ids = self.windows[part].windows.read(first, count).reshape(count, -1)
        return (((part, first + i), ids_T) for i, ids_T in enumerate(ids))

    def compute_digest(self, step: int) -> str:
        """What tells a batch from others: its ids, or where they stand in which files of a bucket."""
        all_rows = range(self.batch_size)
        indices = (self.store_version, self.get_indices(step, all_rows)) if self.map_reads else None
        content = repr(indices).encode() if indices else self.read_rows(step, all_rows).tobytes()
        return hashlib.sha256(content).hexdigest()[:16]

    def count_epochs(self, step: int) -> dict[str, float]:
        epochs = self.count_epochs_per_set(step)
        if not self.weights:
            return {'data/epoch': epochs[0]}
        set_epochs = {f'data/epoch/{name}': value for name, value in zip(self.weights, epochs, strict=True)}
        return {'data/epoch': max(epochs), **set_epochs}

    def count_epochs_per_set(self, step: int) -> list[float]:
        """How often each set of windows has been read before a step."""
        num_read, shares = step * self.batch_size, self.weights.values() if self.weights else [1]
        return [num_read * share / len(part) for share, part in zip(shares, self.windows, strict=True)]


class HeldOutWindows:
    """Held-out windows, of which only those are read that are looked at, each once."""

    def __init__(self, batches: ShuffledBatches, length: int):
        self.batches, self.shape, self.loaded_rows = batches, (batches.batch_size, length + 1), {}

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: slice) -> np.ndarray:
        rows = range(*index.indices(len(self)))
        if missing := [row for row in rows if row not in self.loaded_rows]:
            self.loaded_rows |= zip(missing, self.batches.read_rows(0, missing), strict=True)
        return np.stack([self.loaded_rows[row] for row in rows]) if rows else np.zeros((0, self.shape[1]), np.int32)
