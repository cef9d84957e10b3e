"""Image files (matplotlib) of the curves of a report."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use('Agg')
import matplotlib.pyplot as plt
from matplotlib.container import ErrorbarContainer

from sinklab.escape import FIGURE_RC_PARAMS, quote_file_name
from sinklab.report.figures import Figure, make_figures
from sinklab.report.run_groups import RunGroup, group_runs
from sinklab.report.runs import RunResult
from sinklab.storage.files import atomic_write

LINE_COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')  # by Okabe and Ito
LINE_STYLES = ('-', '--', ':', '-.')
MAX_LEGEND_ENTRIES = 12  # with more run groups there is no legend
LABEL_CHARS = 60  # characters of a line of a label
FONT_OPTIONS = {'svg.fonttype': 'none', 'pdf.fonttype': 42}  # keep text as text rather than as outlines


def write_pictures(folder: Path, runs: list[RunResult], formats: Sequence[str] = ('png',)) -> list[Path]:
    """Write the figures of lines as image files; return their paths.

    Args:
        folder: The folder for the files.
        runs: At least one run.
        formats: File extensions that matplotlib supports, such as `png`, `svg` and `pdf`. Bitmaps have 200 dots per
            inch.
    """
    run_groups = group_runs(runs)
    paths = []
    with plt.rc_context(FONT_OPTIONS | FIGURE_RC_PARAMS):
        for figure in make_figures(run_groups, with_maps=False):
            drawn = draw_lines(figure, run_groups)
            for extension in formats:
                paths.append(folder / f'{quote_file_name(figure["name"])}.{extension}')
                with atomic_write(paths[-1]) as unfinished:
                    drawn.savefig(unfinished, dpi=200, bbox_inches='tight', format=extension)
            plt.close(drawn)
    return paths


def wrap_label(text: str) -> str:
    """Break a long name into lines."""
    return '\n'.join(textwrap.wrap(text, LABEL_CHARS))


def get_line_style(group: int) -> dict:
    return dict(
        color=LINE_COLOURS[group % len(LINE_COLOURS)],
        linestyle=LINE_STYLES[group // len(LINE_COLOURS) % len(LINE_STYLES)],
    )


def draw_lines(figure: Figure, run_groups: list[RunGroup]) -> plt.Figure:
    """Draw the panels of a figure of lines next to each other, with the row groups in the legend."""
    panels = figure['panels']
    drawn, axes_row = plt.subplots(
        1, len(panels), figsize=(4 * len(panels), 2.8), squeeze=False, layout='constrained'
    )
    legend_lines: dict[str, plt.Line2D | ErrorbarContainer] = {}
    for panel, axes in zip(panels, axes_row[0], strict=True):
        for line in panel['lines']:
            label, artist = draw_line(axes, line, run_groups, 0 if panel['label'].endswith('(%)') else -np.inf)
            if line['kind'] != 'member' and line.get('split') != 'training':
                legend_lines.setdefault(label, artist)
        axes.set(xlabel=panel['x_label'], ylabel=panel['label'])
        axes.spines[['top', 'right']].set_visible(False)
        if panel['kind'] == 'blocks':
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.axhline(panel['reference_value'], color='#999', linestyle=':')
    if 0 < len(legend_lines) <= MAX_LEGEND_ENTRIES:
        drawn.set_figheight(drawn.get_figheight() + 0.22 * -(-len(legend_lines) // 3))
        handles = list(legend_lines.values())
        options: dict[str, Any] = dict(loc='outside lower center', ncols=3, frameon=False, fontsize=8)
        legend = drawn.legend(handles, ['-'] * len(handles), **options)
        for text, label in zip(legend.get_texts(), legend_lines, strict=True):
            text.set_text(wrap_label(label))  # as a label, a name that begins with an underscore would be left out
    return drawn


def draw_line(
    axes: plt.Axes, line: dict, run_groups: list[RunGroup], min_value: float
) -> tuple[str, plt.Line2D | ErrorbarContainer]:
    """Draw a line, and its spread down to `min_value`; return its label and the artist for the legend."""
    artist: plt.Line2D | ErrorbarContainer
    kind, x = line['kind'], line['x']
    y = line['y'][-len(x) :]  # of ratios by block, those of the last probe
    low = np.maximum(y - line.get('sd', 0), min_value)
    style = get_line_style(line['group'])
    if kind == 'member' or line.get('split') == 'training':
        style |= dict(alpha=0.35, linewidth=0.7)
    if line.get('dots') or len(x) == 1:
        spread = [y - low, line['sd']] if 'sd' in line else None
        artist = axes.errorbar(
            x, y, spread, color=style['color'], alpha=style.get('alpha'), fmt='o', markersize=4, capsize=2
        )
    else:
        (artist,) = axes.plot(x, y, **style)
        if 'sd' in line:
            axes.fill_between(x, low, y + line['sd'], color=style['color'], alpha=0.15, linewidth=0)
    count = f' (n={line["n"]})' if kind == 'mean' else ''
    return f'{run_groups[line["group"]].name}{count}', artist
