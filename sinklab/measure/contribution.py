"""What of a head's output comes from the first token."""

from sinklab.measure.measure import Number, Picture, of_heads
from sinklab.measure.norms import norms
from sinklab.measure.sink import EPSILON


def of_first(attention_LPHTS, value_LPSHK, head_LPTHK, columns: int = 0):
    """Mean over the queries i > 1 of ||A_i1 v_1|| / ||o_i||, _LPH; 0 where a head says nothing."""
    added_LPTH = (
        abs(attention_LPHTS[..., columns]).swapaxes(-1, -2) * norms(value_LPSHK[..., columns, :, :])[..., None, :]
    )
    return (added_LPTH / norms(head_LPTHK).clip(EPSILON))[..., 1:, :].mean(-2)


MEASURES = (
    of_heads(
        'contribution',
        lambda attention, value, head, setting: of_first(attention, value, head, setting.columns),
        (
            Number(
                'contribution/1',
                'contribution',
                'The mean of ||A_i1 v_1|| / ||o_i|| over the queries i > 1, o before norm, gate and V bias.',
                in_table=True,
            ),
        ),
        reads=('attention_LPHTS', 'value_LPSHK', 'head_LPTHK'),
        picture=Picture(
            'heads',
            'contribution',
            'contribution_LH',
            'What the first token adds',
            'contribution',
            'Mean ||A_i1 v_1|| / ||o_i|| of each layer and head.',
        ),
    ),
)
