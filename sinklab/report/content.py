"""What the page shows, before it is one: figures in their order, and the arrays that they draw."""

from sinklab.escape import escape_control
from sinklab.measure.table import FIGURES
from sinklab.report import axes, maps, paper
from sinklab.report.arms import RunGroup
from sinklab.report.lines import LineFigures
from sinklab.report.pack import BinaryPayload
from sinklab.report.runs import RunResult


def make_page_data(run_groups: list[RunGroup], rows: list[dict], as_paper: bool) -> tuple[list[dict], str]:
    """(the figures, what their script unpacks)."""
    payload, runs = BinaryPayload(), [run for run_group in run_groups for run in run_group.runs]
    page_figures = make_all_figures(run_groups, rows, payload, as_paper)
    if as_paper:
        page_figures = paper.sort_like_paper(page_figures)
    steps = sorted({step for run in runs for step in run.probe_steps})
    group_infos = [dict(name=escape_control(run_group.name), published=run_group.row_info['published']) for run_group in run_groups]
    return page_figures, payload.encode(dict(figures=page_figures, steps=steps, arms=group_infos, runs=[make_run_info(run, run_groups) for run in runs]))


def make_all_figures(run_groups: list[RunGroup], rows: list[dict], payload: BinaryPayload, as_paper: bool) -> list[dict]:
    line_figures, runs = LineFigures(run_groups, payload), [run for run_group in run_groups for run in run_group.runs]
    candidates = [line_figures.make_sink_and_loss_figure(as_paper), *map(line_figures.make_axis_figure, axes.find_axes(run_groups, rows)), line_figures.make_context_figure()]
    for figure_spec in FIGURES:
        if any(run.has_figure(figure_spec) for run in runs):
            map_figure = (
                line_figures.make_ratios_figure(figure_spec) if figure_spec.kind == 'ratios' else maps.MAP_MAKERS[figure_spec.kind](runs, figure_spec, payload)
            )
            candidates.append(map_figure | dict(without=[run.name for run in runs if run.probe_steps and not run.has_figure(figure_spec)]))
    return [figure for figure in [*candidates, line_figures.make_choice_figure()] if figure and figure.get('panels', True)]


def make_run_info(run: RunResult, run_groups: list[RunGroup]) -> dict:
    return dict(
        name=escape_control(run.name),
        arm=[run_group.name for run_group in run_groups].index(run.group_name),
        kind=run.outcome,
        probes=run.probe_steps,
    )
