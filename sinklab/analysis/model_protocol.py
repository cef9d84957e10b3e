"""The protocol of a model that can be measured: encode text, capture arrays, compute losses."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from sinklab.analysis.bos import BosMode
from sinklab.analysis.edits import Edit, EditableArray
from sinklab.errors import UserError
from sinklab.metrics.metric import Arrays, MetricContext

# Takes the arrays of a forward pass, under the names of sinklab.metrics.metric, and returns the arrays to keep.
ExtractFn = Callable[[dict[str, Any]], Arrays]
# Takes the number of sequences that were processed since the last call.
ProgressFn = Callable[[int], Any]


def ignore_progress(sequences: int) -> None:
    """Do nothing."""


class MeasurableModel(Protocol):
    """A model that can be measured: a checkpoint of a run, or a Hugging Face model."""

    @property
    def name(self) -> str: ...

    @property
    def bos(self) -> BosMode:
        """Which BOS texts begin with."""
        ...

    @property
    def digest(self) -> str:
        """A digest of the parameters, and of everything else but edits that decides the output."""
        ...

    @property
    def dtype(self) -> str:
        """The type of activations: `float32` or `bfloat16`."""
        ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def max_length(self) -> int | None:
        """The maximum number of tokens of a sequence; None: no limit."""
        ...

    @property
    def position(self) -> str:
        """The kind of position encoding, as in `model.position` of the config."""
        ...

    @property
    def available_arrays(self) -> tuple[str, ...]:
        """The names of the arrays that a forward pass gives for all layers, or for all layers with attention."""
        ...

    @property
    def array_layers(self) -> Mapping[str, tuple[int, ...]]:
        """The layers, from 1 as in reports, that have an array; an array that is not listed exists in all layers.

        `EditableArray.layers` counts from 0.
        """
        ...

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences that say what is not measured, and why."""
        ...

    @property
    def editable_arrays(self) -> Mapping[str, EditableArray]:
        """Return the places where each target can be edited, without targets that cannot be edited."""
        ...

    def copy_with_edits(self, edits: tuple[Edit, ...]) -> 'MeasurableModel':
        """Return a copy of the model whose captured arrays and losses are those of edited forward passes.

        Without edits, the copy computes them with the same operations, so that differences are those of edits.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with the tokens that are put before every text."""
        ...

    def encode_windows(self, text: str, length: int) -> list[list[int]]:
        """Return the token ids of consecutive windows of a text, as if each was a text of its own.

        Each has `length` ids with those that are put before every text. A remainder that fills no window is left out.
        """
        ...

    def decode_tokens(self, ids_T: np.ndarray) -> list[str]:
        """Return the text of each token."""
        ...

    def get_learned_key_names(self) -> list[str]:
        """Return the names of the keys before the text that are no tokens of it, such as learned sinks."""
        ...

    def is_causal_softmax(self, length: int) -> bool:
        """Return whether all layers have causal softmax attention over the whole text and no other keys."""
        ...

    def apply_training_format(self, ids_PT: np.ndarray) -> np.ndarray:
        """Return sequences in the format of training, such as with a fixed token."""
        ...

    def make_context(self, length: int, **overrides: Any) -> MetricContext: ...

    def capture(
        self,
        ids_PT: np.ndarray,
        extract: ExtractFn,
        position_T: np.ndarray | None = None,
        on_progress: ProgressFn = ignore_progress,
    ) -> dict[str, np.ndarray]:
        """Run the model and return what `extract` keeps of all layers and sequences.

        Arrays without the axis P are those of the first batch.
        """
        ...

    def compute_token_losses(self, ids_PT: np.ndarray, position_T: np.ndarray | None = None) -> np.ndarray:
        """Return loss_PT in nats of every token but the first.

        It is nan for tokens that are not in the training loss.
        """
        ...


def check_length(model: MeasurableModel, ids_PT: np.ndarray) -> int:
    """Return the length of the sequences; raise UserError if it exceeds the maximum of the model."""
    length = int(ids_PT.shape[1])
    if model.max_length and length > model.max_length:
        raise UserError(f'{model.name} reads {model.max_length} tokens, but {length} are given; shorten the text')
    return length


def run_in_batches(
    compute: Callable[[np.ndarray], Arrays],
    ids_PT: np.ndarray,
    batch_size: int,
    on_progress: ProgressFn = ignore_progress,
) -> dict[str, np.ndarray]:
    """Run `compute` on batches and concatenate its arrays along the axis P.

    Arrays without the axis P are those of the first batch.
    """
    outputs = []
    for start in range(0, len(ids_PT), batch_size):
        outputs.append(compute(ids_PT[start : start + batch_size]))
        on_progress(len(ids_PT[start : start + batch_size]))
    return {
        name: np.concatenate([output[name] for output in outputs], 1) if '_LP' in name else array
        for name, array in outputs[0].items()
    }
