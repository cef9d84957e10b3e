"""How does the loss bear on the sink? Prefix language modeling and windows of attention.

    sinklab train --config=configs/objective.py:window_256 --workdir=runs/window_256

Weight decay, the third regularizer of Table 1, is in optimization.py. The loss of a prefix row leaves the prefix out;
its validation loss does not, as released. Decided: a token of the prefix is seen by all T queries, so its alpha_k is
their mean, where section 3 divides by T - k + 1, by which it could be above 1; `sink/prefix` is of the strongest
token of each sequence, layer and head, and `argmax/k` says how often that is x_k, with a sink or without. A window of
w holds w keys, the query's own among them. At T = 64 a window of 32 hides x_1 from half of the queries, so that
alpha_1 <= 0.5: the probe reports `sink/1/window` beside it, over the queries that see it.
"""

from configs.table import scale_with_size, table


def make_prefix_row(tokens):
    note = 'A figure only (p = 5): the sink sits on one of the prefix tokens, which one varies; see sink/prefix.'
    return dict(diff={'model.mask.prefix': tokens}, published={}, source='Gu et al. (v1), Figure 3B', note=note)


EDGE_NOTE = (
    'alpha/edge is of longer texts than the window: sinklab measure RUN --length=N, up to the length of training.'
)


def make_window_row(
    keys, note=f'A figure only: small windows prevent the sink, those from about 256 have it. {EDGE_NOTE}'
):
    diff = scale_with_size({'model.mask.window': keys})
    return dict(diff=diff, published={}, source='Gu et al. (v1), Figure 2D', note=note)


ROWS = {
    'full': dict(diff={}, published={'sink/1': 18.18, 'valid/loss': 3.73}, source='Gu et al. (v1), Table 1'),
    **{f'prefix_{tokens}': make_prefix_row(tokens) for tokens in (2, 3, 4, 5, 10)},
    'window_32': make_window_row(
        32, 'A figure only: no sink; confounded at T = 64, where half of the queries do not see x_1.'
    ),
    **{f'window_{keys}': make_window_row(keys) for keys in (64, 128, 256, 512, 1024)},
    'block_256': dict(
        diff=scale_with_size({'model.mask.block': 256}),
        published={},
        source='none: windows that do not overlap, beside the shifted ones of Gu et al.',
        note='Nothing was published; each block has a first token of its own.',
    ),
}

get_config = table(ROWS)
