"""Windows in the order in which a run reads them, and held-out ones when they are wanted; both wherever they lie."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import grain
import numpy as np

from sinklab.data.sequences.interventions import Intervened

Place = tuple[int, int]  # (which set of windows, index in it)


class Places:
    """The places of a set of windows, for an order of them."""

    def __init__(self, part: int, count: int):
        self.part, self.count = part, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Place:
        return self.part, index


class Shuffled:
    """Batches of windows, each epoch shuffled anew; with weights, of several sets of windows in those shares.

    From a bucket, whose store reads `each` of several at once, windows that follow each other are read as one, and a
    batch is known by its places.
    """

    def __init__(
        self,
        windows: list[Intervened],
        seed: int,
        batch_size: int,
        weights: Mapping[str, float] | None = None,
        each: Callable | None = None,
        store: str = '',
    ):
        self.windows, self.batch_size, self.weights = windows, batch_size, weights
        self.each, self.store = each, store
        sets = [Places(part, len(found)) for part, found in enumerate(windows)]
        orders = [grain.MapDataset.source(places).seed(seed).shuffle().repeat() for places in sets]
        self.dataset = grain.MapDataset.mix(orders, list(weights.values())) if weights else orders[0]

    def places(self, step: int, rows: Iterable[int]) -> list[Place]:
        return [self.dataset[step * self.batch_size + row] for row in rows]

    def rows(self, step: int, rows: Iterable[int]) -> np.ndarray:
        places = self.places(step, rows)
        return np.stack(self.gathered(places) if self.each else [self.windows[part][at] for part, at in places])

    def gathered(self, places: list[Place]) -> list[np.ndarray]:
        """What stands at these places, read at once."""
        numbers = [(part, self.windows[part].windows.number(at)) for part, at in places]
        read = {}
        for found in self.each(lambda run: dict(self.run(*run)), self.runs(numbers)):
            read |= found
        return [
            self.windows[part].changed(at, read[number]) for (part, at), number in zip(places, numbers, strict=True)
        ]

    def runs(self, numbers: list[Place]) -> list[tuple[int, int, int]]:
        """(set, first, count) of windows, by their numbers, that follow each other."""
        return [
            (part, *run)
            for part in sorted({part for part, _ in numbers})
            for run in self.windows[part].windows.runs(number for other, number in numbers if other == part)
        ]

    def run(self, part: int, first: int, count: int) -> Iterator[tuple[Place, np.ndarray]]:
        ids = self.windows[part].windows.read(first, count).reshape(count, -1)
        return (((part, first + i), ids_T) for i, ids_T in enumerate(ids))

    def mark(self, step: int) -> str:
        """What tells a batch from others: its ids, or where they stand in which files of a bucket."""
        everything = range(self.batch_size)
        places = (self.store, self.places(step, everything)) if self.each else None
        content = repr(places).encode() if places else self.rows(step, everything).tobytes()
        return hashlib.sha256(content).hexdigest()[:16]

    def epochs(self, step: int) -> dict[str, float]:
        epochs = self.epochs_of_each(step)
        if not self.weights:
            return {'data/epoch': epochs[0]}
        named = {f'data/epoch/{name}': of for name, of in zip(self.weights, epochs, strict=True)}
        return {'data/epoch': max(epochs), **named}

    def epochs_of_each(self, step: int) -> list[float]:
        """How often each set of windows has been read before a step."""
        read, shares = step * self.batch_size, self.weights.values() if self.weights else [1]
        return [read * share / len(part) for share, part in zip(shares, self.windows, strict=True)]


class Held:
    """Held-out windows, of which only those are read that are looked at, each once."""

    def __init__(self, batches: Shuffled, length: int):
        self.batches, self.shape, self.known = batches, (batches.batch_size, length + 1), {}

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, where: slice) -> np.ndarray:
        wanted = range(*where.indices(len(self)))
        if missing := [row for row in wanted if row not in self.known]:
            self.known |= zip(missing, self.batches.rows(0, missing), strict=True)
        return np.stack([self.known[row] for row in wanted]) if wanted else np.zeros((0, self.shape[1]), np.int32)
