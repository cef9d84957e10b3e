"""Similarity of hidden states: spectral entropy, mixing and secondary sinks."""

import numpy as np

from sinklab.metrics.metric import (
    Metric,
    MetricInfo,
    merge_disjoint,
    name_by_layer,
)
from sinklab.metrics.norms import compute_norms
from sinklab.metrics.sink import EPSILON

SPECTRUM_SENTENCE = (
    "Entropy of the eigenvalues of the tokens' Gram matrix, which sum to 1, after each block: 0 if one "
    'direction has all of the norm, log T if hidden states are orthogonal and have equal norms.'
)
MIXING_SENTENCE = 'Mean cosine between the hidden states of two tokens, without the first token, after each block.'
SECONDARY_SINK_COSINE = 0.9  # a secondary sink has a larger |cos| with the first token
SECONDARY_SINK_BLOCKS = 4  # in more blocks than this
SECONDARY_SENTENCE = (
    'Number of tokens whose hidden state has |cos| > 0.9 with that of the first token, in more than '
    '4 of the blocks between the largest rise and fall of its norm (Wong et al., 2025).'
)


def compute_gram_matrices(residual_LPTD):
    """Compute the Gram matrices <h_s, h_t>, _LPTT in float32."""
    residual = residual_LPTD.astype('float32')
    return residual @ residual.swapaxes(-1, -2)


def compute_cosines(gram_LPTT):
    norm = gram_LPTT.diagonal(0, -2, -1) ** 0.5
    return gram_LPTT / (norm[..., :, None] * norm[..., None, :]).clip(EPSILON)


def compute_spectral_entropy(gram_LPTT):
    """Compute -sum l log l in nats, _LP, over the eigenvalues l of each Gram matrix divided by its trace."""
    xp = gram_LPTT.__array_namespace__()
    share = xp.linalg.eigvalsh(gram_LPTT / gram_LPTT.trace(0, -2, -1)[..., None, None])
    return -(share * xp.log(xp.where(share > EPSILON, share, 1))).sum(-1)


def compute_mixing(cosine_LPTT):
    """Compute the mean cosine of two tokens other than the first, _LP."""
    others = cosine_LPTT[..., 1:, 1:]
    count = others.shape[-1]
    return (others.sum((-1, -2)) - others.trace(0, -2, -1)) / max(1, count * (count - 1))


def compute_similarities(residual) -> dict:
    gram = compute_gram_matrices(residual)
    cosine = compute_cosines(gram)
    return {
        'spectrum_LP': compute_spectral_entropy(gram),
        'mixing_LP': compute_mixing(cosine),
        'likeness_LPT': cosine[..., 0, :],
        'first_LP': compute_norms(residual[:, :, 0]),
    }


def count_secondary_sinks(likeness_LPT, first_L) -> float:
    """Count the tokens of a text that are secondary sinks (Wong et al., 2025); return the mean over texts.

    Wong et al. also require fewer than L - 15 blocks, which a model of fewer than 21 blocks cannot satisfy. This
    condition is left out.

    Args:
        likeness_LPT: Cosine of each hidden state with that of the first token, after each block.
        first_L: Mean norm of the hidden state of the first token, after each block.
    """
    change = np.diff(np.log(first_L.clip(EPSILON)))  # an edit may set hidden states to 0
    if not (change > 0).any():
        return 0.0
    rise, fall = int(np.argmax(change)) + 1, int(np.argmin(change)) + 1
    between = slice(rise, fall if fall > rise and change.min() < 0 else None)
    lasts_PT = (np.abs(likeness_LPT[between]) > SECONDARY_SINK_COSINE).sum(0) > SECONDARY_SINK_BLOCKS
    return float(lasts_PT[:, 1:].sum(-1).mean())


METRICS = (
    Metric(
        inputs=('residual_LPTD',),
        compute_arrays=lambda residual, context: compute_similarities(residual),
        compute_numbers=lambda arrays, context: (
            merge_disjoint(name_by_layer(name, np.mean(arrays[f'{name}_LP'], 1)) for name in ('spectrum', 'mixing'))
            | {'secondary/tokens': count_secondary_sinks(arrays['likeness_LPT'], np.mean(arrays['first_LP'], 1))}
        ),
        infos=(
            MetricInfo('spectrum/{k}', 'spectral entropy {k}', SPECTRUM_SENTENCE, 'nats'),
            MetricInfo('mixing/{k}', 'mixing {k}', MIXING_SENTENCE),
            MetricInfo('secondary/tokens', 'secondary sinks', SECONDARY_SENTENCE, digits=2),
        ),
        saved_arrays=('spectrum_L', 'mixing_L', 'likeness_LT'),
    ),
)
