"""The pictures of the page as files for a paper, in PNG, SVG or PDF (matplotlib)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use('Agg')
import matplotlib.pyplot as plt

from sinklab.escape import FIGURE, escape_figure, quote_file_name
from sinklab.files.whole import whole
from sinklab.measure.emergence import middle
from sinklab.measure.measure import Picture
from sinklab.measure.table import HEADLINE, VALID_LOSS
from sinklab.report.arms import Arm, arms, mean, table
from sinklab.report.axes import Axis, Point, axes
from sinklab.report.emergence import Emerging, emergences
from sinklab.report.maps import bounds
from sinklab.report.runs import Run, branches, drawn_pictures
from sinklab.report.sweep import EMERGES, LOSS

COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')  # Okabe and Ito
DASHES = ('-', '--', ':', '-.')
HEADS = 4  # shown of each run
PER_ROW = 4  # runs, in a grid of them
MOST = 12  # runs of which maps are drawn
LABELLED = 12  # arms of a legend
FONTS = {'svg.fonttype': 'none', 'pdf.fonttype': 42}  # text stays text


def write(folder: Path, runs: list[Run], kinds: Sequence[str] = ('png',)) -> list[Path]:
    """curves, a picture for each axis of a sweep, of emergence, of the table of measures; PNG at 200 dots an inch."""
    found, paths = arms(runs), []
    with plt.rc_context(FONTS | FIGURE):
        for name, draw, given in figures(found):
            figure = draw(found, given)
            for kind in kinds:
                paths.append(folder / f'{quote_file_name(name)}.{kind}')
                with whole(paths[-1]) as unfinished:
                    figure.savefig(unfinished, dpi=200, bbox_inches='tight', format=kind)
            plt.close(figure)
    return paths


def figures(found: list[Arm]) -> list[tuple]:
    """(name, what draws it, of what)."""
    along = axes(found, table(found))
    moved = [axis for axis in along if any(EMERGES in point.ours for points in axis.lines for point in points)]
    by_axis = [(f'along-{axis.field}', draw_along, axis) for axis in along]
    by_axis += [('emergence', draw_emergence, moved)] if moved else []
    runs = [run for arm in found for run in arm.runs]
    drawn = [(picture.name, FIGURES[picture.kind], picture) for picture in drawn_pictures(runs)]
    return [('curves', curves, None), *by_axis, *drawn]


def style(at: int) -> dict:
    return dict(color=COLOURS[at % len(COLOURS)], linestyle=DASHES[at // len(COLOURS) % len(DASHES)])


def curves(found: list[Arm], _: None) -> plt.Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.8), layout='constrained')
    lines = {}
    for at, arm in enumerate(found):
        lines |= curve(left, arm, HEADLINE.name, style(at))
        curve(right, arm, 'valid/loss', style(at))
        for run in arm.runs:
            right.plot(*run.curve('train/loss'), **style(at), alpha=0.3 / len(arm.runs), linewidth=0.8)
    runs = [run for arm in found for run in arm.runs]
    colours = [style(at)['color'] for at, arm in enumerate(found) for _ in arm.runs]
    for axis, name in ((left, HEADLINE.name), (right, 'valid/loss')):
        for number, steps, values in branches(runs, name):
            axis.plot(steps, values, ':', marker='.', color=colours[number])
    left.set(xlabel='step', ylabel=HEADLINE.axis, ylim=(-2, None))
    right.set(xlabel='step', ylabel='loss (pale: train)')
    return legend(plain(figure), left, lines)


def curve(axis: plt.Axes, arm: Arm, name: str, style: dict) -> dict[str, plt.Line2D]:
    """Draw the mean of its runs with its spread, and they thin; of a single one, itself. Return {name: line}."""
    found = mean(arm.counted, name)
    thin = dict(alpha=0.35, linewidth=0.7) if found else {}
    lines = [axis.plot(*run.curve(name), **style, **thin)[0] for run in arm.runs]
    if not found:
        return {arm.name: lines[0]}
    steps, values, spread = found
    (line,) = axis.plot(steps, values, **style)
    axis.fill_between(steps, values - spread, values + spread, color=style['color'], alpha=0.15, linewidth=0)
    return {f'{arm.name} (n={len(arm.counted)})': line}


def draw_along(found: list[Arm], along: Axis) -> plt.Figure:
    """Sink and loss against a field, ours filled and published hollow."""
    figure, panels = plt.subplots(1, 2, figsize=(8, 2.8), layout='constrained')
    lines = [{}, {}]
    for panel, (name, label) in enumerate([(HEADLINE.name, HEADLINE.axis), (LOSS, VALID_LOSS.axis)]):
        axis = panels[panel]
        for at, points in enumerate(along.lines):
            ours = [(one.at, one.ours[name]['mean'], one.ours[name]['sd'] or 0) for one in points if name in one.ours]
            if ours:
                lines[panel]['ours'] = axis.errorbar(
                    *zip(*ours, strict=True), **style(at), marker='o', markersize=4, capsize=2
                )
            if theirs := published(points, name):
                hollow = dict(marker='o', markersize=4, markerfacecolor='none', linewidth=0.8)
                (lines[panel]['published'],) = axis.plot(*theirs, **style(at) | dict(linestyle='--'), **hollow)
        axis.set(xlabel=escape_figure(along.name), ylabel=label)
        axis.set(xticks=range(len(along.labels)), xticklabels=list(map(escape_figure, along.labels)))
    return legend(plain(figure), panels[0], lines[0])


def published(points: list[Point], name: str) -> list[tuple]:
    return [*zip(*[(one.at, one.published[name]) for one in points if name in one.published], strict=True)]


def draw_emergence(found: list[Arm], along: list[Axis]) -> plt.Figure:
    """Against each field the two probes between which the sink of each run emerges, and in how many runs one does."""
    size = dict(figsize=(1 + 2.6 * len(along), 2.8), layout='constrained')
    figure, panels = plt.subplots(1, len(along), sharey=True, squeeze=False, **size)
    for axis, field in zip(panels[0], along, strict=True):
        lines = [emergences(points, found) for points in field.lines]
        for number, line in enumerate(lines):
            emerging(axis, line, style(number))
        here = [[one for line in lines for one in line if one.at == at] for at in range(len(field.labels))]
        counts = [f'{sum(len(one.each) for one in ones)}/{sum(one.runs for one in ones)}' for ones in here]
        words = [f'{escape_figure(label)}\n{count}' for label, count in zip(field.labels, counts, strict=True)]
        axis.set(
            xlabel=escape_figure(f'{field.name}, and runs with a sink'), xticks=range(len(words)), xticklabels=words
        )
    panels[0, 0].set(ylabel='step of emergence', ylim=(0, None))
    return plain(figure)


def emerging(axis: plt.Axes, line: list[Emerging], style: dict) -> None:
    """A bar for each run, side by side, with a dot where it is seen first, and a line through their means."""
    for one in line:
        places = one.at + 0.06 * (np.arange(len(one.each)) - (len(one.each) - 1) / 2)
        axis.vlines(places, [run.after or 0 for run in one.each], [run.at for run in one.each], **style)
        axis.plot(places, [run.at for run in one.each], 'o', color=style['color'], markersize=2)
    means = [(one.at, np.mean([middle(run.after, run.at) for run in one.each])) for one in line if one.each]
    axis.plot(*zip(*means, strict=True), **style, linewidth=0.8, marker='_', markersize=12)


def pictured(found: list[Arm], picture: Picture) -> list[Run]:
    return [run for arm in found for run in arm.runs if run.has(picture)][:MOST]


def heads(found: list[Arm], picture: Picture) -> plt.Figure:
    runs = pictured(found, picture)
    columns = min(PER_ROW, len(runs))
    rows = -(-len(runs) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3 * columns, 2.8 * rows), squeeze=False, layout='constrained')
    low, top = bounds(picture, [run.values[picture.name][-1] for run in runs])
    for run, axis in zip(runs, axes.flat, strict=False):
        values_LH = run.values[picture.name][-1]
        layers, count = values_LH.shape
        extent = (0.5, count + 0.5, 0.5, layers + 0.5)
        look = dict(cmap='RdBu_r' if low < 0 else 'viridis', vmin=low, vmax=top)
        image = axis.imshow(values_LH, origin='lower', aspect='auto', extent=extent, **look)
        axis.set_title(escape_figure(run.name), fontsize=9, wrap=True)
        axis.set(xlabel='head', ylabel='layer', xticks=ticks(count), yticks=ticks(layers))
    for axis in axes.flat[len(runs) :]:
        axis.set_visible(False)
    return scaled(figure, image, axes, picture.label)


def scaled(figure: plt.Figure, image: Any, axes: Any, label: str) -> plt.Figure:
    """With a scale of one width, however high the figure is."""
    figure.colorbar(image, ax=axes, label=label, aspect=16 * len(axes), pad=0.02)
    return figure


def ticks(count: int) -> list[int]:
    """At most eight."""
    return [*range(1, count + 1, -(-count // 8))]


def matrices(found: list[Arm], picture: Picture) -> plt.Figure:
    runs = pictured(found, picture)
    figure, axes = plt.subplots(
        len(runs), HEADS, figsize=(2.2 * HEADS, 2.5 * len(runs)), squeeze=False, layout='constrained'
    )
    for run, row in zip(runs, axes, strict=True):
        values_LHTS = run.matrices(picture)
        for axis in row:
            axis.set_axis_off()
        for (layer, head), axis in zip(run.strongest(HEADS), row, strict=False):
            image = axis.imshow(values_LHTS[layer, head], vmin=0, vmax=picture.largest or values_LHTS.max())
            axis.set_title(f'{escape_figure(run.name)}\nlayer {layer + 1} head {head + 1}', fontsize=8)
            axis.set(xticks=[], yticks=[])
            axis.set_axis_on()
    return scaled(figure, image, axes, picture.label)


def ratios(found: list[Arm], picture: Picture) -> plt.Figure:
    figure, axis = plt.subplots(figsize=(4, 2.8), layout='constrained')
    lines = {}
    for at, arm in enumerate(found):
        ratios_L = [run.values[picture.name][-1] for run in arm.runs if run.has(picture)]
        thin = dict(alpha=0.35, linewidth=0.7) if len(ratios_L) > 1 else dict(marker='o')
        for ratio_L in ratios_L:
            (lines[arm.name],) = axis.plot(range(1, len(ratio_L) + 1), ratio_L, **style(at), **thin)
        if len(ratios_L) > 1:
            mean_L = sum(ratios_L) / len(ratios_L)
            del lines[arm.name]
            (line,) = axis.plot(range(1, len(mean_L) + 1), mean_L, **style(at), marker='o')
            lines[f'{arm.name} (n={len(ratios_L)})'] = line
    axis.axhline(1, color='#999', linestyle=':')
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set(xlabel='block', ylabel=picture.label)
    return legend(plain(figure), axis, lines)


def legend(figure: plt.Figure, axis: plt.Axes, shown: dict[str, Any]) -> plt.Figure:
    """Inside where it is short, below where it would hide the lines; of too many arms none.

    Lines are given by their names, not by labels: Matplotlib leaves out those that begin with an underscore.
    """
    words, lines = [*map(escape_figure, shown)], [*shown.values()]
    if 0 < len(shown) <= 3:
        made = axis.legend(lines, ['-'] * len(lines), frameon=False)
    elif 0 < len(shown) <= LABELLED:
        figure.set_figheight(figure.get_figheight() + 0.22 * -(-len(shown) // 3))
        made = figure.legend(
            lines, ['-'] * len(lines), loc='outside lower center', ncols=3, frameon=False, fontsize=8
        )
    else:
        return figure
    for text, word in zip(made.get_texts(), words, strict=True):
        text.set_text(word)
    return figure


def plain(figure: plt.Figure) -> plt.Figure:
    for axis in figure.axes:
        axis.spines[['top', 'right']].set_visible(False)
    return figure


FIGURES = dict(heads=heads, matrices=matrices, ratios=ratios)
