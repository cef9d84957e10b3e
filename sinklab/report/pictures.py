"""The pictures of the page as PNG files for a paper (matplotlib)."""

from pathlib import Path

import matplotlib

matplotlib.use('Agg')
import matplotlib.pyplot as plt

from sinklab.files.whole import whole
from sinklab.measure.measure import Picture
from sinklab.measure.table import HEADLINE
from sinklab.report.page import HEADS, colour, grid, largest
from sinklab.report.runs import Run, branches, common_pictures


def write(folder: Path, runs: list[Run]) -> list[Path]:
    """curves.png and a file for each picture of the table of measures, at 200 dots an inch."""
    figures = {'curves': curves(runs)}
    figures |= {picture.name: FIGURES[picture.kind](runs, picture) for picture in common_pictures(runs)}
    for name, figure in figures.items():
        with whole(folder / f'{name}.png') as unfinished:
            figure.savefig(unfinished, dpi=200, bbox_inches='tight', format='png')
        plt.close(figure)
    return [folder / f'{name}.png' for name in figures]


def curves(runs: list[Run]) -> plt.Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.8), layout='constrained')
    for number, run in enumerate(runs):
        left.plot(*run.curve(HEADLINE.name), color=colour(number), label=run.name)
        right.plot(*run.curve('valid/loss'), color=colour(number), label=run.name)
        right.plot(*run.curve('train/loss'), color=colour(number), alpha=0.3, linewidth=0.8)
    for axis, name in ((left, HEADLINE.name), (right, 'valid/loss')):
        for number, steps, values in branches(runs, name):
            axis.plot(steps, values, ':', marker='.', color=colour(number))
    left.set(xlabel='step', ylabel=HEADLINE.axis, ylim=(-2, None))
    right.set(xlabel='step', ylabel='loss (line: valid, pale: train)')
    left.legend(frameon=False)
    return plain(figure)


def heads(runs: list[Run], picture: Picture) -> plt.Figure:
    rows, columns = grid(runs)
    figure, axes = plt.subplots(rows, columns, figsize=(3 * columns, 2.8 * rows), squeeze=False, layout='constrained')
    top = largest(runs, picture)
    for run, axis in zip(runs, axes.flat, strict=False):
        values_LH = run.values[picture.name][-1]
        layers, count = values_LH.shape
        extent = (0.5, count + 0.5, 0.5, layers + 0.5)
        image = axis.imshow(values_LH, origin='lower', vmin=0, vmax=top, aspect='auto', extent=extent)
        axis.set(
            title=run.name, xlabel='head', ylabel='layer', xticks=range(1, count + 1), yticks=range(1, layers + 1)
        )
    figure.colorbar(image, ax=axes, label=picture.label)
    return figure


def matrices(runs: list[Run], picture: Picture) -> plt.Figure:
    figure, axes = plt.subplots(
        len(runs), HEADS, figsize=(2.2 * HEADS, 2.3 * len(runs)), squeeze=False, layout='constrained'
    )
    for run, row in zip(runs, axes, strict=True):
        for (layer, head), axis in zip(run.strongest(HEADS), row, strict=False):
            image = axis.imshow(run.values[picture.name][layer, head], vmin=0, vmax=largest(runs, picture))
            axis.set_title(f'{run.name}, layer {layer + 1} head {head + 1}', fontsize=8)
            axis.set(xticks=[], yticks=[])
    figure.colorbar(image, ax=axes, label=picture.label)
    return figure


def ratios(runs: list[Run], picture: Picture) -> plt.Figure:
    figure, axis = plt.subplots(figsize=(4, 2.8), layout='constrained')
    for number, run in enumerate(runs):
        ratio_L = run.values[picture.name]
        axis.plot(range(1, len(ratio_L) + 1), ratio_L, marker='o', color=colour(number), label=run.name)
    axis.axhline(1, color='#999', linestyle=':')
    axis.set(xlabel='block', ylabel=picture.label)
    axis.legend(frameon=False)
    return plain(figure)


def plain(figure: plt.Figure) -> plt.Figure:
    for axis in figure.axes:
        axis.spines[['top', 'right']].set_visible(False)
    return figure


FIGURES = dict(heads=heads, matrices=matrices, ratios=ratios)
