"""Hypotheses: experiments on claims of the paper that small models contradict or leave open.

    sinklab claims --config=configs/hypotheses.py --seeds=5 --workdir=runs/claims
    sinklab claims --config=configs/hypotheses.py --size=small --seeds=3 --workdir=runs/claims_small

Each hypothesis is a prediction about rows of this file that can fail. docs/results/claims.md has the results.

- Weight decay (`decay_more`): Sink_1 rises and falls with the absolute weight decay, as in Table 1, at every size.
  The rows `decay_N` have that weight decay at every size.
- Batch size (`batch_small`): a quarter of the batch has less of a sink because it reads fewer tokens and because its
  gradients are noisier at the same rate. So it has more of one with as many tokens, and still more at half the rate.
- Sigmoid (`sigmoid_loss`): its loss is high because its rows begin with a mass of T/4. So with a gain of 4/T, which
  is 1/16 at the quickstart's length, its loss is lower.
- Value bias (`column_v`): it delays the sink and does not prevent it. So with twice the steps there is more of one.
- Learning rate (`rate_higher`): Sink_1 rises with the rate up to a peak, and falls above it.
- More of a sink (`alpha_2`, `rate_not_steps`): the sink of the baseline is too strong for a change to raise it. So
  these claims hold at half the learning rate, where the baseline has less of a sink.
- Natural sinks (rows `natural*`): each of a fixed first token, a high learning rate and a high weight decay is enough
  for a sink in 4,000 steps, or more tokens, another model, BOS before documents or windows that begin with one give
  one without them (docs/results/emergence.md).
- Later work, whose papers do not say so: a sink emerges with it; clipped softmax, whose weights can be 0, has less.
"""

from sinklab.configs import packing
from sinklab.configs.attention import ROWS as ATTENTION
from sinklab.configs.claims import LOSS_METRIC, make_claim, make_presence_claim
from sinklab.configs.learned_kv import ROWS as LEARNED_KV
from sinklab.configs.optimization import ROWS as OPTIMIZATION
from sinklab.configs.publications import (
    BONDARENKO,
    GU_ICLR,
    GU_V1,
    HE,
    KAUL,
    LIN,
    PULL_264,
    QIU_2026,
    THIS_PROJECT,
    ZHAI,
)
from sinklab.configs.table import make_row, scale, table


def make_decay_row(decay, row):
    """Return a row with this weight decay at every size, and the published numbers of `row`."""
    return row | dict(diff={'optimizer.weight_decay': decay}, note='the same decay at every size')


def make_unpublished_row(diff):
    return make_row(diff, THIS_PROJECT, note='not published')


