"""Figures of reports as data: lines over steps and blocks, and maps of heads and attention.

The HTML page and the image files draw the same figures. A figure of lines has `panels`, each with `lines` whose
arrays are `x`, `y` and, for a mean, the standard deviation `sd`. A figure of maps has `maps` of quantized values.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from sinklab.metrics import registry
from sinklab.metrics.metric import FigureSpec, MetricInfo
from sinklab.metrics.registry import HEADLINE_FIGURE, HEADLINE_METRIC, VALID_LOSS
from sinklab.report.run_groups import RunGroup
from sinklab.report.runs import RunResult, select_evenly

Figure = dict[str, Any]

TRAIN_LOSS = 'train/loss'
MAX_POINTS = 400  # of a curve
MAX_RUNS_WITH_LOSSES = 8  # with more runs, training losses are left out
MAX_MAP_VALUES = 1_500_000  # values in all head maps of one figure together
MAX_MATRIX_VALUES = 2_500_000  # values in all attention matrices of one figure together
MAX_MATRIX_RUNS = 24  # runs with attention matrices
MAX_MATRIX_HEADS, MIN_MATRIX_HEADS = 16, 4  # heads of one run; the minimum even beyond the limit on values


def make_figures(run_groups: list[RunGroup], with_maps: bool = True) -> list[Figure]:
    """Make the figures of a report.

    Args:
        run_groups: The groups of runs, in the order of the report. The index of a run is that in the runs of all
            groups together.
        with_maps: Whether to read attention matrices, and make their figures and those of layers and heads.
    """
    figure_makers = dict(heads=make_head_maps, matrices=make_matrix_maps, ratios=make_ratios_figure)
    specs = [spec for spec in registry.FIGURES if with_maps or spec.kind == 'ratios']
    candidates = [
        make_sink_and_loss_figure(run_groups),
        *(figure_makers[spec.kind](run_groups, spec) for spec in specs),
    ]
    return [figure for figure in candidates if figure]


def list_runs(run_groups: list[RunGroup]) -> list[RunResult]:
    return [run for run_group in run_groups for run in run_group.runs]


def make_line_figure(name: str, title: str, sentence: str, panels: list[dict]) -> Figure | None:
    """Make a figure of the panels that have a line; return None if there is none."""
    panels = [panel for panel in panels if panel['lines']]
    return dict(name=name, kind='lines', title=title, sentence=sentence, panels=panels) if panels else None


def make_panel(metric_info: MetricInfo, lines: list[dict], kind: str = 'steps', x_label: str = 'step') -> dict:
    return dict(
        label=metric_info.axis_label,
        digits=metric_info.digits,
        sentence=metric_info.description,
        kind=kind,
        x_label=x_label,
        lines=lines,
    )


def make_sink_and_loss_figure(run_groups: list[RunGroup]) -> Figure | None:
    """Make the figure of Sink_1 and loss over steps."""
    sink_panel = make_panel(HEADLINE_METRIC, make_lines(run_groups, HEADLINE_METRIC.name))
    loss_lines = make_lines(run_groups, VALID_LOSS.name)
    loss_sentence = VALID_LOSS.description
    train_lines = make_lines(run_groups, TRAIN_LOSS)
    if train_lines and len(list_runs(run_groups)) <= MAX_RUNS_WITH_LOSSES:
        loss_sentence = 'lines are training batches, dots are held-out windows.'
        # Validation losses have few points. Members of a mean are left out.
        dots = [dict(line, split='validation', dots=True) for line in loss_lines if line['kind'] != 'member']
        loss_lines = [*(dict(line, split='training') for line in train_lines), *dots]
    loss_panel = make_panel(VALID_LOSS, loss_lines) | dict(label=f'loss ({VALID_LOSS.unit})', sentence=loss_sentence)
    sentence = f'{HEADLINE_METRIC.label}: {HEADLINE_METRIC.description} loss: {loss_sentence}'
    return make_line_figure('curves', 'Sink and loss', sentence, [sink_panel, loss_panel])


def make_lines(run_groups: list[RunGroup], name: str) -> list[dict]:
    """Make the lines of a metric over steps, as `make_curves` does, with a limited number of points."""
    lines = make_curves(run_groups, lambda run: run.get_curve(name))
    for line in lines:
        indices = select_extremes(line['y'], MAX_POINTS)
        line |= {axis: line[axis][indices] for axis in ('x', 'y', 'sd') if axis in line}
    return lines


def make_curves(run_groups: list[RunGroup], get_curve: Callable[[RunResult], tuple[list[int], Any]]) -> list[dict]:
    """Make the lines of runs over steps.

    Args:
        run_groups: The groups of runs.
        get_curve: Function that returns the steps of a run and its values there, numbers or arrays.

    Returns:
        A line for each run that has values and, if several counted runs of a group have common steps, their mean
        with its sample standard deviation. The kind of a run's line is `member` next to a mean and `only` otherwise.
    """
    lines = []
    run_index = 0
    for group_index, run_group in enumerate(run_groups):
        curves = [dict(zip(*get_curve(run), strict=True)) for run in run_group.counted_runs]
        curves = [curve for curve in curves if curve]
        mean_steps = sorted(set.intersection(*map(set, curves))) if len(curves) > 1 else []
        kind = 'member' if mean_steps else 'only'
        for run in run_group.runs:
            steps, values = get_curve(run)
            if steps:
                lines.append(
                    dict(kind=kind, group=group_index, run=run_index, x=np.int32(steps), y=np.float32(values))
                )
            run_index += 1
        if mean_steps:
            values = np.array([[curve[step] for step in mean_steps] for curve in curves])
            mean = dict(y=np.float32(values.mean(0)), sd=np.float32(values.std(0, ddof=1)))
            lines.append(
                dict(kind='mean', group=group_index, run=None, n=len(curves), x=np.int32(mean_steps), **mean)
            )
    return lines


def select_extremes(values: np.ndarray, max_points: int) -> list[int]:
    """Select the indices of at most `max_points` values, keeping minima and maxima.

    A curve that is short enough keeps all its values. A longer one is split into `max_points // 2 - 1` equal parts;
    the first value, the last value and the minimum and maximum of each part are kept.
    """
    if len(values) <= max_points:
        return list(range(len(values)))
    indices = {0, len(values) - 1}
    for part in np.array_split(np.arange(len(values)), max_points // 2 - 1):
        part_values = np.asarray(values)[part]
        indices |= {int(part[part_values.argmin()]), int(part[part_values.argmax()])}
    return sorted(indices)


def make_ratios_figure(run_groups: list[RunGroup], figure_spec: FigureSpec) -> Figure | None:
    """Make the figure of a ratio by block; a line has the values y of all blocks at each of its `steps`."""
    lines = make_curves(run_groups, lambda run: run.get_probe_curve(figure_spec))
    for line in lines:
        ratio_NL = line['y']
        x = figure_spec.first_row + np.arange(ratio_NL.shape[1], dtype=np.int32)
        line |= dict(steps=line['x'].tolist(), x=x, y=ratio_NL.ravel())
        line.pop('sd', None)
    info = MetricInfo(figure_spec.name, figure_spec.label, figure_spec.caption, digits=2)
    x_label = 'hidden state' if figure_spec.first_row else 'layer'
    panel = make_panel(info, lines, 'blocks', x_label) | dict(reference_value=1)
    return make_line_figure(figure_spec.name, figure_spec.title, figure_spec.caption, [panel])


def make_head_maps(run_groups: list[RunGroup], figure_spec: FigureSpec) -> Figure | None:
    """Make the figure with a map of all layers and heads for each run; None if no run has one.

    Each run gets an equal share of MAX_MAP_VALUES, which limits its number of probes.
    """
    curves = {index: run.get_probe_curve(figure_spec) for index, run in enumerate(list_runs(run_groups))}
    drawn_curves = {index: curve for index, curve in curves.items() if curve[0]}
    if not drawn_curves:
        return None
    scale = compute_scale(figure_spec, [values_NLH for _, values_NLH in drawn_curves.values()])
    maps = []
    for index, (steps, values_NLH) in drawn_curves.items():
        _, layers, heads = values_NLH.shape
        probes = select_evenly(len(steps), max(1, MAX_MAP_VALUES // len(drawn_curves) // (layers * heads)))
        maps.append(
            dict(
                run=index,
                rows=layers,
                columns=heads,
                first_row=0,
                first_column=0,
                steps=[steps[probe] for probe in probes],
                values=quantize(values_NLH[probes], *scale, np.uint16),
            )
        )
    return make_map_figure(figure_spec, scale, maps, row_name='layer', column_name='head')


def make_matrix_maps(run_groups: list[RunGroup], figure_spec: FigureSpec) -> Figure | None:
    """Make the figure with attention matrices of the strongest heads of the first MAX_MATRIX_RUNS runs, or None.

    Each run gets an equal share of MAX_MATRIX_VALUES, which limits its heads first and then its probes. The last
    probe is always included.
    """
    probed_runs = [
        (index, run) for index, run in enumerate(list_runs(run_groups)) if HEADLINE_FIGURE.name in run.probe_values
    ]
    scale = (0.0, figure_spec.scale_max or 1.0)
    maps = []
    for index, run in probed_runs[:MAX_MATRIX_RUNS]:
        last_LHTS = run.load_matrices(figure_spec)
        if last_LHTS is None:
            continue
        *_, queries, keys = last_LHTS.shape
        max_matrices = MAX_MATRIX_VALUES // min(MAX_MATRIX_RUNS, len(probed_runs)) // (queries * keys)
        heads = run.find_strongest_heads(int(np.clip(max_matrices, MIN_MATRIX_HEADS, MAX_MATRIX_HEADS)))
        matrices = {}
        for probe in select_evenly(len(run.probe_steps), max(1, max_matrices // len(heads))):
            if (probe_LHTS := run.load_matrices(figure_spec, probe)) is not None:
                matrices[run.probe_steps[probe]] = probe_LHTS
        for layer, head in heads:
            matrix_NTS = np.stack([probe_LHTS[layer, head] for probe_LHTS in matrices.values()])
            maps.append(
                dict(
                    run=index,
                    layer=layer,
                    head=head,
                    rows=queries,
                    columns=keys,
                    first_row=1,
                    first_column=1 - (keys - queries),
                    steps=list(matrices),
                    values=quantize(matrix_NTS, *scale, np.uint8),
                )
            )
    return make_map_figure(figure_spec, scale, maps, row_name='query', column_name='key') if maps else None


def make_map_figure(
    figure_spec: FigureSpec, scale: tuple[float, float], maps: list[dict], **axis_names: str
) -> Figure:
    return dict(
        name=figure_spec.name,
        kind=figure_spec.kind,
        title=figure_spec.title,
        sentence=figure_spec.caption,
        label=figure_spec.label,
        scale_min=scale[0],
        scale_max=scale[1],
        maps=maps,
        **axis_names,
    )


def compute_scale(figure_spec: FigureSpec, values: list[np.ndarray]) -> tuple[float, float]:
    """Compute the limits of a colour scale: from 0, or symmetric around 0 if a value is negative.

    The upper limit is `scale_max` of the figure, or the largest value if it has none.
    """
    scale_max = figure_spec.scale_max or max(float(np.nanmax(array)) for array in values)
    min_value = min(float(np.nanmin(array)) for array in values)
    limit = max(scale_max, -min_value)
    return (-limit, limit) if min_value < 0 else (0.0, scale_max)


def quantize(values: np.ndarray, scale_min: float, scale_max: float, dtype: Any) -> np.ndarray:
    """Quantize values of any shape to all levels of an unsigned integer type, and flatten them.

    Values outside the scale are clipped. NaN counts as `scale_min`.
    """
    finite = np.nan_to_num(values, nan=scale_min, posinf=scale_max, neginf=scale_min)
    fractions = np.clip((finite - scale_min) / max(scale_max - scale_min, 1e-30), 0, 1)
    return np.rint(fractions * np.iinfo(dtype).max).astype(dtype).ravel()
