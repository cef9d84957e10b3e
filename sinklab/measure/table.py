"""All that is measured. The probe, `log.sinks`, reports, sweeps and the README's table read it here."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from sinklab.measure import backcopy, contribution, entropy, norms, sink
from sinklab.measure.measure import Arrays, Measure, Number
from sinklab.measure.setting import Setting, forward_arrays, received_sums

MEASURES = (*sink.MEASURES, *entropy.MEASURES, *contribution.MEASURES, *norms.MEASURES, *backcopy.MEASURES)
NUMBERS = [number for measure in MEASURES for number in measure.shown]
PICTURES = [measure.picture for measure in MEASURES if measure.picture]
HEADLINE, HEADLINE_MAP = NUMBERS[0], PICTURES[0]  # what is shown where there is room for one


def in_setting(setting: Setting) -> Iterator[Measure]:
    return (measure for measure in MEASURES if measure.applies(setting))


def arrays(captured: Any, setting: Setting) -> Arrays:
    """What all measures keep of a Capture of L layers."""
    read = forward_arrays(captured, setting)
    found = {}
    for measure in in_setting(setting):
        found |= measure.arrays(*(read[name] for name in measure.reads), setting)
    return found


def numbers(kept: Arrays, setting: Setting) -> dict[str, float]:
    """What a probe adds to metrics.jsonl."""
    found = {}
    for measure in in_setting(setting):
        found |= measure.numbers(kept, setting)
    return found


def context(received: Any, setting: Setting) -> Arrays:
    """The same of a training batch, over its whole length: NAME/context, where sums over queries have it."""
    received = received_sums(received, setting)
    found = {}
    for measure in in_setting(setting):
        found |= measure.context(received, setting) if measure.context else {}
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
