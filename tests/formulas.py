"""Formulas of the papers in NumPy and float64, written as in the papers and not as in the code under test."""

import math

import numpy as np
from scipy.special import erf

EPSILON = 1e-8  # value of the released code
RELATIVE_POSITIONS = 'relative_paper_code', 'relative_paper_printed', 'relative_paper_negative'


def relu(x):
    return np.maximum(x, 0)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def elu1(x):
    """Compute elu(x) + 1."""
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def logsumexp(x):
    return np.logaddexp.reduce(x)


def p_norm(weight, p):
    """Compute (sum of weight^p)^(1/p) through logarithms."""
    return np.exp(logsumexp(p * np.log(weight)) / p)


# (similarity, normalizer) -> function from the scores s of one query with its visible keys to the weights.
OPERATIONS = {
    ('exp', 'sum'): lambda s: np.exp(s) / np.exp(s).sum(),
    ('exp', 'p_norm'): lambda s, p: np.exp(s - logsumexp(p * s) / p),
    ('exp', 'plus_one'): lambda s: np.exp(s) / (1 + np.exp(s).sum()),
    ('softpick', 'sum'): lambda s: relu(np.exp(s) - 1) / (np.abs(np.exp(s) - 1).sum() + EPSILON),
    ('sigmoid', 'none'): lambda s: sigmoid(s),
    ('sigmoid', 'sum'): lambda s: sigmoid(s) / (sigmoid(s).sum() + EPSILON),
    ('sigmoid', 'p_norm'): lambda s, p: sigmoid(s) / p_norm(sigmoid(s), p),
    ('sigmoid', 'count'): lambda s, n: sigmoid(s) / n,
    ('elu1', 'none'): lambda s: elu1(s),
    ('elu1', 'sum'): lambda s: elu1(s) / (elu1(s).sum() + EPSILON),
    ('elu1', 'p_norm'): lambda s, p: elu1(s) / p_norm(elu1(s), p),
    ('elu1', 'count'): lambda s, n: elu1(s) / n,
    ('relu', 'count'): lambda s, n: relu(s) / n,
    ('relu', 'none'): lambda s: relu(s),
    ('relu', 'sum'): lambda s: relu(s) / (relu(s).sum() + EPSILON),
    ('identity', 'none'): lambda s: s,
    ('identity', 'clamped'): lambda s: s / max(abs(s.sum()), 1),
    ('identity', 'count'): lambda s, n: s / n,
    ('identity', 'sum'): lambda s: s / (s.sum() + EPSILON),
}


def compute_weights(score_TS, visible_TS, attention, columns=0):
    """Compute the attention of one head, one query at a time. Invisible keys have weight 0.

    The first `columns` keys are learned columns and no tokens.
    """
    formula = OPERATIONS[attention.similarity, attention.normalizer]
    attention_TS = np.zeros(score_TS.shape)
    for row, score, visible in zip(attention_TS, score_TS, visible_TS, strict=True):
        extra_arguments = {'p_norm': [attention.power], 'count': [max(visible[columns:].sum(), 1)]}
        if visible.any():
            weight = attention.gain * formula(score[visible], *extra_arguments.get(attention.normalizer, []))
            if (attention.gamma, attention.zeta) != (0, 1):
                weight = np.clip((attention.zeta - attention.gamma) * weight + attention.gamma, 0, 1)
            row[visible] = weight
    return attention_TS


ACTIVATIONS = {
    'relu': relu,
    'gelu': lambda x: x * (1 + erf(x / math.sqrt(2))) / 2,
    'gelu_tanh': lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    'swish': lambda x: x * sigmoid(x),
}
GATED = {'reglu': 'relu', 'geglu': 'gelu', 'geglu_tanh': 'gelu_tanh', 'swiglu': 'swish'}


def compute_ffn(x, weights, kind):
    if kind in GATED:
        return (ACTIVATIONS[GATED[kind]](x @ weights['gate_DF']) * (x @ weights['in_DF'])) @ weights['out_FD']
    return ACTIVATIONS[kind](x @ weights['in_DF']) @ weights['out_FD']


def rms_norm(x, gain, epsilon):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * gain


