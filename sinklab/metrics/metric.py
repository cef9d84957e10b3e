"""Metric entries: what a metric reads, computes, saves and shows, and the context it is computed in.

A metric may read `PROBE_ARRAYS`. Those of sinklab also read arrays that some models lack: `gate_LPTH`, the mean over
dimensions of the gate of attention, and `sink_LPCD`, the residual stream of sink tokens after each block.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import numpy as np

from sinklab.config.spec import Spec

# The arrays that every probe has, of L layers and P sequences. S: the learned keys, then the text.
PROBE_ARRAYS = {
    'attention_LPHTS': 'attention matrices in float32, as the model uses them',
    'query_LPTHK': 'queries as attention receives them',
    'key_LPSHK': 'keys as attention receives them',
    'value_LPSHK': 'values as attention receives them',
    'head_LPTHK': 'outputs of the heads, sum_j A_ij v_j',
    'normed_LPTD': 'input of attention, the residual stream after the norm',
    'ffn_LPTD': 'what the FFN adds to the residual stream',
    'residual_LPTD': 'residual stream after each block',
}
IMPLICIT_KEY_NORMALIZERS = ('plus_one',)  # normalizers that are softmax with a column whose key and value are zero


@dataclasses.dataclass(frozen=True)
class MetricContext:
    """The properties of a model and its texts that metrics need. The first token is key number `learned_keys`."""

    length: int  # T, of a text
    learned_keys: int  # keys left of the text: learned keys, and the implicit zero key of `plus_one`
    implicit: bool  # the leftmost column is in no array of the model; `complete_arrays` adds it
    gain: float  # of attention
    keys: int  # J: the first tokens whose importance is reported
    prefix: int  # first tokens that all queries see; 0: causal
    window: int | None  # below the length; of all layers
    reach: int  # how many queries can see the first token, in some layer
    triggers: bool  # some queries are triggers of Bigram-Backcopy
    lengths: tuple[int, ...] = ()  # shorter lengths that are measured in addition
    thresholds: tuple[float, ...] = ()
    repeated: bool = False  # all tokens of a text are the same
    gated: bool = False  # attention has a gate
    period: int = 0  # tokens after which a text repeats itself; 0: it does not


def make_context(spec: Spec, length: int, learned_keys: int, **overrides: Any) -> MetricContext:
    """Make the context of a model.

    Args:
        spec: The spec of the model.
        length: The number of tokens of a text.
        learned_keys: The number of keys left of the text in the arrays of the model.
        **overrides: Fields of `MetricContext` that replace those of the spec.
    """
    mask, attention = spec.model.mask, spec.model.attention
    window = mask.window if len(spec.model.layer_types) == 1 else None  # None if layers have different windows
    implicit = attention.normalizer in IMPLICIT_KEY_NORMALIZERS
    fields = dict(
        length=length,
        learned_keys=learned_keys + implicit,
        implicit=implicit,
        gain=attention.gain,
        keys=min(spec.probe.keys, length),
        prefix=mask.prefix or 0,
        window=window if window and window < length else None,
        reach=min(window or length, mask.block or length, length),
        triggers=spec.data.task == 'backcopy',
        gated=spec.model.gate != 'none',
    )
    return MetricContext(**fields | overrides)


def add_implicit_key(attention_TS: Any, context: MetricContext) -> Any:
    """Add the implicit column on the left, if there is one: it gets what the row lacks to a sum of `gain`."""
    if not context.implicit:
        return attention_TS
    missing_mass = (context.gain - attention_TS.sum(-1, keepdims=True)).clip(0)
    return attention_TS.__array_namespace__().concatenate([missing_mass, attention_TS], -1)


def extract_arrays(captured: Any, context: MetricContext) -> dict[str, Any]:
    """Extract the arrays of the `Intermediates` of L layers by name, with the implicit column."""
    arrays = {name: array for name, array in vars(captured).items() if '_B' in name and array is not None}
    return complete_arrays({name.replace('_B', '_LP'): array for name, array in arrays.items()}, context)


def complete_arrays(arrays: dict[str, Any], context: MetricContext) -> dict[str, Any]:
    """Add the implicit column to attention, keys and values, if there is one."""
    if context.implicit and 'attention_LPHTS' in arrays:  # not every layer of an open model has attention
        arrays['attention_LPHTS'] = add_implicit_key(arrays['attention_LPHTS'], context)
        for name in ('value_LPSHK', 'key_LPSHK'):
            if name in arrays:
                xp = arrays[name].__array_namespace__()
                arrays[name] = xp.pad(arrays[name], ((0, 0), (0, 0), (1, 0), (0, 0), (0, 0)))
    return arrays


def complete_key_attention_sums(key_attention_sums: Any, context: MetricContext) -> Any:
    """Add the implicit column to the key mass, as `extract_arrays` does for attention."""
    if not context.implicit:
        return key_attention_sums
    xp = key_attention_sums.raw_BHS.__array_namespace__()
    missing_BH1 = context.length * (context.gain - key_attention_sums.abs_weight_sum_BH)[..., None]
    raw_BHS = xp.concatenate([missing_BH1, key_attention_sums.raw_BHS], -1)
    return dataclasses.replace(
        key_attention_sums,
        raw_BHS=raw_BHS,
        share_BHS=raw_BHS / context.gain,
        abs_weight_sum_BH=xp.full_like(key_attention_sums.abs_weight_sum_BH, context.gain),
    )


Arrays = Mapping[str, Any]


def format_fixed(value: float, digits: int, sign: str = '') -> str:
    """Format a number with fixed decimals; a number that rounds to 0 has no sign.

    Args:
        value: The number.
        digits: Digits after the decimal point.
        sign: '+' to mark positive numbers, too.
    """
    text = f'{value:z.{digits}f}'
    return f'{value:{sign}.{digits}f}' if text.strip('0.') else text


@dataclasses.dataclass(frozen=True)
class MetricInfo:
    """How a number of metrics.jsonl is shown to people.

    Attributes:
        name: Its name in metrics.jsonl; {k} stands for a token, layer or threshold.
        label: Its name in tables and figures.
        description: What it is, for the documentation.
        unit: Its unit, '' for none.
        digits: Digits after the decimal point.
        in_table: Show it in the table of runs, and when `train` ends.
        in_sweep: Compare it between the rows of a sweep, also where nothing is published.
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
        array_name: The name of the array in a probe's file.
        title: The title of the figure.
        label: The name of its values.
        caption: Its caption.
        transform: Function of the array; its result is shown.
        scale_max: The end of the scale; None for the largest value.
        first_row: Of `ratios`: 0 for layers; 1 for hidden states, which count as in transformers: 0 is the embedding.
    """

    kind: Literal['heads', 'matrices', 'ratios']
    array_name: str
    title: str
    label: str
    caption: str = 'Mean of each layer and head.'
    transform: Callable[[np.ndarray], np.ndarray] = np.asarray
    scale_max: float | None = None
    first_row: int = 0

    @property
    def name(self) -> str:
        """The first part of the name of the array, which names the file of the figure."""
        return self.array_name.partition('_')[0]


@dataclasses.dataclass(frozen=True)
class Metric:
    """A metric entry: it computes numbers from arrays of a forward pass; docs/guides/add_a_metric.md registers one.

    Attributes:
        inputs: Names of the arrays that it reads: those of `PROBE_ARRAYS`.
        compute_arrays: Function (*those arrays, context) -> arrays that the probe returns. It is compiled with the
            probe.
        compute_numbers: Function (those arrays as NumPy, context) -> numbers by name, for metrics.jsonl.
        infos: The numbers that tables, pages and the documentation show.
        saved_arrays: Names of the arrays of a probe's file. `name_LH` is the mean over the sequences P of `name_LPH`.
        figure: A figure of a saved array, or None.
        is_applicable: Function context -> whether the metric exists for this model and these texts.
        compute_batch_numbers: Function (`KeyAttentionSums` of a training batch, context) -> numbers, for `log.sinks`;
            None if the metric cannot be computed from a `KeyAttentionSums`.
    """

    inputs: tuple[str, ...] = ()
    compute_arrays: Callable[..., Arrays] = lambda *_: {}
    compute_numbers: Callable[[Arrays, MetricContext], Mapping[str, Any]] = lambda *_: {}
    infos: tuple[MetricInfo, ...] = ()
    saved_arrays: tuple[str, ...] = ()
    figure: FigureSpec | None = None
    is_applicable: Callable[[MetricContext], bool] = lambda context: True
    compute_batch_numbers: Callable[[Any, MetricContext], Arrays] | None = None


def make_head_metric(
    name: str,
    compute_value: Callable[..., Any],
    infos: tuple[MetricInfo, ...],
    inputs: tuple[str, ...] = ('attention_LPHTS',),
    compute_numbers: Callable[[np.ndarray, MetricContext], dict[str, float]] | None = None,
    **fields: Any,
) -> Metric:
    """Make a metric entry of one value for each layer, sequence and head.

    Args:
        name: The name of the array: `name_LPH` of a probe, saved as its mean over sequences, `name_LH`.
        compute_value: Function (*arrays that it reads, context) -> value_LPH.
        infos: The numbers that are shown. Without `compute_numbers` there is one, the mean over all heads.
        inputs: Names of the arrays that `compute_value` reads.
        compute_numbers: Function (value_LPH, context) -> numbers by name.
        **fields: Further fields of `Metric`.
    """

    def summarize_heads(arrays: Arrays, context: MetricContext) -> dict[str, float]:
        value_LPH = arrays[f'{name}_LPH']
        return compute_numbers(value_LPH, context) if compute_numbers else {infos[0].name: float(np.mean(value_LPH))}

    return Metric(
        inputs,
        lambda *arguments: {f'{name}_LPH': compute_value(*arguments)},
        summarize_heads,
        infos,
        (f'{name}_LH',),
        **fields,
    )


def name_by_layer(name: str, value_L: Any, first: int = 1) -> dict[str, float]:
    """Return {NAME/LL: value}.

    Args:
        name: The first part of the names.
        value_L: A value of each layer.
        first: The first LL: 1 for hidden states, which count as in transformers (0 is the embedding); 0 for layers.
    """
    return {f'{name}/{layer:02}': float(value) for layer, value in enumerate(value_L, first)}


def merge_disjoint(parts: Iterable[Arrays]) -> dict[str, Any]:
    """Merge mappings; raise ValueError if two of them share a name."""
    pairs = [pair for part in parts for pair in part.items()]
    if duplicates := [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]:
        raise ValueError(f'two metrics have the names {", ".join(duplicates)}')
    return dict(pairs)
