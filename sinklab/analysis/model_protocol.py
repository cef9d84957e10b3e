"""The base of models that can be measured: encode text, capture arrays, compute losses."""

import abc
from collections.abc import Callable, Mapping
from typing import Any

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


class MeasurableModel(abc.ABC):
    """A model that can be measured: a checkpoint of a run, or a Hugging Face model.

    Attributes:
        name: The reference of the model.
        model: The module: of PyTorch, or of flax.nnx.
        tokenizer: The tokenizer: of transformers, or of the package tokenizers.
        bos: Which BOS texts begin with.
        dtype: The type of activations: `float32` or `bfloat16`.
        vocabulary: The number of token ids.
        max_length: The maximum number of tokens of a sequence; None: no limit.
        position: The kind of position encoding, as in `model.position` of the config.
        available_arrays: The names of the arrays that a forward pass gives for all layers, or for all layers with
            attention.
        array_layers: The layers, from 0, that have an array; an array that is not listed exists in all layers.
        editable_arrays: The places where each target can be edited, without targets that cannot be edited.
        learned_key_names: The names of the keys before the text that are no tokens of it, such as learned sinks.
        remarks: Sentences that say where parameters come from, and what is not measured, and why.
    """

    name: str
    model: Any
    tokenizer: Any
    bos: BosMode
    dtype: str
    vocabulary: int
    max_length: int | None
    position: str
    available_arrays: tuple[str, ...]
    array_layers: Mapping[str, tuple[int, ...]]
    editable_arrays: Mapping[str, EditableArray]
    learned_key_names: list[str]
    remarks: list[str]

    @abc.abstractmethod
    def copy_with_edits(self, edits: tuple[Edit, ...]) -> 'MeasurableModel':
        """Return a copy of the model whose captured arrays and losses are those of edited forward passes.

        Without edits, the copy computes them with the same operations, so that differences are those of edits.
        """

    @abc.abstractmethod
    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a text alone."""

    @abc.abstractmethod
    def add_first_tokens(self, ids: list[int]) -> list[int]:
        """Return token ids with the tokens that are put before every text, or elsewhere into it."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with the tokens that are put before every text."""
        return self.add_first_tokens(self.encode_text(text))

    def encode_windows(self, text: str, length: int) -> list[list[int]]:
        """Return the token ids of consecutive windows of a text, as if each was a text of its own.

        Each has `length` ids with those that are put before every text. A remainder that fills no window is left out.
        """
        ids = self.encode_text(text)
        text_id = self.vocabulary  # no id of the vocabulary; stands for the ids of the text
        window_ids = self.add_first_tokens([text_id] * max(length, len(ids)))[:length]
        text_ids = iter(ids)
        return [
            [next(text_ids) if window_id == text_id else window_id for window_id in window_ids]
            for _ in range(len(ids) // max(1, window_ids.count(text_id)))
        ]

    @abc.abstractmethod
    def decode_tokens(self, ids_T: np.ndarray) -> list[str]:
        """Return the text of each token."""

    def apply_training_format(self, ids_PT: np.ndarray) -> np.ndarray:
        """Return sequences in the format of training, such as with a fixed token."""
        return ids_PT

    @abc.abstractmethod
    def make_context(self, length: int, **overrides: Any) -> MetricContext:
        """Return the context of metrics for texts of `length` tokens."""

    @abc.abstractmethod
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

    @abc.abstractmethod
    def compute_token_losses(self, ids_PT: np.ndarray, position_T: np.ndarray | None = None) -> np.ndarray:
        """Return loss_PT in nats of every token but the first.

        It is nan for tokens that are not in the training loss.
        """

    @abc.abstractmethod
    def compute_logits(self, ids_PT: np.ndarray) -> np.ndarray:
        """Return logits_PTV in float32."""

    def check_length(self, ids_PT: np.ndarray) -> int:
        """Return the length of the sequences; raise UserError if it exceeds the maximum of the model."""
        length = int(ids_PT.shape[1])
        if self.max_length and length > self.max_length:
            raise UserError(f'{self.name} reads {self.max_length} tokens, but {length} are given; shorten the text')
        return length


def run_in_batches(
    compute: Callable[[np.ndarray, tuple[Edit, ...]], Arrays],
    ids_PT: np.ndarray,
    batch_size: int,
    on_progress: ProgressFn = ignore_progress,
    edits: tuple[Edit, ...] = (),
) -> dict[str, np.ndarray]:
    """Run `compute` on batches, each with the edits of its texts, and concatenate its arrays along the axis P.

    Arrays without the axis P are those of the first batch.
    """
    outputs = []
    for start in range(0, len(ids_PT), batch_size):
        texts = slice(start, start + batch_size)
        outputs.append(compute(ids_PT[texts], tuple(edit.select_texts(texts) for edit in edits)))
        on_progress(len(ids_PT[texts]))
    return {
        name: np.concatenate([output[name] for output in outputs], 1) if '_LP' in name else array
        for name, array in outputs[0].items()
    }
