"""What of a head's output comes from the first token."""

from sinklab.measure.measure import MetricInfo, FigureSpec, make_head_metric
from sinklab.measure.norms import compute_norms
from sinklab.measure.setting import MetricSetting
from sinklab.measure.sink import EPSILON


def compute_first_contribution(attention_LPHTS, value_LPSHK, head_LPTHK, setting: MetricSetting):
    """Mean over the queries i > 1 of ||A_i1 v_1|| / ||o_i||, _LPH; 0 where a head says nothing."""
    weight_LPTH = abs(attention_LPHTS[..., setting.columns]).swapaxes(-1, -2)
    added_LPTH = weight_LPTH * compute_norms(value_LPSHK[:, :, setting.columns, None])
    return (added_LPTH / compute_norms(head_LPTHK).clip(EPSILON))[:, :, 1:].mean(2)


CONTRIBUTION_METRICS = (
    make_head_metric(
        'contribution',
        compute_first_contribution,
        (
            MetricInfo(
                'contribution/1',
                'contribution',
                "The first token's part of a head's output: mean of ||A_i1 v_1|| / ||o_i|| over i > 1.",
                in_table=True,
            ),
        ),
        inputs=('attention_LPHTS', 'value_LPSHK', 'head_LPTHK'),
        picture=FigureSpec('heads', 'contribution_LH', 'What the first token adds', '||A_i1 v_1|| / ||o_i||'),
    ),
)
