"""The intervals of claims as one picture (matplotlib)."""

from pathlib import Path

import matplotlib

matplotlib.use('Agg')
import matplotlib.pyplot as plt

from sinklab.escape import FIGURE_RC_PARAMS, escape_figure
from sinklab.files.whole import atomic_write
from sinklab.report.verdict import INTERVAL_DESCRIPTION

VERDICT_COLOURS = {
    'holds': '#009E73',
    'contradicted': '#D55E00',
    'not seen': '#0072B2',
    'unsettled': '#999999',
}
PUBLISHED_MARKER = dict(marker='|', color='black', s=60)


def write_claims_plot(path: Path, entries: list[dict], unit: str) -> None:
    """A line a claim, of those whose difference has this unit; the dash is what was published."""
    with plt.rc_context(FIGURE_RC_PARAMS):
        draw_claims_plot(path, entries, unit)


def draw_claims_plot(path: Path, entries: list[dict], unit: str) -> None:
    drawn_entries = [
        entry for entry in entries if entry['interval'] and entry['unit'] == unit and entry['verdict'] in VERDICT_COLOURS
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
        range(len(drawn_entries)), [escape_figure(f'{entry["claim"]} {entry["way"]}') for entry in drawn_entries], fontsize=7
    )
    axes.set_ylim(len(drawn_entries) - 0.4, -0.6)
    handles = [plt.Line2D([], [], color=colour, linewidth=2, label=name) for name, colour in VERDICT_COLOURS.items()]
    handles += [plt.Line2D([], [], color='black', marker='|', linewidth=0, label='published')]
    figure.legend(handles=handles, fontsize=7, loc='outside upper center', ncols=len(handles), frameon=False)
    with atomic_write(path) as unfinished:
        figure.savefig(unfinished, dpi=150, format='png')
    plt.close(figure)
