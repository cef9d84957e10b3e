"""The protocol of a model that can be measured: encode text, capture arrays, compute losses."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from sinklab.metrics.metric import Arrays, MetricSetting
from sinklab.schema import UserError

# (arrays of a forward pass with a leading L and P, by the names of measure/setting.py) -> what is kept of them.
ExtractFn = Callable[[dict[str, Any]], Arrays]
# Is told of so many sequences more that have been read.
ProgressFn = Callable[[int], Any]


def ignore_progress(sequences: int) -> None:
    """Nobody is told."""


class MeasurableModel(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def bos(self) -> str:
        """`auto`, `none` or `force`."""
        ...

    @property
    def digest(self) -> str:
        """Digest of the parameters, and of everything else that decides the output."""
        ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def max_length(self) -> int | None:
        """The number of tokens that a text may have."""
        ...

    @property
    def position(self) -> str:
        """As in spec.Position, or another word."""
        ...

    @property
    def available_arrays(self) -> tuple[str, ...]:
        """The arrays that it has for all layers, or for those that have attention."""
        ...

    @property
    def array_layers(self) -> Mapping[str, tuple[int, ...]]:
        """The layers, from 1, that have an array; all layers have the arrays that are not listed."""
        ...

    @property
    def heads_per_layer(self) -> tuple[int, ...]:
        """The heads of each layer that has attention, where layers may differ; else empty."""
        ...

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is not measured, and why, a sentence each."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with what stands before every text."""
        ...

    def decode_tokens(self, ids_T: np.ndarray) -> list[str]:
        """What each token stands for."""
        ...

    def get_learned_key_names(self) -> list[str]:
        """The names of what stands left of the text."""
        ...

    def is_causal_softmax(self, length: int) -> bool:
        """Whether each token of a text attends to all up to itself and to nothing else, by softmax, in all layers."""
        ...

    def apply_training_format(self, ids_PT: np.ndarray) -> np.ndarray:
        """Sequences as training shaped its own."""
        ...

    def make_setting(self, length: int, **overrides: Any) -> MetricSetting: ...

    def capture(
        self,
        ids_PT: np.ndarray,
        extract: ExtractFn,
        position_T: np.ndarray | None = None,
        on_progress: ProgressFn = ignore_progress,
    ) -> dict[str, np.ndarray]:
        """What is kept of all layers and sequences; of arrays without a P, of the first sequences."""
        ...

    def compute_loss(self, ids_PT: np.ndarray, position_T: np.ndarray | None = None) -> np.ndarray:
        """loss_PT in nats of every token but the first; nan of what training puts into texts and does not predict."""
        ...


def check_length(model: MeasurableModel, ids_PT: np.ndarray) -> int:
    """The length of the sequences; raises UserError where it is more than a model can read."""
    length = int(ids_PT.shape[1])
    if model.max_length and length > model.max_length:
        raise UserError(f'{model.name} reads {model.max_length} tokens, and {length} are given; shorten the text')
    return length


def run_in_batches(
    compute: Callable[[np.ndarray], Arrays],
    ids_PT: np.ndarray,
    batch_size: int,
    on_progress: ProgressFn = ignore_progress,
) -> dict[str, np.ndarray]:
    """What is kept of so many sequences at once, part after part; of arrays without a P, the first part's."""
    outputs = []
    for start in range(0, len(ids_PT), batch_size):
        outputs.append(compute(ids_PT[start : start + batch_size]))
        on_progress(len(ids_PT[start : start + batch_size]))
    return {
        name: np.concatenate([output[name] for output in outputs], 1) if '_LP' in name else array
        for name, array in outputs[0].items()
    }
