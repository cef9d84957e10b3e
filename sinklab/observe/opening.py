"""What `sinklab.open` gives: a run or an open model in a notebook, read and never written."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from sinklab.checkpoint import digests, restore
from sinklab.escape import FIGURE, escape_figure
from sinklab.folder import Folder
from sinklab.install import format_extra_command
from sinklab.named import OPEN, is_open_model, missing_run, run_and_step, wanted
from sinklab.observe import hub
from sinklab.observe.measuring import measured
from sinklab.observe.own import Own
from sinklab.observe.subject import Subject
from sinklab.record import Refusal


def subject(given: str, bos: str = 'auto', remote_code: bool = False) -> Subject:
    """A step of a run, the newest whole one if none is named, or hf:PATH_OR_ID."""
    if given.startswith(OPEN):
        folder = hub.folder_of(given.removeprefix(OPEN), remote_code)  # before torch is loaded
        try:
            from sinklab.observe.open_model import OpenModel
        except ImportError as error:
            raise Refusal(f'{given} needs {error.name}; install it: {format_extra_command("hf")}') from error
        with hub.explain_remote_code(given):
            return OpenModel(folder, bos, remote_code, given)
    return Own(*step_of(given, reads_open_models=True), bos)


def subjects(given: str, bos: str = 'auto') -> Iterator[Subject]:
    """All steps of a run, each for as long as it is looked at."""
    folder, step = of_run(given)
    if step is not None:
        raise Refusal(f'--all is of all steps, and {given} is one; give {folder}')
    return (Own(folder, one, bos) for one in wanted(folder, step))


def step_of(given: str, reads_open_models: bool = False) -> tuple[Folder, int]:
    """RUN@STEP, or of RUN the newest step that is whole."""
    folder, step = of_run(given, reads_open_models)
    saved = wanted(folder, step)
    newest = digests.newest(folder) if step is None else None
    return folder, saved[-1] if newest is None else newest


def of_run(given: str, reads_open_models: bool = False) -> tuple[Folder, int | None]:
    if given.startswith(OPEN):
        raise missing_run(given)
    folder, step = run_and_step(given)
    if not folder.is_claimed() or is_open_model(folder):
        raise missing_run(str(folder), reads_open_models)
    return folder, step


def open(given: str, **how: Any) -> 'Run | Opened':
    """Open a run, RUN@STEP or hf:PATH_OR_ID, as `sinklab.open` does; parameters are read when they are needed."""
    found = subject(str(given), **how)
    return Run(found) if isinstance(found, Own) else Opened(found)


@dataclasses.dataclass(repr=False)
class Attention:
    """The attention matrices of one text, as `sinklab.open(...).attention(text)` returns them.

    Attributes:
        matrix_LHTS: NumPy array in float32 (layers, heads, queries, keys). Where layers differ in their number of
            heads, a head that a layer lacks is nan.
        queries: The tokens of the text.
        keys: The same tokens. Before them stand the names, in brackets, of the keys that every query sees and that
            are no part of the text, such as `(sink_token)`.
        layers: The layer of the model, from 0, of each matrix. Layers without attention are left out, and a layer
            with two attentions stands here twice.
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
        at, head = self._strongest_of(np.ones(self.matrix_LHTS.shape[:2], bool))
        return self.layers[at], head

    def plot(self, layer: int | None = None, head: int | None = None, place: int | None = None) -> Any:
        """Draw the matrix of one head; of what is not given, that with the largest mean attention to the first token.

        Arguments are indices and count from 0. The title counts layers and heads from 1, as reports do.

        Args:
            layer: of the model, from 0. Of a layer with two attentions it is the matrix with the stronger head.
            head: from 0.
            place: of the matrix in `layers` and `matrix_LHTS`, from 0, instead of `layer`.

        Raises:
            Refusal: there is no such matrix.
        """
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        at, head = self._find(layer, head, place)
        layer, same = self.layers[at], [one for one, other in enumerate(self.layers) if other == self.layers[at]]
        which = f', matrix {same.index(at) + 1} of {len(same)}' if len(same) > 1 else ''
        size = 2 + 0.2 * len(self.keys)
        with rc_context(FIGURE):  # a text keeps what holds when it is made
            figure = Figure(figsize=(size, size), layout='constrained')
            axes = figure.subplots()
            image = axes.imshow(self.matrix_LHTS[at, head], cmap='viridis', vmin=0)
            axes.set_xticks(range(len(self.keys)), map(label, self.keys), rotation=90, fontsize=7)
            axes.set_yticks(range(len(self.queries)), map(label, self.queries), fontsize=7)
            axes.set(xlabel='key', ylabel='query', title=f'layer {layer + 1}{which}, head {head + 1}')
            figure.colorbar(image, shrink=0.6, label='attention')
        return figure

    def _find(self, layer: int | None, head: int | None, place: int | None) -> tuple[int, int]:
        """Return the place and the head of the strongest of those that are asked for."""
        count, heads = self.matrix_LHTS.shape[:2]
        if place is not None and (layer is not None or not 0 <= place < count):
            raise Refusal(f'place={place} must be 0 to {count - 1}, and stands instead of a layer')
        asked_LH = np.ones((count, heads), bool)
        if layer is not None:
            asked_LH &= (np.array(self.layers) == layer)[:, None]
        if place is not None:
            asked_LH &= (np.arange(count) == place)[:, None]
        if head is not None:
            asked_LH &= np.arange(heads) == head
        if not asked_LH.any():
            whole = self.layers == tuple(range(count))
            layers = f'0 to {count - 1}' if whole else ', '.join(map(str, dict.fromkeys(self.layers)))
            asked = ' '.join(f'{name} {one}' for name, one in (('layer', layer), ('head', head)) if one is not None)
            raise Refusal(f'there is no {asked}; indices count from 0: layers {layers}, heads 0 to {heads - 1}')
        return self._strongest_of(asked_LH)

    def _strongest_of(self, asked_LH: np.ndarray) -> tuple[int, int]:
        first_LH = self.matrix_LHTS[..., len(self.keys) - len(self.queries)].mean(-1)
        first_LH = np.where(
            asked_LH, np.where(np.isnan(first_LH), -1, first_LH), -2
        )  # nan: a head that a layer lacks
        at, head = np.unravel_index(first_LH.argmax(), first_LH.shape)
        return int(at), int(head)


