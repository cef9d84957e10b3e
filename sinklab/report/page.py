"""report.html: one file that needs no network, the pictures to be played with (plotly)."""

import html
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sinklab.files.whole import whole
from sinklab.measure.measure import Picture
from sinklab.measure.table import HEADLINE
from sinklab.report.runs import NUMBERS, Run, branches, cells, common_pictures, table

COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000')  # Okabe and Ito
HEADS = 4  # shown of each run
PER_ROW = 4  # runs, in a grid of them

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 1080px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.15rem; margin: 2.2rem 0 .2rem } p { margin: .3rem 0 .6rem; color: #555 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .9rem; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left }
"""


def write(path: Path, runs: list[Run]) -> None:
    figures = [('Sink and loss', f'{HEADLINE.label}: {HEADLINE.sentence}', curves(runs))]
    figures += [
        (picture.title, picture.sentence, FIGURES[picture.kind](runs, picture)) for picture in common_pictures(runs)
    ]
    parts = [
        f'<h2>{title}</h2><p>{html.escape(text)}</p>'
        + figure.to_html(full_html=False, include_plotlyjs=not at, auto_play=False, config=dict(displaylogo=False))
        for at, (title, text, figure) in enumerate(figures)
    ]
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>sinklab report</title>'
        f'<style>{STYLE}</style></head><body><h1>Attention sinks: {html.escape(", ".join(run.name for run in runs))}'
        f'</h1>{summary(runs)}{"".join(parts)}</body></html>'
    )
    with whole(path) as unfinished:
        unfinished.write_text(page, encoding='utf-8')


def summary(runs: list[Run]) -> str:
    rows = ''.join(
        f'<tr>{"".join(f"<td>{html.escape(cell)}</td>" for cell in cells(row))}</tr>' for row in table(runs)
    )
    headings = (f'<th title="{html.escape(number.sentence)}">{number.label}</th>' for number in NUMBERS)
    notes = ''.join(f'<p>{html.escape(f"{run.name}: {note}")}</p>' for run in runs for note in run.notes)
    return f'<table><tr><th>arm</th>{"".join(headings)}</tr>{rows}</table>{notes}'


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def curves(runs: list[Run]) -> go.Figure:
    figure = make_subplots(1, 2, subplot_titles=(HEADLINE.axis, 'loss (solid: valid, dotted: train)'))
    shown = ((1, HEADLINE.name, 'solid'), (2, 'valid/loss', 'solid'), (2, 'train/loss', 'dot'))
    for number, run in enumerate(runs):
        for column, name, dash in shown:
            steps, values = run.curve(name)
            line = dict(color=colour(number), dash=dash, width=1 if dash == 'dot' else 2)
            label = run.name if column == 1 else f'{run.name}, {name}'
            figure.add_scatter(
                x=steps,
                y=values,
                name=label,
                line=line,
                legendgroup=run.name,
                showlegend=column == 1,
                row=1,
                col=column,
            )
    for column, name, _ in shown:
        for number, steps, values in branches(runs, name):
            figure.add_scatter(
                x=steps,
                y=values,
                line=dict(color=colour(number), dash='dot', width=1),
                mode='lines+markers',
                legendgroup=runs[number].name,
                showlegend=False,
                hoverinfo='skip',
                row=1,
                col=column,
            )
    figure.update_xaxes(title='step')
    return figure.update_layout(template='simple_white', height=380, margin=dict(l=50, r=20, t=40, b=45))


def grid(runs: list[Run]) -> tuple[int, int]:
    columns = min(PER_ROW, len(runs))
    return -(-len(runs) // columns), columns


def heads(runs: list[Run], picture: Picture) -> go.Figure:
    """A heat map a run, all moved by one slider over the steps that any of them was probed at."""
    rows, columns = grid(runs)
    figure = make_subplots(rows, columns, subplot_titles=[run.name for run in runs])
    steps = sorted({step for run in runs for step in run.probe_steps})
    for at, run in enumerate(runs):
        figure.add_trace(heat(run, steps[-1], picture), row=at // columns + 1, col=at % columns + 1)
    figure.frames = [go.Frame(name=str(step), data=[heat(run, step, picture) for run in runs]) for step in steps]
    move = dict(mode='immediate', frame=dict(duration=0, redraw=True), transition=dict(duration=0))
    slider = dict(
        active=len(steps) - 1,
        currentvalue=dict(prefix='step '),
        pad=dict(t=45),
        steps=[dict(label=str(step), method='animate', args=[[str(step)], move]) for step in steps],
    )
    figure.update_xaxes(title='head', dtick=1)
    figure.update_yaxes(title='layer', dtick=1)
    return figure.update_layout(
        template='simple_white',
        height=130 + 290 * rows,
        sliders=[slider],
        coloraxis=scale(runs, picture),
        margin=dict(l=50, r=20, t=40, b=45),
    )


def largest(runs: list[Run], picture: Picture) -> float:
    return picture.largest or max(float(run.values[picture.name].max()) for run in runs)


def scale(runs: list[Run], picture: Picture) -> dict:
    return dict(cmin=0, cmax=largest(runs, picture), colorscale='Viridis', colorbar=dict(title=picture.label))


def heat(run: Run, step: int, picture: Picture) -> go.Heatmap:
    """The newest probe at or before a step."""
    before = [number for number, probed in enumerate(run.probe_steps) if probed <= step]
    values_LH = run.values[picture.name][before[-1] if before else 0]
    layers, heads = values_LH.shape
    return go.Heatmap(
        z=np.round(values_LH, 4),
        x=list(range(1, heads + 1)),
        y=list(range(1, layers + 1)),
        coloraxis='coloraxis',
        hovertemplate=f'layer %{{y}}, head %{{x}}: {picture.label} %{{z:.3f}}<extra></extra>',
    )


def matrices(runs: list[Run], picture: Picture) -> go.Figure:
    picked = [(run, layer, head) for run in runs for layer, head in run.strongest(HEADS)]
    titles = [f'{run.name}, layer {layer + 1} head {head + 1}' for run, layer, head in picked]
    rows = -(-len(picked) // HEADS)
    figure = make_subplots(rows, HEADS, subplot_titles=titles, horizontal_spacing=0.03, vertical_spacing=0.14 / rows)
    for number, (run, layer, head) in enumerate(picked):
        matrix_TS = run.values[picture.name][layer, head]
        image = go.Heatmap(z=np.round(matrix_TS, 3), coloraxis='coloraxis')
        image.hovertemplate = 'query %{y}, key %{x}: %{z:.3f}<extra></extra>'
        queries, keys = matrix_TS.shape
        image.x0, image.y0 = 1 - (keys - queries), 1  # token 1 is the first of the text, and 0 is a column
        figure.add_trace(image, row=number // HEADS + 1, col=number % HEADS + 1)
    figure.update_annotations(font_size=12)
    figure.update_yaxes(autorange='reversed')
    return figure.update_layout(
        template='simple_white',
        height=60 + 270 * rows,
        coloraxis=scale(runs, picture),
        margin=dict(l=30, r=20, t=40, b=30),
    )


def ratios(runs: list[Run], picture: Picture) -> go.Figure:
    figure = go.Figure()
    for number, run in enumerate(runs):
        ratio_L = run.values[picture.name]
        layers = list(range(1, len(ratio_L) + 1))
        figure.add_scatter(x=layers, y=ratio_L, name=run.name, mode='lines+markers', line_color=colour(number))
    figure.add_hline(1, line_dash='dot', line_color='#999')
    figure.update_xaxes(title='block', dtick=1)
    return figure.update_layout(
        template='simple_white', height=340, yaxis_title=picture.label, margin=dict(l=50, r=20, t=20, b=45)
    )


FIGURES = dict(heads=heads, matrices=matrices, ratios=ratios)
