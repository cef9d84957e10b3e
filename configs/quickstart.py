"""A sink emerges on a laptop, on real text, in minutes; without a normalizer it does not."""

from configs.table import table

# The levers that the paper names, turned until a sink fits into minutes: a fixed first token (Table 7), a
# high learning rate (Table 9) and a strong weight decay (Table 1).
BASE = {
    'model.layers': 4,
    'model.width': 64,
    'model.heads': 4,
    'model.head_width': 16,
    'model.ffn_width': 192,
    'model.vocabulary': 512,
    'model.initialization': 'gpt2',
    'model.dtype': 'float32',
    'optimizer.peak_learning_rate': 1e-2,
    'optimizer.schedule': 'cosine',
    'optimizer.final_learning_rate': 1e-3,
    'optimizer.steps': 1600,
    'optimizer.batch_size': 32,
    'optimizer.weight_decay': 0.5,
    'data.length': 64,
    'data.fixed_position': 1,
    'valid.every_steps': 500,
    'valid.windows': 512,
    'probe.every_steps': 100,
    'checkpoint.every_steps': 500,
}

ROWS = {
    'softmax': dict(
        diff={},
        published={'sink/1': 18.18, 'valid/loss': 3.73},
        source='Table 4, softmax (60M, 20k steps)',
    ),
    'sigmoid': dict(
        diff={'model.attention.similarity': 'sigmoid', 'model.attention.normalizer': 'none'},
        published={'sink/1': 0.44, 'valid/loss': 3.70},
        source='Table 4, sigmoid without normalization (60M, 20k steps; proxy scores)',
    ),
}

get_config = table(ROWS, BASE)
