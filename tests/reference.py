"""The model once more, in NumPy and float64, written from the formulas and not from the code under test."""

import numpy as np


def softmax(score):
    weight = np.exp(score - score.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True)


def attention(score_TS, visible_TS, similarity, normalizer):
    """Textbook attention weights of one head."""
    if (similarity, normalizer) == ('exp', 'sum'):
        return softmax(np.where(visible_TS, score_TS, -np.inf))
    sigmoid = np.where(visible_TS, 1 / (1 + np.exp(-score_TS)), 0)
    if (similarity, normalizer) == ('sigmoid', 'none'):
        return sigmoid
    assert (similarity, normalizer) == ('sigmoid', 'sum')
    return sigmoid / (sigmoid.sum(-1, keepdims=True) + 1e-8)  # the epsilon of the released code


def rms_norm(x, gain, epsilon):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * gain


def rotate(x_TK):
    """RoPE as a rotation of complex numbers: dimension i is the real part, i + K/2 the imaginary one."""
    length, width = x_TK.shape
    half = width // 2
    angle = np.arange(length)[:, None] / 10_000 ** (2 * np.arange(half) / width)
    turned = (x_TK[:, :half] + 1j * x_TK[:, half:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], -1)


def forward(params, token_T, model):
    """(logits_TV, attention_LHTT, residual_LTD) of one sequence."""
    length = len(token_T)
    visible = np.tril(np.ones((length, length), bool))
    x = np.float64(params['embedding_VD'])[token_T]
    attentions, residuals = [], []
    for layer in range(model.layers):
        block = take(params['blocks'], layer)
        normed = rms_norm(x, block['attention_norm']['gain_D'], model.norm_epsilon)
        heads = []
        for head in range(model.heads):
            weights = block['attention']
            query, key, value = (normed @ weights[f'{name}_DHK'][:, head] for name in ('query', 'key', 'value'))
            if model.position == 'rotary':
                query, key = rotate(query), rotate(key)
            score = query @ key.T / np.sqrt(model.head_width)
            A = attention(score, visible, model.attention.similarity, model.attention.normalizer)
            x = x + A @ value @ weights['output_HKD'][head]
            heads.append(A)
        normed = rms_norm(x, block['ffn_norm']['gain_D'], model.norm_epsilon)
        gate, inner = normed @ block['ffn']['gate_DF'], normed @ block['ffn']['in_DF']
        x = x + (gate / (1 + np.exp(-gate)) * inner) @ block['ffn']['out_FD']
        attentions.append(np.stack(heads))
        residuals.append(x)
    logits = rms_norm(x, params['norm']['gain_D'], model.norm_epsilon) @ np.float64(params['head_VD']).T
    return logits, np.stack(attentions), np.stack(residuals)


def take(tree, layer):
    """One layer of stacked parameters, in float64."""
    return {
        name: take(value, layer) if isinstance(value, dict) else np.float64(value)[layer]
        for name, value in tree.items()
    }
