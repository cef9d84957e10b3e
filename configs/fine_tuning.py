"""What becomes of sinks in conversations? The 1B pair, fine-tuned: softmax, and sigmoid without a normalizer.

    sinklab prepare --source='chat:ultrachat_200k/train_sft-*.parquet' --tokenizer=neox/tokenizer.json \\
        --held_out=0.01 --out=stores/ultrachat
    sinklab train --config=configs/fine_tuning.py:softmax_1b --from=params:runs/softmax_1b --workdir=runs/softmax_chat

A row begins with the parameters of its namesake in configs/scale.py; the tokenizer is that of its run. Of the paper:
the recipe of alignment-handbook, UltraChat-200k, 2e-5 with cosine, batches of 64 x 2048 tokens, one epoch (about 2.0k
steps). Of the recipe and its library's defaults, the paper naming none: a warm-up of a tenth of the steps, a cosine
down to 0, no weight decay, AdamW's 0.999. Decided: 2000 steps; the loss is of the assistant's words, where the recipe
names no mask (--config.data.loss=all); one conversation of a hundred is held out, and the probe reads of those.
Without --from a row trains a new model on conversations. A model of Hugging Face that is trained further without a
row (--from=hf:PATH) has the same optimizer: see IMPORTED.
"""

from configs.scale import SIGMOID, SIZE_1B
from configs.sizes import QUICKSTART, SMOKE
from configs.table import table

BASE = {
    'optimizer.peak_learning_rate': 2e-5,
    'optimizer.schedule': 'cosine',
    'optimizer.final_share': 0.0,
    'optimizer.warmup_steps': 200,
    'optimizer.steps': 2000,
    'optimizer.batch_size': 64,
    'optimizer.weight_decay': 0.0,
    'optimizer.beta2': 0.999,
    'data.source': 'store:stores/ultrachat',
    'data.held_out': 0.01,
    'data.loss': 'assistant',
}

# What a model of Hugging Face is trained further with where no row is named: --from=hf:PATH without --config. The
# warm-up is a tenth of however many steps are asked for.
IMPORTED_MODEL_OPTIMIZER = {path: value for path, value in BASE.items() if path.startswith('optimizer.')}

# A small corpus has few conversations to hold out.
SIZES = {
    'paper': {},
    'quickstart': QUICKSTART
    | {
        'optimizer.peak_learning_rate': 1e-3,
        'optimizer.final_share': 0.0,
        'optimizer.warmup_steps': 15,
        'optimizer.steps': 150,
        'optimizer.weight_decay': 0.0,
        'data.held_out': 0.15,
    },
    'smoke': SMOKE | {'data.held_out': 0.15},
}


MODEL_1B = {path: value for path, value in SIZE_1B.items() if path.startswith('model.')}


def make_row(diff):
    note = 'A figure only: the training loss falls from about 2.6 to 1.8-2.0. No sink was published.'
    return dict(diff=diff, published={}, source='Gu et al. (ICLR), appendix E', note=note)


ROWS = {
    'softmax_1b': make_row(MODEL_1B),
    'sigmoid_1b': make_row(MODEL_1B | SIGMOID),
}

get_config = table(ROWS, BASE, SIZES)
