"""What an entry of the table of measures says."""

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
    """A number of metrics.jsonl for people; {k} in its name and label stands for a token, layer or threshold."""

    name: str
    label: str
    sentence: str
    unit: str = ''
    digits: int = 3
    table: bool = False  # of runs, and at the end of `train`
    sweep: bool = False  # compared between rows, published or not

    @property
    def axis(self) -> str:
        return f'{self.label} ({self.unit})' if self.unit else self.label

    def text(self, value: float) -> str:
        return f'{fixed(value, self.digits)} {self.unit}'.rstrip()


@dataclasses.dataclass(frozen=True)
class Picture:
    """Of an array that every probe saves: values_LH (with a slider over steps), matrices_LHTS or ratios_L."""

    kind: Literal['heads', 'matrices', 'ratios']
    array: str
    title: str
    label: str  # of its values
    sentence: str = 'The mean of each layer and head.'
    of: Callable[[np.ndarray], np.ndarray] = np.asarray  # the array
    largest: float | None = None  # of its scale; None: the largest value

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
    """An entry of the table; docs/add_a_measure.md goes through it."""

    reads: tuple[str, ...] = ()  # arrays of the forward pass
    arrays: Callable[..., Arrays] = nothing  # (*those read, setting) -> what is kept, in the program of the probe
    numbers: Callable[[Arrays, Setting], dict[str, float]] = nothing  # of what is kept
    shown: tuple[Number, ...] = ()
    saved: tuple[str, ...] = ()  # in a probe's file: what is kept, or of name_LP.. the mean over sequences, name_L..
    picture: Picture | None = None
    applies: Callable[[Setting], bool] = always
    context: Callable[[Any, Setting], Arrays] = nothing  # numbers of Received sums over a training batch
    row: Callable[[Any], Any] | None = None  # attention_BHTS of some queries -> a value of each of them


def of_heads(
    name: str,
    value: Callable[..., Any],
    shown: tuple[Number, ...],
    reads: tuple[str, ...] = ('attention_LPHTS',),
    numbers: Callable[[np.ndarray, Setting], dict[str, float]] | None = None,
    **more: Any,
) -> Measure:
    """value(*read, setting) -> name_LPH, saved as name_LH; without other numbers, its mean is the one shown."""

    def of_kept(kept: Arrays, setting: Setting) -> dict[str, float]:
        value_LPH = kept[f'{name}_LPH']
        return numbers(value_LPH, setting) if numbers else {shown[0].name: float(np.mean(value_LPH))}

    return Measure(reads, lambda *given: {f'{name}_LPH': value(*given)}, of_kept, shown, (f'{name}_LH',), **more)


def of_rows(name: str, row: Callable[[Any], Any], shown: Number, **more: Any) -> Measure:
    """The mean over queries of a value of each row."""
    return of_heads(name, lambda attention, setting: row(attention).mean(-1), (shown,), row=row, **more)


def union(parts: Iterable[Arrays]) -> dict[str, Any]:
    """Of parts that share no name."""
    pairs = [pair for part in parts for pair in part.items()]
    if twice := [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]:
        raise ValueError(f'two measures give {", ".join(twice)}')
    return dict(pairs)
