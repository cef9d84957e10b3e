"""The intervals of claims as one picture (matplotlib)."""

from pathlib import Path

import matplotlib

matplotlib.use('Agg')
import matplotlib.pyplot as plt

from sinklab.escape import FIGURE, escape_figure
from sinklab.files.whole import whole
from sinklab.report.verdict import OVER

COLOURS = {
    'holds': '#009E73',
    'contradicted': '#D55E00',
    'not seen': '#0072B2',
    'unsettled': '#999999',
}
PUBLISHED = dict(marker='|', color='black', s=60)


def write(path: Path, entries: list[dict], unit: str) -> None:
    """A line a claim, of those whose difference has this unit; the dash is what was published."""
    with plt.rc_context(FIGURE):
        draw(path, entries, unit)


def draw(path: Path, entries: list[dict], unit: str) -> None:
    shown = [
        entry for entry in entries if entry['interval'] and entry['unit'] == unit and entry['verdict'] in COLOURS
    ]
    figure, axes = plt.subplots(figsize=(6.4, 1.0 + 0.19 * len(shown)), layout='constrained')
    for at, entry in enumerate(shown):
        axes.plot(entry['interval'], [at, at], color=COLOURS[entry['verdict']], linewidth=2)
        axes.plot(entry['mean'], at, 'o', color=COLOURS[entry['verdict']], markersize=4)
        if entry['published'] is not None:
            axes.scatter(entry['published'], at, **PUBLISHED)
    axes.axvline(0, color='black', linewidth=0.5)
    axes.set(xlabel=f'mean difference and its interval, {OVER} ({unit})')
    axes.set_yticks(
        range(len(shown)), [escape_figure(f'{entry["claim"]} {entry["way"]}') for entry in shown], fontsize=7
    )
    axes.set_ylim(len(shown) - 0.4, -0.6)
    handles = [plt.Line2D([], [], color=colour, linewidth=2, label=name) for name, colour in COLOURS.items()]
    handles += [plt.Line2D([], [], color='black', marker='|', linewidth=0, label='published')]
    figure.legend(handles=handles, fontsize=7, loc='outside upper center', ncols=len(handles), frameon=False)
    with whole(path) as unfinished:
        figure.savefig(unfinished, dpi=150, format='png')
    plt.close(figure)
