"""What the paper, its author's talk and a few papers since claim, as contrasts of two numbers of runs.

    sinklab claims --seeds=8 --jobs=2 --workdir=runs/claims
    sinklab claims sigmoid column_k --workdir=runs/claims

A number is that of a row's run, TABLE:ROW, at its end or before its first step; seeds are paired. `>`, `<` and `=`
say how `of` is beside `than`. `least` is the smallest difference that counts: 5 points of a sink score, 0.02 of a
loss. What cannot be tested at a small size says why. At the quickstart's size every row has a fixed first token but
those of data.py, and those of blocks.py have twice the heads: each is compared with its like.
"""

BASE, FREE, EIGHT = 'attention:softmax', 'data:amount_5b', 'blocks:swiglu'
SINK, STAR, LOSS, FAILS = 'sink/1', 'sink/star', 'valid/loss', 'fails'
LEAST = {SINK: 5.0, 'sink/2': 5.0, 'sink/3': 5.0, 'sink/prefix': 5.0, STAR: 5.0, LOSS: 0.02, FAILS: 0.5}
BARBERO = 'Barbero et al., 2504.02732'
V1, ICLR = 'Gu et al. (v1)', 'Gu et al. (ICLR)'


def claim(words, source, row, way, than=None, number=SINK, least=None):
    """Of a row beside another reading; where none is given, the same number of BASE."""
    pair = dict(of=(row, number), than=than or (BASE, number))
    return dict(words=words, source=source, **pair, way=way, least=least or LEAST[number])


def present(words, source, row):
    """A sink that was not there before training."""
    return claim(words, source, row, '>', (row, SINK, 'start'))


def elsewhere(words, source, row, number):
    """A sink that lies there and not on the first token."""
    return claim(words, source, row, '>', (row, SINK), number)


def fails(words, source, row):
    return claim(words, source, row, '>', number=FAILS)


def untestable(words, source, why):
    return dict(words=words, source=source, why=why)


EMERGENCE = {
    'emerges': present('The sink emerges in training.', f'{V1}, Figure 2A', BASE),
    'rate_lower': claim('A smaller rate, less of a sink.', f'{ICLR}, Table 9', 'optimization:rate_2e-4_20k', '<'),
    'rate_lowest': claim('A quarter of the rate, less yet.', f'{ICLR}, Table 9', 'optimization:rate_1e-4_20k', '<'),
    'rate_higher': claim('A larger rate, more of one.', f'{ICLR}, Table 9', 'optimization:rate_8e-4_20k', '>'),
    'rate_not_steps': claim(
        'Twice the rate and half the steps: still more.', f'{ICLR}, Table 9', 'optimization:rate_8e-4_10k', '>'
    ),
    'steps': claim(
        'Twice the steps, more of one.',
        f'{ICLR}, Table 9',
        'optimization:rate_2e-4_40k',
        '>',
        ('optimization:rate_2e-4_20k', SINK),
    ),
    'batch_small': claim('The batch does not matter: a quarter.', f'{V1}, Table 6', 'optimization:batch_128', '='),
    'batch_half': claim('The batch does not matter: half.', f'{V1}, Table 6', 'optimization:batch_256', '='),
    'batch_large': claim('The batch does not matter: twice.', f'{V1}, Table 6', 'optimization:batch_1024', '='),
    'decay_more': claim('More weight decay, more of a sink.', f'{V1}, Table 1', 'optimization:decay_0.5', '>'),
    'decay_less': claim(
        'Less weight decay, less of one.', f'{V1}, Table 1', 'optimization:decay_0.01', '<', least=2.0
    ),
    'decay_none': present('Without weight decay there is one.', f'{V1}, Table 1', 'optimization:decay_0'),
    'decay_too_much': claim(
        'Not monotone: 20 times has less than 5 times.',
        f'{V1}, Table 1',
        'optimization:decay_2',
        '<',
        ('optimization:decay_0.5', SINK),
    ),
    'decay_far_too_much': claim('50 times has none.', f'{V1}, Table 1', 'optimization:decay_5', '<'),
}

