"""Claims of the paper, its author's talk and later papers, as comparisons of two metrics of runs.

    sinklab claims --seeds=8 --jobs=2 --workdir=runs/claims
    sinklab claims sigmoid column_k --workdir=runs/claims

A claim compares the reading `left` with the reading `right`; `relation` is `>`, `<` or `=`. A reading is a metric of
the runs of a row, TABLE:ROW, at the end of training or, with `start`, before the first step. Runs are paired by seed.
`min_difference` is the smallest difference that counts: 5 percentage points of a sink metric, 0.02 of a loss. A claim
that cannot be tested at a small size has an `untestable_reason` instead.

At the sizes quickstart and small every row has a fixed first token, except in data.py and packing.py, where only rows
with `fixed` in their name have a fixed token. At the size quickstart the rows of blocks.py have twice as many heads.
Each row is therefore compared with a baseline of the same kind.
"""

from sinklab.configs.publications import (
    BARBERO,
    BONDARENKO,
    GU_ICLR,
    GU_V1,
    GUO,
    LIN,
    MIMO,
    PULL_117,
    PULL_264,
    QIU_2026,
    SUN,
    XIAO,
    YE,
    ZHAI,
    ZHOU,
)

BELOW_SMALL = 'quickstart', 'smoke'
# Why claims about model_size.py cannot be tested at other sizes.
NEEDS_SIZE_SMALL = dict.fromkeys(
    BELOW_SMALL, 'has rows whose layers and widths do not depend on --size; the optimizer of --size=small fits them'
)

BASELINE_ROW, NO_FIXED_TOKEN_ROW, EIGHT_HEADS_ROW = 'attention:softmax', 'data:amount_5b', 'blocks:swiglu'
SINK_METRIC, SINK_STAR_METRIC, LOSS_METRIC, FAILS_METRIC = 'sink/1', 'sink/star', 'valid/loss', 'fails'
# The smallest differences that count; 5 percentage points for other metrics, which are rates of sinks.
MIN_DIFFERENCES = {
    LOSS_METRIC: 0.02,
    'norm/ratio/05': 0.5,
    'norm/value/ratio': 0.1,
    FAILS_METRIC: 0.5,
}


def make_claim(statement, source, comparison, metric=SINK_METRIC, min_difference=None, **fields):
    """Make a claim about a metric of a row.

    Args:
        statement: the claim as a sentence.
        source: where it is published.
        comparison: (row, relation, reference), or (row, relation) for a comparison with BASELINE_ROW. A row is
            TABLE:ROW, the relation `>`, `<` or `=`, and the reference a row, (row, metric) or (row, metric, 'start').
        metric: the metric of the row.
        min_difference: the smallest difference that counts; None for that of MIN_DIFFERENCES.
        **fields: `untestable_at`, {size: the reason why the claim cannot be tested at this size}.
    """
    row, relation, *references = comparison
    reference = references[0] if references else BASELINE_ROW
    return dict(
        statement=statement,
        source=source,
        left=(row, metric),
        right=(reference, metric) if isinstance(reference, str) else reference,
        relation=relation,
        min_difference=min_difference or MIN_DIFFERENCES.get(metric, 5.0),
        **fields,
    )


def make_presence_claim(statement, source, row, **fields):
    """Make a claim that Sink_1 of a row is higher after training than before."""
    return make_claim(statement, source, (row, '>', (row, SINK_METRIC, 'start')), **fields)


def make_other_position_claim(statement, source, row, metric):
    """Make a claim that another sink metric of a row is higher than its Sink_1."""
    return make_claim(statement, source, (row, '>', (row, SINK_METRIC)), metric)


def make_failure_claim(statement, source, row):
    return make_claim(statement, source, (row, '>'), FAILS_METRIC)


def make_untestable_claim(statement, source, reason):
    return dict(statement=statement, source=source, untestable_reason=reason)


def make_claims(make, source, **claims):
    """Make claims of one source, each from (statement, the arguments of `make` after the source)."""
    return {name: make(statement, source, *arguments) for name, (statement, *arguments) in claims.items()}


TABLE_1, TABLE_3, TABLE_4 = f'{GU_V1}, Table 1', f'{GU_V1}, Table 3', f'{GU_V1}, Table 4'
TABLE_6, TABLE_7, TABLE_13 = f'{GU_V1}, Table 6', f'{GU_V1}, Table 7', f'{GU_V1}, Table 13'
SECTION_5, ICLR_TABLE_9 = f'{GU_V1}, section 5', f'{GU_ICLR}, Table 9'

