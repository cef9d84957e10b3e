"""Bigram-Backcopy task (Guo et al., 2024): a Markov chain whose trigger tokens copy their predecessor.

A sequence starts with z_1 = `<s>`. z_2 is drawn from the unigram distribution of the characters that are not
triggers. After that, z_n+1 = z_n-1 if z_n is a trigger; otherwise z_n+1 is drawn from P(. | z_n), the bigram
distribution of a text. The triggers are the most frequent characters of the text. Ids are characters in order of
frequency, so triggers have the smallest ids. `<s>` has the largest id.
"""

import dataclasses
import hashlib

import numpy as np

from sinklab.errors import UserError


@dataclasses.dataclass(frozen=True)
class MarkovChain:
    """Unigram and bigram statistics of a text, with the number of trigger tokens."""

    unigram_V: np.ndarray
    bigram_VV: np.ndarray  # P(column | row)
    triggers: int  # ids below this number are triggers

    @property
    def begin_token(self) -> int:
        return len(self.unigram_V)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.bigram_VV.tobytes()).hexdigest()[:16]


def fit_chain(texts: list[str], vocabulary: int, triggers: int) -> MarkovChain:
    """Fit a Markov chain to the bigrams of the most frequent characters of texts.

    Args:
        texts: The texts, which are joined by newlines.
        vocabulary: Largest vocabulary, including `<s>`. Characters beyond the `vocabulary` - 1 most frequent ones are
            removed from the text.
        triggers: Number of trigger tokens.

    Raises:
        UserError: The text has fewer than `triggers` + 2 distinct characters in the vocabulary.
    """
    text = '\n'.join(texts)
    code_points = np.frombuffer(text.encode('utf-32-le'), np.uint32)
    characters, ids, counts = np.unique(code_points, return_inverse=True, return_counts=True)
    rank = np.empty_like(counts)
    rank[np.lexsort((characters, -counts))] = np.arange(len(counts))
    ids = rank[ids]
    ids = ids[ids < vocabulary - 1]
    size = int(ids.max(initial=-1)) + 1
    if size < triggers + 2:
        raise UserError(
            f'config.data.triggers is {triggers}, but the text has {size} distinct characters in the vocabulary; '
            'lower it, or give more text'
        )
    unigram_V = np.bincount(ids, minlength=size) / len(ids)
    pairs_VV = np.bincount(ids[:-1] * size + ids[1:], minlength=size**2).reshape(size, size)
    follows_V = pairs_VV.sum(1, keepdims=True)
    bigram_VV = np.where(follows_V > 0, pairs_VV / np.maximum(follows_V, 1), unigram_V)
    return MarkovChain(unigram_V, bigram_VV, triggers)


def sample_sequences(chain: MarkovChain, count: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """Sample int32 sequences of shape (count, length) from a Markov chain."""
    cumulative_VV = chain.bigram_VV.cumsum(1)
    non_trigger_V = np.where(np.arange(chain.begin_token) < chain.triggers, 0, chain.unigram_V)
    ids_BT = np.empty((count, length), np.int32)
    ids_BT[:, 0] = chain.begin_token
    ids_BT[:, 1] = rng.choice(chain.begin_token, count, p=non_trigger_V / non_trigger_V.sum())
    for t in range(2, length):
        last_B = ids_BT[:, t - 1]
        drawn_B = (cumulative_VV[last_B] < rng.random((count, 1))).sum(1).clip(max=chain.begin_token - 1)
        ids_BT[:, t] = np.where(last_B < chain.triggers, ids_BT[:, t - 2], drawn_B)
    return ids_BT
