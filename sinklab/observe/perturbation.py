"""How far a change of one token spreads (Barbero et al., 2025): a sink is said to keep it from the others."""

import numpy as np

from sinklab.measure.norms import norms
from sinklab.measure.spikes import by_layer
from sinklab.observe.subject import Subject
from sinklab.record import Refusal
from sinklab.targets import readable

AT_ONCE = 8  # texts


def spread(
    subject: Subject, ids_PT: np.ndarray, place: int, seed: int, position_T: np.ndarray | None = None
) -> dict[str, float]:
    """perturbation/LL: mean over texts and tokens at and after `place` (from 0) of ||dh_t|| over ||h_t||, by block.

    dh_t is what becomes of h_t where the token at `place` is another one, drawn from the vocabulary.
    """
    if 'residual_LPTD' not in subject.reads:
        raise Refusal(f'{subject.name} shows no hidden states, in which a change could spread; leave --perturb out')
    drawn_P = np.random.default_rng(seed).integers(subject.vocabulary - 1, size=len(ids_PT))
    other_PT = ids_PT.copy()
    other_PT[:, place] = drawn_P + (drawn_P >= readable(ids_PT[:, place]))  # never itself
    parts = [slice(at, at + AT_ONCE) for at in range(0, len(ids_PT), AT_ONCE)]
    ratio_LPT = [change(subject, ids_PT[part], other_PT[part], position_T)[:, :, place:] for part in parts]
    return by_layer('perturbation', np.concatenate(ratio_LPT, 1).mean((1, 2)))


def change(subject: Subject, ids_PT: np.ndarray, other_PT: np.ndarray, position_T: np.ndarray | None) -> np.ndarray:
    before, after = (subject.observe(ids, residual, position_T)['residual_LPTD'] for ids in (ids_PT, other_PT))
    return norms(np.float32(after) - np.float32(before)) / norms(np.float32(before))


def residual(layer: dict) -> dict:
    return {'residual_LPTD': layer['residual_LPTD']}