DATA = {
    'amount': claim('Little data, no sink: a hundredth.', f'{V1}, Figure 2C', 'data:amount_50m', '<', (FREE, SINK)),
    'random_1': claim(
        'A random first token, more of a sink.', f'{V1}, section 5', 'data:random_1', '>', (FREE, SINK)
    ),
    'random_1_10': claim(
        'Ten random tokens: it tends to disappear.', f'{V1}, section 5', 'data:random_1_10', '<', (FREE, SINK)
    ),
    'random_1_2': elsewhere('Two random tokens: on the second.', f'{V1}, section 5', 'data:random_1_2', 'sink/2'),
    'fixed_1': claim('A fixed first token, more of a sink.', f'{V1}, Table 7', 'data:fixed_1', '>', (FREE, SINK)),
    'fixed_2': elsewhere('A token fixed at 2 takes it.', f'{V1}, Table 7', 'data:fixed_2', 'sink/2'),
    'fixed_3': elsewhere('A token fixed at 3 takes it.', f'{V1}, Table 7', 'data:fixed_3', 'sink/3'),
    'prefix': claim(
        'A prefix has it on one of its tokens.',
        f'{V1}, Figure 3B',
        'objective:prefix_5',
        '>',
        ('objective:prefix_5', 'sink/prefix', 'start'),
        'sink/prefix',
    ),
    'packing_document': claim(
        'Documents that do not see each other have less of one.',
        BARBERO,
        'packing:document',
        '<',
        ('packing:causal', SINK),
    ),
    'packing_bos': claim(
        'BOS before each document, more.', BARBERO, 'packing:document_bos', '>', ('packing:document', SINK)
    ),
    'packing_fixed': claim(
        'BOS at the start of each window as well, more.',
        BARBERO,
        'packing:causal_fixed',
        '>',
        ('packing:causal', SINK),
    ),
}

ARCHITECTURE = {
    **{
        f'position_{row}': present(f'It is there: positions {row}.', f'{V1}, Table 2', f'positions:{row}')
        for row in ('none', 'absolute', 'learned', 'relative_paper_code', 'alibi')
    },
    **{
        f'ffn_{row}': present(f'It is there: FFN {row}.', f'{V1}, Table 8', f'blocks:{row}')
        for row in ('relu', 'geglu')
    },
    **{
        f'heads_{count}': present(f'It is there: heads {count}.', f'{V1}, Table 9', f'blocks:heads_{count}')
        for count in (1, 2)
    },
    'add': present('It is there where heads are added.', f'{V1}, Table 9', 'blocks:add'),
    'post_norm': present('It is there with post-norm.', f'{V1}, appendix D.3', 'blocks:post_norm'),
    'sandwich_norm': present('It is there with sandwich norm.', 'Sun et al., 2603.05498', 'blocks:sandwich_norm'),
    'qk_norm': present('It is there with normed queries and keys.', 'Sun et al., 2603.05498', 'blocks:qk_norm'),
    'head_norm': claim('A norm of each head suppresses it.', '2605.06611', 'blocks:head_norm', '<', (EIGHT, SINK)),
    'gate_elementwise': claim(
        'A gate of each element suppresses it.',
        'Qiu et al., 2505.06708',
        'blocks:gate_elementwise',
        '<',
        (EIGHT, SINK),
    ),
    'gate_headwise': claim(
        'So does one of each head.', 'Qiu et al., 2505.06708', 'blocks:gate_headwise', '<', (EIGHT, SINK)
    ),
    'gate_shared': present('One that heads share does not.', 'Qiu et al., 2505.06708', 'blocks:gate_shared'),
    'gate_value_state': claim(
        'A gate of values suppresses it.', '2510.09017', 'blocks:gate_value_state', '<', (EIGHT, SINK)
    ),
}

COLUMNS = {
    **{
        f'column_{row}': claim(
            f'A column takes it from the first token: {row}.', f'{V1}, Table 3', f'columns:{row}', '<'
        )
        for row in ('sink_token', 'kv', 'k')
    },
    'column_k_shared': claim('One that heads share takes it, too.', f'{ICLR}, Table 12', 'columns:k_shared', '<'),
    **{
        f'column_{row}_has_it': elsewhere('... and has it.', f'{V1}, Table 3', f'columns:{row}', STAR)
        for row in ('sink_token', 'kv', 'k')
    },
    'column_v': claim('A bias of values does not matter.', f'{V1}, Table 3', 'columns:v', '='),
    'column_logit': claim('A learned logit takes it.', 'gpt-oss (OpenAI, 2025)', 'columns:logit', '<'),
    'column_value_norm': claim(
        'The longer the value of a column, the less it takes.',
        f'{V1}, Table 10',
        'columns:k_first_20',
        '<',
        ('columns:k_first_1', STAR),
        STAR,
    ),
    'column_key_width': claim(
        'The fewer dimensions of its key are learned, the less it takes.',
        f'{ICLR}, Table 13',
        'columns:k_width_1',
        '<',
        ('columns:k_width_64', STAR),
        STAR,
    ),
}

