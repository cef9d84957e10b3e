"""Bigram-Backcopy task (Guo et al., 2024): a Markov chain whose trigger tokens copy their predecessor.

z_1 is `<s>`; z_2 is drawn from the characters that are no triggers; then z_n+1 = z_n-1 where z_n is a trigger, and is
drawn from P(. | z_n), the bigrams of a text, where it is none. The triggers are its most frequent characters. Ids are
characters in the order of their frequency, so that the triggers come first, and `<s>` last.
"""

import dataclasses
import hashlib

import numpy as np

from sinklab.schema import UserError


@dataclasses.dataclass(frozen=True)
class MarkovChain:
    unigram_V: np.ndarray
    bigram_VV: np.ndarray  # P(column | row)
    triggers: int  # the ids below it

    @property
    def begin_token(self) -> int:
        return len(self.unigram_V)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.bigram_VV.tobytes()).hexdigest()[:16]


def fit_chain(texts: list[str], vocabulary: int, triggers: int) -> MarkovChain:
    """The statistics of the texts' vocabulary - 1 most frequent characters, or of all if they are fewer."""
    text = '\n'.join(texts)
    code_points = np.frombuffer(text.encode('utf-32-le'), np.uint32)
    characters, ids, counts = np.unique(code_points, return_inverse=True, return_counts=True)
    rank = np.empty_like(counts)
    rank[np.lexsort((characters, -counts))] = np.arange(len(counts))
    ids = rank[ids]
    ids = ids[ids < vocabulary - 1]
    size = int(ids.max()) + 1
    if size < triggers + 2:
        raise UserError(f'config.data.triggers is {triggers}, and the text has {size} characters; lower it')
    unigram_V = np.bincount(ids, minlength=size) / len(ids)
    pairs_VV = np.bincount(ids[:-1] * size + ids[1:], minlength=size**2).reshape(size, size)
    follows_V = pairs_VV.sum(1, keepdims=True)
    bigram_VV = np.where(follows_V > 0, pairs_VV / np.maximum(follows_V, 1), unigram_V)
    return MarkovChain(unigram_V, bigram_VV, triggers)


def sample_sequences(
    chain: MarkovChain, count: int, length: int, rng: np.random.Generator, rows: range | None = None
) -> np.ndarray:
    """Draw sequences of a chain, all of them or a part.

    Args:
        count: sequences of the whole batch, which decides what each of them is.
        length: tokens of a sequence.
        rng: a generator over PCG64, whose numbers for other rows are skipped.
        rows: the consecutive rows of the batch that are drawn; None: all.

    Returns:
        int32 of shape (rows, length).
    """
    rows = range(count) if rows is None else rows
    rows_before, rows_after, num_rows = rows.start, count - rows.stop, len(rows)
    skip = rng.bit_generator.advance if rows_before or rows_after else lambda numbers: None
    cumulative_VV = chain.bigram_VV.cumsum(1)
    non_trigger_V = np.where(np.arange(chain.begin_token) < chain.triggers, 0, chain.unigram_V)
    ids_BT = np.empty((num_rows, length), np.int32)
    ids_BT[:, 0] = chain.begin_token
    skip(rows_before)  # a number for each row: the first column takes one by inversion, as the others do
    ids_BT[:, 1] = rng.choice(chain.begin_token, num_rows, p=non_trigger_V / non_trigger_V.sum())
    for t in range(2, length):
        last_B = ids_BT[:, t - 1]
        skip(rows_after + rows_before)
        drawn_B = (cumulative_VV[last_B] < rng.random((num_rows, 1))).sum(1).clip(max=chain.begin_token - 1)
        ids_BT[:, t] = np.where(last_B < chain.triggers, ids_BT[:, t - 2], drawn_B)
    return ids_BT
