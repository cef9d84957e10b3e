"""An entry of the table of metrics: what it reads of a forward pass, computes, stores and shows."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import numpy as np

from sinklab.measure.setting import MetricSetting

Arrays = Mapping[str, Any]


def format_fixed(value: float, digits: int, sign: str = '') -> str:
    """Return a number with so many decimals; what rounds to 0 has no sign.

    Args:
        sign: + puts one before positive numbers.
    """
    text = f'{value:z.{digits}f}'
    return f'{value:{sign}.{digits}f}' if text.strip('0.') else text


@dataclasses.dataclass(frozen=True)
class MetricInfo:
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
    description: str
    unit: str = ''
    digits: int = 3
    in_table: bool = False
    in_sweep: bool = False

    @property
    def axis_label(self) -> str:
        return f'{self.label} ({self.unit})' if self.unit else self.label

    def format_value(self, value: float) -> str:
        return f'{format_fixed(value, self.digits)} {self.unit}'.rstrip()


@dataclasses.dataclass(frozen=True)
class FigureSpec:
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
    array_name: str
    title: str
    label: str
    caption: str = 'The mean of each layer and head.'
    transform: Callable[[np.ndarray], np.ndarray] = np.asarray
    scale_max: float | None = None

    @property
    def name(self) -> str:
        """Of its file."""
        return self.array_name.partition('_')[0]


def is_always_applicable(setting: MetricSetting) -> bool:
    return True


def compute_nothing(*_: Any) -> Arrays:
    return {}


@dataclasses.dataclass(frozen=True)
class Metric:
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

    inputs: tuple[str, ...] = ()
    compute_arrays: Callable[..., Arrays] = compute_nothing
    compute_numbers: Callable[[Arrays, MetricSetting], Mapping[str, Any]] = compute_nothing
    infos: tuple[MetricInfo, ...] = ()
    saved_arrays: tuple[str, ...] = ()
    figure: FigureSpec | None = None
    is_applicable: Callable[[MetricSetting], bool] = is_always_applicable
    context_numbers: Callable[[Any, MetricSetting], Arrays] = compute_nothing
    row_function: Callable[[Any], Any] | None = None


def make_head_metric(
    name: str,
    compute_value: Callable[..., Any],
    infos: tuple[MetricInfo, ...],
    inputs: tuple[str, ...] = ('attention_LPHTS',),
    compute_numbers: Callable[[np.ndarray, MetricSetting], dict[str, float]] | None = None,
    **fields: Any,
) -> Metric:
    """Make a metric entry of one value for each layer, sequence and head.

    Args:
        name: The name of the array: `name_LPH` of a probe, saved as its mean over sequences, `name_LH`.
        value: Function (*arrays that it reads, setting) -> value_LPH.
        shown: The numbers that are shown. Without `numbers` there is one, the mean over all heads.
        reads: Names of the arrays that `value` reads.
        numbers: Function (value_LPH, setting) -> numbers by name.
        **more: Further fields of `Measure`.
    """

    def summarize_heads(arrays: Arrays, setting: MetricSetting) -> dict[str, float]:
        value_LPH = arrays[f'{name}_LPH']
        return compute_numbers(value_LPH, setting) if compute_numbers else {infos[0].name: float(np.mean(value_LPH))}

    return Metric(inputs, lambda *arguments: {f'{name}_LPH': compute_value(*arguments)}, summarize_heads, infos, (f'{name}_LH',), **fields)


def make_row_metric(name: str, row_function: Callable[[Any], Any], info: MetricInfo, **fields: Any) -> Metric:
    """Make a metric entry of the mean over queries of a value of each row of attention.

    Args:
        name: The name of the array, as in `of_heads`.
        row: Function attention_BHTS -> value_BHT.
        shown: How the mean over all heads is shown.
        **more: Further fields of `Measure`.
    """
    return make_head_metric(name, lambda attention, setting: row_function(attention).mean(-1), (info,), row=row_function, **fields)


def merge_disjoint(parts: Iterable[Arrays]) -> dict[str, Any]:
    """Of parts that share no name."""
    pairs = [pair for part in parts for pair in part.items()]
    if duplicates := [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]:
        raise ValueError(f'two measures give {", ".join(duplicates)}')
    return dict(pairs)
