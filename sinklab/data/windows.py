"""Windows: rows of T + 1 ids, so that T of them have a next one to predict."""

import numpy as np

from sinklab.data.tokens import Tokens
from sinklab.record import Refusal


class Windows:
    """Disjoint blocks of T + 1 ids over one row of tokens, by index; of a share of them, drawn by the seed."""

    def __init__(self, ids: np.ndarray, length: int, side: str, share: float = 1.0, seed: int = 0):
        self.ids, self.size, self.side = ids, length + 1, side
        count = len(ids) // self.size
        if count < 1:
            raise Refusal(
                f'the {side} side of the corpus has {len(ids)} tokens and a window takes {self.size}; '
                'lower config.data.length, or bring more text'
            )
        drawn = np.random.default_rng(seed).permutation(count) if share < 1 else np.arange(count)
        self.places = drawn[: max(1, round(share * count))]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> np.ndarray:
        start = self.places[index] * self.size
        return self.ids[start : start + self.size].astype(np.int32)


def first_tokens(tokens: Tokens, sequences: int, length: int, before: int | None = None) -> np.ndarray:
    """int32_PT: the first `length` ids of held-out texts, then, if those are too few, their next ones.

    With `before`, that id stands before each text, and the last of its `length` ids makes room for it.
    """
    given = [] if before is None else [before]
    taken = length - len(given)
    spans = [
        (start - first, start)
        for first, end in zip(tokens.text_starts, tokens.held_out_starts[1:], strict=True)
        for start in range(first, end - taken + 1, taken)
    ]
    if len(spans) < sequences:
        raise Refusal(
            f'config.probe wants {sequences} sequences of {length} tokens and the held-out documents have '
            f'{len(spans)}; lower config.probe.sequences, or raise config.data.held_out'
        )
    spans = sorted(spans, key=lambda span: span[0])[:sequences]
    texts = [tokens.held_out[start : start + taken] for _, start in spans]
    return np.stack([np.array([*given, *text], np.int32) for text in texts])
