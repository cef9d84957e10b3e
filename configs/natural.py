"""Natural: whether a sink emerges without a fixed first token, with the paper's optimizer, on one GPU.

    sinklab train --config=configs/natural.py:softmax --size=10m --workdir=runs/natural \\
        --config.data.source=store:stores/large

The sizes 10m, 25m and paper (60M) have 10, 27 and 59 million parameters without the embeddings. Heads are 96 wide,
and the FFN is twice the model width, as in the paper. A run has 4,000 steps of 65,536 tokens: a fifth of the paper's
steps and a sixteenth of its batch. Learning rate, warm-up and weight decay are those of the paper. The vocabulary
fits a corpus of some hundred million tokens (benchmarks/large_corpus.py). The rows `bos`, `fixed_1` and `kv` add what
promotes or takes the sink.
"""

from sinklab.configs import learned_kv, packing, sizes
from sinklab.configs.attention import ROWS as ATTENTION_ROWS
from sinklab.configs.publications import THIS_PROJECT
from sinklab.configs.table import make_row, table

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


SIZES = sizes.SIZES | {'25m': make_size(8, 6), '10m': make_size(7, 4)}


def make_unpublished_row(diff, note):
    return make_row(diff, THIS_PROJECT, note=note)


ROWS = {
    'softmax': make_unpublished_row({}, 'In the paper Sink_1 of the 60M model emerges between 1k and 2k steps.'),
    'sigmoid': make_unpublished_row(ATTENTION_ROWS['sigmoid']['diff'], 'No sink in the paper.'),
    'sigmoid_minus_log_t': make_unpublished_row(ATTENTION_ROWS['sigmoid_minus_log_t']['diff'], 'Offset -log T.'),
    'bos': make_unpublished_row(
        packing.BOS | packing.PROBE_BOS, 'BOS before each document, and before the texts of probes.'
    ),
    'fixed_1': make_unpublished_row({'data.fixed_position': 1}, 'A fixed first token.'),
    'kv': make_unpublished_row(
        learned_kv.ROWS['kv']['diff'], 'Learned key and value biases take the sink in the paper.'
    ),
}

get_config = table(ROWS, BASE, SIZES)