def compute_sinusoids(position_T, width):
    """Compute all sines, then all cosines, of position / 10000^(2i/D)."""
    angle = [[t / 10_000 ** (2 * i / width) for i in range(width // 2)] for t in position_T]
    return np.concatenate([np.sin(angle), np.cos(angle)], -1)


def rotate(x_TK, position_T, rotary):
    """Apply RoPE as a rotation of complex numbers: dimension i is the real part, i + K/2 the imaginary part."""
    half = x_TK.shape[-1] // 2
    wavelength = [scale_wavelength(2 * math.pi * rotary.base ** (i / half), rotary) for i in range(half)]
    angle = 2 * math.pi * np.asarray(position_T)[:, None] / np.array(wavelength)
    rotated = (x_TK[:, :half] + 1j * x_TK[:, half:]) * np.exp(1j * angle)
    return np.concatenate([rotated.real, rotated.imag], -1)


def scale_wavelength(wavelength, rotary):
    """Scale a wavelength by a factor.

    Linear scaling applies to every wavelength. Llama 3.1 (apply_scaling) scales long ones fully, and middle ones in
    part.
    """
    if rotary.scaling == 'none':
        return wavelength
    if rotary.scaling == 'linear' or wavelength > rotary.length / rotary.slow:
        return wavelength * rotary.factor
    if wavelength < rotary.length / rotary.fast:
        return wavelength
    smooth = (rotary.length / wavelength - rotary.slow) / (rotary.fast - rotary.slow)
    return 1 / ((1 - smooth) / (rotary.factor * wavelength) + smooth / wavelength)


def compute_alibi_slopes(heads):
    """Compute the slopes of ALiBi as get_slopes of Press et al. does.

    For a power of 2, they are a geometric series. Other numbers of heads take the series of the next smaller power
    of 2 and a part of the series after it.
    """
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**i for i in range(heads)]
    closest = 2 ** math.floor(math.log2(heads))
    return compute_alibi_slopes(closest) + compute_alibi_slopes(2 * closest)[0::2][: heads - closest]


def compute_t5_bucket(distance):
    """Compute the bucket of T5 for a key before the query, of 32 buckets up to distance 128.

    The released code adds this number to the scores.
    """
    if distance < 16:
        return distance
    return min(31, 16 + math.floor(math.log(distance / 16) / math.log(128 / 16) * 16))


def compute_printed_bucket(distance):
    """Compute equation 7 of the paper.

    Between B/2 and D it is B/2 + floor(log(distance / (B/2)) / log(D / (B/2))) * B/2.
    """
    if distance < 16:
        return distance
    return 31 if distance >= 128 else 16 + math.floor(math.log(distance / 16) / math.log(128 / 16)) * 16


def compute_forget_bias(score_T):
    """Compute bias_TS = sum_{l=s+1..t} log sigmoid(score_l) for keys at or before a query."""
    log_gate_T = np.log(sigmoid(score_T))
    return np.array([[log_gate_T[s + 1 : t + 1].sum() for s in range(len(score_T))] for t in range(len(score_T))])


def compute_position_bias(kind, position_T, heads, table_RH=None):
    """Compute bias_HTS for keys at or before a query."""
    distance = {
        'alibi': lambda d: [-slope * d for slope in compute_alibi_slopes(heads)],
        'relative_paper_code': lambda d: [compute_t5_bucket(d)] * heads,
        'relative_paper_printed': lambda d: [compute_printed_bucket(d)] * heads,
        'relative_paper_negative': lambda d: [-compute_t5_bucket(d)] * heads,
        'relative_t5': lambda d: table_RH[compute_t5_bucket(d)],
    }.get(kind, lambda d: [0.0] * heads)
    rows = [[distance(max(int(t - s), 0)) for s in position_T] for t in position_T]
    return np.moveaxis(np.array(rows, float), -1, 0)


def average_pairs(query_TK, key_TK):
    """Compute means over the queries i > 1, by name: with key 1, and with the keys 2..i on average."""
    norm, width = np.linalg.norm, query_TK.shape[-1]
    values = {
        'cos': lambda q, k: q @ k / (norm(q) * norm(k)) if norm(q) * norm(k) else 0.0,
        'norms': lambda q, k: norm(q) * norm(k),
        'score': lambda q, k: q @ k / math.sqrt(width),
    }
    late_queries = range(1, len(query_TK))
    return {
        name: (
            np.mean([value(query_TK[i], key_TK[0]) for i in late_queries]),
            np.mean([np.mean([value(query_TK[i], key_TK[j]) for j in range(1, i + 1)]) for i in late_queries]),
        )
        for name, value in values.items()
    }


def compute_qk_metrics(query_LPTHK, key_LPTHK):
    """Compute the qk metrics of a probe from the queries and keys of its texts."""
    layers, texts, _, heads, _ = query_LPTHK.shape
    pair_means = [
        average_pairs(np.float64(query_LPTHK[layer, text, :, head]), np.float64(key_LPTHK[layer, text, :, head]))
        for layer, text, head in np.ndindex(layers, texts, heads)
    ]
    metrics = {}
    for name in pair_means[0]:
        first, other = np.mean([means[name] for means in pair_means], 0)
        metrics |= {f'qk/{name}/1': first, f'qk/{name}/other': other, f'qk/{name}/difference': first - other}
    return metrics


def compute_visibility(length, mask, document_T):
    """Compute the visible keys of each query by the definition of each mask."""
    t, s = np.indices((length, length))
    visible_TS = (s <= t) | (s < (mask.prefix or 0))
    if mask.window:
        visible_TS &= t - s < mask.window
    if mask.block:
        visible_TS &= t // mask.block == s // mask.block
    if mask.document:
        visible_TS &= np.equal.outer(document_T, document_T)
    return visible_TS
