"""Windows: rows of T + 1 ids, so that T of them have a next one to predict."""

import numpy as np

from sinklab.data.tokens import Tokens
from sinklab.spec import Refusal


class Windows:
    """Disjoint blocks of T + 1 ids over one row of tokens, by index."""

    def __init__(self, ids: np.ndarray, length: int, side: str):
        self.ids, self.size, self.side = ids, length + 1, side
        if len(self) < 1:
            raise Refusal(
                f'the {side} side of the corpus has {len(ids)} tokens and a window takes {length + 1}; '
                'lower config.data.length, or bring more text'
            )

    def __len__(self) -> int:
        return len(self.ids) // self.size

    def __getitem__(self, index: int) -> np.ndarray:
        return self.ids[index * self.size : (index + 1) * self.size].astype(np.int32)


def first_tokens(tokens: Tokens, sequences: int, length: int) -> np.ndarray:
    """int32_PT: the first `length` ids of held-out documents, then, if those are too few, their next ones."""
    spans = [
        (start - first, start)
        for first, end in zip(tokens.held_out_starts[:-1], tokens.held_out_starts[1:], strict=True)
        for start in range(first, end - length + 1, length)
    ]
    if len(spans) < sequences:
        raise Refusal(
            f'config.probe wants {sequences} sequences of {length} tokens and the held-out documents have '
            f'{len(spans)}; lower config.probe.sequences, or raise config.data.held_out'
        )
    spans = sorted(spans, key=lambda span: span[0])[:sequences]
    return np.stack([tokens.held_out[start : start + length].astype(np.int32) for _, start in spans])
