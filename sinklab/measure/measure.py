"""An entry of the table of metrics: what it reads of a forward pass, computes, stores and shows."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import numpy as np

from sinklab.measure.setting import Setting

Arrays = Mapping[str, Any]


def fixed(value: float, digits: int, sign: str = '') -> str:
    """Return a number with so many decimals; what rounds to 0 has no sign.

    Args:
        sign: + puts one before positive numbers.
    """
    text = f'{value:z.{digits}f}'
    return f'{value:{sign}.{digits}f}' if text.strip('0.') else text


@dataclasses.dataclass(frozen=True)
class Number:
    """How a number of metrics.jsonl is shown to people.

    Attributes:
        name: Its name in metrics.jsonl; {k} stands for a token, layer or threshold.
        label: Its name in tables and figures.
        sentence: What it is, for the documentation.
        unit: Its unit, '' for none.
        digits: Digits after the decimal point.
        table: Show it in the table of runs, and when `train` ends.
        sweep: Compare it between the rows of a sweep, also where nothing is published.
    """

    name: str
    label: str
    sentence: str
    unit: str = ''
    digits: int = 3
    table: bool = False
    sweep: bool = False

    @property
    def axis(self) -> str:
        return f'{self.label} ({self.unit})' if self.unit else self.label

    def text(self, value: float) -> str:
        return f'{fixed(value, self.digits)} {self.unit}'.rstrip()


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure of an array that every probe saves.

    Attributes:
        kind: `heads` for values_LH (with a slider over steps), `matrices` for matrices_LHTS, `ratios` for ratios_L.
        array: The name of the array in a probe's file.
        title: The title of the figure.
        label: The name of its values.
        sentence: Its caption.
        of: Function of the array that is shown.
        largest: The end of the scale; None for the largest value.
    """

    kind: Literal['heads', 'matrices', 'ratios']
    array: str
    title: str
    label: str
    sentence: str = 'The mean of each layer and head.'
    of: Callable[[np.ndarray], np.ndarray] = np.asarray
    largest: float | None = None

    @property
    def name(self) -> str:
        """Of its file."""
        return self.array.partition('_')[0]


def always(setting: Setting) -> bool:
    return True


def nothing(*_: Any) -> Arrays:
    return {}


@dataclasses.dataclass(frozen=True)
class Measure:
    """A metric entry: it computes numbers from arrays of a forward pass; docs/guides/add_a_metric.md adds one.

    Attributes:
        reads: Names of the arrays that it reads (see `sinklab.measure.setting`), such as `attention_LPHTS`.
        arrays: Function (*those arrays, setting) -> arrays that the probe returns. It is compiled with the probe.
        numbers: Function (those arrays as NumPy, setting) -> numbers by name, for metrics.jsonl.
        shown: The numbers that tables, pages and the documentation show.
        saved: Names of the arrays of a probe's file. `name_LH` is the mean over the sequences P of `name_LPH`.
        picture: A figure of a saved array, or None.
        applies: Function setting -> whether the metric exists for this model and these texts.
        context: Function (sums of attention over a training batch, setting) -> numbers, for `log.sinks`.
        row: Function attention_BHTS -> one value a query, for `log.rows`.
    """

    reads: tuple[str, ...] = ()
    arrays: Callable[..., Arrays] = nothing
    numbers: Callable[[Arrays, Setting], dict[str, float]] = nothing
    shown: tuple[Number, ...] = ()
    saved: tuple[str, ...] = ()
    picture: Picture | None = None
    applies: Callable[[Setting], bool] = always
    context: Callable[[Any, Setting], Arrays] = nothing
    row: Callable[[Any], Any] | None = None


def of_heads(
    name: str,
    value: Callable[..., Any],
    shown: tuple[Number, ...],
    reads: tuple[str, ...] = ('attention_LPHTS',),
    numbers: Callable[[np.ndarray, Setting], dict[str, float]] | None = None,
    **more: Any,
) -> Measure:
    """Make a metric entry of one value for each layer, sequence and head.

    Args:
        name: The name of the array: `name_LPH` of a probe, saved as its mean over sequences, `name_LH`.
        value: Function (*arrays that it reads, setting) -> value_LPH.
        shown: The numbers that are shown. Without `numbers` there is one, the mean over all heads.
        reads: Names of the arrays that `value` reads.
        numbers: Function (value_LPH, setting) -> numbers by name.
        **more: Further fields of `Measure`.
    """

    def of_kept(kept: Arrays, setting: Setting) -> dict[str, float]:
        value_LPH = kept[f'{name}_LPH']
        return numbers(value_LPH, setting) if numbers else {shown[0].name: float(np.mean(value_LPH))}

    return Measure(reads, lambda *given: {f'{name}_LPH': value(*given)}, of_kept, shown, (f'{name}_LH',), **more)


def of_rows(name: str, row: Callable[[Any], Any], shown: Number, **more: Any) -> Measure:
    """Make a metric entry of the mean over queries of a value of each row of attention.

    Args:
        name: The name of the array, as in `of_heads`.
        row: Function attention_BHTS -> value_BHT.
        shown: How the mean over all heads is shown.
        **more: Further fields of `Measure`.
    """
    return of_heads(name, lambda attention, setting: row(attention).mean(-1), (shown,), row=row, **more)


def union(parts: Iterable[Arrays]) -> dict[str, Any]:
    """Of parts that share no name."""
    pairs = [pair for part in parts for pair in part.items()]
    if twice := [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]:
        raise ValueError(f'two measures give {", ".join(twice)}')
    return dict(pairs)
