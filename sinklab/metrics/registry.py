"""Registry of all metrics, which probes, reports, sweeps and the documentation read."""

import dataclasses
import re
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from sinklab.config.spec import REGISTERED
from sinklab.errors import UserError, format_unknown_name
from sinklab.metrics import (
    angles,
    bigram_backcopy,
    entropy,
    heads,
    hidden_states,
    massive_activations,
    norms,
    propositions,
    sink,
    sink_position,
)
from sinklab.metrics.metric import (
    PROBE_ARRAYS,
    Arrays,
    Metric,
    MetricContext,
    MetricInfo,
    complete_key_attention_sums,
    extract_arrays,
    merge_disjoint,
)

Metrics = Sequence[Metric]
# Metrics of probes. `register_metric` adds those of users.
METRICS = [
    *sink.METRICS,
    *entropy.METRICS,
    *norms.CONTRIBUTION_METRICS,
    *norms.METRICS,
    *angles.METRICS,
    *bigram_backcopy.METRICS,
    *heads.METRICS,
]
# Metrics of finished models only: they take too much time or space for every probe of a training run.
OFFLINE_METRICS = (
    *angles.OFFLINE_METRICS,
    *massive_activations.METRICS,
    *hidden_states.METRICS,
    *sink_position.METRICS,
    *propositions.METRICS,
    *heads.OFFLINE_METRICS,
)
METRIC_INFOS = [info for metric in METRICS for info in metric.infos]
OFFLINE_METRIC_INFOS = [info for metric in OFFLINE_METRICS for info in metric.infos]
# Numbers that `sinklab measure` computes on request, since they need more passes.
REQUESTED_METRIC_INFOS = (
    MetricInfo('loss', 'loss', '`--loss`: mean of -log p of every token but the first.', 'nats'),
    MetricInfo(
        'loss/int{k}',
        'loss, int{k}',
        '`--quantize=k`: the loss after weights and inputs of all linear maps but embedding and head are rounded to '
        'the nearest of 2^k - 1 values from -m to m (m: largest |x| of an output channel, or the input for a text).',
        'nats',
    ),
    MetricInfo(
        'gradient_sink_ratio',
        'gradient-sink ratio',
        '`--gradients`: norm of the gradient of the loss at the first token over the mean of the others, at the '
        'normalized input of attention (Chen et al., 2603.17771): median over layers and texts.',
        digits=2,
    ),
    MetricInfo(
        'gradient_sink_ratio/{k}',
        'gradient-sink ratio {k}',
        'The same for one layer, from 0: median over texts.',
        digits=2,
    ),
)
FIGURES = [metric.figure for metric in METRICS if metric.figure]
# Numbers of records that are no metrics, or the first parts of their names.
OTHER_NUMBERS = 'step', 'seconds', 'train', 'valid', 'speed', 'data', 'loss', 'perplexity', 'fails', 'emergence'
# A number that tables and figures show and that is not a metric of a probe.
VALID_LOSS = MetricInfo('valid/loss', 'valid loss', 'Mean cross-entropy of held-out windows.', 'nats')
# The number and the figure that are shown where only one is.
HEADLINE_METRIC = next(info for info in METRIC_INFOS if info.name == 'sink/1')
HEADLINE_FIGURE = next(figure for figure in FIGURES if figure.array_name == 'alpha_LPHJ')


def register_metric(metric: Metric) -> None:
    """Add a metric of your own: from then on probes, `measure`, reports and sweeps have it.

    It replaces your metrics that have one of its names.

    Raises:
        UserError: It reads an array that no probe has, or a metric of sinklab has one of its names.
    """
    for name in {*metric.inputs} - {*PROBE_ARRAYS}:
        raise UserError(format_unknown_name(f'the input {name!r} of a metric', name, PROBE_ARRAYS, 'arrays'))
    tuples = {name: tuple(getattr(metric, name)) for name in ('inputs', 'infos', 'saved_arrays')}  # hashable
    metric = dataclasses.replace(metric, **tuples)
    names = list_names(metric)
    saved_arrays = {name for other in (*METRICS, *OFFLINE_METRICS) for name in other.saved_arrays}
    taken = {name for name in names if find_metric_info(name) or name.partition('/')[0] in OTHER_NUMBERS}
    for name in sorted(names & saved_arrays | taken):
        if f'metric {name}' not in REGISTERED:
            raise UserError(f'the metric {name} exists already; choose another name')
    REGISTERED.update(f'metric {name}' for name in names)
    METRICS[:] = [other for other in METRICS if names.isdisjoint(list_names(other))] + [metric]
    METRIC_INFOS[:] = [info for metric in METRICS for info in metric.infos]
    FIGURES[:] = [metric.figure for metric in METRICS if metric.figure]


