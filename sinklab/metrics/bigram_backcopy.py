"""Bigram-Backcopy metrics, for trigger tokens and other tokens separately."""

import numpy as np

from sinklab.metrics.metric import Metric, MetricInfo
from sinklab.metrics.sink import normalize_rows


def compute_trigger_attention(first_LPHT, trigger_PT) -> dict[str, float]:
    """Mean attention to the first token, from triggers and from the others; the first query has no choice."""
    first_PT = np.asarray(first_LPHT).mean((0, 2))[:, 1:]
    return {
        f'alpha/1/{side}': compute_masked_mean(first_PT, is_side)
        for side, is_side in split_by_trigger(trigger_PT[:, 1:])
    }


def compute_trigger_losses(loss_NT, right_NT, trigger_NT) -> dict[str, float]:
    """Mean loss after triggers and after others, and how often the likeliest token after a trigger is the next."""
    losses_by_side = {
        f'valid/loss/{side}': compute_masked_mean(loss_NT, is_side) for side, is_side in split_by_trigger(trigger_NT)
    }
    return losses_by_side | {'valid/accuracy/trigger': compute_masked_mean(right_NT, trigger_NT)}


def split_by_trigger(trigger_NT):
    return ('trigger', trigger_NT), ('other', ~trigger_NT)


def compute_masked_mean(values_NT, where_NT) -> float:
    return float(np.mean(np.asarray(values_NT), where=where_NT))


ATTENTION_SENTENCE = 'Mean attention to the first token from triggers, and from other queries.'
METRICS = (
    Metric(
        inputs=('attention_LPHTS',),
        compute_arrays=lambda attention, context: {
            'first_LPHT': normalize_rows(attention)[..., context.learned_keys]
        },
        compute_numbers=lambda arrays, context: compute_trigger_attention(arrays['first_LPHT'], arrays['trigger_PT']),
        infos=tuple(
            MetricInfo(f'alpha/1/{side}', f'alpha_1 {side}', ATTENTION_SENTENCE) for side in ('trigger', 'other')
        ),
        is_applicable=lambda context: context.triggers,
    ),
)