EMERGENCE = {
    'emerges': make_presence_claim('A sink emerges in training.', f'{GU_V1}, Figure 2A', BASELINE_ROW),
    **make_claims(
        make_claim,
        ICLR_TABLE_9,
        rate_lower=('Half the learning rate gives less of a sink.', ('optimization:rate_2e-4_20k', '<')),
        rate_lowest=('A quarter of the learning rate gives less of a sink.', ('optimization:rate_1e-4_20k', '<')),
        rate_higher=('Twice the learning rate gives more of a sink.', ('optimization:rate_8e-4_20k', '>')),
    ),
    'rate_not_steps': make_claim(
        'Twice the learning rate for half the steps gives more of a sink.',
        ICLR_TABLE_9,
        ('optimization:rate_8e-4_10k', '>'),
    ),
    'steps': make_claim(
        'At half the learning rate, twice the steps give more of a sink.',
        ICLR_TABLE_9,
        ('optimization:rate_2e-4_40k', '>', 'optimization:rate_2e-4_20k'),
    ),
    **make_claims(
        make_claim,
        TABLE_6,
        batch_small=('A quarter of the batch size gives as much of a sink.', ('optimization:batch_128', '=')),
        batch_half=('Half the batch size gives as much of a sink.', ('optimization:batch_256', '=')),
        batch_large=('Twice the batch size gives as much of a sink.', ('optimization:batch_1024', '=')),
    ),
    'decay_more': make_claim(
        'Five times the weight decay gives more of a sink.', TABLE_1, ('optimization:decay_0.5', '>')
    ),
    'decay_less': make_claim(
        'A tenth of the weight decay gives less of a sink.',
        TABLE_1,
        ('optimization:decay_0.01', '<'),
        min_difference=2.0,
    ),
    'decay_none': make_presence_claim('A sink emerges without weight decay.', TABLE_1, 'optimization:decay_0'),
    'decay_too_much': make_claim(
        '20 times the weight decay gives less of a sink than 5 times.',
        TABLE_1,
        ('optimization:decay_2', '<', 'optimization:decay_0.5'),
    ),
    'decay_far_too_much': make_claim(
        '50 times the weight decay gives less of a sink.', TABLE_1, ('optimization:decay_5', '<')
    ),
}

DATA = {
    'amount': make_claim(
        'A hundredth of the data gives less of a sink.',
        f'{GU_V1}, Figure 2C',
        ('data:amount_50m', '<', NO_FIXED_TOKEN_ROW),
    ),
    'random_1': make_claim(
        'A random first token gives more of a sink.', SECTION_5, ('data:random_1', '>', NO_FIXED_TOKEN_ROW)
    ),
    'random_1_10': make_claim(
        'With ten random first tokens the sink tends to disappear.',
        SECTION_5,
        ('data:random_1_10', '<', NO_FIXED_TOKEN_ROW),
    ),
    'random_1_2': make_other_position_claim(
        'With two random first tokens the sink is on the second.', SECTION_5, 'data:random_1_2', 'sink/2'
    ),
    'fixed_1': make_claim(
        'A fixed first token gives more of a sink.', TABLE_7, ('data:fixed_1', '>', NO_FIXED_TOKEN_ROW)
    ),
    **make_claims(
        make_other_position_claim,
        TABLE_7,
        fixed_2=('A token fixed at position 2 has more of a sink than the first.', 'data:fixed_2', 'sink/2'),
        fixed_3=('A token fixed at position 3 has more of a sink than the first.', 'data:fixed_3', 'sink/3'),
    ),
    'prefix': make_claim(
        'With a prefix, one of its tokens has a sink.',
        f'{GU_V1}, Figure 3B',
        ('objective:prefix_5', '>', ('objective:prefix_5', 'sink/prefix', 'start')),
        'sink/prefix',
    ),
    'packing_document': make_claim(
        'Attention that stays within documents gives less of a sink.',
        BARBERO,
        ('packing:document', '<', 'packing:causal'),
    ),
    'packing_bos': make_claim(
        'With attention within documents, BOS before each document gives more of a sink.',
        BARBERO,
        ('packing:document_bos', '>', 'packing:document'),
    ),
    'packing_fixed': make_claim(
        'With attention across documents, BOS before each document and window gives more of a sink.',
        BARBERO,
        ('packing:causal_fixed', '>', 'packing:causal'),
    ),
}