# The quickstart without its fixed token, with the learning rate and the weight decay of the paper, and for longer.
NATURAL = {
    'data.fixed_position': None,
    'optimizer.peak_learning_rate': 4e-4,
    'optimizer.schedule': 'constant',
    'optimizer.final_share': None,
    'optimizer.weight_decay': 0.1,
} | scale('optimizer.steps', 8 / 3)
FIXED = {'data.fixed_position': 1}
RATE = {'optimizer.peak_learning_rate': 1e-2}
DECAY = {'optimizer.weight_decay': 0.5}
RATE_4E3 = {'optimizer.peak_learning_rate': 4e-3}
LONG = scale('data.length', 8) | scale('optimizer.batch_size', 1 / 8) | scale('valid.windows', 1 / 8)
BOS = LONG | packing.DOCUMENT | packing.BOS | packing.PROBE_BOS
FUNCTIONS = {'data.source': 'stdlib:functions'}
DOCUMENTS = FUNCTIONS | {'data.packing': False}
LARGE = (
    scale('model.layers', 2) | scale('model.width', 3) | scale('model.head_width', 3) | scale('model.ffn_width', 3)
)
# {row: (in words, what it changes in NATURAL)}
NATURAL_ROWS = {
    'natural': ('no fixed token, at a rate of 4e-4 and a decay of 0.1', {}),
    'natural_fixed': ('a fixed first token', FIXED),
    'natural_rate': ('a rate of 1e-2', RATE),
    'natural_decay': ('a decay of 0.5', DECAY),
    'natural_fixed_rate': ('a fixed first token and a rate of 1e-2', FIXED | RATE),
    'natural_fixed_rate_1e-3': (
        'a fixed first token and a rate of 1e-3',
        FIXED | {'optimizer.peak_learning_rate': 1e-3},
    ),
    'natural_fixed_rate_4e-3': ('a fixed first token and a rate of 4e-3', FIXED | RATE_4E3),
    'natural_fixed_decay': ('a fixed first token and a decay of 0.5', FIXED | DECAY),
    'natural_rate_decay': ('a rate of 1e-2 and a decay of 0.5', RATE | DECAY),
    'natural_fixed_rate_decay': ('a fixed first token, a rate of 1e-2 and a decay of 0.5', FIXED | RATE | DECAY),
    'natural_rate_4e-3': ('a rate of 4e-3', RATE_4E3),
    'natural_rate_4e-3_learned': ('a rate of 4e-3 and learned positions', RATE_4E3 | {'model.position': 'learned'}),
    'natural_rate_4e-3_wide_heads': (
        'a rate of 4e-3 and heads of four times the width',
        RATE_4E3 | scale('model.head_width', 4),
    ),
    'natural_rate_4e-3_larger': ('a rate of 4e-3 and a model of 3M parameters', RATE_4E3 | LARGE),
    'natural_rate_4e-3_steps': (
        'a rate of 4e-3 and five times the steps',
        RATE_4E3 | scale('optimizer.steps', 40 / 3),
    ),
    'natural_rate_4e-3_long': ('a rate of 4e-3 and texts of eight times the length', RATE_4E3 | LONG),
    'natural_rate_4e-3_bos': ('a rate of 4e-3, long texts and BOS before each document', RATE_4E3 | BOS),
    'natural_rate_bos': ('a rate of 1e-2, long texts and BOS before each document', RATE | BOS),
    'natural_rate_decay_bos': (
        'a rate of 1e-2, a decay of 0.5, long texts and BOS before each document',
        RATE | DECAY | BOS,
    ),
    'natural_rate_4e-3_documents': (
        'a rate of 4e-3 and windows that begin with a function or class',
        RATE_4E3 | DOCUMENTS,
    ),
    'natural_rate_documents': ('a rate of 1e-2 and windows that begin with a function or class', RATE | DOCUMENTS),
    'natural_rate_decay_documents': (
        'a rate of 1e-2, a decay of 0.5 and windows that begin with a function or class',
        RATE | DECAY | DOCUMENTS,
    ),
    'natural_rate_decay_documents_steps': (
        'a rate of 1e-2, a decay of 0.5, windows that begin with a function or class, and three times the steps',
        RATE | DECAY | DOCUMENTS | scale('optimizer.steps', 8),
    ),
    'natural_rate_decay_functions': (
        'a rate of 1e-2, a decay of 0.5 and as many packed windows of functions and classes',
        RATE | DECAY | FUNCTIONS | {'data.share': 0.154},
    ),
}
HALF_RATE_ROW = 'optimization:rate_2e-4_20k'
AS_MANY_TOKENS = scale('optimizer.batch_size', 1 / 4) | scale('optimizer.steps', 4)

ROWS = {
    'decay_0.1': make_decay_row(0.1, ATTENTION['softmax']),
    'decay_0.5': make_decay_row(0.5, OPTIMIZATION['decay_0.5']),
    'decay_1.0': make_decay_row(1.0, OPTIMIZATION['decay_1']),
    'decay_2.0': make_decay_row(2.0, OPTIMIZATION['decay_2']),
    'batch_tokens': make_unpublished_row(AS_MANY_TOKENS),
    'batch_tokens_half_rate': make_unpublished_row(AS_MANY_TOKENS | scale('optimizer.peak_learning_rate', 1 / 2)),
    'sigmoid_gain': make_unpublished_row(ATTENTION['sigmoid']['diff'] | {'model.attention.gain': 1 / 16}),
    'value_bias_long': make_unpublished_row(LEARNED_KV['v']['diff'] | scale('optimizer.steps', 2)),
    'rate_3': make_unpublished_row(scale('optimizer.peak_learning_rate', 3)),
    'half_steps': make_unpublished_row(scale('optimizer.steps', 1 / 2)),
    'alpha_2_half_rate': make_unpublished_row(
        ATTENTION['alpha_2']['diff'] | scale('optimizer.peak_learning_rate', 1 / 2)
    ),
    **{row: make_unpublished_row(NATURAL | diff) for row, (_, diff) in NATURAL_ROWS.items()},
}

