"""Probe sequences: what every run on a store is measured on."""

import numpy as np

from sinklab import spec
from sinklab.data.store.meta import LENGTH, SEQUENCES
from sinklab.data.store.store import Store
from sinklab.record import Refusal


def natural(store: Store, probe: spec.Probe, before: list[int]) -> np.ndarray:
    """The first ids of held-out texts, in the order of their keys; then, if those are too few, their next ones.

    With ids `before`, those stand before each text, and the last of its `length` ids make room for them.
    """
    names = store.named(probe.domain, 'config.probe.domain')
    taken = probe.length - len(before)
    parts = [texts(store, name) for name in names]
    owner, first, length, key = (np.concatenate(column) for column in zip(*parts, strict=True))
    if (count := int(np.sum(length // taken))) < probe.sequences:
        raise Refusal(
            f'config.probe wants {probe.sequences} sequences of {probe.length} tokens and the held-out documents '
            f'have {count}; lower config.probe.sequences or length, or hold out more'
        )
    chosen, number = [], 0
    while len(chosen) < probe.sequences:
        long = np.flatnonzero(length >= (number + 1) * taken)
        long = long[np.argsort(key[long])][: probe.sequences - len(chosen)]
        chosen += [(store.domains[owner[i]], int(first[i]) + number * taken) for i in long]
        number += 1
    rows = {name: store.row('held_out', name) for name in names}
    ids = store.each(lambda text: rows[text[0]].ids(text[1], text[1] + taken), chosen)
    return np.stack([np.array([*before, *text], np.int32) for text in ids])


def texts(store: Store, domain: str) -> tuple[np.ndarray, ...]:
    """(number of the domain, start, length, key) of every held-out text, its BOS left out."""
    row = store.row('held_out', domain)
    starts, keys = row.documents()
    first = starts + int(store.has_bos)
    owner = np.full(len(keys), store.domains.index(domain))
    return owner, first, np.append(starts, len(row))[1:] - first, keys


def random(store: Store, probe: spec.Probe, before: list[int]) -> np.ndarray:
    return prepend(ids_without_text(store, 'random_PT', probe)[:, : probe.length], before)


def single_token(store: Store, probe: spec.Probe, before: list[int]) -> np.ndarray:
    return prepend(np.repeat(ids_without_text(store, 'repeated_P', probe)[:, None], probe.length, axis=1), before)


def ids_without_text(store: Store, name: str, probe: spec.Probe) -> np.ndarray:
    if probe.sequences > SEQUENCES or probe.length > LENGTH:
        raise Refusal(
            f'config.probe wants {probe.sequences} sequences of {probe.length} tokens, and of {probe.inputs} ones a '
            f'store has {SEQUENCES} of {LENGTH}; lower config.probe.sequences or length'
        )
    return store.probes()[name][: probe.sequences]


def prepend(ids_PT: np.ndarray, before: list[int]) -> np.ndarray:
    """With ids before them, at the cost of the last."""
    return np.insert(ids_PT, [0] * len(before), before, axis=1)[:, : ids_PT.shape[1]]


INPUTS = {'natural': natural, 'random': random, 'repeated': single_token}