ARCHITECTURE = {
    **make_claims(
        make_presence_claim,
        f'{GU_V1}, Table 2',
        position_none=('A sink emerges without positional embeddings.', 'positions:none'),
        position_absolute=('A sink emerges with absolute positional embeddings.', 'positions:absolute'),
        position_learned=('A sink emerges with learned positional embeddings.', 'positions:learned'),
        position_alibi=('A sink emerges with ALiBi.', 'positions:alibi'),
    ),
    'position_relative_paper_code': make_untestable_claim(
        "A sink emerges with the relative positions of the paper's code.",
        f'{GU_V1}, Table 2',
        'has a position bias that alone makes a sink before training: configs/positions.py',
    ),
    **make_claims(
        make_presence_claim,
        f'{GU_V1}, Table 8',
        ffn_relu=('A sink emerges with a ReLU FFN.', 'blocks:relu'),
        ffn_geglu=('A sink emerges with a GeGLU FFN.', 'blocks:geglu'),
    ),
    **make_claims(
        make_presence_claim,
        f'{GU_V1}, Table 9',
        heads_1=('A sink emerges with one head in each layer.', 'blocks:heads_1'),
        heads_2=('A sink emerges with two heads in each layer.', 'blocks:heads_2'),
        add=('A sink emerges if the outputs of heads are added.', 'blocks:add'),
    ),
    'post_norm': make_presence_claim('A sink emerges with post-norm.', f'{GU_V1}, appendix D.3', 'blocks:post_norm'),
    'sandwich_norm': make_presence_claim('A sink emerges with sandwich norm.', SUN, 'blocks:sandwich_norm'),
    'qk_norm': make_presence_claim('A sink emerges with QK norm.', SUN, 'blocks:qk_norm'),
    'head_norm': make_claim(
        'A norm of the output of each head gives less of a sink.',
        '2605.06611',
        ('blocks:head_norm', '<', EIGHT_HEADS_ROW),
    ),
    'gate_elementwise': make_claim(
        'A gate of each element of the attention output gives less of a sink.',
        'Qiu et al., 2505.06708',
        ('blocks:gate_elementwise', '<', EIGHT_HEADS_ROW),
    ),
    'gate_headwise': make_claim(
        'A gate of each head gives less of a sink.',
        'Qiu et al., 2505.06708',
        ('blocks:gate_headwise', '<', EIGHT_HEADS_ROW),
    ),
    'gate_shared': make_presence_claim(
        'A sink emerges with a gate that heads share.', 'Qiu et al., 2505.06708', 'blocks:gate_shared'
    ),
    'gate_value_state': make_claim(
        'A value-state gate gives less of a sink.', '2510.09017', ('blocks:gate_value_state', '<', EIGHT_HEADS_ROW)
    ),
}

LEARNED_KV = {
    **make_claims(
        make_claim,
        TABLE_3,
        column_sink_token=('With a sink token the first token has less of a sink.', ('learned_kv:sink_token', '<')),
        column_kv=('With a KV bias the first token has less of a sink.', ('learned_kv:kv', '<')),
        column_k=('With a K bias the first token has less of a sink.', ('learned_kv:k', '<')),
    ),
    'column_k_shared': make_claim(
        'With a K bias that heads share, the first token has less of a sink.',
        f'{GU_ICLR}, Table 12',
        ('learned_kv:k_shared', '<'),
    ),
    **{
        f'column_{row}_has_it': make_other_position_claim(
            f'There is more of a sink on {words} than on the first token.',
            TABLE_3,
            f'learned_kv:{row}',
            SINK_STAR_METRIC,
        )
        for row, words in {'sink_token': 'a sink token', 'kv': 'a KV bias', 'k': 'a K bias'}.items()
    },
    'column_v': make_claim('With a V bias there is as much of a sink as without.', TABLE_3, ('learned_kv:v', '=')),
    'column_logit': make_claim(
        'With a learned logit the first token has less of a sink.',
        'gpt-oss (OpenAI, 2025)',
        ('learned_kv:logit', '<'),
    ),
    'column_value_norm': make_claim(
        'A K bias whose value has norm 20 has less of a sink than one of norm 1.',
        f'{GU_V1}, Table 10',
        ('learned_kv:k_first_20', '<', 'learned_kv:k_first_1'),
        SINK_STAR_METRIC,
    ),
    'column_key_width': make_claim(
        'A K bias with 1 learned dimension has less of a sink than one with 64.',
        f'{GU_ICLR}, Table 13',
        ('learned_kv:k_width_1', '<', 'learned_kv:k_width_64'),
        SINK_STAR_METRIC,
    ),
}

