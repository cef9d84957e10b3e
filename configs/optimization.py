"""Optimization: how learning rate, steps, batch size, decay, schedule and optimizer affect the sink.

    sinklab train --config=configs/optimization.py:rate_8e-4_10k --workdir=runs/rate_8e-4_10k

The baseline is also the row of batch size 512 and of weight decay 0.1. Its probes give the curve over steps of Figure
2A: the sink emerges between 1k and 2k steps (about 7 % at 5k, read from ICLR Figure 28).

Decided:

- The learning rate stays at its peak, as in the released configs. The text of the paper says cosine (row `cosine`).
- Step counts are those of the table, not those of the released configs.
- Weight decay is the decoupled one of AdamW. The text of the paper writes it as a term of the loss.
- The learning rate does not change with the batch size.
"""

from sinklab.configs.publications import GU_ICLR, GU_V1, KAUL
from sinklab.configs.table import scale_with_size, table


def make_row(diff, sink, loss, source):
    return dict(diff=diff, published={'sink/1': sink, 'valid/loss': loss}, source=source)


def make_rate_row(diff, sink, loss):
    return make_row(scale_with_size(diff), sink, loss, f'{GU_ICLR}, Table 9')


def make_unpublished_row(diff, source, note):
    return dict(diff=scale_with_size(diff), published={}, source=source, note=note)


def make_batch_row(size, sink, loss):
    return make_row(scale_with_size({'optimizer.batch_size': size}), sink, loss, f'{GU_V1}, Table 6')


def make_decay_row(gamma, sink, loss):
    return make_row(scale_with_size({'optimizer.weight_decay': gamma}), sink, loss, f'{GU_V1}, Table 1')


RELEASED_CONFIGS = 'the released configs of Gu et al.'
FIGURE_2B = 'Figure 2B (v1), whose other curve is rate_4e-4_20k'

ROWS = {
    'rate_4e-4_20k': make_rate_row({}, 18.18, 3.73),
    'rate_8e-4_10k': make_rate_row({'optimizer.peak_learning_rate': 8e-4, 'optimizer.steps': 10_000}, 23.44, 3.79),
    'rate_8e-4_20k': make_rate_row({'optimizer.peak_learning_rate': 8e-4}, 32.23, 3.70),
    'rate_2e-4_20k': make_rate_row({'optimizer.peak_learning_rate': 2e-4}, 11.21, 3.78),
    'rate_2e-4_40k': make_rate_row({'optimizer.peak_learning_rate': 2e-4, 'optimizer.steps': 40_000}, 16.81, 3.68),
    'rate_1e-4_20k': make_rate_row({'optimizer.peak_learning_rate': 1e-4}, 2.90, 3.92),
    'rate_1e-4_80k': make_rate_row({'optimizer.peak_learning_rate': 1e-4, 'optimizer.steps': 80_000}, 6.29, 3.67),
    'rate_1e-3_20k': make_unpublished_row(
        {'optimizer.peak_learning_rate': 1e-3},
        RELEASED_CONFIGS,
        f'A released rate, and a curve of {FIGURE_2B}. No number was published.',
    ),
    'rate_1e-4_40k': make_unpublished_row(
        {'optimizer.peak_learning_rate': 1e-4, 'optimizer.steps': 40_000},
        RELEASED_CONFIGS,
        f'A released rate, and a curve of {FIGURE_2B}. No number was published; Table 9 has 20k and 80k steps.',
    ),
    'rate_1e-5_80k': make_unpublished_row(
        {'optimizer.peak_learning_rate': 1e-5, 'optimizer.steps': 80_000},
        RELEASED_CONFIGS,
        f'A released rate, and a curve of {FIGURE_2B}. No number was published. '
        'The first 20k steps are those of a run of 20k steps.',
    ),
    'batch_128': make_batch_row(128, 16.45, 3.92),
    'batch_256': make_batch_row(256, 17.19, 3.78),
    'batch_1024': make_batch_row(1024, 16.19, 3.68),
    'decay_0': make_decay_row(0.0, 15.20, 3.72),
    'decay_0.001': make_decay_row(0.001, 15.39, 3.72),
    'decay_0.01': make_decay_row(0.01, 15.23, 3.72),
    'decay_0.5': make_decay_row(0.5, 41.08, 3.80),
    'decay_1': make_decay_row(1.0, 37.71, 3.90),
    'decay_2': make_decay_row(2.0, 6.13, 4.23),
    'decay_5': make_decay_row(5.0, 0.01, 5.24),
    'decay_10': make_unpublished_row({'optimizer.weight_decay': 10.0}, RELEASED_CONFIGS, 'No result was published.'),
    'cosine': dict(
        diff={'optimizer.schedule': 'cosine', 'optimizer.final_share': 0.1},
        published={},
        source=f'{GU_V1}, section 4',
        note='The text says cosine, but the released runs are constant. The final rate is not stated; final_share is '
        'chosen here. At the quickstart size the baseline is this row.',
    ),
    'sgd': dict(
        diff={
            'optimizer.name': 'sgd',
            'optimizer.peak_learning_rate': 0.1,
            'optimizer.weight_decay': 4e-4,
            'optimizer.beta2': None,
            'optimizer.epsilon': None,
        },
        published={'kurtosis': 5},
        source=KAUL,
        note='With Adam 140. Rate and decay are chosen here; their product is that of the default.',
    ),
    'muon': dict(
        diff={'optimizer.name': 'muon', 'optimizer.beta1': 0.95},
        published={'kurtosis': 0.04},
        source='OSP, 2506.19697 (1.4B, 1T tokens)',
        note='With Adam 1818.56. OSP also has an RMSNorm with one gain and a projected embedding.',
    ),
}

get_config = table(ROWS)
