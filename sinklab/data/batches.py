"""Windows of T + 1 token ids with interventions, and batches of them as a pure function of (seed, step)."""

import bisect
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import grain
import numpy as np

from sinklab.config.spec import DataConfig
from sinklab.data.bigram_backcopy import MarkovChain, sample_sequences
from sinklab.data.store import TokenArray
from sinklab.errors import UserError
from sinklab.loss_mask import exclude_from_loss, is_in_loss, strip_loss_mask

TRAINING_STREAM, VALIDATION_STREAM, PROBE_STREAM = range(3)  # seeds of independent random streams
# Positions in the sequence of training windows that the digest of the order covers: those of the first batches, and
# later ones, because grain shuffles each epoch with another seed. With other positions, the digest of every run would
# change, and no run could be resumed.
ORDER_POSITIONS = (*range(64), *(2**power for power in range(6, 33)))


class Windows:
    """Windows of T + 1 token ids, by number, after the interventions of the configuration.

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
        UserError: There is no window.
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
        self.size = data.length + 1
        self.with_fixed_token = with_fixed_token
        self.starts = [list_window_starts(tokens, self.size, data.packing) for tokens in token_arrays]
        self.ends = list(itertools.accumulate(map(len, self.starts)))
        num_windows = self.ends[-1]
        if num_windows < 1:
            if not data.packing:
                remedy = 'lower config.data.length, or set config.data.packing=True'
                raise UserError(f'the split {label!r} has no document of {self.size} tokens or more; {remedy}')
            problem = f'the split {label!r} has {sum(map(len, token_arrays))} tokens, but a window needs {self.size}'
            raise UserError(f'{problem}; lower config.data.length, or give more text')
        # The numbers of the windows that are used.
        self.numbers: range | np.ndarray = range(num_windows)
        if share < 1:
            count = max(1, round(share * num_windows))
            self.numbers = np.random.default_rng(data.seed).permutation(num_windows)[:count]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: int) -> np.ndarray:
        part = bisect.bisect_right(self.ends, number)
        start = int(self.starts[part][number - (self.ends[part - 1] if part else 0)])
        tokens = self.token_arrays[part]
        end = start + self.size
        ids_T = tokens.read_ids(start, end).astype(np.int32)
        if self.data.loss == 'assistant':
            ids_T = np.where(tokens.read_loss_mask(start, end), ids_T, exclude_from_loss(ids_T))
        ids_T = set_random_tokens(ids_T, self.data, self.vocabulary, f'{self.label} {number}')
        return set_fixed_token(ids_T, self.data) if self.with_fixed_token else ids_T


def list_window_starts(tokens: TokenArray, size: int, packing: bool) -> Sequence[int] | np.ndarray:
    """List the starts of windows: of disjoint blocks, or without packing of documents that are long enough."""
    if packing:
        return range(0, len(tokens) - size + 1, size)
    starts, _ = tokens.read_documents()
    return starts[np.diff(starts, append=len(tokens)) >= size]


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


@dataclasses.dataclass(frozen=True)
class Batches:
    """Batches of int32 token ids of shape (B, T + 1), by step from 0 without an upper bound.

    Attributes:
        batch_size: B.
        read_rows: Function (step, rows) that returns some rows of the batch of a step.
        order_digest: Digest of the order of the data.
        count_epochs: Function (step) that returns the epochs read before a step, by name in metrics.jsonl.
    """

    batch_size: int
    read_rows: Callable[[int, Iterable[int]], np.ndarray]
    order_digest: str
    count_epochs: Callable[[int], dict[str, float]]


def compute_digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def make_shuffled_batches(
    windows: list[Windows], seed: int, batch_size: int, weights: Mapping[str, float] | None = None
) -> Batches:
    """Make batches of windows, shuffled anew in each epoch; with weights, a mixture of several sets of windows.

    Args:
        windows: Sets of windows. Without weights only the first set is used.
        seed: Seed of the shuffle.
        batch_size: Rows of a batch.
        weights: Weight of each set by name.
    """
    orders = [order_windows(number, part, seed) for number, part in enumerate(windows)]
    # Maps the position of a row among the rows of all batches to (set, number of a window).
    order = grain.MapDataset.mix(orders, list(weights.values())) if weights else orders[0]

    def read_rows(step: int, rows: Iterable[int]) -> np.ndarray:
        pairs = [order[step * batch_size + row] for row in rows]
        return np.stack([windows[part][number] for part, number in pairs])

    def count_epochs(step: int) -> dict[str, float]:
        """Count the epochs of the whole mixture, the largest number, and of each set."""
        epochs = {
            f'data/epoch/{name}': step * batch_size * weight / len(part)
            for (name, weight), part in zip((weights or {'': 1.0}).items(), windows, strict=True)
        }
        return {'data/epoch': max(epochs.values()), **(epochs if weights else {})}

    order_digest = compute_digest(repr([order[position] for position in ORDER_POSITIONS]).encode())
    return Batches(batch_size, read_rows, order_digest, count_epochs)


def order_windows(part: int, windows: Windows, seed: int) -> grain.MapDataset:
    """Return the pairs (part, number of a window) of one set in the order of training."""
    positions = grain.MapDataset.range(len(windows)).seed(seed).shuffle().repeat()
    return positions.map(lambda index: (part, int(windows.numbers[index])))


def make_synthetic_batches(chain: MarkovChain, seed: int, batch_size: int, length: int) -> Batches:
    """Make batches that are sampled from the Markov chain of the Bigram-Backcopy task."""

    def read_rows(step: int, rows: Iterable[int]) -> np.ndarray:
        rng = np.random.default_rng([seed, TRAINING_STREAM, step])
        return sample_sequences(chain, batch_size, length, rng)[list(rows)]

    order_digest = compute_digest(read_rows(0, range(batch_size)).tobytes())
    return Batches(batch_size, read_rows, order_digest, lambda step: {})