OPERATION = {
    'sigmoid': make_claim('Sigmoid without normalization gives less of a sink.', TABLE_4, ('attention:sigmoid', '<')),
    'sigmoid_minus_log_t': make_claim(
        'Sigmoid with an offset of -log T gives less of a sink.',
        f'as {TABLE_4}',
        ('attention:sigmoid_minus_log_t', '<'),
    ),
    'sigmoid_normalized': make_claim(
        'Normalized sigmoid gives more of a sink than sigmoid without normalization.',
        TABLE_4,
        ('attention:sigmoid_normalized', '>', 'attention:sigmoid'),
    ),
    'sigmoid_loss': make_claim(
        'Sigmoid without normalization has a lower loss than softmax.',
        TABLE_4,
        ('attention:sigmoid', '<'),
        LOSS_METRIC,
    ),
    'sigmoid_minus_log_t_loss': make_claim(
        'Sigmoid with an offset of -log T has the same loss as softmax.',
        f'as {TABLE_4}',
        ('attention:sigmoid_minus_log_t', '='),
        LOSS_METRIC,
    ),
    'elu1': make_claim('elu + 1 without normalization gives less of a sink.', TABLE_4, ('attention:elu1', '<')),
    'kernel_elu1_normalized': make_presence_claim(
        'A sink emerges with a normalized elu + 1 kernel.', TABLE_4, 'attention:kernel_elu1_normalized'
    ),
    'linear': make_claim(
        'Linear attention without normalization gives less of a sink.', TABLE_13, ('attention:linear', '<')
    ),
    'mlp': make_claim('An MLP kernel without normalization gives less of a sink.', TABLE_13, ('attention:mlp', '<')),
    'mlp_normalized': make_claim(
        'A normalized MLP kernel gives less of a sink.', TABLE_4, ('attention:mlp_normalized', '<')
    ),
    **{
        f'alpha_{alpha}': make_claim(
            f'Attention weights that sum to {alpha} give {words} of a sink.',
            f'{GU_V1}, Table 12',
            (f'attention:alpha_{alpha}', relation),
        )
        for alpha, relation, words in ((2, '>', 'more'), (0.2, '<', 'less'), (0.1, '<', 'less'))
    },
    **make_claims(
        make_failure_claim,
        f'{GU_ICLR}, D.4',
        softmax_p_2=('Softmax normalized by the 2-norm does not train.', 'attention:softmax_p_2'),
        softmax_p_3=('Softmax normalized by the 3-norm does not train.', 'attention:softmax_p_3'),
        softmax_p_4=('Softmax normalized by the 4-norm does not train.', 'attention:softmax_p_4'),
    ),
    **make_claims(
        make_failure_claim,
        TABLE_13,
        elu1_normalized=('Normalized elu + 1 does not train.', 'attention:elu1_normalized'),
        kernel_elu1=('An elu + 1 kernel without normalization does not train.', 'attention:kernel_elu1'),
        linear_normalized=('Normalized linear attention does not train.', 'attention:linear_normalized'),
    ),
    'off_by_one': make_claim(
        'Softmax with 1 added to its sum gives less of a sink.',
        'Kaul et al., 2410.17174',
        ('attention:softmax_off_by_one', '<'),
    ),
    'softpick': make_claim('Softpick gives less of a sink.', 'Zuhri et al., 2504.20966', ('attention:softpick', '<')),
    'relu': make_claim('ReLU divided by the number of keys gives less of a sink.', GUO, ('attention:relu', '<')),
}

