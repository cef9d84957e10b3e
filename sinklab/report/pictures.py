"""Figures as image files (matplotlib): curves, maps, sweep axes, and claim intervals."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use('Agg')
import matplotlib.pyplot as plt

from sinklab.escape import FIGURE_RC_PARAMS, quote_file_name
from sinklab.metrics.emergence import estimate_step
from sinklab.metrics.metric import FigureSpec
from sinklab.metrics.registry import HEADLINE_METRIC, VALID_LOSS
from sinklab.report.emergence import PointEmergence, find_emergences
from sinklab.report.figure_data import compute_scale
from sinklab.report.run_groups import (
    AxisPoint,
    RunGroup,
    SweepAxis,
    compute_mean_curve,
    find_axes,
    group_runs,
    make_group_table,
)
from sinklab.report.runs import RunResult, find_fork_segments, select_drawn_figures
from sinklab.report.statistics import INTERVAL_DESCRIPTION
from sinklab.report.sweep_table import EMERGENCE_METRIC, LOSS_METRIC
from sinklab.storage.files import atomic_write

LINE_COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')  # by Okabe and Ito
LINE_STYLES = ('-', '--', ':', '-.')
HEADS_PER_RUN = 4  # attention matrices of one run
RUNS_PER_ROW = 4  # head maps in one row of the grid
MAX_MAP_RUNS = 12  # runs with maps
MAX_LEGEND_ENTRIES = 12  # with more run groups there is no legend
LABEL_CHARS = 60  # characters of a line of a label
FONT_OPTIONS = {'svg.fonttype': 'none', 'pdf.fonttype': 42}  # keep text as text rather than as outlines


def write_pictures(folder: Path, runs: list[RunResult], formats: Sequence[str] = ('png',)) -> list[Path]:
    """Write the figures of runs as image files.

    The figures are the curves, one figure for each sweep axis, the emergence of the sink, and the figures of the
    metric registry. Bitmaps have 200 dots per inch.

    Args:
        folder: The folder for the files.
        runs: At least one run.
        formats: File extensions that matplotlib supports, such as `png`, `svg` and `pdf`.

    Returns:
        The paths of the files.
    """
    run_groups, paths = group_runs(runs), []
    with plt.rc_context(FONT_OPTIONS | FIGURE_RC_PARAMS):
        for name, draw, argument in list_figures(run_groups):
            figure = draw(run_groups, argument)
            for extension in formats:
                paths.append(folder / f'{quote_file_name(name)}.{extension}')
                with atomic_write(paths[-1]) as unfinished:
                    figure.savefig(unfinished, dpi=200, bbox_inches='tight', format=extension)
            plt.close(figure)
    return paths


def wrap_label(text: str) -> str:
    """Break a long name into lines."""
    return '\n'.join(textwrap.wrap(text, LABEL_CHARS))


def list_figures(run_groups: list[RunGroup]) -> list[tuple]:
    """List the figures as (name, function that draws the figure, its second argument)."""
    sweep_axes = find_axes(run_groups, make_group_table(run_groups))
    axes_with_emergence = [
        axis
        for axis in sweep_axes
        if any(EMERGENCE_METRIC in point.ours for points in axis.lines for point in points)
    ]
    axis_figures = [(f'along-{axis.field}', draw_sweep_axis, axis) for axis in sweep_axes]
    axis_figures += [('emergence', draw_emergence, axes_with_emergence)] if axes_with_emergence else []
    runs = [run for run_group in run_groups for run in run_group.runs]
    map_figures = [
        (figure_spec.name, MAP_DRAWERS[figure_spec.kind], figure_spec) for figure_spec in select_drawn_figures(runs)
    ]
    return [('curves', draw_curves, None), *axis_figures, *map_figures]


def get_line_style(index: int) -> dict:
    return dict(
        color=LINE_COLOURS[index % len(LINE_COLOURS)],
        linestyle=LINE_STYLES[index // len(LINE_COLOURS) % len(LINE_STYLES)],
    )


def draw_curves(run_groups: list[RunGroup], _: None) -> plt.Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.8), layout='constrained')
    lines = {}
    for index, run_group in enumerate(run_groups):
        lines |= draw_mean_curve(left, run_group, HEADLINE_METRIC.name, get_line_style(index))
        draw_mean_curve(right, run_group, 'valid/loss', get_line_style(index))
        for run in run_group.runs:
            right.plot(
                *run.get_curve('train/loss'), **get_line_style(index), alpha=0.3 / len(run_group.runs), linewidth=0.8
            )
    runs = [run for run_group in run_groups for run in run_group.runs]
    colours = [get_line_style(index)['color'] for index, run_group in enumerate(run_groups) for _ in run_group.runs]
    for axis, name in ((left, HEADLINE_METRIC.name), (right, 'valid/loss')):
        for run_index, steps, values in find_fork_segments(runs, name):
            axis.plot(steps, values, ':', marker='.', color=colours[run_index])
    left.set(xlabel='step', ylabel=HEADLINE_METRIC.axis_label, ylim=(-2, None))
    right.set(xlabel='step', ylabel='loss (pale: train)')
    return add_legend(hide_top_and_right_spines(figure), left, lines)


def draw_mean_curve(axis: plt.Axes, run_group: RunGroup, metric_name: str, line_style: dict) -> dict[str, plt.Line2D]:
    """Draw a metric of a run group over steps.

    With several counted runs that have common steps, draw their mean, its sample standard deviation as a band, and
    each run as a thin line. Otherwise draw each run.

    Returns:
        {label of the legend: line}, with one entry.
    """
    mean_curve = compute_mean_curve(run_group.counted_runs, metric_name)
    run_style = dict(alpha=0.35, linewidth=0.7) if mean_curve else {}
    lines = [axis.plot(*run.get_curve(metric_name), **line_style, **run_style)[0] for run in run_group.runs]
    if not mean_curve:
        return {run_group.name: lines[0]}
    steps, values, spread = mean_curve
    (line,) = axis.plot(steps, values, **line_style)
    axis.fill_between(steps, values - spread, values + spread, color=line_style['color'], alpha=0.15, linewidth=0)
    return {f'{run_group.name} (n={len(run_group.counted_runs)})': line}


def draw_sweep_axis(run_groups: list[RunGroup], sweep_axis: SweepAxis) -> plt.Figure:
    """Draw Sink_1 and loss against a config field; published values have hollow markers."""
    figure, panels = plt.subplots(1, 2, figsize=(8, 2.8), layout='constrained')
    lines = [{}, {}]
    for panel, (name, label) in enumerate(
        [(HEADLINE_METRIC.name, HEADLINE_METRIC.axis_label), (LOSS_METRIC, VALID_LOSS.axis_label)]
    ):
        axis = panels[panel]
        for index, points in enumerate(sweep_axis.lines):
            own_points = [
                (point.tick, point.ours[name]['mean'], point.ours[name]['sd'] or 0)
                for point in points
                if name in point.ours
            ]
            if own_points:
                lines[panel]['ours'] = axis.errorbar(
                    *zip(*own_points, strict=True), **get_line_style(index), marker='o', markersize=4, capsize=2
                )
            if published_points := select_published(points, name):
                hollow = dict(marker='o', markersize=4, markerfacecolor='none', linewidth=0.8)
                (lines[panel]['published'],) = axis.plot(
                    *published_points, **get_line_style(index) | dict(linestyle='--'), **hollow
                )
        axis.set(xlabel=wrap_label(sweep_axis.name), ylabel=label)
        axis.set(xticks=range(len(sweep_axis.labels)), xticklabels=list(map(wrap_label, sweep_axis.labels)))
    return add_legend(hide_top_and_right_spines(figure), panels[0], lines[0])


def select_published(points: list[AxisPoint], metric_name: str) -> list[tuple]:
    return [
        *zip(
            *[(point.tick, point.published[metric_name]) for point in points if metric_name in point.published],
            strict=True,
        )
    ]


def draw_emergence(run_groups: list[RunGroup], sweep_axes: list[SweepAxis]) -> plt.Figure:
    """Draw the two probes between which the sink of each run emerges, against each swept config field.

    The tick labels give the number of runs that learned a sink and the number of all runs.
    """
    size = dict(figsize=(1 + 2.6 * len(sweep_axes), 2.8), layout='constrained')
    figure, panels = plt.subplots(1, len(sweep_axes), sharey=True, squeeze=False, **size)
    for axis, sweep_axis in zip(panels[0], sweep_axes, strict=True):
        lines = [find_emergences(points, run_groups) for points in sweep_axis.lines]
        for index, line in enumerate(lines):
            draw_emergence_bars(axis, line, get_line_style(index))
        points_by_tick = [
            [point for line in lines for point in line if point.tick == tick]
            for tick in range(len(sweep_axis.labels))
        ]
        counts = [
            f'{sum(len(point.emergences) for point in tick_points)}/{sum(point.num_runs for point in tick_points)}'
            for tick_points in points_by_tick
        ]
        tick_labels = [
            f'{wrap_label(label)}\n{count}' for label, count in zip(sweep_axis.labels, counts, strict=True)
        ]
        axis.set(
            xlabel=wrap_label(f'{sweep_axis.name}, and runs with a sink'),
            xticks=range(len(tick_labels)),
            xticklabels=tick_labels,
        )
    panels[0, 0].set(ylabel='step of emergence', ylim=(0, None))
    return hide_top_and_right_spines(figure)


def draw_emergence_bars(axis: plt.Axes, line: list[PointEmergence], line_style: dict) -> None:
    """Draw a bar from the start to the end step of emergence for each run, and a line through the means.

    A dot marks the end step, which is the first probe after the sink emerged.
    """
    for point in line:
        xs = point.tick + 0.06 * (np.arange(len(point.emergences)) - (len(point.emergences) - 1) / 2)
        axis.vlines(
            xs,
            [run_emergence.start_step or 0 for run_emergence in point.emergences],
            [run_emergence.end_step for run_emergence in point.emergences],
            **line_style,
        )
        axis.plot(
            xs,
            [run_emergence.end_step for run_emergence in point.emergences],
            'o',
            color=line_style['color'],
            markersize=2,
        )
    means = [
        (
            point.tick,
            np.mean(
                [
                    estimate_step(run_emergence.start_step, run_emergence.end_step)
                    for run_emergence in point.emergences
                ]
            ),
        )
        for point in line
        if point.emergences
    ]
    axis.plot(*zip(*means, strict=True), **line_style, linewidth=0.8, marker='_', markersize=12)


def select_drawn_runs(run_groups: list[RunGroup], figure_spec: FigureSpec) -> list[RunResult]:
    return [run for run_group in run_groups for run in run_group.runs if run.has_figure(figure_spec)][:MAX_MAP_RUNS]


def draw_head_maps(run_groups: list[RunGroup], figure_spec: FigureSpec) -> plt.Figure:
    runs = select_drawn_runs(run_groups, figure_spec)
    columns = min(RUNS_PER_ROW, len(runs))
    rows = -(-len(runs) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3 * columns, 2.8 * rows), squeeze=False, layout='constrained')
    scale_min, scale_max = compute_scale(figure_spec, [run.probe_values[figure_spec.name][-1] for run in runs])
    for run, axis in zip(runs, axes.flat, strict=False):
        values_LH = run.probe_values[figure_spec.name][-1]
        layers, count = values_LH.shape
        extent = (0.5, count + 0.5, 0.5, layers + 0.5)
        image_options = dict(cmap='RdBu_r' if scale_min < 0 else 'viridis', vmin=scale_min, vmax=scale_max)
        image = axis.imshow(values_LH, origin='lower', aspect='auto', extent=extent, **image_options)
        axis.set_title(wrap_label(run.name), fontsize=9, wrap=True)
        axis.set(xlabel='head', ylabel='layer', xticks=choose_ticks(count), yticks=choose_ticks(layers))
    for axis in axes.flat[len(runs) :]:
        axis.set_visible(False)
    return add_colour_bar(figure, image, axes, figure_spec.label)


def add_colour_bar(figure: plt.Figure, image: Any, axes: Any, label: str) -> plt.Figure:
    """Add a colour bar whose width does not depend on the height of the figure."""
    figure.colorbar(image, ax=axes, label=label, aspect=16 * len(axes), pad=0.02)
    return figure


def choose_ticks(count: int) -> list[int]:
    """Choose at most eight evenly spaced ticks from 1 to `count`."""
    return [*range(1, count + 1, -(-count // 8))]


def draw_matrices(run_groups: list[RunGroup], figure_spec: FigureSpec) -> plt.Figure:
    runs = select_drawn_runs(run_groups, figure_spec)
    figure, axes = plt.subplots(
        len(runs), HEADS_PER_RUN, figsize=(2.2 * HEADS_PER_RUN, 2.5 * len(runs)), squeeze=False, layout='constrained'
    )
    for run, row in zip(runs, axes, strict=True):
        values_LHTS = run.load_matrices(figure_spec)
        for axis in row:
            axis.set_axis_off()
        for (layer, head), axis in zip(run.find_strongest_heads(HEADS_PER_RUN), row, strict=False):
            image = axis.imshow(values_LHTS[layer, head], vmin=0, vmax=figure_spec.scale_max or values_LHTS.max())
            axis.set_title(f'{wrap_label(run.name)}\nlayer {layer + 1} head {head + 1}', fontsize=8)
            axis.set(xticks=[], yticks=[])
            axis.set_axis_on()
    return add_colour_bar(figure, image, axes, figure_spec.label)


def draw_ratios(run_groups: list[RunGroup], figure_spec: FigureSpec) -> plt.Figure:
    figure, axis = plt.subplots(figsize=(4, 2.8), layout='constrained')
    lines = {}
    for index, run_group in enumerate(run_groups):
        ratios_L = [run.probe_values[figure_spec.name][-1] for run in run_group.runs if run.has_figure(figure_spec)]
        line_options = dict(alpha=0.35, linewidth=0.7) if len(ratios_L) > 1 else dict(marker='o')
        for ratio_L in ratios_L:
            (lines[run_group.name],) = axis.plot(
                range(1, len(ratio_L) + 1), ratio_L, **get_line_style(index), **line_options
            )
        if len(ratios_L) > 1:
            mean_L = sum(ratios_L) / len(ratios_L)
            del lines[run_group.name]
            (line,) = axis.plot(range(1, len(mean_L) + 1), mean_L, **get_line_style(index), marker='o')
            lines[f'{run_group.name} (n={len(ratios_L)})'] = line
    axis.axhline(1, color='#999', linestyle=':')
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set(xlabel='block', ylabel=figure_spec.label)
    return add_legend(hide_top_and_right_spines(figure), axis, lines)


def add_legend(figure: plt.Figure, axis: plt.Axes, line_of_label: dict[str, Any]) -> plt.Figure:
    """Add a legend inside the axes if it is short, below the axes if it is longer, or not at all.

    A long legend would hide the lines inside the axes. With more than MAX_LEGEND_ENTRIES entries there is no legend.
    Labels are set as text afterwards, because matplotlib leaves out lines whose label begins with an underscore.
    """
    labels, lines = [*map(wrap_label, line_of_label)], [*line_of_label.values()]
    if 0 < len(line_of_label) <= 3:
        drawn_legend = axis.legend(lines, ['-'] * len(lines), frameon=False)
    elif 0 < len(line_of_label) <= MAX_LEGEND_ENTRIES:
        figure.set_figheight(figure.get_figheight() + 0.22 * -(-len(line_of_label) // 3))
        drawn_legend = figure.legend(
            lines, ['-'] * len(lines), loc='outside lower center', ncols=3, frameon=False, fontsize=8
        )
    else:
        return figure
    for text, label in zip(drawn_legend.get_texts(), labels, strict=True):
        text.set_text(label)
    return figure


def hide_top_and_right_spines(figure: plt.Figure) -> plt.Figure:
    for axis in figure.axes:
        axis.spines[['top', 'right']].set_visible(False)
    return figure


MAP_DRAWERS = dict(heads=draw_head_maps, matrices=draw_matrices, ratios=draw_ratios)


VERDICT_COLOURS = {
    'holds': '#009E73',
    'contradicted': '#D55E00',
    'not seen': '#0072B2',
    'unsettled': '#999999',
}
PUBLISHED_MARKER = dict(marker='|', color='black', s=60)


def write_claims_plot(path: Path, entries: list[dict], unit: str) -> None:
    """Write a PNG plot of the confidence interval of each claim whose difference has the unit `unit`.

    A dash marks the published difference. Untestable claims and claims without an interval are left out.
    """
    with plt.rc_context(FIGURE_RC_PARAMS):
        draw_claims_plot(path, entries, unit)


def draw_claims_plot(path: Path, entries: list[dict], unit: str) -> None:
    drawn_entries = [
        entry
        for entry in entries
        if entry['interval'] and entry['unit'] == unit and entry['verdict'] in VERDICT_COLOURS
    ]
    figure, axes = plt.subplots(figsize=(6.4, 1.0 + 0.19 * len(drawn_entries)), layout='constrained')
    for row, entry in enumerate(drawn_entries):
        axes.plot(entry['interval'], [row, row], color=VERDICT_COLOURS[entry['verdict']], linewidth=2)
        axes.plot(entry['mean'], row, 'o', color=VERDICT_COLOURS[entry['verdict']], markersize=4)
        if entry['published'] is not None:
            axes.scatter(entry['published'], row, **PUBLISHED_MARKER)
    axes.axvline(0, color='black', linewidth=0.5)
    axes.set(xlabel=f'mean difference and its interval, {INTERVAL_DESCRIPTION} ({unit})')
    axes.set_yticks(
        range(len(drawn_entries)),
        [wrap_label(f'{entry["claim"]} {entry["relation"]}') for entry in drawn_entries],
        fontsize=7,
    )
    axes.set_ylim(len(drawn_entries) - 0.4, -0.6)
    handles = [plt.Line2D([], [], color=colour, linewidth=2, label=name) for name, colour in VERDICT_COLOURS.items()]
    handles += [plt.Line2D([], [], color='black', marker='|', linewidth=0, label='published')]
    figure.legend(handles=handles, fontsize=7, loc='outside upper center', ncols=len(handles), frameon=False)
    with atomic_write(path) as unfinished:
        figure.savefig(unfinished, dpi=150, format='png')
    plt.close(figure)