CLAIMS = {
    **{
        name: make_presence_claim(f'A sink emerges with {words}.', f'on {source}', row)
        for name, words, source, row in (
            ('xsa', 'exclusive self-attention', ZHAI, 'blocks:xsa'),
            ('xsa_gated', 'gated exclusive self-attention', PULL_264, 'blocks:xsa_gated'),
            ('gated_norm', 'a gate in each norm', QIU_2026, 'blocks:gated_norm'),
            ('forget_gate', 'a forget gate instead of positions', LIN, 'positions:forget_gate'),
            ('orthoadam', 'OrthoAdam', KAUL, 'optimization:orthoadam'),
            ('epsilon', 'an epsilon of 1e-5', HE, 'optimization:epsilon_1e-5'),
        )
    },
    'clipped_softmax': make_claim(
        'Clipped softmax gives less of a sink.', f'on {BONDARENKO}', ('attention:clipped_softmax', '<')
    ),
    'decay_rises': make_claim(
        'A weight decay of 0.1 gives less of a sink than 0.5.',
        f'on {GU_V1}, Table 1',
        ('hypotheses:decay_0.1', '<', 'hypotheses:decay_0.5'),
    ),
    'decay_turns': make_claim(
        'A weight decay of 1 gives less of a sink than 0.5.',
        f'on {GU_V1}, Table 1',
        ('hypotheses:decay_1.0', '<', 'hypotheses:decay_0.5'),
    ),
    'decay_falls': make_claim(
        'A weight decay of 2 gives less of a sink than 1.',
        f'on {GU_V1}, Table 1',
        ('hypotheses:decay_2.0', '<', 'hypotheses:decay_1.0'),
    ),
    'batch_tokens': make_claim(
        'At a quarter of the batch size, four times the steps give more of a sink.',
        f'on {GU_V1}, Table 6',
        ('hypotheses:batch_tokens', '>', 'optimization:batch_128'),
    ),
    'batch_rate': make_claim(
        'With a quarter of the batch size and four times the steps, half the learning rate gives more of a sink.',
        f'on {GU_V1}, Table 6',
        ('hypotheses:batch_tokens_half_rate', '>', 'hypotheses:batch_tokens'),
    ),
    'sigmoid_gain': make_claim(
        'A gain of 1/16 gives sigmoid a lower loss.',
        f'on {GU_V1}, Table 4',
        ('hypotheses:sigmoid_gain', '<', 'attention:sigmoid'),
        LOSS_METRIC,
        untestable_at=dict.fromkeys(
            ('small', 'paper', 'smoke'), 'has a gain that is 4/T only for T = 64: --size=quickstart'
        ),
    ),
    'value_bias_grows': make_claim(
        'With a V bias, twice the steps give more of a sink.',
        f'on {GU_V1}, Table 3',
        ('hypotheses:value_bias_long', '>', 'learned_kv:v'),
    ),
    'rate_rises': make_claim(
        'A quarter of the learning rate gives less of a sink than half of it.',
        f'on {GU_ICLR}, Table 9',
        ('optimization:rate_1e-4_20k', '<', 'optimization:rate_2e-4_20k'),
    ),
    'rate_falls': make_claim(
        'Three times the learning rate gives less of a sink.', f'on {GU_ICLR}, Table 9', ('hypotheses:rate_3', '<')
    ),
    'rate_not_steps_half_rate': make_claim(
        'At half the learning rate, twice the rate for half the steps gives more of a sink.',
        f'on {GU_ICLR}, Table 9',
        ('hypotheses:half_steps', '>', HALF_RATE_ROW),
    ),
    'alpha_2_half_rate': make_claim(
        'At half the learning rate, attention weights that sum to 2 give more of a sink.',
        f'on {GU_V1}, Table 12',
        ('hypotheses:alpha_2_half_rate', '>', HALF_RATE_ROW),
    ),
    **{
        row: make_presence_claim(f'A sink emerges with {words}.', f'on {GU_V1}, Figure 2A', f'hypotheses:{row}')
        for row, (words, _) in NATURAL_ROWS.items()
    },
}

get_config = table(ROWS)