LATER_ROWS = {
    **{
        f'{name}_loss': make_claim(f'{words} gives a lower loss.', source, (row, '<', reference), LOSS_METRIC)
        for name, words, source, row, reference in (
            ('xsa', 'Exclusive self-attention', ZHAI, 'blocks:xsa', EIGHT_HEADS_ROW),
            ('xsa_gated', 'Gated exclusive self-attention', PULL_264, 'blocks:xsa_gated', EIGHT_HEADS_ROW),
            ('gated_norm', 'A gate in each norm', QIU_2026, 'blocks:gated_norm', EIGHT_HEADS_ROW),
            ('value_residual', 'A value residual', ZHOU, 'blocks:value_residual', EIGHT_HEADS_ROW),
            ('differential', 'Differential attention', YE, 'blocks:differential', EIGHT_HEADS_ROW),
            ('forget_gate', 'A forget gate instead of positions', LIN, 'positions:forget_gate', BASELINE_ROW),
            ('hybrid_logit', 'With windows, a sink logit', MIMO, 'objective:hybrid_logit', 'objective:hybrid'),
            ('hybrid_gate', 'With windows, a gate', f'on {PULL_117}', 'objective:hybrid_gate', 'objective:hybrid'),
            (
                'hybrid_xsa',
                'With windows, exclusive self-attention',
                f'on {ZHAI}',
                'objective:hybrid_xsa',
                'objective:hybrid',
            ),
        )
    },
    'value_residual': make_claim(
        'A value residual gives less of a sink.', ZHOU, ('blocks:value_residual', '<', EIGHT_HEADS_ROW)
    ),
    'differential': make_claim(
        'Differential attention gives less of a sink.', YE, ('blocks:differential', '<', EIGHT_HEADS_ROW)
    ),
    'dynamic_tanh': make_claim(
        'DynamicTanh instead of a norm gives more of a sink.', SUN, ('blocks:dynamic_tanh', '>', EIGHT_HEADS_ROW)
    ),
    **make_claims(
        make_claim,
        SUN,
        heads_16=('Heads of half the width give less of a sink.', ('blocks:heads_16', '<', EIGHT_HEADS_ROW)),
        heads_32=('Heads of a quarter of the width give less of a sink.', ('blocks:heads_32', '<', EIGHT_HEADS_ROW)),
    ),
    'clipped_softmax_loss': make_claim(
        'Clipped softmax has the same loss as softmax.', BONDARENKO, ('attention:clipped_softmax', '='), LOSS_METRIC
    ),
    'value_drain': make_claim(
        'A value residual makes the value of the first token larger relative to the others.',
        ZHOU,
        ('blocks:value_residual', '>', EIGHT_HEADS_ROW),
        'norm/value/ratio',
    ),
}

UNTESTABLE = {
    '1b': make_untestable_claim(
        'Sigmoid without normalization has no sink at 1B parameters.',
        f'{GU_V1}, section 7.3',
        'needs 1B parameters: configs/scale.py',
    ),
    'instruct': make_untestable_claim(
        'Chat models have as much of a sink as their base models.',
        f'{GU_V1}, Table 5',
        'needs a base model and its chat model: sinklab measure',
    ),
    'domains': make_untestable_claim(
        'The domain of the text hardly changes the sink.',
        f'{GU_V1}, Figure 7',
        'needs 17 domains of the Pile: configs/open_models.py',
    ),
    'streaming': make_untestable_claim(
        'Keeping the first four tokens keeps the perplexity of a stream.',
        XIAO,
        'needs texts longer than those of training: configs/open_models.py',
    ),
    'spikes': make_untestable_claim(
        'Massive activations come with a sink.',
        f'{GU_V1}, section 3.1',
        'needs deep models, in which norms jump by three orders of magnitude: configs/open_models.py',
    ),
    'muon': make_untestable_claim(
        'Muon gives fewer outliers than AdamW.',
        'OSP, 2506.19697',
        'needs the kurtosis of models of 1.4B parameters: sinklab measure',
    ),
}

SIZE = {
    'size': make_claim(
        'Larger models have more of a sink (here 1.3M and 0.2M parameters).',
        f'{GU_V1}, Figure 1',
        ('model_size:0.2m_equal_tokens', '<', 'model_size:1.3m'),
        untestable_at=NEEDS_SIZE_SMALL,
    ),
    'context': make_claim(
        'Longer training texts give more of a sink.', BARBERO, ('context_length:quarter', '<', 'context_length:full')
    ),
    'first_norm': make_claim(
        'Softmax has a larger norm ratio of the first token than sigmoid with an offset.',
        f'on {GU_V1}, section 3.1',
        ('attention:sigmoid_minus_log_t', '<'),
        'norm/ratio/05',
        untestable_at=dict.fromkeys(BELOW_SMALL, 'needs at least five layers: --size=small'),
    ),
    'window': make_presence_claim(
        'A sink emerges with a window of half the training length.',
        f'{GU_V1}, Figure 2D',
        'objective:window_1024',
        untestable_at=dict.fromkeys(BELOW_SMALL, 'needs a window longer than the probed 64 tokens: --size=small'),
    ),
    'window_small': make_claim(
        'A window of an eighth of the training length gives less of a sink to queries that see the first token.',
        f'{GU_V1}, Figure 2D',
        ('objective:window_256', '<', (BASELINE_ROW, SINK_METRIC)),
        'sink/1/window',
        untestable_at=dict.fromkeys(
            BELOW_SMALL, 'has a window of 8 keys, in which uniform attention is above the threshold: --size=small'
        ),
    ),
}

CLAIMS = {**EMERGENCE, **DATA, **ARCHITECTURE, **LEARNED_KV, **OPERATION, **LATER_ROWS, **SIZE, **UNTESTABLE}
