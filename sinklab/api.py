"""The objects that `sinklab.open` returns: a run or a Hugging Face model, opened read-only."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sinklab.analysis.edits import Edit, convert_edits, fit_edits
from sinklab.analysis.measure import measure_model
from sinklab.analysis.model_protocol import MeasurableModel
from sinklab.analysis.model_ref import open_model
from sinklab.analysis.run_model import RunModel
from sinklab.checkpoint import checkpointer
from sinklab.errors import UserError, format_extra_command, format_unknown_name
from sinklab.escape import FIGURE_RC_PARAMS
from sinklab.metrics.metric import MetricContext
from sinklab.metrics.registry import select_by_name, select_measurable
from sinklab.metrics.sink import compute_importance, is_sink, normalize_rows
from sinklab.model.layers import NORM_PLACEMENTS
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


Text = str | Sequence[str] | np.ndarray | Sequence[int] | Sequence[Sequence[int]]
Edits = Edit | Sequence[Edit] | None


def extract_attention(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: arrays[name] for name in ('attention_LPHTS',) if name in arrays}


def extract_residual(arrays: dict[str, Any]) -> dict[str, Any]:
    return {'residual_LPTD': arrays['residual_LPTD']}


class OpenedModel:
    """A run or a Hugging Face model that is open for reading; `sinklab.open` makes it."""

    def __init__(self, subject: MeasurableModel):
        self.subject = subject

    def __repr__(self) -> str:
        return f'sinklab.open({self.subject.name!r})'

    @property
    def model(self) -> Any:
        """The PyTorch module of an open model, or the flax.nnx module of a run.

        That of a run returns (logits_BTV, Intermediates) of `model(ids_BT, capture=True)`.
        """
        return self.subject.model

    @property
    def tokenizer(self) -> Any:
        """The tokenizer: of the package tokenizers for a run, of transformers for an open model."""
        return self.subject.tokenizer

    def ids(self, text: Text) -> np.ndarray:
        """Return the token ids of one or more texts, in the format of training; ids are returned as they are.

        Args:
            text: One text, or several. All are cut to the length of the shortest. Or token ids: integers (tokens,) or
                (texts, tokens), to which nothing is added.

        Returns:
            An integer array (texts, tokens).

        Raises:
            UserError: A text is empty, has fewer than two tokens, or is no text.
        """
        texts = [text] if isinstance(text, str) else text
        if isinstance(texts, list | tuple) and all(isinstance(item, str) for item in texts):
            encoded = [self.subject.encode(item) for item in texts]
            min_length = min(map(len, encoded), default=0)
            if min_length < 2 or not all(texts):  # an empty text has tokens, too, if every text begins with some
                raise UserError('a text is empty or has only one token; give text=... with at least 2 tokens')
            return self.subject.apply_training_format(np.array([item[:min_length] for item in encoded]))
        try:
            ids_PT = np.atleast_2d(text)
        except ValueError:  # rows of different lengths
            ids_PT = np.empty(0)
        is_ids = np.issubdtype(ids_PT.dtype, np.integer) and ids_PT.ndim == 2 and ids_PT.size and ids_PT.shape[1] > 1
        if not is_ids or ids_PT.min() < 0 or ids_PT.max() >= self.subject.vocabulary:
            raise UserError(
                f'{text!r:.80} is no text; give a string, a list of strings, or at least 2 token ids from 0 to '
                f'{self.subject.vocabulary - 1}'
            )
        return ids_PT

    def _encode_one(self, text: Text) -> np.ndarray:
        ids_PT = self.ids(text)
        if len(ids_PT) > 1:
            raise UserError(f'give one text, not {text!r:.80}; call the function once for each text')
        return ids_PT

    def _apply(self, edit: Edits, ids_PT: np.ndarray) -> MeasurableModel:
        """Return a copy of the model with edits, which must fit the texts; without edits, the model itself."""
        subject = self.subject
        num_learned = len(subject.learned_key_names)
        edits = fit_edits(convert_edits(edit), subject.editable_arrays, ids_PT, num_learned, subject.name)
        return subject.copy_with_edits(edits) if edits else subject

    def attention(self, text: Text, edit: Edits = None) -> AttentionMatrices:
        """Compute the attention matrices of all layers and heads for one text.

        Args:
            text: The text, or its token ids.
            edit: A `sinklab.Edit` of the forward pass, or several, which are applied in their order.

        Raises:
            UserError: The text is empty, or longer than the model reads, or an edit does not fit the model.
        """
        ids_PT = self._encode_one(text)
        arrays = self._apply(edit, ids_PT).capture(ids_PT, extract_attention)
        tokens = self.subject.decode_tokens(ids_PT[0])
        matrix_LHTS = arrays['attention_LPHTS'][:, 0]
        layers = self.subject.array_layers.get('attention_LPHTS') or range(len(matrix_LHTS))
        return AttentionMatrices(matrix_LHTS, tokens, [*self.subject.learned_key_names, *tokens], tuple(layers))

    def measure(
        self,
        name: str = '',
        text: Text = '',
        edit: Edits = None,
        threshold: float | None = None,
        **overrides: Any,
    ) -> float | dict[str, float]:
        """Compute one metric of one or more texts, or several metrics.

        Args:
            name: The name of a metric (`sink/1`), the beginning of several names (`sink`), or '' for all metrics.
            text: As `ids` takes it.
            edit: A `sinklab.Edit` of the forward pass, or several, which are applied in their order.
            threshold: For `sink/k`: the threshold on alpha instead of 0.3.
            **overrides: Fields of `sinklab.metrics.metric.MetricContext` to change, such as `thresholds=(0.2, 0.3)`.

        Returns:
            One number, or a dict from names to numbers.

        Raises:
            UserError: There is no such metric, or a text or an edit does not fit the model.
        """
        ids_PT = self.ids(text)
        if threshold is not None:
            if not name.removeprefix('sink/').isdecimal():
                raise UserError(f'threshold={threshold} is for sink/1, sink/2 and so on, not for {name!r}; remove it')
            length = ids_PT.shape[1]
            name = f'{name}/T{length}@{threshold:g}'
            overrides |= dict(lengths=(length,), thresholds=(threshold,))
        numbers = self._measure(self._apply(edit, ids_PT), ids_PT, (name,), **overrides)
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
                similar = name.lower().replace('_', '/')
                raise UserError(format_unknown_name(f'the metric {name!r}', similar, known_names, 'metrics'))
        numbers = measure_model(subject, ids_PT, names=tuple(names), **overrides).numbers
        selected = {
            key: value
            for name in names
            for key, value in numbers.items()
            if name in ('', key) or (name not in numbers and key.startswith(f'{name}/'))
        }
        if names and not selected:
            raise UserError(f'the metric {names[0]!r} does not exist for this model and this text; give another one')
        return selected

    def loss(self, text: Text, edit: Edits = None) -> float:
        """Compute the mean loss of one or more texts, in nats per token, of every token but the first.

        Args:
            text: As `ids` takes it.
            edit: A `sinklab.Edit` of the forward pass, or several, which are applied in their order.

        Raises:
            UserError: A text or an edit does not fit the model.
        """
        return float(np.nanmean(self.token_losses(text, edit)))

    def token_losses(self, text: Text, edit: Edits = None) -> np.ndarray:
        """Compute the losses (texts, tokens - 1) in nats of every token but the first; nan if not trained on."""
        ids_PT = self.ids(text)
        return self._apply(edit, ids_PT).compute_token_losses(ids_PT)

    def logits(self, text: Text, edit: Edits = None) -> np.ndarray:
        """Compute the logits (texts, tokens, vocabulary) of the next token after each token."""
        ids_PT = self.ids(text)
        return self._apply(edit, ids_PT).compute_logits(ids_PT)

    def top_tokens(self, text: Text, k: int = 5, edit: Edits = None) -> list[tuple[str, float]]:
        """Return the k most likely tokens after a text, with their probabilities, in descending order."""
        logit_V = self.logits(self._encode_one(text), edit)[0, -1].astype(float)
        weight_V = np.exp(logit_V - logit_V.max())
        top_ids = np.argsort(-weight_V)[:k]
        return [*zip(self.subject.decode_tokens(top_ids), (weight_V / weight_V.sum())[top_ids].tolist(), strict=True)]

    def generate(self, text: Text, num_tokens: int = 20, edit: Edits = None) -> np.ndarray:
        """Continue a text with the most likely tokens, with edits of each forward pass (steering).

        Args:
            text: One text, as `ids` takes it.
            num_tokens: The number of new tokens.
            edit: A `sinklab.Edit` of the forward pass, or several. Until they are known, tokens 0 stand for the new
                ones, which edits of all positions and functions see as well.

        Returns:
            The token ids (1, tokens) of the text and its continuation.

        Raises:
            UserError: The text, `num_tokens` or an edit does not fit the model, or the value of an edit is `mean`.
        """
        ids_PT = self._encode_one(text)
        length, max_length = ids_PT.shape[1], self.subject.max_length or math.inf
        if not 0 <= num_tokens <= max_length - length:
            raise UserError(
                f'num_tokens={num_tokens} after {length} tokens is not allowed; {self!r} reads {max_length} tokens'
            )
        if any(isinstance(item.value, str) for item in convert_edits(edit)):
            raise UserError("value='mean' would be the mean of later tokens, too; give an array or a function")
        if length < (prefix := self.subject.make_context(length).prefix):
            raise UserError(f'the text has {length} tokens, and the prefix of {self!r} {prefix}; give a longer one')
        ids_PT = np.pad(ids_PT, ((0, 0), (0, num_tokens)))
        subject = self._apply(edit, ids_PT)
        for position in range(length, length + num_tokens):
            ids_PT[0, position] = subject.compute_logits(ids_PT)[0, position - 1].argmax()
        return ids_PT

    def cache(self, text: Text, edit: Edits = None) -> dict[str, np.ndarray]:
        """Return the arrays of a forward pass by name, as `numpy.savez` and safetensors take them.

        Returns:
            In float32: `attention` (layers, texts, heads, queries, keys); `query`, `key`, `value` and `head`, the
            outputs of heads (layers, texts, tokens, heads, dimensions); `normed`, the input of attention, `ffn` and
            `residual`, the hidden states after each block (layers, texts, tokens, dimensions). Learned keys stand
            before those of the text. Besides, `ids` (texts, tokens), and `is_sink` (layers, texts, heads, tokens):
            the tokens of the first half of the text whose alpha is above 0.3.
        """
        ids_PT = self.ids(text)
        captured = self._apply(edit, ids_PT).capture(ids_PT, dict)
        arrays = {name.partition('_')[0]: np.ascontiguousarray(array, np.float32) for name, array in captured.items()}
        context = self.subject.make_context(ids_PT.shape[1])
        num_keys = context.length // 2  # later tokens have few queries
        rows = normalize_rows(arrays['attention'])
        alpha_LPHJ = compute_importance(rows, num_keys, context.learned_keys, context.prefix)
        is_sink_LPHT = np.pad(is_sink(alpha_LPHJ), [(0, 0)] * 3 + [(0, context.length - num_keys)])
        return arrays | {'ids': ids_PT, 'is_sink': is_sink_LPHT}

    def logit_lens(self, text: Text, edit: Edits = None) -> np.ndarray:
        """Compute logits (layers, texts, tokens, vocabulary) of all hidden states by the final norm and the head."""
        self._apply(Edit('residual'), self.ids(text))  # refuses models without one vector per token
        residual_LPTD = self._compute_residual(text, edit)
        logit_NTV = self._compute_head(residual_LPTD.reshape(-1, *residual_LPTD.shape[2:]))  # as if layers were texts
        return logit_NTV.reshape(*residual_LPTD.shape[:3], -1)

    def _compute_residual(self, text: Text, edit: Edits) -> np.ndarray:
        ids_PT = self.ids(text)
        return self._apply(edit, ids_PT).capture(ids_PT, extract_residual)['residual_LPTD'].astype(np.float32)

    def _compute_head(self, residual_PTD: np.ndarray) -> np.ndarray:
        """Compute logits_PTV of hidden states, by a forward pass in which the last block returns them."""
        last = self.subject.editable_arrays['residual'].layers[-1]
        edit = Edit('residual', positions=None, layers=last, value=residual_PTD[None])
        return self.logits(np.zeros(residual_PTD.shape[:2], int), edit)

    def attribute_logits(self, text: Text, token: int | str, other: int | str | None = None) -> dict[str, np.ndarray]:
        """Compute direct logit attribution: what each head and FFN adds to the logit of a token.

        The final norm divides each part by the scale that it has for the whole hidden state, so that the sum of all
        parts is the logit.

        Args:
            text: As `ids` takes it.
            token: The token whose logit is explained: its id, or its text.
            other: A token whose logit is subtracted; None: none.

        Returns:
            `head` (layers, texts, tokens, heads) and `ffn` (layers, texts, tokens), of what hidden states lose
            without it, and `rest` (texts, tokens): the embedding, biases, and what a norm after attention adds.

        Raises:
            UserError: A text is not one token, or the logits are not linear in the hidden states after the norm.
        """
        cache, places = self.cache(text), self.subject.editable_arrays
        if len({places[name].layers if name in places else None for name in ('head', 'ffn', 'residual')}) > 1:
            raise UserError(f'{self!r} has layers whose heads or FFN cannot be edited; give another model')
        kept = [Edit(name, value=cache[name]) for name in ('head', 'ffn')]

        def compute_part(ablation: Edit) -> np.ndarray:
            """Return what the hidden states lose in each layer if only these outputs are 0."""
            return np.diff(cache['residual'] - self._compute_residual(text, [*kept, ablation]), axis=0, prepend=0)

        ffn_LPTD = compute_part(Edit('ffn'))
        heads = range(places['head'].heads)
        head_LPTHD = np.stack([compute_part(Edit('head', heads=head)) for head in heads], 3)
        last_PTD = cache['residual'][-1]
        rest_PTD = last_PTD - head_LPTHD.sum((0, 3)) - ffn_LPTD.sum(0)
        # The norm and the head of scaled unit vectors and of 0 are, but for one factor, a matrix and a bias.
        length, width = last_PTD.shape[1:]
        unit_ND = np.zeros((-(-(width + 1) // length) * length, width), np.float32)
        np.fill_diagonal(unit_ND, 1e3)  # so large that the epsilon of the norm does not matter
        logit_NV = self._compute_head(unit_ND.reshape(-1, length, width)).reshape(len(unit_ND), -1)
        bias_V, matrix_DV = logit_NV[width], logit_NV[:width] - logit_NV[width]
        logit_PTV, linear_PTV = self.logits(text) - bias_V, last_PTD @ matrix_DV
        scale_PT = (logit_PTV * linear_PTV).sum(-1) / (linear_PTV**2).sum(-1)
        tolerance = (1e-3 if self.subject.dtype == 'float32' else 1e-2) * np.abs(logit_PTV).max()
        if not np.allclose(scale_PT[..., None] * linear_PTV, logit_PTV, atol=tolerance):
            raise UserError(f'the logits of {self!r} are not linear after the final norm, as with softcapping')
        direction_V = np.zeros(len(bias_V), np.float32)
        for sign, name in [(1, token)] if other is None else [(1, token), (-1, other)]:
            ids = self.subject.encode_text(name) if isinstance(name, str) else [int(name)]
            if len(ids) != 1 or not 0 <= ids[0] < len(bias_V):
                raise UserError(f'{name!r} is not one token; give the text or the id of one')
            direction_V[ids] += sign
        column_D = matrix_DV @ direction_V
        return {
            'head': head_LPTHD @ column_D * scale_PT[..., None],
            'ffn': ffn_LPTD @ column_D * scale_PT,
            'rest': rest_PTD @ column_D * scale_PT + bias_V @ direction_V,
        }

    def sweep_edit(
        self,
        text: Text,
        edit: Edit,
        score: Callable[[np.ndarray], float] | None = None,
        over: Sequence[str] = ('layers', 'positions'),
    ) -> np.ndarray:
        """Return the scores of a text with an edit of each layer and position, as an array for a heat map.

        Args:
            text: As `ids` takes it.
            edit: The edit, whose fields in `over` are replaced by each index.
            score: A function of the logits (texts, tokens, vocabulary); None: the mean loss.
            over: The fields of `Edit` that are the axes of the array, such as `('layers', 'heads')`.
        """
        if not isinstance(edit, Edit):
            raise UserError(f'sweep_edit() takes one Edit, not {edit!r:.80}')
        ids_PT = self.ids(text)
        self._apply(edit, ids_PT)
        indices = self.subject.editable_arrays[edit.target].list_indices(ids_PT.shape[1])
        if unknown := [field for field in over if field not in indices]:
            raise UserError(format_unknown_name(f'over={unknown[0]!r}', unknown[0], indices))
        scores = []
        for values in itertools.product(*(indices[field] for field in over)):
            fields: dict[str, Any] = dict(zip(over, values, strict=True))
            changed = dataclasses.replace(edit, **fields)
            scores.append(score(self.logits(ids_PT, changed)) if score else self.loss(ids_PT, changed))
        return np.reshape(scores, [len(indices[field]) for field in over])

    def compare(
        self,
        text: Text,
        edits: Edit | Sequence[Edit] | Mapping[str, Edit | Sequence[Edit]],
        names: str | Sequence[str] = ('sink/1', 'alpha/1'),
    ) -> dict[str, dict[str, float]]:
        """Compute the loss and metrics of texts without and with edits.

        All losses of a run come from its full attention matrices. Without edits it may round differently from
        `loss`.

        Args:
            text: As `ids` takes it.
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
            subject = self._apply(edit, ids_PT) if edit else self.subject.copy_with_edits(())
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

    def attribute_logits(self, text: Text, token: int | str, other: int | str | None = None) -> dict[str, np.ndarray]:
        if NORM_PLACEMENTS[self.spec.model.norm].joined:
            raise UserError(f'{self!r} has norms after the sum of a branch, which scale what earlier layers added')
        return super().attribute_logits(text, token, other)

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