def list_names(metric: Metric) -> set[str]:
    return {*metric.saved_arrays, *(info.name for info in metric.infos)}


def select_applicable(context: MetricContext, metrics: Metrics = METRICS) -> list[Metric]:
    return [metric for metric in metrics if metric.is_applicable(context)]


def compute_probe_arrays(captured: Any, context: MetricContext, metrics: Metrics = METRICS) -> Arrays:
    """Compute the arrays of all metrics from the `Intermediates` of L layers."""
    return compute_arrays(extract_arrays(captured, context), context, metrics)


def compute_arrays(forward: Arrays, context: MetricContext, metrics: Metrics) -> Arrays:
    """Compute the arrays of metrics from the arrays of a forward pass.

    Raises:
        UserError: An array has another number of axes than the letters at the end of its name, or a metric saves an
            array that no metric computes.
    """
    metrics = select_applicable(context, metrics)
    arrays = merge_disjoint(
        metric.compute_arrays(*(forward[name] for name in metric.inputs), context) for metric in metrics
    )
    for name, array in arrays.items():
        if np.ndim(array) != len(name.rpartition('_')[2]):
            raise UserError(
                f'a metric computes {name} with the shape {np.shape(array)}; give one axis for each letter'
            )
    for name in (name for metric in metrics for name in metric.saved_arrays):
        if {name, name.replace('_L', '_LP')}.isdisjoint(arrays):
            raise UserError(format_unknown_name(f'the saved array {name!r} of a metric', name, arrays, 'arrays'))
    return arrays


def select_measurable(inputs: Collection[str], metrics: Metrics | None = None) -> Metrics:
    """Select the metrics that read only some of these arrays, of all metrics, OFFLINE_METRICS included, if None."""
    candidates = (*METRICS, *OFFLINE_METRICS) if metrics is None else metrics
    return tuple(metric for metric in candidates if {*metric.inputs} <= {*inputs})


def select_by_name(names: Collection[str], metrics: Metrics) -> Metrics:
    """Select the metrics that give a number NAME, or numbers NAME/...; '' selects all that give numbers."""

    def gives(metric: Metric, name: str) -> bool:
        beginnings = ('/'.join(info.name.split('/')[: name.count('/') + 1]) for info in metric.infos)
        return any(not name or match_name(beginning, name) for beginning in beginnings)

    return tuple(metric for metric in metrics if any(gives(metric, name) for name in names))


def compute_numbers(arrays: Arrays, context: MetricContext, metrics: Metrics = METRICS) -> dict[str, float]:
    """Compute the numbers that a probe adds to metrics.jsonl."""
    return merge_disjoint(metric.compute_numbers(arrays, context) for metric in select_applicable(context, metrics))


def compute_batch_metrics(captured: Any, context: MetricContext) -> Arrays:
    """Compute the numbers NAME/context of a training batch from its `KeyAttentionSums`, if it has them."""
    if captured.key_attention_sums is None:
        return {}
    key_attention_sums = complete_key_attention_sums(captured.key_attention_sums, context)
    numbers = merge_disjoint(
        metric.compute_batch_numbers(key_attention_sums, context)
        for metric in select_applicable(context)
        if metric.compute_batch_numbers is not None
    )
    return {f'{name}/context': value for name, value in numbers.items()}


def select_saved_arrays(arrays: Arrays, context: MetricContext, metrics: Metrics = METRICS) -> dict[str, np.ndarray]:
    """Select the arrays that a probe file stores: `name_LH` is the mean of `name_LPH` over sequences."""
    names = [name for metric in select_applicable(context, metrics) for name in metric.saved_arrays]
    return {name: arrays[name] if name in arrays else arrays[name.replace('_L', '_LP')].mean(1) for name in names}


def find_metric_info(name: str) -> MetricInfo | None:
    """Find the MetricInfo of a recorded name, such as sink/{k} with k = 2 for sink/2; None if there is none."""
    for entry in (*METRIC_INFOS, *OFFLINE_METRIC_INFOS, *REQUESTED_METRIC_INFOS):
        if match := match_name(entry.name, name):
            return dataclasses.replace(entry, name=name, label=entry.label.format(**match.groupdict()))
    return None


def match_name(pattern: str, name: str) -> re.Match[str] | None:
    """Match a recorded name with the name of a MetricInfo, in which {k} stands for a number."""
    return re.fullmatch(re.sub(r'\\{(\w+)\\}', r'(?P<\1>[\\d.e-]+)', re.escape(pattern)), name)
