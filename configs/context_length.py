"""Context length: how the length of the training texts affects the sink.

    sinklab sweep --config=configs/context_length.py --size=small --seeds=3 --workdir=runs/context
    sinklab claims --config=configs/context_length.py --size=small --seeds=3 --workdir=runs/claims_small

All rows have the tokens per step and the steps of the size. The sizes `quickstart` and `smoke` have windows of four
times the length in this file, so that the probe fits into a quarter of it. The rows `context_N` of extensions.py are
those of Barbero et al., with the lengths and the model of their paper.
"""

from sinklab.configs.attention import ROWS as ATTENTION
from sinklab.configs.claims import SINK_METRIC, make_claim
from sinklab.configs.publications import BARBERO
from sinklab.configs.sizes import QUICKSTART, SIZES, SMOKE
from sinklab.configs.table import make_row, scale, table


def make_length_row(share):
    diff = scale('data.length', 1 / share) | scale('optimizer.batch_size', share) | scale('valid.windows', share)
    note = 'A figure only (120M parameters): almost no sink at 128 tokens, an increase up to 2048, the same loss.'
    return make_row(diff, BARBERO, note=note)


ROWS = {
    'full': ATTENTION['softmax'] | dict(note='The length of the size.'),
    'half': make_length_row(2),
    'quarter': make_length_row(4),
}

# A quarter of the length is the claim `context` of claims.py.
CLAIMS = {
    'context_half': make_claim(
        'Training texts of the whole length give more of a sink than those of half the length.',
        BARBERO,
        ('context_length:half', '<', ('context_length:full', SINK_METRIC)),
    )
}

get_config = table(
    ROWS,
    sizes=SIZES
    | {
        'quickstart': QUICKSTART | {'data.length': 256, 'optimizer.batch_size': 8, 'valid.windows': 128},
        'smoke': SMOKE | {'data.length': 64, 'optimizer.batch_size': 1},
    },
)