def label(word: str) -> str:
    """Return a token as a label of an axis, in which spaces and ends of lines are seen."""
    return escape_figure(word.replace(' ', '·').replace('\n', '⏎').replace('\t', '⇥')) or '∅'


def matrices(layer: dict) -> dict:
    return {name: layer[name] for name in ('attention_LPHTS',) if name in layer}


def by_layer(matrix_LHTS: np.ndarray, heads: tuple[int, ...]) -> np.ndarray:
    """Return heads that stand beside each other, as layers of different numbers of heads; what lacks is nan."""
    if len(set(heads)) < 2:
        return matrix_LHTS
    found = np.full((len(heads), max(heads), *matrix_LHTS.shape[2:]), np.nan, matrix_LHTS.dtype)
    for at, matrix_HTS in enumerate(np.split(matrix_LHTS[0], np.cumsum(heads)[:-1])):
        found[at, : len(matrix_HTS)] = matrix_HTS
    return found


class Opened:
    """A run or a model of transformers that is open for reading; `sinklab.open` makes it."""

    def __init__(self, subject: Subject):
        self.subject = subject

    def __repr__(self) -> str:
        return f'sinklab.open({self.subject.name!r})'

    def ids(self, text: str | list[str]) -> np.ndarray:
        """Return the token ids of one or more texts, as training shaped its own.

        Args:
            text: One text, or several. All are cut to the length of the shortest.

        Returns:
            An array of whole numbers (texts, tokens).

        Raises:
            Refusal: A text is empty, or has fewer than two tokens.
        """
        found = [self.subject.encode(one) for one in ([text] if isinstance(text, str) else text)]
        if not all([text] if isinstance(text, str) else [*text]):
            raise Refusal('a text is empty; give one of some tokens, as text=...')
        shortest = min(map(len, found), default=0)
        if shortest < 2:
            raise Refusal(f'the shortest text has {shortest} tokens; give at least 2')
        return self.subject.shaped(np.array([one[:shortest] for one in found]))

    def attention(self, text: str) -> Attention:
        """Compute the attention matrices of all layers and heads for one text.

        Raises:
            Refusal: The text is empty, or longer than the model reads.
        """
        ids_PT = self.ids(text)
        kept = self.subject.observe(ids_PT, matrices)
        words = self.subject.words(ids_PT[0])
        matrix_LHTS = by_layer(kept['attention_LPHTS'][:, 0], self.subject.heads)
        layers = self.subject.array_layers.get('attention_LPHTS') or range(1, len(matrix_LHTS) + 1)
        layers = tuple(layer - 1 for layer in layers)
        return Attention(matrix_LHTS, words, [*self.subject.columns(), *words], layers)

    def measure(self, name: str = '', text: str | list[str] = '', **how: Any) -> float | dict[str, float]:
        """Compute one metric of one or more texts, or several metrics.

        Args:
            name: The name of a metric (`sink/1`), the beginning of several names (`sink`), or '' for all metrics.
            text: One text, or several; all are cut to the length of the shortest.
            **how: Fields of `sinklab.measure.setting.Setting` to change, such as `thresholds=(0.2, 0.3)`.

        Returns:
            One number, or a dict from names to numbers.

        Raises:
            Refusal: There is no such metric, or a text does not fit the model.
        """
        numbers = measured(self.subject, self.ids(text), **how).numbers
        if name in numbers:
            return numbers[name]
        found = {one: value for one, value in numbers.items() if not name or one.startswith(f'{name}/')}
        if not found:
            kinds = ', '.join(dict.fromkeys(one.partition('/')[0] for one in numbers))
            raise Refusal(f'there is no measure {name!r}; there are {kinds}')
        return found


