"""The figures of the page that are maps: values of layers and heads, and matrices, at each probe."""

import numpy as np

from sinklab.measure.measure import Picture
from sinklab.report.pack import Pack
from sinklab.report.probes import spaced
from sinklab.report.runs import Run

CELLS = 1_500_000  # values of all maps of one picture together
PIXELS = 2_500_000  # of all matrices of one picture
RUNS = 24  # whose matrices are there
HEADS = 16  # of one run
LEAST = 4  # heads of a run, however many there are


def heads(runs: list[Run], picture: Picture, pack: Pack) -> dict:
    """A map a run, of as many probes as all runs together have room for."""
    shown = [(at, run, run.values[picture.name]) for at, run in enumerate(runs) if run.has(picture)]
    low, top = bounds(picture, [values_NLH for _, _, values_NLH in shown])
    maps = []
    for at, run, values_NLH in shown:
        kept = spaced(len(values_NLH), max(1, CELLS // len(shown) // values_NLH[0].size))
        values = pack.levels(values_NLH[kept], low, top, 'u2')
        shape = dict(rows=values_NLH.shape[1], columns=values_NLH.shape[2], first=1)
        maps.append(dict(shape, run=at, steps=[run.probe_steps[step] for step in kept], values=values, depth=65535))
    return about(picture, low, top) | dict(maps=maps, across='head', up='layer')


def matrices(runs: list[Run], picture: Picture, pack: Pack) -> dict:
    """The strongest heads of the first runs, at as many probes as there is room for, the last one first of all."""
    shown = [(at, run) for at, run in enumerate(runs) if run.has(picture)][:RUNS]
    low, top, maps = 0.0, picture.largest or 1.0, []
    for at, run in shown:
        last_LHTS = run.matrices(picture)
        queries, keys = last_LHTS.shape[2:]
        room = PIXELS // len(shown) // (queries * keys)
        picked = run.strongest(max(LEAST, min(HEADS, room)))
        kept = spaced(len(run.probe_steps), max(1, room // len(picked)))
        steps = [run.matrices(picture, step) for step in kept[:-1]] + [last_LHTS]
        for layer, head in picked:
            values = pack.levels(np.stack([step[layer, head] for step in steps]), low, top, 'u1')
            shape = dict(rows=queries, columns=keys, first=1 - (keys - queries), layer=layer + 1, head=head + 1)
            maps.append(dict(shape, run=at, steps=[run.probe_steps[step] for step in kept], values=values, depth=255))
    return about(picture, low, top) | dict(maps=maps, across='key', up='query', runs=len(shown))


def bounds(picture: Picture, values: list[np.ndarray]) -> tuple[float, float]:
    """Of the scale: from 0, or as far below as above where some value is negative."""
    top = picture.largest or max(float(np.nanmax(one)) for one in values)
    low = min(float(np.nanmin(one)) for one in values)
    widest = max(top, -low)
    return (-widest, widest) if low < 0 else (0.0, top)


def about(picture: Picture, low: float, top: float) -> dict:
    found = dict(name=picture.name, kind=picture.kind, title=picture.title, sentence=picture.sentence)
    return found | dict(label=picture.label, low=low, top=top)


FIGURES = dict(heads=heads, matrices=matrices)
