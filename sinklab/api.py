"""The objects that `sinklab.open` returns: a run or a Hugging Face model, opened read-only."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sinklab.analysis.edits import Edit, check_edits, convert_edits
from sinklab.analysis.measure import measure_model
from sinklab.analysis.model_protocol import MeasurableModel
from sinklab.analysis.model_ref import open_model
from sinklab.analysis.run_model import RunModel
from sinklab.checkpoint import checkpointer
from sinklab.errors import UserError, format_extra_command, format_unknown_name
from sinklab.escape import FIGURE_RC_PARAMS
from sinklab.metrics.metric import MetricContext
from sinklab.metrics.registry import select_by_name, select_measurable
from sinklab.run_dir import select_steps


def open(model_ref: str, **options: Any) -> 'OpenedRun | OpenedModel':
    """Open RUN, RUN@STEP, hf:PATH_OR_ID or gguf:PATH for `sinklab.open`.

    The parameters of a run are read when they are first needed, those of a Hugging Face model at once.
    """
    model = open_model(str(model_ref), **options)
    return OpenedRun(model) if isinstance(model, RunModel) else OpenedModel(model)


@dataclasses.dataclass(repr=False)
class AttentionMatrices:
    """The attention matrices of one text, as `sinklab.open(...).attention(text)` returns them.

    Attributes:
        matrix_LHTS: NumPy array in float32 (layers, heads, queries, keys).
        queries: The tokens of the text.
        keys: The same tokens. Before them stand the names, in brackets, of the keys that every query sees and that
            are no part of the text, such as `(sink_token)`.
        layers: The layer of the model, from 0, of each matrix. Layers without attention are left out.
    """

    matrix_LHTS: np.ndarray
    queries: list[str]
    keys: list[str]
    layers: tuple[int, ...]

    def __repr__(self) -> str:
        matrices, heads, queries, keys = self.matrix_LHTS.shape
        return f'<Attention: {matrices} matrices x {heads} heads, {queries} queries x {keys} keys>'

    def strongest(self) -> tuple[int, int]:
        """Return (layer of the model, head), from 0, of the largest mean attention to the first token."""
        index, head = self._find_strongest(None, None)
        return self.layers[index], head

    def plot(self, layer: int | None = None, head: int | None = None) -> Any:
        """Draw the attention matrix of one head.

        If several matrices fit the arguments, the one with the largest mean attention to the first token is drawn.

        Args:
            layer: The layer of the model, from 0; None: any.
            head: The head, from 0; None: any.

        Returns:
            A matplotlib figure.

        Raises:
            UserError: There is no such matrix.
        """
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        index, head = self._find_strongest(layer, head)
        size = 2 + 0.2 * len(self.keys)
        with rc_context(FIGURE_RC_PARAMS):  # a text keeps the settings that hold when it is created
            figure = Figure(figsize=(size, size), layout='constrained')
            axes = figure.subplots()
            image = axes.imshow(self.matrix_LHTS[index, head], cmap='viridis', vmin=0)
            axes.set_xticks(range(len(self.keys)), map(format_token, self.keys), rotation=90, fontsize=7)
            axes.set_yticks(range(len(self.queries)), map(format_token, self.queries), fontsize=7)
            axes.set(xlabel='key', ylabel='query', title=f'layer {self.layers[index]}, head {head}')
            figure.colorbar(image, shrink=0.6, label='attention')
        return figure

    def _find_strongest(self, layer: int | None, head: int | None) -> tuple[int, int]:
        """Return (index of the matrix, head) of the largest mean attention to the first token, as `plot` selects."""
        first_LH = self.matrix_LHTS[..., len(self.keys) - len(self.queries)].mean(-1)
        candidates = [
            (index, other_head)
            for index, other_head in np.ndindex(*first_LH.shape)
            if layer in (None, self.layers[index]) and head in (None, other_head)
        ]
        if not candidates:
            raise UserError(
                f'there is no matrix of layer {layer} and head {head}; indices count from 0: layers '
                f'{", ".join(map(str, self.layers))}, heads 0 to {first_LH.shape[1] - 1}'
            )
        return max(candidates, key=first_LH.__getitem__)


def format_token(token: str) -> str:
    """Return a token as an axis label, in which spaces, tabs and line breaks are visible."""
    return token.replace(' ', '·').replace('\n', '⏎').replace('\t', '⇥') or '∅'


def extract_attention(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: arrays[name] for name in ('attention_LPHTS',) if name in arrays}


class OpenedModel:
    """A run or a Hugging Face model that is open for reading; `sinklab.open` makes it."""

    def __init__(self, subject: MeasurableModel):
        self.subject = subject

    def __repr__(self) -> str:
        return f'sinklab.open({self.subject.name!r})'

    def ids(self, text: str | list[str]) -> np.ndarray:
        """Return the token ids of one or more texts, in the format of training.

        Args:
            text: One text, or several. All are cut to the length of the shortest.

        Returns:
            An integer array (texts, tokens).

        Raises:
            UserError: A text is empty, has fewer than two tokens, or is no text.
        """
        texts = [text] if isinstance(text, str) else text
        if not isinstance(texts, list | tuple) or not all(isinstance(item, str) for item in texts):
            raise UserError(f'{text!r:.80} is no text; give a string, or a list of strings')
        encoded = [self.subject.encode(item) for item in texts]
        min_length = min(map(len, encoded), default=0)
        if min_length < 2 or not all(texts):  # an empty text has tokens, too, if every text begins with some
            raise UserError('a text is empty or has only one token; give text=... with at least 2 tokens')
        return self.subject.apply_training_format(np.array([item[:min_length] for item in encoded]))

    def _apply(self, edit: Edit | Sequence[Edit] | None, length: int) -> MeasurableModel:
        """Return a copy of the model with edits, which must fit texts of `length` tokens; without edits, itself."""
        edits = convert_edits(edit)
        check_edits(edits, self.subject.editable_arrays, length, self.subject.name)
        return self.subject.copy_with_edits(edits) if edits else self.subject

    def attention(self, text: str, edit: Edit | Sequence[Edit] | None = None) -> AttentionMatrices:
        """Compute the attention matrices of all layers and heads for one text.

        Args:
            text: The text.
            edit: A `sinklab.Edit` of the forward pass, or several, which are applied in their order.

        Raises:
            UserError: The text is empty, or longer than the model reads, or an edit does not fit the model.
        """
        if not isinstance(text, str):
            raise UserError(f'attention() takes one text, not {text!r:.80}; call it once for each text')
        ids_PT = self.ids(text)
        arrays = self._apply(edit, ids_PT.shape[1]).capture(ids_PT, extract_attention)
        tokens = self.subject.decode_tokens(ids_PT[0])
        matrix_LHTS = arrays['attention_LPHTS'][:, 0]
        layers = self.subject.array_layers.get('attention_LPHTS') or range(len(matrix_LHTS))
        return AttentionMatrices(matrix_LHTS, tokens, [*self.subject.learned_key_names, *tokens], tuple(layers))

    def measure(
        self,
        name: str = '',
        text: str | list[str] = '',
        edit: Edit | Sequence[Edit] | None = None,
        **overrides: Any,
    ) -> float | dict[str, float]:
        """Compute one metric of one or more texts, or several metrics.

        Args:
            name: The name of a metric (`sink/1`), the beginning of several names (`sink`), or '' for all metrics.
            text: One text, or several; all are cut to the length of the shortest.
            edit: A `sinklab.Edit` of the forward pass, or several, which are applied in their order.
            **overrides: Fields of `sinklab.metrics.metric.MetricContext` to change, such as `thresholds=(0.2, 0.3)`.

        Returns:
            One number, or a dict from names to numbers.

        Raises:
            UserError: There is no such metric, or a text or an edit does not fit the model.
        """
        ids_PT = self.ids(text)
        numbers = self._measure(self._apply(edit, ids_PT.shape[1]), ids_PT, (name,), **overrides)
        return numbers.get(name, numbers)

    def _measure(
        self, subject: MeasurableModel, ids_PT: np.ndarray, names: Sequence[str], **overrides: Any
    ) -> dict[str, float]:
        """Return the numbers of these names; for a name that is none, those that begin with it and a slash.

        Raises:
            UserError: There is no such metric or field. A metric of another kind of model is refused after the pass.
        """
        fields = [field.name for field in dataclasses.fields(MetricContext)]
        for field in overrides.keys() - {*fields}:
            raise UserError(format_unknown_name(f'measure({field}=...)', field, fields))
        metrics = select_measurable(subject.available_arrays)
        families = dict.fromkeys(info.name.partition('/')[0] for metric in metrics for info in metric.infos)
        for name in names:
            if not select_by_name((name,), metrics):
                known_names = [*families, *(info.name for metric in metrics for info in metric.infos)]
                raise UserError(format_unknown_name(f'the metric {name!r}', name, known_names, 'metrics'))
        numbers = measure_model(subject, ids_PT, names=tuple(names), **overrides).numbers
        selected = {
            key: value
            for key, value in numbers.items()
            if any(name in ('', key) or (name not in numbers and key.startswith(f'{name}/')) for name in names)
        }
        if names and not selected:
            raise UserError(f'the metric {names[0]!r} does not exist for this model and this text; give another one')
        return selected

    def loss(self, text: str | list[str], edit: Edit | Sequence[Edit] | None = None) -> float:
        """Compute the mean loss of one or more texts, in nats per token, of every token but the first.

        Args:
            text: One text, or several; all are cut to the length of the shortest.
            edit: A `sinklab.Edit` of the forward pass, or several, which are applied in their order.

        Raises:
            UserError: A text or an edit does not fit the model.
        """
        ids_PT = self.ids(text)
        return float(np.nanmean(self._apply(edit, ids_PT.shape[1]).compute_token_losses(ids_PT)))

    def compare(
        self,
        text: str | list[str],
        edits: Edit | Sequence[Edit] | Mapping[str, Edit | Sequence[Edit]],
        names: str | Sequence[str] = ('sink/1', 'alpha/1'),
    ) -> dict[str, dict[str, float]]:
        """Compute the loss and metrics of texts without and with edits.

        All losses of a run come from its full attention matrices. Without edits it may round differently from
        `loss`.

        Args:
            text: One text, or several; all are cut to the length of the shortest.
            edits: A `sinklab.Edit`, or several, which are applied together; or a dict from labels to such edits,
                which are compared with each other.
            names: The metric, or several, by the names that `measure` takes.

        Returns:
            {'without': numbers, 'with': numbers}, or {'without': numbers, LABEL: numbers, ...}, where numbers are a
            dict of `loss` and of the metrics. `pandas.DataFrame(...).T` shows it as a table.

        Raises:
            UserError: There is no such metric, a label is `without`, or a text or an edit does not fit the model.
        """
        ids_PT = self.ids(text)
        rows = {}
        labelled = edits if isinstance(edits, Mapping) else {'with': edits}
        if 'without' in labelled:
            raise UserError('the label without is that of the numbers without edits; give another one')
        for label, edit in {'without': None, **labelled}.items():
            subject = self._apply(edit, ids_PT.shape[1]) if edit else self.subject.copy_with_edits(())
            rows[label] = {'loss': float(np.nanmean(subject.compute_token_losses(ids_PT)))}
            rows[label] |= self._measure(subject, ids_PT, [names] if isinstance(names, str) else names)
        return rows


class OpenedRun(OpenedModel):
    """A run of sinklab at one step, finished or still training; `sinklab.open` makes it."""

    subject: RunModel

    @property
    def spec(self) -> Any:
        """The config of the run as a frozen dataclass, `sinklab.config.spec.Spec`."""
        return self.subject.spec

    @property
    def steps(self) -> list[int]:
        """The steps that have a checkpoint, in ascending order."""
        return self.subject.run_dir.list_checkpoint_steps()

    def at(self, step: int) -> 'OpenedRun':
        """Return the same run at another checkpoint.

        Raises:
            UserError: There is no checkpoint at this step.
        """
        (saved_step,) = select_steps(self.subject.run_dir, step)
        return OpenedRun(RunModel(self.subject.run_dir, saved_step, self.subject.bos, self.subject.dtype))

    def params(self, step: int | None = None) -> dict[str, Any]:
        """Read the parameters of a checkpoint, and verify their digests.

        Args:
            step: The step of the checkpoint; None: the one that is open.

        Returns:
            Nested dicts of NumPy arrays, named as the parameters of the flax.nnx module.
        """
        params: dict[str, Any] = checkpointer.restore_parameters(
            self.subject.run_dir.path, self.subject.step if step is None else step
        )
        return params

    @functools.cached_property
    def model(self) -> Any:
        """The model as a flax.nnx module: `model(ids_BT, capture=True)` returns (logits_BTV, Intermediates)."""
        return self.subject.build_module()

    def curve(self, name: str) -> Any:
        """Return the logged values of one metric, or of all whose names begin with `name` and a slash.

        Returns:
            A pandas data frame with one row for each step and one column for each metric.

        Raises:
            UserError: The run has logged no such metric.
        """
        try:
            import pandas
        except ImportError as error:
            raise UserError(f'curve() needs pandas; install it: {format_extra_command("notebook")}') from error

        records = self.subject.run_dir.read_records()
        if not records:
            raise UserError(f'{self.subject.run_dir} has logged no metrics; train it first')
        frame = pandas.DataFrame(records).set_index('step')
        columns = [column for column in frame.columns if column == name or column.startswith(f'{name}/')]
        if not columns:
            suggestion = next((column for column in frame.columns if column.endswith(f'/{name}')), None)
            raise UserError(format_unknown_name(repr(name), name, frame.columns, 'metrics', suggestion))
        return frame[columns].dropna(how='all')
