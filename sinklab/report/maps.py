"""The figures of the page that are maps: values of layers and heads, and matrices, at each probe."""

import numpy as np

from sinklab.measure.measure import FigureSpec
from sinklab.report.pack import BinaryPayload
from sinklab.report.probes import select_evenly
from sinklab.report.runs import RunResult

MAX_MAP_VALUES = 1_500_000  # values of all maps of one picture together
MAX_MATRIX_VALUES = 2_500_000  # of all matrices of one picture
MAX_MATRIX_RUNS = 24  # whose matrices are there
MAX_MATRIX_HEADS = 16  # of one run
MIN_MATRIX_HEADS = 4  # heads of a run, however many there are


def make_head_maps(runs: list[RunResult], figure_spec: FigureSpec, payload: BinaryPayload) -> dict:
    """A map a run, of as many probes as all runs together have room for."""
    drawn_runs = [(index, run, run.probe_values[figure_spec.name]) for index, run in enumerate(runs) if run.has_figure(figure_spec)]
    low, top = compute_scale(figure_spec, [values_NLH for _, _, values_NLH in drawn_runs])
    maps = []
    for index, run, values_NLH in drawn_runs:
        probe_indices = select_evenly(len(values_NLH), max(1, MAX_MAP_VALUES // len(drawn_runs) // values_NLH[0].size))
        values = payload.add_quantized(values_NLH[probe_indices], low, top, 'u2')
        shape = dict(rows=values_NLH.shape[1], columns=values_NLH.shape[2], first=1)
        maps.append(dict(shape, run=index, steps=[run.probe_steps[step] for step in probe_indices], values=values, depth=65535))
    return make_map_header(figure_spec, low, top) | dict(maps=maps, across='head', up='layer')


def make_matrix_maps(runs: list[RunResult], figure_spec: FigureSpec, payload: BinaryPayload) -> dict:
    """The strongest heads of the first runs, at as many probes as there is room for, the last one first of all."""
    drawn_runs = [(index, run) for index, run in enumerate(runs) if run.has_figure(figure_spec)][:MAX_MATRIX_RUNS]
    low, top, maps = 0.0, figure_spec.scale_max or 1.0, []
    for index, run in drawn_runs:
        last_LHTS = run.load_matrices(figure_spec)
        queries, keys = last_LHTS.shape[2:]
        max_values = MAX_MATRIX_VALUES // len(drawn_runs) // (queries * keys)
        chosen_heads = run.find_strongest_heads(max(MIN_MATRIX_HEADS, min(MAX_MATRIX_HEADS, max_values)))
        probe_indices = select_evenly(len(run.probe_steps), max(1, max_values // len(chosen_heads)))
        steps = [run.load_matrices(figure_spec, step) for step in probe_indices[:-1]] + [last_LHTS]
        for layer, head in chosen_heads:
            values = payload.add_quantized(np.stack([step[layer, head] for step in steps]), low, top, 'u1')
            shape = dict(rows=queries, columns=keys, first=1 - (keys - queries), layer=layer + 1, head=head + 1)
            maps.append(dict(shape, run=index, steps=[run.probe_steps[step] for step in probe_indices], values=values, depth=255))
    return make_map_header(figure_spec, low, top) | dict(maps=maps, across='key', up='query', runs=len(drawn_runs))


def compute_scale(figure_spec: FigureSpec, values: list[np.ndarray]) -> tuple[float, float]:
    """Of the scale: from 0, or as far below as above where some value is negative."""
    top = figure_spec.scale_max or max(float(np.nanmax(array)) for array in values)
    low = min(float(np.nanmin(array)) for array in values)
    widest = max(top, -low)
    return (-widest, widest) if low < 0 else (0.0, top)


def make_map_header(figure_spec: FigureSpec, low: float, top: float) -> dict:
    header = dict(name=figure_spec.name, kind=figure_spec.kind, title=figure_spec.title, sentence=figure_spec.caption)
    return header | dict(label=figure_spec.label, low=low, top=top)


MAP_MAKERS = dict(heads=make_head_maps, matrices=make_matrix_maps)
