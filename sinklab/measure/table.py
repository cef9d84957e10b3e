"""All that is measured. The probe, `log.sinks`, reports, sweeps and the README's table read it here."""

import dataclasses
import re
from typing import Any

import numpy as np

from sinklab.measure import backcopy, contribution, entropy, norms, sink
from sinklab.measure.measure import Arrays, Measure, Number, union
from sinklab.measure.setting import Setting, forward_arrays, received_sums

MEASURES = (*sink.MEASURES, *entropy.MEASURES, *contribution.MEASURES, *norms.MEASURES, *backcopy.MEASURES)
NUMBERS = [number for measure in MEASURES for number in measure.shown]
PICTURES = [measure.picture for measure in MEASURES if measure.picture]
HEADLINE, HEADLINE_MAP = NUMBERS[0], PICTURES[0]  # what is shown where there is room for one


def in_setting(setting: Setting) -> list[Measure]:
    return [measure for measure in MEASURES if measure.applies(setting)]


def arrays(captured: Any, setting: Setting) -> Arrays:
    """What all measures keep of a Capture of L layers."""
    forward = forward_arrays(captured, setting)
    return union(m.arrays(*(forward[name] for name in m.reads), setting) for m in in_setting(setting))


def numbers(kept: Arrays, setting: Setting) -> dict[str, float]:
    """What a probe adds to metrics.jsonl."""
    return union(measure.numbers(kept, setting) for measure in in_setting(setting))


def context(received: Any, setting: Setting) -> Arrays:
    """The same of a training batch, over its whole length: NAME/context, where sums over queries have it."""
    sums = received_sums(received, setting)
    found = union(measure.context(sums, setting) for measure in in_setting(setting))
    return {f'{name}/context': value for name, value in found.items()}


def saved(kept: Arrays) -> dict[str, np.ndarray]:
    """The arrays of a probe's file."""
    found = {}
    for name in (name for measure in MEASURES for name in measure.saved):
        if name in kept:
            found[name] = kept[name]
        elif (whole := name.replace('_L', '_LP')) in kept:
            found[name] = kept[whole].mean(1)
    return found


def number(name: str) -> Number | None:
    """What people read of a recorded name; that of sink/{k} for sink/2, with 2 in its label."""
    for entry in NUMBERS:
        if match := re.fullmatch(re.escape(entry.name).replace(r'\{k\}', r'([\d.]+)'), name):
            label = entry.label.format(k=match[1]) if match.groups() else entry.label
            return dataclasses.replace(entry, name=name, label=label)
    return None
