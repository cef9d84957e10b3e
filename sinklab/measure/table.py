"""The table of all measures. The probe, `log.sinks`, reports, sweeps and docs/number_table.py read it."""

import dataclasses
import re
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from sinklab.measure import angles, backcopy, contribution, entropy, norms, places, propositions, sink, spikes, stream
from sinklab.measure.measure import Arrays, Measure, Number, nothing, union
from sinklab.measure.setting import Setting, forward_arrays, received_sums, with_implicit

Measures = tuple[Measure, ...]
MEASURES = (
    *sink.MEASURES,
    *entropy.MEASURES,
    *contribution.MEASURES,
    *norms.MEASURES,
    *angles.MEASURES,
    *backcopy.MEASURES,
)
# What is measured of a finished model alone: too dear, or too much, for every probe of a training.
DEEPER = (*angles.DEEPER, *spikes.MEASURES, *stream.MEASURES, *places.MEASURES, *propositions.MEASURES)
NUMBERS = [number for measure in MEASURES for number in measure.shown]
DEEPER_NUMBERS = [number for measure in DEEPER for number in measure.shown]
PICTURES = [measure.picture for measure in MEASURES if measure.picture]
# The number that tables and figures show besides those of the measures.
VALID_LOSS = Number('valid/loss', 'valid loss', 'Mean cross-entropy of held-out windows.', 'nats')
# What is shown where there is room for one.
HEADLINE = next(number for number in NUMBERS if number.name == 'sink/1')
HEADLINE_MAP = next(picture for picture in PICTURES if picture.array == 'alpha_LPHJ')


def in_setting(setting: Setting, among: Measures = MEASURES) -> list[Measure]:
    return [measure for measure in among if measure.applies(setting)]


def arrays(captured: Any, setting: Setting, among: Measures = MEASURES) -> Arrays:
    """What all measures keep of a Capture of L layers."""
    return kept(forward_arrays(captured, setting), setting, among)


def kept(forward: Arrays, setting: Setting, among: Measures) -> Arrays:
    """What measures keep of the arrays of a forward pass."""
    return union(m.arrays(*(forward[name] for name in m.reads), setting) for m in in_setting(setting, among))


def measurable(reads: Collection[str]) -> Measures:
    """All measures, DEEPER ones among them, that read nothing but these arrays."""
    return tuple(measure for measure in (*MEASURES, *DEEPER) if {*measure.reads} <= {*reads})


def numbers(kept: Arrays, setting: Setting, among: Measures = MEASURES) -> dict[str, float]:
    """What a probe adds to metrics.jsonl."""
    return union(measure.numbers(kept, setting) for measure in in_setting(setting, among))


def rows(setting: Setting) -> dict[str, Callable[[Any], Any]]:
    """What is measured of whole rows and of nothing less: attention_BHTS of some queries -> a value of each."""
    measures = [measure for measure in in_setting(setting) if measure.row and measure.context is nothing]
    return {m.shown[0].name: lambda attention, m=m: m.row(with_implicit(attention, setting)) for m in measures}


def context(captured: Any, setting: Setting) -> Arrays:
    """NAME/context of a training batch, over its whole length: of first keys and of rows, where asked for."""
    found = {name: value.mean() for name, value in (captured.row_means or {}).items()}
    if captured.received is not None:
        sums = received_sums(captured.received, setting)
        found |= union(measure.context(sums, setting) for measure in in_setting(setting))
    return {f'{name}/context': value for name, value in found.items()}


def file_arrays(kept: Arrays, setting: Setting, among: Measures = MEASURES) -> dict[str, np.ndarray]:
    """The arrays of a probe's file: as kept, or their means over sequences."""
    names = [name for measure in in_setting(setting, among) for name in measure.saved]
    return {name: kept[name] if name in kept else kept[name.replace('_L', '_LP')].mean(1) for name in names}


def number(name: str) -> Number | None:
    """What people read of a recorded name; that of sink/{k} for sink/2, with 2 in its label."""
    for entry in (*NUMBERS, *DEEPER_NUMBERS):
        if match := re.fullmatch(re.sub(r'\\{(\w+)\\}', r'(?P<\1>[\\d.e-]+)', re.escape(entry.name)), name):
            return dataclasses.replace(entry, name=name, label=entry.label.format(**match.groupdict()))
    return None
