"""Claims of the paper, its author's talk and later papers, as comparisons of two metrics of runs.

    sinklab claims --seeds=8 --jobs=2 --workdir=runs/claims
    sinklab claims sigmoid column_k --workdir=runs/claims

A claim compares the reading `of` with the reading `than`; `way` is `>`, `<` or `=`. A reading is a metric of the runs
of a row, TABLE:ROW, at the end of training or, with `start`, before the first step. Runs are paired by seed. `least`
is the smallest difference that counts: 5 percentage points of a sink metric, 0.02 of a loss. A claim that cannot be
tested at a small size has a reason, `why`, instead.

At the quickstart size every row has a fixed first token except the rows of data.py, and the rows of blocks.py have
twice as many heads. Each row is therefore compared with a baseline of the same kind.
"""

BASELINE_ROW, NO_FIXED_TOKEN_ROW, EIGHT_HEADS_ROW = 'attention:softmax', 'data:amount_5b', 'blocks:swiglu'
SINK_METRIC, SINK_STAR_METRIC, LOSS_METRIC, FAILS_METRIC = 'sink/1', 'sink/star', 'valid/loss', 'fails'
MIN_DIFFERENCES = {
    SINK_METRIC: 5.0,
    'sink/2': 5.0,
    'sink/3': 5.0,
    'sink/prefix': 5.0,
    SINK_STAR_METRIC: 5.0,
    LOSS_METRIC: 0.02,
    'sink/1/window': 5.0,
    'norm/ratio/05': 0.5,
    FAILS_METRIC: 0.5,
}
BARBERO_SOURCE = 'Barbero et al., 2504.02732'
GU_V1, GU_ICLR = 'Gu et al. (v1)', 'Gu et al. (ICLR)'
WINDOW_REASON = 'is of windows longer than the probed 64 tokens: --size=small'


def make_claim(statement, source, row, direction, reference=None, metric=SINK_METRIC, min_difference=None):
    """Make a claim about a metric of a row.

    Args:
        statement: the claim as a sentence.
        source: where it is published.
        row: the row, as TABLE:ROW.
        direction: `>`, `<` or `=`.
        reference: the reading to compare with, (row, metric) or (row, metric, 'start'); None for the same metric of
            BASELINE_ROW.
        metric: the metric of the row.
        min_difference: the smallest difference that counts; None for that of MIN_DIFFERENCES.
    """
    readings = dict(of=(row, metric), than=reference or (BASELINE_ROW, metric))
    return dict(
        words=statement, source=source, **readings, way=direction, least=min_difference or MIN_DIFFERENCES[metric]
    )


def make_presence_claim(statement, source, row):
    """Make a claim that Sink_1 of a row is higher after training than before."""
    return make_claim(statement, source, row, '>', (row, SINK_METRIC, 'start'))


def make_other_position_claim(statement, source, row, metric):
    """Make a claim that another sink metric of a row is higher than its Sink_1."""
    return make_claim(statement, source, row, '>', (row, SINK_METRIC), metric)


def make_failure_claim(statement, source, row):
    return make_claim(statement, source, row, '>', metric=FAILS_METRIC)


def make_untestable_claim(statement, source, reason):
    return dict(words=statement, source=source, why=reason)


def exclude_sizes(claim, reason, sizes=('quickstart', 'smoke')):
    """Return a claim that cannot be tested at some sizes, for a reason."""
    return claim | dict(untestable_at=dict.fromkeys(sizes, reason))