OPERATION = {
    'sigmoid': claim('Sigmoid, not normalized: none.', f'{V1}, Table 4', 'attention:sigmoid', '<'),
    'sigmoid_apple': claim('Nor with an offset of -log T.', f'as {V1}, Table 4', 'attention:sigmoid_apple', '<'),
    'sigmoid_normalized': claim(
        'Normalized, sigmoid has one.',
        f'{V1}, Table 4',
        'attention:sigmoid_normalized',
        '>',
        ('attention:sigmoid', SINK),
    ),
    'sigmoid_learns': claim('... and its loss is lower.', f'{V1}, Table 4', 'attention:sigmoid', '<', number=LOSS),
    'sigmoid_apple_learns': claim(
        'With the offset it learns as much.', f'as {V1}, Table 4', 'attention:sigmoid_apple', '=', number=LOSS
    ),
    'elu1': claim('elu + 1, not normalized: none.', f'{V1}, Table 4', 'attention:elu1', '<'),
    'kernel_elu1_normalized': present(
        'A normalized kernel has one.', f'{V1}, Table 4', 'attention:kernel_elu1_normalized'
    ),
    'linear': claim('Linear attention: none.', f'{V1}, Table 13', 'attention:linear', '<'),
    'mlp': claim('Signed weights: none.', f'{V1}, Table 13', 'attention:mlp', '<'),
    'mlp_normalized': claim(
        'Signed weights: none, though normalized.', f'{V1}, Table 4', 'attention:mlp_normalized', '<'
    ),
    'alpha_2': claim('Rows that sum to 2 have more.', f'{V1}, Table 12', 'attention:alpha_2', '>'),
    'alpha_0.2': claim('Rows that sum to 0.2 have less.', f'{V1}, Table 12', 'attention:alpha_0.2', '<'),
    'alpha_0.1': claim('Rows that sum to 0.1 have less.', f'{V1}, Table 12', 'attention:alpha_0.1', '<'),
    **{
        f'softmax_p_{p}': fails(
            f'Softmax by its {p}-norm does not train.', f'{ICLR}, D.4', f'attention:softmax_p_{p}'
        )
        for p in (2, 3, 4)
    },
    **{
        row: fails(f'{words} does not train.', f'{V1}, Table 13', f'attention:{row}')
        for row, words in (
            ('elu1_normalized', 'elu + 1, normalized,'),
            ('kernel_elu1', 'A kernel, not normalized,'),
            ('linear_normalized', 'Linear attention, normalized,'),
        )
    },
    'off_by_one': claim(
        'Softmax with 1 in its sum: none on the first token.',
        'Kaul et al., 2410.17174',
        'attention:softmax_off_by_one',
        '<',
    ),
    'softpick': claim('Softpick: none.', 'Zuhri et al., 2504.20966', 'attention:softpick', '<'),
    'relu': claim('relu(s) / i: none.', 'Guo et al., 2410.13835', 'attention:relu', '<'),
}

LARGE = {
    'size': untestable('Larger models have more.', f'{V1}, Figure 1', 'is of Pythia, 14M to 12B: sinklab measure'),
    '1b': untestable(
        'Sigmoid has none at 1B, either.', f'{V1}, section 7.3', 'is of 1B parameters: configs/scale.py'
    ),
    'instruct': untestable(
        'Chat models have what their bases have.', f'{V1}, Table 5', 'is of open models: sinklab measure'
    ),
    'domains': untestable(
        'The domain hardly matters.', f'{V1}, Figure 7', 'is of 17 domains of the Pile: valid.domain'
    ),
    'streaming': untestable(
        'Four first tokens keep the perplexity of a stream.',
        'Xiao et al., 2309.17453',
        'is of texts longer than the training: sinklab stream',
    ),
    'context': untestable(
        'Longer training texts have more.',
        'Barbero et al., 2504.02732',
        'is of 128 to 2048 tokens, and of 5B: configs/beyond.py',
    ),
    'spikes': untestable(
        'Massive activations come with it.',
        f'{V1}, section 3.1',
        'is of where norms jump by three orders, in deep models: norm/ratio of each run, sinklab measure',
    ),
    'muon': untestable(
        'Muon for AdamW: fewer outliers.', 'OSP, 2506.19697', 'is of kurtosis at 1.4B: sinklab measure'
    ),
    'window': untestable(
        'A small window prevents it, one of 256 does not.',
        f'{V1}, Figure 2D',
        'is of windows longer than the probed 64 tokens: in a shorter one alpha_1 cannot reach 0.3',
    ),
}

CLAIMS = {**EMERGENCE, **DATA, **ARCHITECTURE, **COLUMNS, **OPERATION, **LARGE}
