"""Rows of other papers: streaming, context length, and gradient sinks.

    sinklab train --config=configs/extensions.py:streaming_sink_token --workdir=runs/streaming_sink_token

The base is the recipe of Pythia-160M (deduplicated Pile, 143k steps of 256 x 2048 tokens). The other rows keep its
warm-up and its cosine schedule. The block is that of this codebase: RMSNorm, rotary positions over the whole head, no
biases, attention before the FFN. A perplexity X+Y is that of the first PG19 test book with a cache of the first X and
the last Y keys. The quickstart size has longer windows in this file, so that contexts can be shorter. Its context
rows have too few steps; give them --config.optimizer.steps=1500.
"""

from sinklab.configs.publications import BARBERO, XIAO
from sinklab.configs.sizes import QUICKSTART, SMOKE
from sinklab.configs.table import make_row, scale_with_size, table

BASE = {
    'model.layers': 12,
    'model.heads': 12,
    'model.head_width': 64,
    'model.ffn': 'gelu',
    'model.ffn_width': 3072,
    'optimizer.peak_learning_rate': 6e-4,
    'optimizer.schedule': 'cosine',
    'optimizer.final_share': 0.1,
    'optimizer.warmup_steps': 1430,
    'optimizer.steps': 143_000,
    'optimizer.batch_size': 256,
}

SIZES = {
    'paper': {},
    'quickstart': QUICKSTART
    | {
        'optimizer.warmup_steps': 50,
        'optimizer.batch_size': 4,
        'data.length': 512,
        'data.fixed_position': None,
        'valid.windows': 64,
        'probe.length': 32,
    },
    'smoke': SMOKE | {'optimizer.warmup_steps': 0, 'data.length': 192, 'valid.windows': 2},
}


def make_streaming_row(diff, perplexities, accuracies, **fields):
    published = {
        f'perplexity/{cache}': perplexity for cache, perplexity in zip(CACHE_LENGTHS, perplexities, strict=True)
    }
    published |= dict(zip(ACCURACY_TASKS, accuracies, strict=True)) if accuracies else {}
    return make_row(diff, f'{XIAO}, section 4.2 and Table 3', **published, **fields)


def make_context_row(length):
    """Make a row of one context length, with about 5B tokens and the same number of tokens per step."""
    sizes = {'model.ffn_width': 2048, 'optimizer.steps': 10_000}
    if length != 2048:
        sizes |= {'data.length': length, 'optimizer.batch_size': 256 * 2048 // length}
    diff = {'model.ffn': 'swiglu'} | scale_with_size(sizes)
    note = 'A figure only: almost no sink at 128, an increase up to 2048, the same loss.'
    return make_row(diff, f'{BARBERO} (120M, LLaMA-2 style)', note=note)


CACHE_LENGTHS = ('0+1024', '1+1023', '2+1022', '4+1020')
ACCURACY_TASKS = ('arc_challenge', 'arc_easy', 'hellaswag', 'lambada', 'openbookqa', 'piqa', 'winogrande')

ROWS = {
    'streaming_vanilla': make_streaming_row(
        {}, (27.87, 18.49, 18.05, 18.05), (18.6, 45.2, 29.4, 39.6, 16.0, 62.2, 50.1)
    ),
    'streaming_zero_sink': make_streaming_row(
        {'model.attention.normalizer': 'plus_one'},
        (29214, 19.90, 18.27, 18.01),
        None,
        note='The 29214 is disputed (issue 44 of mit-han-lab/streaming-llm), so it is not a target.',
    ),
    'streaming_sink_token': make_streaming_row(
        {'model.learned_kv.kind': 'sink_token'},
        (1235, 18.01, 18.01, 18.02),
        (19.6, 45.6, 29.8, 39.9, 16.6, 62.6, 50.8),
        note='X includes the sink token.',
    ),
    **{f'context_{length}': make_context_row(length) for length in (128, 256, 512, 1024, 2048)},
    'gradient_sinks': make_row(
        {'model.ffn': 'swiglu'}
        | scale_with_size(
            {
                'model.layers': 16,
                'model.width': 512,
                'model.heads': 8,
                'model.ffn_width': 1408,
                'optimizer.peak_learning_rate': 2e-3,
                'optimizer.steps': 20_000,
                'optimizer.batch_size': 512,
                'data.length': 1024,
            }
        ),
        'Chen et al., 2603.17771 (0.1B, C4)',
        note='sinklab measure --gradients gives its gradient-sink ratio. By two public notes on the paper, which was '
        'not read, the median is 15.5, and V-scale lowers one of 40.3 to 5.6: ratios of gradients, not activations. '
        'V-scale is not implemented.',
    ),
}

get_config = table(ROWS, BASE, SIZES)