EMERGENCE = {
    'emerges': make_presence_claim('The sink emerges in training.', f'{GU_V1}, Figure 2A', BASELINE_ROW),
    'rate_lower': make_claim(
        'A smaller rate, less of a sink.', f'{GU_ICLR}, Table 9', 'optimization:rate_2e-4_20k', '<'
    ),
    'rate_lowest': make_claim(
        'A quarter of the rate, less yet.', f'{GU_ICLR}, Table 9', 'optimization:rate_1e-4_20k', '<'
    ),
    'rate_higher': make_claim(
        'A larger rate, more of one.', f'{GU_ICLR}, Table 9', 'optimization:rate_8e-4_20k', '>'
    ),
    'rate_not_steps': make_claim(
        'Twice the rate and half the steps: still more.', f'{GU_ICLR}, Table 9', 'optimization:rate_8e-4_10k', '>'
    ),
    'steps': make_claim(
        'Twice the steps, more of one.',
        f'{GU_ICLR}, Table 9',
        'optimization:rate_2e-4_40k',
        '>',
        ('optimization:rate_2e-4_20k', SINK_METRIC),
    ),
    'batch_small': make_claim(
        'The batch does not matter: a quarter.', f'{GU_V1}, Table 6', 'optimization:batch_128', '='
    ),
    'batch_half': make_claim('The batch does not matter: half.', f'{GU_V1}, Table 6', 'optimization:batch_256', '='),
    'batch_large': make_claim(
        'The batch does not matter: twice.', f'{GU_V1}, Table 6', 'optimization:batch_1024', '='
    ),
    'decay_more': make_claim(
        'More weight decay, more of a sink.', f'{GU_V1}, Table 1', 'optimization:decay_0.5', '>'
    ),
    'decay_less': make_claim(
        'Less weight decay, less of one.', f'{GU_V1}, Table 1', 'optimization:decay_0.01', '<', min_difference=2.0
    ),
    'decay_none': make_presence_claim(
        'Without weight decay there is one.', f'{GU_V1}, Table 1', 'optimization:decay_0'
    ),
    'decay_too_much': make_claim(
        'Not monotone: 20 times has less than 5 times.',
        f'{GU_V1}, Table 1',
        'optimization:decay_2',
        '<',
        ('optimization:decay_0.5', SINK_METRIC),
    ),
    'decay_far_too_much': make_claim('50 times has less.', f'{GU_V1}, Table 1', 'optimization:decay_5', '<'),
}

DATA = {
    'amount': make_claim(
        'Little data, less of a sink: a hundredth.',
        f'{GU_V1}, Figure 2C',
        'data:amount_50m',
        '<',
        (NO_FIXED_TOKEN_ROW, SINK_METRIC),
    ),
    'random_1': make_claim(
        'A random first token, more of a sink.',
        f'{GU_V1}, section 5',
        'data:random_1',
        '>',
        (NO_FIXED_TOKEN_ROW, SINK_METRIC),
    ),
    'random_1_10': make_claim(
        'Ten random tokens: it tends to disappear.',
        f'{GU_V1}, section 5',
        'data:random_1_10',
        '<',
        (NO_FIXED_TOKEN_ROW, SINK_METRIC),
    ),
    'random_1_2': make_other_position_claim(
        'Two random tokens: on the second.', f'{GU_V1}, section 5', 'data:random_1_2', 'sink/2'
    ),
    'fixed_1': make_claim(
        'A fixed first token, more of a sink.',
        f'{GU_V1}, Table 7',
        'data:fixed_1',
        '>',
        (NO_FIXED_TOKEN_ROW, SINK_METRIC),
    ),
    'fixed_2': make_other_position_claim(
        'A token fixed at 2 takes it.', f'{GU_V1}, Table 7', 'data:fixed_2', 'sink/2'
    ),
    'fixed_3': make_other_position_claim(
        'A token fixed at 3 takes it.', f'{GU_V1}, Table 7', 'data:fixed_3', 'sink/3'
    ),
    'prefix': make_claim(
        'A prefix has it on one of its tokens.',
        f'{GU_V1}, Figure 3B',
        'objective:prefix_5',
        '>',
        ('objective:prefix_5', 'sink/prefix', 'start'),
        'sink/prefix',
    ),
    'packing_document': make_claim(
        'Documents that do not see each other have less of one.',
        BARBERO_SOURCE,
        'packing:document',
        '<',
        ('packing:causal', SINK_METRIC),
    ),
    'packing_bos': make_claim(
        'BOS before each document, more.',
        BARBERO_SOURCE,
        'packing:document_bos',
        '>',
        ('packing:document', SINK_METRIC),
    ),
    'packing_fixed': make_claim(
        'BOS at the start of each window as well, more.',
        BARBERO_SOURCE,
        'packing:causal_fixed',
        '>',
        ('packing:causal', SINK_METRIC),
    ),
}

