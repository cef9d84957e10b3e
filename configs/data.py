"""Data: how the amount of data, random first tokens and fixed tokens affect the sink.

    sinklab train --config=configs/data.py:fixed_2 --workdir=runs/fixed_2

Amounts are shares of the baseline's 5B tokens, at the same number of steps. With a store of another size the same
shares are other amounts; a run prints its own amount when it starts. Random tokens are drawn from all ids, once for
each window, and probes read natural text. The fixed token has id 1, in training, validation and probe sequences.
Decided: random and fixed tokens are targets of the loss like other tokens, as in the released code. A size may set a
fixed first token; every row except `fixed_K` removes it.
"""

from sinklab.configs.publications import GU_V1
from sinklab.configs.table import make_row, table

FIGURE_2C = f'{GU_V1}, Figure 2C'
FIGURES_2C_AND_28 = f'{FIGURE_2C}; (ICLR), Figure 28'
NO_FIXED_TOKEN = {'data.fixed_position': None}  # override sizes that fix the first token


def make_amount_row(share, note, source=FIGURE_2C):
    return make_row(NO_FIXED_TOKEN | {'data.share': share}, source, note=note)


def make_random_row(first, last, **fields):
    diff = NO_FIXED_TOKEN | {'data.random_first': first, 'data.random_last': last}
    return make_row(diff, f'{GU_V1}, section 5', **fields)


def make_fixed_row(position, *sinks):
    published = {f'sink/{k}': sink for k, sink in enumerate(sinks, 1)}
    return make_row({'data.fixed_position': position}, f'{GU_V1}, Table 7', **published)


ROWS = {
    'amount_5b': make_row(NO_FIXED_TOKEN, FIGURE_2C, 18.18, 3.73),
    'amount_2.5b': make_amount_row(0.5, 'A figure only.'),
    'amount_500m': make_amount_row(0.1, 'A figure only: others read Sink_1 near 4 % and a loss near 3.8.'),
    'amount_200m': make_amount_row(0.04, 'A figure only.'),
    'amount_100m': make_amount_row(
        0.02, 'Figures only: overfitting between 1k and 2k steps, Sink_1 below 1 % up to 5k steps.', FIGURES_2C_AND_28
    ),
    'amount_50m': make_amount_row(
        0.01, 'Figures only: overfitting between 1k and 2k steps, Sink_1 below 1 %, loss near 4.5.', FIGURES_2C_AND_28
    ),
    'random_1': make_random_row(1, 1, sink=27.03),
    'random_1_2': make_random_row(1, 2, **{'sink/1': 1.98, 'sink/2': 14.08}),
    'random_2': make_random_row(2, 2, sink=20.99),
    **{
        f'random_1_{last}': make_random_row(1, last, note='No number: the sink tends to disappear.')
        for last in (3, 5, 10)
    },
    'fixed_1': make_fixed_row(1, 74.11, 0.00, 0.00, 0.01),
    'fixed_2': make_fixed_row(2, 0.00, 69.03, 0.00, 0.01),
    'fixed_3': make_fixed_row(3, 0.00, 0.00, 69.64, 0.00),
}

get_config = table(ROWS)
