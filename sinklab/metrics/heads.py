"""What heads do: which token has the most attention, which have none, the diagonal, induction, rank and gate."""

import numpy as np

from sinklab.metrics.metric import MetricContext, MetricInfo, make_head_metric
from sinklab.metrics.sink import normalize_rows


def compute_first_argmax_rate(attention_LPHTS, context: MetricContext):
    """Compute the share of the queries i > 1 that give the first token more attention than any other token, _LPH."""
    text = abs(attention_LPHTS)[..., 1:, context.learned_keys :]
    return (text[..., 0] > text[..., 1:].max(-1)).mean(-1)


def compute_sparsity(attention_LPHTS, context: MetricContext):
    """Compute the percentage of the A_ij with j <= i that are exactly 0, _LPH."""
    is_earlier_TS = np.tri(context.length, dtype=bool)
    is_zero = (attention_LPHTS[..., context.learned_keys :] == 0) & is_earlier_TS
    return 100 * is_zero.sum((-1, -2)) / is_earlier_TS.sum()


def compute_induction_score(attention_LPHTS, context: MetricContext):
    """Compute the mean attention of repeated tokens to the token after their previous occurrence, _LPH."""
    query_T = np.arange(context.period, context.length)
    share_LPHTS = normalize_rows(attention_LPHTS)[..., context.learned_keys :]
    return share_LPHTS[..., query_T, query_T - context.period + 1].mean(-1)


def compute_stable_rank(head_LPTHK):
    """Compute ||M||_F^2 / ||M||_2^2 of the outputs of each head, a matrix M of tokens and dimensions; 0 for M = 0."""
    head_LPHTK = head_LPTHK.astype('float32').swapaxes(2, 3)
    gram_LPHKK = head_LPHTK.swapaxes(-1, -2) @ head_LPHTK
    largest_LPH = head_LPHTK.__array_namespace__().linalg.eigvalsh(gram_LPHKK)[..., -1]
    return gram_LPHKK.trace(0, -2, -1) / largest_LPH.clip(1e-30)


METRICS = (
    make_head_metric(
        'first_argmax',
        compute_first_argmax_rate,
        (
            MetricInfo(
                'first_token_argmax_rate',
                'first argmax',
                'Share of (text, layer, head, query) in which the first token has more attention than each other one '
                '(Kaul et al., 2024), without the first query, which sees no other.',
            ),
        ),
    ),
    make_head_metric(
        'sparsity',
        compute_sparsity,
        (MetricInfo('sparsity', 'sparsity', 'Share of the entries A_ij with j <= i that are exactly 0.', '%', 2),),
    ),
    make_head_metric(
        'gate',
        lambda gate_LPTH, context: gate_LPTH.mean(2),
        (MetricInfo('mean_gate', 'mean gate', 'Mean of the gate of attention (Qiu et al., 2025).'),),
        inputs=('gate_LPTH',),
        is_applicable=lambda context: context.gated,
    ),
)
OFFLINE_METRICS = (
    make_head_metric(
        'diagonal',
        lambda attention, context: (
            normalize_rows(attention)[..., context.learned_keys :].diagonal(0, -2, -1).mean(-1)
        ),
        (MetricInfo('diagonal_mass', 'diagonal', 'Mean attention of queries to their own token, A_ii.'),),
    ),
    make_head_metric(
        'induction',
        compute_induction_score,
        (
            MetricInfo(
                'induction_score',
                'induction',
                'On texts that repeat their first half: mean attention to the token after the previous occurrence of '
                "the query's token.",
            ),
            MetricInfo('induction_score/max', 'induction, best', 'The same for the head in which it is largest.'),
        ),
        compute_numbers=lambda value_LPH, context: {
            'induction_score': float(np.mean(value_LPH)),
            'induction_score/max': float(np.mean(value_LPH, 1).max()),
        },
        is_applicable=lambda context: context.period > 0,
    ),
    make_head_metric(
        'stable_rank',
        lambda head, context: compute_stable_rank(head),
        (
            MetricInfo(
                'stable_rank',
                'stable rank',
                'Stable rank ||M||_F^2 / ||M||_2^2 of the outputs M of a head, a row for each token: 1 if all are '
                'multiples of one vector.',
                digits=2,
            ),
        ),
        inputs=('head_LPTHK',),
    ),
)