ARCHITECTURE = {
    **{
        f'position_{row}': make_presence_claim(
            f'It is there: positions {row}.', f'{GU_V1}, Table 2', f'positions:{row}'
        )
        for row in ('none', 'absolute', 'learned', 'alibi')
    },
    'position_relative_paper_code': make_untestable_claim(
        'It is there: positions relative_paper_code.',
        f'{GU_V1}, Table 2',
        'is of a position bias that alone makes a sink, before training: configs/positions.py',
    ),
    **{
        f'ffn_{row}': make_presence_claim(f'It is there: FFN {row}.', f'{GU_V1}, Table 8', f'blocks:{row}')
        for row in ('relu', 'geglu')
    },
    **{
        f'heads_{count}': make_presence_claim(
            f'It is there: heads {count}.', f'{GU_V1}, Table 9', f'blocks:heads_{count}'
        )
        for count in (1, 2)
    },
    'add': make_presence_claim('It is there where heads are added.', f'{GU_V1}, Table 9', 'blocks:add'),
    'post_norm': make_presence_claim('It is there with post-norm.', f'{GU_V1}, appendix D.3', 'blocks:post_norm'),
    'sandwich_norm': make_presence_claim(
        'It is there with sandwich norm.', 'Sun et al., 2603.05498', 'blocks:sandwich_norm'
    ),
    'qk_norm': make_presence_claim(
        'It is there with normed queries and keys.', 'Sun et al., 2603.05498', 'blocks:qk_norm'
    ),
    'head_norm': make_claim(
        'A norm of each head suppresses it.', '2605.06611', 'blocks:head_norm', '<', (EIGHT_HEADS_ROW, SINK_METRIC)
    ),
    'gate_elementwise': make_claim(
        'A gate of each element suppresses it.',
        'Qiu et al., 2505.06708',
        'blocks:gate_elementwise',
        '<',
        (EIGHT_HEADS_ROW, SINK_METRIC),
    ),
    'gate_headwise': make_claim(
        'So does one of each head.',
        'Qiu et al., 2505.06708',
        'blocks:gate_headwise',
        '<',
        (EIGHT_HEADS_ROW, SINK_METRIC),
    ),
    'gate_shared': make_presence_claim(
        'One that heads share does not.', 'Qiu et al., 2505.06708', 'blocks:gate_shared'
    ),
    'gate_value_state': make_claim(
        'A gate of values suppresses it.',
        '2510.09017',
        'blocks:gate_value_state',
        '<',
        (EIGHT_HEADS_ROW, SINK_METRIC),
    ),
}

LEARNED_KV = {
    **{
        f'column_{row}': make_claim(
            f'A column takes it from the first token: {row}.', f'{GU_V1}, Table 3', f'columns:{row}', '<'
        )
        for row in ('sink_token', 'kv', 'k')
    },
    'column_k_shared': make_claim(
        'One that heads share takes it, too.', f'{GU_ICLR}, Table 12', 'columns:k_shared', '<'
    ),
    **{
        f'column_{row}_has_it': make_other_position_claim(
            '... and has it.', f'{GU_V1}, Table 3', f'columns:{row}', SINK_STAR_METRIC
        )
        for row in ('sink_token', 'kv', 'k')
    },
    'column_v': make_claim('A bias of values does not matter.', f'{GU_V1}, Table 3', 'columns:v', '='),
    'column_logit': make_claim('A learned logit takes it.', 'gpt-oss (OpenAI, 2025)', 'columns:logit', '<'),
    'column_value_norm': make_claim(
        'The longer the value of a column, the less it takes.',
        f'{GU_V1}, Table 10',
        'columns:k_first_20',
        '<',
        ('columns:k_first_1', SINK_STAR_METRIC),
        SINK_STAR_METRIC,
    ),
    'column_key_width': make_claim(
        'The fewer dimensions of its key are learned, the less it takes.',
        f'{GU_ICLR}, Table 13',
        'columns:k_width_1',
        '<',
        ('columns:k_width_64', SINK_STAR_METRIC),
        SINK_STAR_METRIC,
    ),
}

