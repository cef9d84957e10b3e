"""Natural: whether a sink emerges without a fixed first token, with the paper's optimizer.

    sinklab claims --config=configs/natural.py --size=0.2m --seeds=5 --jobs=2 --workdir=runs/claims_natural
    sinklab train --config=configs/natural.py:softmax --size=10m --workdir=runs/natural \\
        --config.data.source=store:stores/large

The size 0.2m is the model of the quickstart, without its fixed token, learning rate and weight decay. A run takes
minutes on a CPU. The rows `rate`, `decay` and `fixed_1`, and their pairs, put these three back.
docs/results/natural.md has the results.

The sizes 10m, 25m and paper (60M) have 10, 27 and 59 million parameters without the embeddings. Heads are 96 wide,
and the FFN is twice the model width, as in the paper. A run has 4,000 steps of 65,536 tokens: a fifth of the paper's
steps and a sixteenth of its batch. Learning rate, warm-up and weight decay are those of the paper. The vocabulary
fits a corpus of some hundred million tokens (benchmarks/large_corpus.py). The rows `bos`, `fixed_1` and `kv` add what
promotes or takes the sink.
"""

from sinklab.configs import learned_kv, packing, sizes
from sinklab.configs.attention import ALIASES
from sinklab.configs.attention import ROWS as ATTENTION_ROWS
from sinklab.configs.claims import make_claim, make_presence_claim
from sinklab.configs.publications import GU_V1, THIS_PROJECT
from sinklab.configs.table import make_row, scale, table

BASE = {
    'model.vocabulary': 32_768,
    'optimizer.steps': 4000,
    'optimizer.batch_size': 32,
    'data.held_out': 0.01,
    'valid.every_steps': 500,
    'valid.windows': 128,
    'probe.every_steps': 100,
}


def make_size(layers, heads):
    """Return the fields of a model with the paper's width of heads and of the FFN."""
    width = 96 * heads
    return {'model.layers': layers, 'model.width': width, 'model.heads': heads, 'model.ffn_width': 2 * width}


def keep_model(size):
    """Return the values of a size without its optimizer and its fixed token."""
    return {path: value for path, value in size.items() if not path.startswith(('optimizer.', 'data.fixed'))}


SIZES = sizes.SIZES | {
    '25m': make_size(8, 6),
    '10m': make_size(7, 4),
    '0.2m': keep_model(sizes.QUICKSTART) | {'data.held_out': 0.15},
}


def make_unpublished_row(diff, note):
    return make_row(diff, THIS_PROJECT, note=note)


RATE = {'optimizer.peak_learning_rate': sizes.QUICKSTART['optimizer.peak_learning_rate']}
DECAY = {'optimizer.weight_decay': sizes.QUICKSTART['optimizer.weight_decay']}
FIXED = {'data.fixed_position': 1}

ROWS = {
    'softmax': make_unpublished_row({}, 'In the paper Sink_1 of the 60M model emerges between 1k and 2k steps.'),
    'sigmoid': make_unpublished_row(ATTENTION_ROWS['sigmoid']['diff'], 'No sink in the paper.'),
    'sigmoid_minus_log_t': make_unpublished_row(ATTENTION_ROWS['sigmoid_minus_log_t']['diff'], 'Offset -log T.'),
    'bos': make_unpublished_row(
        packing.BOS | packing.PROBE_BOS, 'BOS before each document, and before the texts of probes.'
    ),
    'fixed_1': make_unpublished_row(FIXED, 'A fixed first token.'),
    'kv': make_unpublished_row(
        learned_kv.ROWS['kv']['diff'], 'Learned key and value biases take the sink in the paper.'
    ),
    # From the optimizer of the paper to that of the quickstart.
    'rate': make_unpublished_row(RATE, "The quickstart's learning rate."),
    'decay': make_unpublished_row(DECAY, "The quickstart's weight decay."),
    'rate_decay': make_unpublished_row(RATE | DECAY, "The quickstart's optimizer, with a constant rate."),
    'fixed_1_rate': make_unpublished_row(FIXED | RATE, "A fixed first token and the quickstart's learning rate."),
    'fixed_1_decay': make_unpublished_row(FIXED | DECAY, "A fixed first token and the quickstart's weight decay."),
    'fixed_1_rate_decay': make_unpublished_row(FIXED | RATE | DECAY, 'All three.'),
    'fixed_1_rate_4e-3': make_unpublished_row(
        FIXED | {'optimizer.peak_learning_rate': 4e-3}, "A fixed first token and ten times the paper's learning rate."
    ),
    'rate_decay_long': make_unpublished_row(
        RATE | DECAY | scale('data.length', 4) | scale('optimizer.batch_size', 1 / 4) | scale('valid.windows', 1 / 4),
        'Texts of four times the length, with as many tokens.',
    ),
    'rate_decay_learned': make_unpublished_row(
        RATE | DECAY | {'model.position': 'learned'}, 'The first position can be told from its embedding.'
    ),
}

CLAIMS = {
    row: make_presence_claim(f'A sink emerges with the row {row}.', f'on {GU_V1}, Figure 2A', f'natural:{row}')
    for row in ROWS
    if row == 'softmax' or row.startswith(('rate', 'decay', 'fixed_1'))
} | {
    f'{name}_{row}': make_claim(
        f'With the row {row}, {words}.',
        f'on {GU_V1}, section 3',
        (f'natural:{row}', relation, (f'natural:{row}', metric, 'start')),
        metric,
        0.01,
    )
    for row in ('softmax', 'rate', 'fixed_1')
    for name, words, relation, metric in (
        ('alpha', 'alpha_1 rises in training', '>', 'alpha/1'),
        ('angle', 'the cosine of queries with the first key rises relative to the others', '>', 'qk/cos/difference'),
        ('value', 'the first value shrinks relative to the others', '<', 'norm/value/ratio'),
    )
}

get_config = table(ROWS, BASE, SIZES, aliases=ALIASES)
