"""How spread attention is."""

from sinklab.measure.measure import Number, Picture, of_rows
from sinklab.measure.sink import proxy


def row(attention_BHTS):
    """-sum_j p_ij log p_ij in nats, p_ij = |A_ij| / sum_j |A_ij| over columns and text."""
    xp, share_BHTS = attention_BHTS.__array_namespace__(), proxy(attention_BHTS)
    return -(share_BHTS * xp.log(xp.where(share_BHTS > 0, share_BHTS, 1))).sum(-1)


MEASURES = (
    of_rows(
        'entropy',
        row,
        Number(
            'entropy/row',
            'entropy',
            'Of a row of attention: mean of -sum_j p_ij log p_ij, p = |A| / sum |A|.',
            'nats',
            2,
            table=True,
        ),
        picture=Picture('heads', 'entropy_LH', 'How spread attention is', 'entropy'),
    ),
)
