"""Sizes: values that replace those of the default, so that any row also runs on a smaller machine.

A size sets the model, the lengths and the step counts. A value in a row is the same at every size, unless the row
marks it with `scale` or `scale_with_size` (configs/table.py).
"""

# A sink emerges on a laptop in minutes, because this size has what promotes a sink in the paper: the first token is
# fixed (Table 7), and the learning rate and the weight decay are far above the default (ICLR Table 9, Table 1). The
# vocabulary is small because a sink emerges only after the tokens are learned: after 2000 steps, 1024 ids gave a sink
# of 8 %, and 2048 ids of 6 %. The width is small because a step at width 128 took nearly twice as long. There are
# three layers, and the smaller initial embeddings of gpt2, because with four layers or with the released embeddings
# the queries of the first layer vanish in the sigmoid runs.
QUICKSTART = {
    'model.layers': 3,
    'model.initialization': 'gpt2',
    'model.width': 64,
    'model.heads': 4,
    'model.head_width': 16,
    'model.ffn_width': 192,
    'model.vocabulary': 512,
    'model.dtype': 'float32',
    'optimizer.peak_learning_rate': 1e-2,
    'optimizer.schedule': 'cosine',
    'optimizer.final_share': 0.1,
    'optimizer.steps': 1500,
    'optimizer.batch_size': 32,
    'optimizer.weight_decay': 0.5,
    'data.length': 64,
    'data.fixed_position': 1,
    'valid.every_steps': 500,
    'valid.windows': 512,
    'probe.every_steps': 100,
    'checkpoint.every_steps': 500,
}

# A second size for claims, on longer texts such as those of benchmarks/english_corpus.py: minutes on a GPU, 30 to
# 40 minutes on a CPU core. Without a fixed first token no sink emerged in 2000 steps (docs/results/claims.md).
SMALL = QUICKSTART | {
    'model.layers': 6,
    'model.width': 128,
    'model.head_width': 32,
    'model.ffn_width': 384,
    'model.vocabulary': 2048,
    'optimizer.peak_learning_rate': 5e-3,
    'optimizer.steps': 2000,
    'data.length': 256,
    'valid.windows': 256,
}

# A dry run of any row in seconds. It executes all code, but too few steps for the model to learn.
SMOKE = {
    'model.layers': 2,
    'model.width': 16,
    'model.heads': 4,
    'model.head_width': 4,
    'model.ffn_width': 24,
    'model.vocabulary': 300,
    'model.dtype': 'float32',
    'optimizer.warmup_steps': 1,
    'optimizer.steps': 4,
    'optimizer.batch_size': 4,
    'data.length': 16,
    'valid.every_steps': 0,
    'valid.windows': 6,
    'probe.every_steps': 0,
    'probe.sequences': 5,
    'probe.length': 12,
    'checkpoint.every_steps': 0,
    'log.every_steps': 1,
}

SIZES = {'paper': {}, 'quickstart': QUICKSTART, 'small': SMALL, 'smoke': SMOKE}

# {field that no size sets: reference field}. With scale_with_size, a field keeps its ratio to the reference field; a
# window, for example, to the length.
REFERENCE_FIELDS = {
    'model.mask.window': 'data.length',
    'model.mask.block': 'data.length',
    'model.learned_kv.key_width': 'model.head_width',
    'model.kv_heads': 'model.heads',
    'model.global_layers.every': 'model.layers',
}
MIN_VALUES = {
    'model.mask.window': 2,  # with 1, a query would only see itself
    'model.mask.block': 2,
    'model.global_layers.every': 2,  # with 1, every layer would be global
    'model.head_width': 2,  # rotary positions need an even number
}
