"""How far a change of one token spreads (Barbero et al., 2025): a sink is said to keep it from the others."""

import numpy as np

from sinklab.measure.norms import compute_norms
from sinklab.measure.spikes import name_by_layer
from sinklab.observe.subject import MeasurableModel
from sinklab.record import UserError
from sinklab.targets import strip_loss_mask

PERTURBATION_BATCH_SIZE = 8  # texts


def measure_perturbation(
    model: MeasurableModel, ids_PT: np.ndarray, position: int, seed: int, position_T: np.ndarray | None = None
) -> dict[str, float]:
    """perturbation/LL: mean over texts and tokens at and after `place` (from 0) of ||dh_t|| over ||h_t||, by block.

    dh_t is what becomes of h_t where the token at `place` is another one, drawn from the vocabulary.
    """
    if 'residual_LPTD' not in model.available_arrays:
        raise UserError(f'{model.name} shows no hidden states, in which a change could spread; leave --perturb out')
    drawn_P = np.random.default_rng(seed).integers(model.vocabulary - 1, size=len(ids_PT))
    other_PT = ids_PT.copy()
    other_PT[:, position] = drawn_P + (drawn_P >= strip_loss_mask(ids_PT[:, position]))  # never itself
    batches = [slice(start, start + PERTURBATION_BATCH_SIZE) for start in range(0, len(ids_PT), PERTURBATION_BATCH_SIZE)]
    ratio_LPT = [compute_relative_change(model, ids_PT[batch], other_PT[batch], position_T)[:, :, position:] for batch in batches]
    return name_by_layer('perturbation', np.concatenate(ratio_LPT, 1).mean((1, 2)))


def compute_relative_change(model: MeasurableModel, ids_PT: np.ndarray, other_PT: np.ndarray, position_T: np.ndarray | None) -> np.ndarray:
    before, after = (model.capture(ids, extract_residual, position_T)['residual_LPTD'] for ids in (ids_PT, other_PT))
    return compute_norms(np.float32(after) - np.float32(before)) / compute_norms(np.float32(before))


def extract_residual(arrays: dict) -> dict:
    return {'residual_LPTD': arrays['residual_LPTD']}
