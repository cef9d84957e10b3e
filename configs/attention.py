"""Which attention operations have a sink? Those whose rows are normalized; the tables of the paper and a few since.

    sinklab train --config=configs/attention.py:sigmoid --workdir=runs/sigmoid

Where rows do not sum to 1 the sink is of proxy scores, |A_ij| / sum_j |A_ij|, which mean nothing where there is next
to no mass: read `mass/row` beside them. Rows named `_normalized` divide by the sum, with signed scores by max(|sum|,
1). `elu1` is a similarity; `kernel_elu1`, `linear` and `mlp` are products of feature maps. `_p_P` divides by the
p-norm, alpha_A multiplies softmax by A. Decided: the last alpha is 0.02, where the ICLR version prints 0.05, and the
sinks of all alphas are of rows rescaled to a sum of 1. softmax_off_by_one is softmax with a column of zero key and
value, and is measured as that: its 1 is a column, `sink/star` is its share, and no row is rescaled. A row fails that
is published so where its runs diverge, or end above 0.6 log V (report/sweep.py, `failed`).
"""

from configs.table import scale_with_size, table


def operation(similarity='exp', normalizer='sum', feature_map='identity', **rest):
    default = dict(similarity='exp', normalizer='sum', feature_map='identity')
    given = dict(similarity=similarity, normalizer=normalizer, feature_map=feature_map) | rest
    return {f'model.attention.{name}': value for name, value in given.items() if value != default.get(name)}


def row(diff, sink, loss, source='Gu et al. (v1), Tables 4 and 13'):
    return dict(diff=diff, published={'sink/1': sink, 'valid/loss': loss}, source=source)


def proxy(diff, sink, loss, source='Gu et al. (v1), Tables 4 and 13'):
    return row(diff, sink, loss, f'{source} (proxy scores)')


def fails(diff, source='Gu et al. (v1), Table 13'):
    return dict(diff=diff, published={'fails': True}, source=source, note='Published as a failure of training.')


def alpha(gain, sink, loss):
    return row(operation(gain=gain), sink, loss, 'Gu et al. (v1), Table 12')


def said(diff, source, note, **published):
    return dict(diff=diff, published=published, source=source, note=note)


def softmax_p(power):
    note = 'Trains, no sink number; the massive activations fall with p, in Figure 29.'
    return said(operation(normalizer='p_norm', power=power), P_NORM, note)


def sigmoid_p(power):
    return said(
        operation('sigmoid', 'p_norm', power=power), P_NORM, 'Trains, and has massive activations; no number.'
    )


def swept(**rest):
    return SIGMOID | scale_with_size({f'optimizer.{name}': value for name, value in rest.items()})


P_NORM = 'Gu et al. (ICLR), appendix D.4'
SWEEP = 'Gu et al. (v1), Table 14'
SIGMOID = operation('sigmoid', 'none')

ROWS = {
    'softmax': row({}, 18.18, 3.73),
    'sigmoid': proxy(SIGMOID, 0.44, 3.70),
    'sigmoid_normalized': row(operation('sigmoid'), 30.24, 3.74),
    'elu1': proxy(operation('elu1', 'none'), 0.80, 3.69),
    'elu1_normalized': fails(operation('elu1')),
    'kernel_elu1': fails(operation('identity', 'none', 'elu1')),
    'kernel_elu1_normalized': proxy(operation('identity', 'sum', 'elu1'), 53.65, 4.19),
    'linear': proxy(operation('identity', 'none'), 0.00, 3.99),
    'linear_normalized': fails(operation('identity', 'clamped')),
    'mlp': proxy(operation('identity', 'none', 'mlp'), 0.74, 3.91),
    'mlp_normalized': proxy(operation('identity', 'clamped', 'mlp'), 0.19, 3.85),
    'alpha_2': alpha(2.0, 29.10, 3.72),
    'alpha_0.2': alpha(0.2, 9.41, 3.72),
    'alpha_0.1': alpha(0.1, 3.59, 3.76),
    'alpha_0.02': alpha(0.02, 4.53, 3.78),
    'softmax_p_0.25': softmax_p(1 / 4),
    'softmax_p_0.33': softmax_p(1 / 3),
    'softmax_p_0.5': softmax_p(1 / 2),
    **{f'softmax_p_{p}': fails(operation(normalizer='p_norm', power=float(p)), P_NORM) for p in (2, 3, 4)},
    'sigmoid_p_1': row(operation('sigmoid', 'p_norm', power=1.0), 30.24, 3.74, f'Gu et al. (v1), Table 4; {P_NORM}')
    | dict(note='sigmoid_normalized by another name: the 1-norm of what is positive is its sum.'),
    **{f'sigmoid_p_{p}': sigmoid_p(float(p)) for p in (2, 3, 4)},
    'sigmoid_decay_0': proxy(swept(weight_decay=0.0), 0.64, 3.77, SWEEP),
    'sigmoid_decay_0.5': proxy(swept(weight_decay=0.5), 0.18, 3.76, SWEEP),
    'sigmoid_decay_1': proxy(swept(weight_decay=1.0), 0.30, 4.06, SWEEP),
    'sigmoid_rate_1e-3': proxy(swept(peak_learning_rate=1e-3), 0.81, 3.68, SWEEP),
    'sigmoid_rate_1e-4': proxy(swept(peak_learning_rate=1e-4), 0.36, 4.08, SWEEP),
    'sigmoid_apple': said(
        operation('sigmoid', 'none', offset=-1.0),
        'Ramapuram et al., 2409.04431',
        'A bias of -log n, so that rows begin with a mass near 1; nothing was published on its sinks.',
    ),
    'softmax_off_by_one': said(
        operation(normalizer='plus_one'),
        'Kaul et al., 2410.17174 (GPT2-130M, 256 tokens, 40k steps)',
        'A K bias of zero key and value; softmax has an argmax rate of 0.333 there; see also beyond.py.',
        first_token_argmax_rate=0.022,
        kurtosis=244.7,
    ),
    'softpick': said(
        operation('softpick'),
        'Zuhri et al., 2504.20966 (340M)',
        'Softmax has a kurtosis of 33510 there; at 1.8B, too, the sink rate is 0.',
        sink_rate=0.0,
        kurtosis=340,
        sparsity=46.97,
    ),
    'relu': said(
        operation('relu', 'count'),
        'Guo et al., 2410.13835',
        'relu(s) / i; no sink on Bigram-Backcopy, nothing was published on text.',
    ),
}

get_config = table(ROWS)
