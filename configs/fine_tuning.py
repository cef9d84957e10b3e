"""Fine-tuning on conversations: the 1B pair, softmax and sigmoid without a normalizer.

    sinklab prepare --source='chat:ultrachat_200k/train_sft-*.parquet' --tokenizer=neox/tokenizer.json \\
        --held_out=0.01 --out=stores/ultrachat
    sinklab train --config=configs/fine_tuning.py:softmax_1b --from=params:runs/softmax_1b --workdir=runs/softmax_chat

A row begins with the parameters of the row of the same name in configs/scale.py, and with the tokenizer of that run.
Without --from, a row trains a new model on conversations. A Hugging Face model that is trained without a row
(--from=hf:PATH) has the same optimizer; see IMPORTED_MODEL_OPTIMIZER.

- From the paper: the recipe of alignment-handbook, UltraChat-200k, a learning rate of 2e-5 with cosine, batches of
  64 x 2048 tokens, one epoch (about 2.0k steps).
- From the recipe and the defaults of its library, because the paper does not state them: a warm-up of a tenth of the
  steps, a cosine down to 0, no weight decay, beta2 = 0.999 of AdamW.
- Decided: 2000 steps. The loss is computed on the assistant's tokens; the recipe names no mask, which is
  --config.data.loss=all. One conversation in a hundred is held out, and probes read held-out conversations.
"""

from sinklab.configs.attention import SIGMOID
from sinklab.configs.publications import GU_ICLR
from sinklab.configs.scale import SIZE_1B
from sinklab.configs.sizes import QUICKSTART, SMOKE
from sinklab.configs.table import make_row, table

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

# The optimizer of Hugging Face models that are trained without a row: --from=hf:PATH without --config. The caller
# sets the warm-up to a tenth of the steps.
IMPORTED_MODEL_OPTIMIZER = {path: value for path, value in BASE.items() if path.startswith('optimizer.')}

# These sizes hold out a larger share, because a small corpus has few conversations.
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
SOURCE = f'{GU_ICLR}, appendix E'
NOTE = 'A figure only: the training loss decreases from about 2.6 to 1.8-2.0. No sink was published.'

ROWS = {
    'softmax_1b': make_row(MODEL_1B, SOURCE, note=NOTE),
    'sigmoid_1b': make_row(MODEL_1B | SIGMOID, SOURCE, note=NOTE),
}

get_config = table(ROWS, BASE, SIZES)
