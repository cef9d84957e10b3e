"""Entropy of attention rows."""

from sinklab.metrics.metric import FigureSpec, MetricInfo, make_head_metric
from sinklab.metrics.sink import normalize_rows


def compute_row_entropy(attention_BHTS):
    """Compute -sum_j p_ij log p_ij in nats, with p_ij = |A_ij| / sum_j |A_ij| over learned keys and text."""
    xp = attention_BHTS.__array_namespace__()
    share_BHTS = normalize_rows(attention_BHTS)
    return -(share_BHTS * xp.log(xp.where(share_BHTS > 0, share_BHTS, 1))).sum(-1)


METRICS = (
    make_head_metric(
        'entropy',
        lambda attention, context: compute_row_entropy(attention).mean(-1),
        (
            MetricInfo(
                'entropy/row',
                'entropy',
                'Entropy of attention rows: mean of -sum_j p_ij log p_ij, p = |A| / sum |A|.',
                'nats',
                2,
                in_table=True,
            ),
        ),
        figure=FigureSpec('heads', 'entropy_LH', 'Attention entropy', 'entropy'),
    ),
)
