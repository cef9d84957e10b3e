"""What the page shows, before it is one: figures in their order, and the arrays that they draw."""

from sinklab.escape import escape_control
from sinklab.measure.table import PICTURES
from sinklab.report import axes, maps, paper
from sinklab.report.arms import Arm
from sinklab.report.lines import Lines
from sinklab.report.pack import Pack
from sinklab.report.runs import Run


def content(arms: list[Arm], rows: list[dict], as_paper: bool) -> tuple[list[dict], str]:
    """(the figures, what their script unpacks)."""
    pack, runs = Pack(), [run for arm in arms for run in arm.runs]
    found = figures(arms, rows, pack, as_paper)
    if as_paper:
        found = paper.ordered(found)
    steps = sorted({step for run in runs for step in run.probe_steps})
    about = [dict(name=escape_control(arm.name), published=arm.about['published']) for arm in arms]
    return found, pack.text(dict(figures=found, steps=steps, arms=about, runs=[of_run(run, arms) for run in runs]))


def figures(arms: list[Arm], rows: list[dict], pack: Pack, as_paper: bool) -> list[dict]:
    lines, runs = Lines(arms, pack), [run for arm in arms for run in arm.runs]
    found = [lines.sink_and_loss(as_paper), *map(lines.along, axes.axes(arms, rows)), lines.context()]
    for picture in PICTURES:
        if any(run.has(picture) for run in runs):
            drawn = (
                lines.ratios(picture) if picture.kind == 'ratios' else maps.FIGURES[picture.kind](runs, picture, pack)
            )
            found.append(drawn | dict(without=[run.name for run in runs if run.probe_steps and not run.has(picture)]))
    return [figure for figure in [*found, lines.numbers()] if figure and figure.get('panels', True)]


def of_run(run: Run, arms: list[Arm]) -> dict:
    return dict(
        name=escape_control(run.name),
        arm=[arm.name for arm in arms].index(run.arm),
        kind=run.kind,
        probes=run.probe_steps,
    )
