"""Bigram-Backcopy (Guo et al., 2410.13835): a synthetic task in which a sink forms on the first token.

    sinklab train --config=configs/bigram_backcopy.py:softmax --size=quickstart --workdir=runs/backcopy

After a trigger, the next character is the one before the trigger; otherwise it is drawn from a bigram distribution.
One head learns to copy on triggers. On other queries it attends to `<s>`, whose value vector becomes small.
`alpha/1/trigger` and `alpha/1/other` measure the attention to `<s>` by kind of query.

The setup is that of Guo et al. except for RMSNorm, where they use LayerNorm, and the text. For their bigrams, give
Tiny Shakespeare: --config.data.source=text:shakespeare.txt. They publish results in words and figures, without
numbers. The results of this project come from one seed at the quickstart size. Do not use sigmoid or elu1 as a
baseline without a sink on this task; see `mass/row`.
"""

from sinklab.configs.publications import GUO, THIS_PROJECT
from sinklab.configs.sizes import SMOKE
from sinklab.configs.table import make_row, scale_with_size, table

BASE = {
    'data.task': 'backcopy',
    'data.triggers': 3,
    'data.length': 256,
    'data.seed': 42,
    'seed': 42,
    'model.vocabulary': 66,
    'model.position': 'learned',
    'model.layers': 1,
    'model.width': 256,
    'model.heads': 1,
    'model.head_width': 256,
    'model.ffn': 'relu',
    'model.initialization': 'torch',
    'model.ffn_width': 1024,
    'model.dtype': 'float32',
    'optimizer.peak_learning_rate': 3e-4,
    'optimizer.warmup_steps': 0,
    'optimizer.steps': 10_000,
    'optimizer.batch_size': 512,
    'optimizer.weight_decay': 1e-4,
    'optimizer.clip_norm': None,
    'optimizer.beta2': 0.99,
}

SIZES = {
    'paper': {},
    'quickstart': {
        'model.width': 64,
        'model.head_width': 64,
        'model.ffn_width': 256,
        'optimizer.peak_learning_rate': 1e-3,  # at 3e-3 the row relu, with ten times this rate, does not learn
        'optimizer.steps': 1200,
        'optimizer.batch_size': 32,
        'data.length': 64,
        'valid.every_steps': 400,
        'valid.windows': 256,
        'probe.every_steps': 100,
        'checkpoint.every_steps': 400,
    },
    'smoke': SMOKE
    | {
        'model.layers': 1,
        'model.heads': 1,
        'model.head_width': 16,
        'model.vocabulary': 66,
        'optimizer.warmup_steps': 0,
    },
}


def make_operation_diff(similarity, normalizer):
    return {'model.attention.similarity': similarity, 'model.attention.normalizer': normalizer}


ROWS = {
    'softmax': make_row(
        {}, GUO, note='A sink on <s> for other queries, none for triggers. Its value vector becomes small.'
    ),
    'softmax_3_layers': make_row(
        {'model.layers': 3}, GUO, note='The sink, a small value vector of <s>, and a peak of the residual norm.'
    ),
    'relu': make_row(
        make_operation_diff('relu', 'count') | scale_with_size({'optimizer.peak_learning_rate': 3e-3}),
        GUO,
        note='relu(s) / i: no sink. Guo et al. train for up to 100k steps.',
    ),
    'elu1': make_row(
        make_operation_diff('elu1', 'none'),
        THIS_PROJECT,
        note='Result of this project: proxy score 0.44 for other queries, row mass 10.',
    ),
    'sigmoid': make_row(
        make_operation_diff('sigmoid', 'none'),
        THIS_PROJECT,
        note='Result of this project: proxy score 0.45 for other queries, row mass 1.2.',
    ),
    'value_gate': make_row(
        {'model.gate': 'value_state'}, '2510.09017', note='No sink, according to a secondary report.'
    ),
    'sgd': make_row(
        {'optimizer.name': 'sgd', 'optimizer.peak_learning_rate': 0.03}
        | {'optimizer.beta2': None, 'optimizer.epsilon': None},
        GUO,
        note='With momentum: the sink, without the peak of the residual norm.',
    ),
}

get_config = table(ROWS, BASE, SIZES)