OPERATION = {
    'sigmoid': make_claim('Sigmoid, not normalized: less.', f'{GU_V1}, Table 4', 'attention:sigmoid', '<'),
    'sigmoid_apple': make_claim(
        'With an offset of -log T as well: less.', f'as {GU_V1}, Table 4', 'attention:sigmoid_apple', '<'
    ),
    'sigmoid_normalized': make_claim(
        'Normalized, sigmoid has one.',
        f'{GU_V1}, Table 4',
        'attention:sigmoid_normalized',
        '>',
        ('attention:sigmoid', SINK_METRIC),
    ),
    'sigmoid_learns': make_claim(
        '... and its loss is lower.', f'{GU_V1}, Table 4', 'attention:sigmoid', '<', metric=LOSS_METRIC
    ),
    'sigmoid_apple_learns': make_claim(
        'With the offset it learns as much.',
        f'as {GU_V1}, Table 4',
        'attention:sigmoid_apple',
        '=',
        metric=LOSS_METRIC,
    ),
    'elu1': make_claim('elu + 1, not normalized: less.', f'{GU_V1}, Table 4', 'attention:elu1', '<'),
    'kernel_elu1_normalized': make_presence_claim(
        'A normalized kernel has one.', f'{GU_V1}, Table 4', 'attention:kernel_elu1_normalized'
    ),
    'linear': make_claim('Linear attention: less.', f'{GU_V1}, Table 13', 'attention:linear', '<'),
    'mlp': make_claim('Signed weights: less.', f'{GU_V1}, Table 13', 'attention:mlp', '<'),
    'mlp_normalized': make_claim(
        'Signed weights: less, though normalized.', f'{GU_V1}, Table 4', 'attention:mlp_normalized', '<'
    ),
    'alpha_2': make_claim('Rows that sum to 2 have more.', f'{GU_V1}, Table 12', 'attention:alpha_2', '>'),
    'alpha_0.2': make_claim('Rows that sum to 0.2 have less.', f'{GU_V1}, Table 12', 'attention:alpha_0.2', '<'),
    'alpha_0.1': make_claim('Rows that sum to 0.1 have less.', f'{GU_V1}, Table 12', 'attention:alpha_0.1', '<'),
    **{
        f'softmax_p_{p}': make_failure_claim(
            f'Softmax by its {p}-norm does not train.', f'{GU_ICLR}, D.4', f'attention:softmax_p_{p}'
        )
        for p in (2, 3, 4)
    },
    **{
        row: make_failure_claim(f'{words} does not train.', f'{GU_V1}, Table 13', f'attention:{row}')
        for row, words in (
            ('elu1_normalized', 'elu + 1, normalized,'),
            ('kernel_elu1', 'A kernel, not normalized,'),
            ('linear_normalized', 'Linear attention, normalized,'),
        )
    },
    'off_by_one': make_claim(
        'Softmax with 1 in its sum: less on the first token.',
        'Kaul et al., 2410.17174',
        'attention:softmax_off_by_one',
        '<',
    ),
    'softpick': make_claim('Softpick: less.', 'Zuhri et al., 2504.20966', 'attention:softpick', '<'),
    'relu': make_claim('relu(s) / i: less.', 'Guo et al., 2410.13835', 'attention:relu', '<'),
}

UNTESTABLE = {
    '1b': make_untestable_claim(
        'Sigmoid has none at 1B, either.', f'{GU_V1}, section 7.3', 'is of 1B parameters: configs/scale.py'
    ),
    'instruct': make_untestable_claim(
        'Chat models have what their bases have.', f'{GU_V1}, Table 5', 'is of open models: configs/open_models.py'
    ),
    'domains': make_untestable_claim(
        'The domain hardly matters.', f'{GU_V1}, Figure 7', 'is of 17 domains of the Pile: configs/open_models.py'
    ),
    'streaming': make_untestable_claim(
        'Four first tokens keep the perplexity of a stream.',
        'Xiao et al., 2309.17453',
        'is of texts longer than the training: configs/open_models.py',
    ),
    'spikes': make_untestable_claim(
        'Massive activations come with it.',
        f'{GU_V1}, section 3.1',
        'is of where norms jump by three orders, in deep models: configs/open_models.py',
    ),
    'muon': make_untestable_claim(
        'Muon for AdamW: fewer outliers.', 'OSP, 2506.19697', 'is of kurtosis at 1.4B: sinklab measure'
    ),
}

SIZE = {
    'size': exclude_sizes(
        make_claim(
            'Larger models have more.',
            f'{GU_V1}, Figure 1',
            'model_size:0.2m_equal_tokens',
            '<',
            ('model_size:1.3m', SINK_METRIC),
        ),
        'was run with --size=small only',
    ),
    'context': make_claim(
        'Longer training texts have more.',
        BARBERO_SOURCE,
        'context_length:quarter',
        '<',
        ('context_length:full', SINK_METRIC),
    ),
    'first_norm': exclude_sizes(
        make_claim(
            'With a sink, the hidden state of the first token is longer.',
            f'{GU_V1}, section 3.1',
            'attention:sigmoid_apple',
            '<',
            metric='norm/ratio/05',
        ),
        'is of models of at least five layers: --size=small',
    ),
    'window': exclude_sizes(
        make_presence_claim('A window of half the text has one.', f'{GU_V1}, Figure 2D', 'objective:window_1024'),
        WINDOW_REASON,
    ),
    'window_small': exclude_sizes(
        make_claim(
            'A window of an eighth of the text has less, for the queries that see the first token.',
            f'{GU_V1}, Figure 2D',
            'objective:window_256',
            '<',
            metric='sink/1/window',
            reference=(BASELINE_ROW, SINK_METRIC),
        ),
        WINDOW_REASON,
    ),
}

CLAIMS = {**EMERGENCE, **DATA, **ARCHITECTURE, **LEARNED_KV, **OPERATION, **SIZE, **UNTESTABLE}
