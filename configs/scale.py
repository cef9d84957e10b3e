"""Do sinks come and go with scale as at 60M? Softmax and sigmoid at 1B.

    sinklab train --config=configs/scale.py:softmax_1b --workdir=runs/softmax_1b --fsdp=8 --micro_batch=64 --remat

The text gives no settings of the 1B runs; these are of the released config (40k steps, 41.9B tokens, the rate flat at
4e-4). Its two scripts have their contents swapped. The sigmoid model has no massive activations.
"""

from configs.table import table

SIGMOID = {'model.attention.similarity': 'sigmoid', 'model.attention.normalizer': 'none'}
BILLION = {
    'model.layers': 22,
    'model.width': 2048,
    'model.heads': 16,
    'model.head_width': 128,
    'model.ffn_width': 5632,
    'optimizer.steps': 40_000,
}


def row(diff, sink, loss, source):
    return dict(diff=diff, published={'sink/1': sink, 'valid/loss': loss}, source=source)


ROWS = {
    'softmax_60m': row({}, 18.18, 3.73, 'Gu et al. (v1), Table 4'),
    'sigmoid_60m': row(SIGMOID, 0.44, 3.70, 'Gu et al. (v1), Table 4 (proxy scores)'),
    'softmax_1b': row(BILLION, 45.11, 3.07, 'Gu et al. (v1), section 7.3'),
    'sigmoid_1b': row(BILLION | SIGMOID, 2.46, 3.10, 'Gu et al. (v1), section 7.3 (proxy scores)'),
}

get_config = table(ROWS)
