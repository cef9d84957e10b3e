"""Hypotheses: experiments on claims of the paper that small models contradict or leave open.

    sinklab claims --config=configs/hypotheses.py --seeds=5 --workdir=runs/hypotheses
    sinklab claims --config=configs/hypotheses.py --size=small --seeds=3 --workdir=runs/hypotheses_small

Each hypothesis is a prediction about rows of this file that can fail. docs/results/claims.md has the results.

- Weight decay: Sink_1 rises and falls with the absolute weight decay, as in Table 1, at every size. The rows
  `decay_N` have that weight decay at every size.
- Batch size: a quarter of the batch has the sink of the baseline if it reads as many tokens at a lower learning rate.
- Sigmoid: its loss is higher because its rows begin with a mass of T/4, so with a gain of 4/T (1/16 at T = 64) it is
  not higher.
- Value bias: it delays the sink and does not weaken it, so with twice the steps it has as much as the baseline.
- Learning rate: Sink_1 rises with the rate up to a peak near the rate of the lowest loss, and falls above it.
"""

from sinklab.configs.attention import ROWS as ATTENTION
from sinklab.configs.claims import BASELINE_ROW, GU_ICLR, GU_V1, LOSS_METRIC, SINK_METRIC, make_claim
from sinklab.configs.columns import ROWS as COLUMNS
from sinklab.configs.table import scale, table

QUARTER_BATCH = scale('optimizer.batch_size', 1 / 4)
AS_MANY_TOKENS = QUARTER_BATCH | scale('optimizer.steps', 4)
TWICE_THE_STEPS = scale('optimizer.steps', 2)


def make_row(*diffs):
    diff = {path: value for part in diffs for path, value in part.items()}
    return dict(diff=diff, published={}, source='this project', note='not published')


def make_rate(factor):
    return scale('optimizer.peak_learning_rate', factor)


ROWS = {
    **{f'decay_{decay}': make_row({'optimizer.weight_decay': decay}) for decay in (0.1, 0.2, 1.0, 2.0)},
    'batch_tokens': make_row(AS_MANY_TOKENS),
    'batch_tokens_half_rate': make_row(AS_MANY_TOKENS, make_rate(1 / 2)),
    'batch_tokens_quarter_rate': make_row(AS_MANY_TOKENS, make_rate(1 / 4)),
    'sigmoid_gain': make_row(ATTENTION['sigmoid']['diff'], {'model.attention.gain': 1 / 16}),
    'softmax_long': make_row(TWICE_THE_STEPS),
    'value_bias_long': make_row(COLUMNS['v']['diff'], TWICE_THE_STEPS),
    **{
        f'rate_{name}': make_row(make_rate(factor))
        for name, factor in (('1_4', 1 / 4), ('1_2', 1 / 2), ('3_2', 3 / 2), ('3', 3))
    },
}


def make_hypothesis(statement, source, row, *args, **fields):
    return make_claim(statement, f'on {source}', f'hypotheses:{row}', *args, **fields)


CLAIMS = {
    'decay_rises': make_hypothesis(
        'A weight decay of 0.5 has more than one of 0.1.', f'{GU_V1}, Table 1', 'decay_0.1', '<'
    ),
    'decay_falls': make_hypothesis('One of 2 has less than one of 0.5.', f'{GU_V1}, Table 1', 'decay_2.0', '<'),
    'batch_tokens': make_hypothesis(
        'A quarter of the batch, with as many tokens, has as much of a sink.',
        f'{GU_V1}, Table 6',
        'batch_tokens',
        '=',
    ),
    'batch_rate': make_hypothesis(
        'A quarter of the batch, with as many tokens and half the rate, has as much of a sink.',
        f'{GU_V1}, Table 6',
        'batch_tokens_half_rate',
        '=',
    ),
    'sigmoid_gain_helps': make_hypothesis(
        'Sigmoid with a gain of 1/16 has a lower loss than without.',
        f'{GU_V1}, Table 4',
        'sigmoid_gain',
        '<',
        ('attention:sigmoid', LOSS_METRIC),
        LOSS_METRIC,
    ),
    'sigmoid_gain_learns': make_hypothesis(
        'Sigmoid with a gain of 1/16 has the loss of softmax.',
        f'{GU_V1}, Table 4',
        'sigmoid_gain',
        '=',
        metric=LOSS_METRIC,
    ),
    'value_bias_delays': make_hypothesis(
        'With twice the steps, a bias of values does not matter.',
        f'{GU_V1}, Table 3',
        'value_bias_long',
        '=',
        ('hypotheses:softmax_long', SINK_METRIC),
    ),
    'rate_rises': make_hypothesis(
        'A quarter of the rate has less than half of it.',
        f'{GU_ICLR}, Table 9',
        'rate_1_4',
        '<',
        ('hypotheses:rate_1_2', SINK_METRIC),
    ),
    'rate_falls': make_hypothesis(
        'Three times the rate has less.', f'{GU_ICLR}, Table 9', 'rate_3', '<', (BASELINE_ROW, SINK_METRIC)
    ),
}

get_config = table(ROWS)