class Run(Opened):
    """A run of sinklab at one step, finished or still training; `sinklab.open` makes it."""

    subject: Own

    @property
    def spec(self) -> Any:
        """The config of the run as a frozen dataclass, `sinklab.spec.Spec`."""
        return self.subject.spec

    @property
    def steps(self) -> list[int]:
        """The steps that have a checkpoint, in ascending order."""
        return self.subject.folder.checkpoint_steps()

    def at(self, step: int) -> 'Run':
        """Return the same run at another checkpoint; raise Refusal where there is none at this step."""
        return Run(Own(self.subject.folder, *wanted(self.subject.folder, step), self.subject.bos))

    def params(self, step: int | None = None) -> dict:
        """Read the parameters of a checkpoint, the one that is open if no step is given, and verify their digests.

        Returns:
            Nested dicts of NumPy arrays, named as the parameters of the flax.nnx module.
        """
        return restore.parameters(self.subject.folder.path, self.subject.step if step is None else step)

    @functools.cached_property
    def model(self) -> Any:
        """The model as a flax.nnx module: `model(ids_BT, capture=True)` returns (logits_BTV, Capture)."""
        return self.subject.model()

    def curve(self, name: str) -> Any:
        """Return what the run itself has logged of one metric, or of all whose names begin with `name` and a slash.

        Returns:
            A data frame of pandas with one row a step and one column a metric.

        Raises:
            Refusal: pandas is not installed, or the run has logged no such metric.
        """
        try:
            import pandas
        except ImportError as error:
            raise Refusal(
                f'a curve is a data frame of pandas; install it: {format_extra_command("notebook")}'
            ) from error
        frame = pandas.DataFrame(self.subject.folder.records()).set_index('step')
        found = [one for one in frame.columns if one == name or one.startswith(f'{name}/')]
        if not found:
            raise Refusal(f'{self.subject.folder} has no {name!r}; it has {", ".join(frame.columns)}')
        return frame[found].dropna(how='all')
