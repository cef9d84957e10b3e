"""What of a head's output comes from the first token."""

from sinklab.measure.measure import Number, Picture, of_heads
from sinklab.measure.norms import norms
from sinklab.measure.setting import Setting
from sinklab.measure.sink import EPSILON


def of_first(attention_LPHTS, value_LPSHK, head_LPTHK, setting: Setting):
    """Mean over the queries i > 1 of ||A_i1 v_1|| / ||o_i||, _LPH; 0 where a head says nothing."""
    weight_LPTH = abs(attention_LPHTS[..., setting.columns]).swapaxes(-1, -2)
    added_LPTH = weight_LPTH * norms(value_LPSHK[:, :, setting.columns, None])
    return (added_LPTH / norms(head_LPTHK).clip(EPSILON))[:, :, 1:].mean(2)


MEASURES = (
    of_heads(
        'contribution',
        of_first,
        (
            Number(
                'contribution/1',
                'contribution',
                "The first token's part of a head's output: mean of ||A_i1 v_1|| / ||o_i|| over i > 1.",
                table=True,
            ),
        ),
        reads=('attention_LPHTS', 'value_LPSHK', 'head_LPTHK'),
        picture=Picture('heads', 'contribution_LH', 'What the first token adds', '||A_i1 v_1|| / ||o_i||'),
    ),
)
