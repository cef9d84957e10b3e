"""Training objective: how prefix language modeling and attention windows affect the sink.

    sinklab train --config=configs/objective.py:window_256 --workdir=runs/window_256

Weight decay, the third regularizer of Table 1, is in optimization.py.

The training loss of a prefix row excludes the prefix; its validation loss includes it, as in the released code.
Decided: all T queries see a token of the prefix, so its alpha_k is the mean over T queries. Section 3 divides by
T - k + 1, with which alpha_k could be above 1. `sink/prefix` measures the strongest prefix token of each sequence,
layer and head. `argmax/k` is how often that token is x_k, with or without a sink.

A window of w has w keys, including the key of the query itself. At T = 64 a window of 32 hides x_1 from half of the
queries, so alpha_1 <= 0.5. The probe therefore also reports `sink/1/window`, over the queries that see x_1.
"""

from sinklab.configs.publications import GU_V1, MIMO
from sinklab.configs.table import make_row, scale_with_size, table


def make_window_row(keys, note):
    return make_row(scale_with_size({'model.mask.window': keys}), f'{GU_V1}, Figure 2D', note=note)


def make_hybrid_row(diff, note=''):
    sizes = scale_with_size({'model.mask.window': 128, 'model.global_layers.every': 6})
    return make_row(diff | sizes, f'{MIMO}, and gpt-oss', note=f'{HYBRID_NOTE}{note}')


WINDOW_NOTE = (
    'A figure only: small windows prevent the sink; windows of about 256 or more have it. '
    'alpha/edge needs texts longer than the window: sinklab measure RUN --length=N, up to the training length.'
)
HYBRID_NOTE = 'Five layers with a window of 128 for each global one. No sink number was published.'

ROWS = {
    'full': make_row({}, f'{GU_V1}, Table 1', 18.18, 3.73),
    **{
        f'prefix_{tokens}': make_row(
            {'model.mask.prefix': tokens},
            f'{GU_V1}, Figure 3B',
            note='A figure only (p = 5): the sink is on one of the prefix tokens, which varies; see sink/prefix.',
        )
        for tokens in (2, 3, 4, 5, 10)
    },
    'window_32': make_window_row(32, 'A figure only: no sink. At T = 64 half of the queries do not see x_1.'),
    **{f'window_{keys}': make_window_row(keys, WINDOW_NOTE) for keys in (64, 128, 256, 512, 1024)},
    'hybrid': make_hybrid_row({}),
    'hybrid_logit': make_hybrid_row({'model.learned_kv.kind': 'logit'}, ' With a learned sink logit.'),
    'hybrid_gate': make_hybrid_row({'model.gate': 'elementwise'}, ' With a gate.'),
    'hybrid_xsa': make_hybrid_row({'model.exclusive': 'fixed'}, ' With exclusive self-attention.'),
    'block_256': make_row(
        scale_with_size({'model.mask.block': 256}),
        'none: windows that do not overlap, unlike those of Gu et al.',
        note='No result was published. Each block has a first token of its own.',
    ),
}

get_config = table(ROWS)
