"""Sizes: what a sweep sets beneath the rows, so that the same experiments fit another machine.

A size changes the model, the lengths and the step counts. What a row changes by a factor is changed by the same
factor at every size: see table.scaled.
"""

# A sink emerges on a laptop in minutes, by the levers of the paper turned up: a first token that is always the same
# (Table 7), a learning rate and a weight decay far above the default (ICLR Table 9, Table 1). The vocabulary is small
# as a sink waits until tokens are known: in 2000 steps, 2048 ids gave 6 % and 1024 gave 8 %. So is the width: a step
# at 128 took nearly twice as long.
QUICKSTART = {
    'model.layers': 4,
    'model.width': 64,
    'model.heads': 4,
    'model.head_width': 16,
    'model.ffn_width': 192,
    'model.vocabulary': 512,
    'model.dtype': 'float32',
    'optimizer.peak_learning_rate': 2e-2,
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

# A dry run of any row in seconds: nothing is learned, everything is executed.
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

SIZES = {'paper': {}, 'quickstart': QUICKSTART, 'smoke': SMOKE}

# Fields that a size leaves alone and whose numbers mean a part of another one that it sets.
PART_OF = {
    'model.mask.window': 'data.length',
    'model.mask.block': 'data.length',
    'model.columns.key_width': 'model.head_width',
}
LEAST = {'model.mask.window': 2, 'model.mask.block': 2}  # of one key, queries would see themselves alone
