"""Attention operations of the paper and of later work, and which of them have a sink.

    sinklab train --config=configs/attention.py:sigmoid --workdir=runs/sigmoid

In the paper, the operations with a sink are those that normalize the attention rows. If rows do not sum to 1, Sink_k
is computed from proxy scores, |A_ij| / sum_j |A_ij|. Proxy scores are meaningless if a row has almost no mass, so
read `mass/row` together with them.

- `*_normalized` divides by the row sum; with signed scores, by max(|sum|, 1).
- `elu1` is a similarity; `kernel_elu1`, `linear` and `mlp` are inner products of feature maps.
- `*_p_P` divides by the p-norm with p = P.
- `alpha_A` multiplies softmax by A. Decided: the last alpha is 0.02, although the ICLR version prints 0.05, and
  Sink_k of these rows is computed after the attention rows are rescaled to a sum of 1.
- `softmax_off_by_one` is equal to softmax with one more column of zero key and zero value, and is measured in that
  form: `sink/star` is the share of the column, and attention rows are not rescaled.

A run of a row that is published as a failure fails if it diverges, or if its final loss is above 0.6 log V
(`has_failed` in sinklab/report/sweep_table.py).
"""

from sinklab.configs.publications import BONDARENKO, GU_ICLR, GU_V1, GUO, KAUL
from sinklab.configs.table import make_row, scale_with_size, table

TABLES_4_AND_13 = f'{GU_V1}, Tables 4 and 13'


def make_operation_diff(similarity='exp', normalizer='sum', feature_map='identity', **other_fields):
    defaults = dict(similarity='exp', normalizer='sum', feature_map='identity')
    fields = dict(similarity=similarity, normalizer=normalizer, feature_map=feature_map) | other_fields
    return {f'model.attention.{name}': value for name, value in fields.items() if value != defaults.get(name)}


def make_proxy_row(diff, sink, loss, source=TABLES_4_AND_13):
    return make_row(diff, f'{source} (proxy scores)', sink, loss)


def make_failing_row(diff, source=f'{GU_V1}, Table 13'):
    return make_row(diff, source, note='Published as a failure of training.', fails=True)


def make_gain_row(gain, sink, loss):
    return make_row(make_operation_diff(gain=gain), f'{GU_V1}, Table 12', sink, loss)


def make_sigmoid_sweep_diff(**fields):
    return SIGMOID | scale_with_size({f'optimizer.{name}': value for name, value in fields.items()})


P_NORM_SOURCE = f'{GU_ICLR}, appendix D.4'
SWEEP_SOURCE = f'{GU_V1}, Table 14'
SIGMOID = make_operation_diff('sigmoid', 'none')

ROWS = {
    'softmax': make_row({}, TABLES_4_AND_13, 18.18, 3.73),
    'sigmoid': make_proxy_row(SIGMOID, 0.44, 3.70),
    'sigmoid_normalized': make_row(make_operation_diff('sigmoid'), TABLES_4_AND_13, 30.24, 3.74),
    'elu1': make_proxy_row(make_operation_diff('elu1', 'none'), 0.80, 3.69),
    'elu1_normalized': make_failing_row(make_operation_diff('elu1')),
    'kernel_elu1': make_failing_row(make_operation_diff('identity', 'none', 'elu1')),
    'kernel_elu1_normalized': make_proxy_row(make_operation_diff('identity', 'sum', 'elu1'), 53.65, 4.19),
    'linear': make_proxy_row(make_operation_diff('identity', 'none'), 0.00, 3.99),
    'linear_normalized': make_failing_row(make_operation_diff('identity', 'clamped')),
    'mlp': make_proxy_row(make_operation_diff('identity', 'none', 'mlp'), 0.74, 3.91),
    'mlp_normalized': make_proxy_row(make_operation_diff('identity', 'clamped', 'mlp'), 0.19, 3.85),
    'alpha_2': make_gain_row(2.0, 29.10, 3.72),
    'alpha_0.2': make_gain_row(0.2, 9.41, 3.72),
    'alpha_0.1': make_gain_row(0.1, 3.59, 3.76),
    'alpha_0.02': make_gain_row(0.02, 4.53, 3.78),
    **{
        f'softmax_p_{name}': make_row(
            make_operation_diff(normalizer='p_norm', power=power),
            P_NORM_SOURCE,
            note='It trains; no sink number was published. Massive activations decrease with p (Figure 29).',
        )
        for name, power in (('0.25', 1 / 4), ('0.33', 1 / 3), ('0.5', 1 / 2))
    },
    **{
        f'softmax_p_{p}': make_failing_row(make_operation_diff(normalizer='p_norm', power=float(p)), P_NORM_SOURCE)
        for p in (2, 3, 4)
    },
    'sigmoid_p_1': make_row(
        make_operation_diff('sigmoid', 'p_norm', power=1.0),
        f'{GU_V1}, Table 4; {P_NORM_SOURCE}',
        30.24,
        3.74,
        note='Equal to sigmoid_normalized: the 1-norm of positive weights is their sum.',
    ),
    **{
        f'sigmoid_p_{p}': make_row(
            make_operation_diff('sigmoid', 'p_norm', power=float(p)),
            P_NORM_SOURCE,
            note='It trains and has massive activations; no number was published.',
        )
        for p in (2, 3, 4)
    },
    'sigmoid_decay_0': make_proxy_row(make_sigmoid_sweep_diff(weight_decay=0.0), 0.64, 3.77, SWEEP_SOURCE),
    'sigmoid_decay_0.5': make_proxy_row(make_sigmoid_sweep_diff(weight_decay=0.5), 0.18, 3.76, SWEEP_SOURCE),
    'sigmoid_decay_1': make_proxy_row(make_sigmoid_sweep_diff(weight_decay=1.0), 0.30, 4.06, SWEEP_SOURCE),
    'sigmoid_rate_1e-3': make_proxy_row(make_sigmoid_sweep_diff(peak_learning_rate=1e-3), 0.81, 3.68, SWEEP_SOURCE),
    'sigmoid_rate_1e-4': make_proxy_row(make_sigmoid_sweep_diff(peak_learning_rate=1e-4), 0.36, 4.08, SWEEP_SOURCE),
    'sigmoid_minus_log_t': make_row(
        make_operation_diff('sigmoid', 'none', offset=-1.0),
        'Ramapuram et al., 2409.04431',
        note='An offset of -log T, so that the initial row mass is near 1. No sink result was published.',
    ),
    'softmax_off_by_one': make_row(
        make_operation_diff(normalizer='plus_one'),
        KAUL,
        note='A K bias with zero key and value. Softmax has an argmax rate of 0.333 there. See also extensions.py.',
        first_token_argmax_rate=0.022,
        kurtosis=244.7,
    ),
    'clipped_softmax': make_row(
        make_operation_diff(gamma=-0.03),
        f'{BONDARENKO} (BERT, 128 tokens)',
        note='Weights below 0.03 become 0. Outliers vanish: a kurtosis of 80 instead of 3076, at the same loss.',
        kurtosis=80,
    ),
    'softpick': make_row(
        make_operation_diff('softpick'),
        'Zuhri et al., 2504.20966 (340M)',
        note='Softmax has a kurtosis of 33510 there. The sink rate is also 0 at 1.8B.',
        sink_rate=0.0,
        kurtosis=340,
        sparsity=46.97,
    ),
    'relu': make_row(
        make_operation_diff('relu', 'count'),
        GUO,
        note='relu(s) / i: no sink on Bigram-Backcopy. No result on text was published.',
    ),
}

get_config = table(ROWS)
