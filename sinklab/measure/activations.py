"""Massive activations: the norm of the first token's hidden state against that of the others."""

import jax.numpy as jnp
import numpy as np


def norms(residual_TD):
    """||h_t||_2 of each token, in float32."""
    return jnp.linalg.norm(residual_TD.astype(jnp.float32), axis=-1)


def ratio(norm_T) -> np.ndarray:
    """||h_1|| / mean_{t > 1} ||h_t||."""
    norm_T = np.asarray(norm_T)
    return norm_T[..., 0] / norm_T[..., 1:].mean(-1)


def numbers(norm_LPT) -> dict[str, float]:
    """norm/ratio/LL after each block, a ratio of means over sequences as in the released code."""
    ratios = ratio(np.mean(norm_LPT, 1))
    return {f'norm/ratio/{layer:02}': float(value) for layer, value in enumerate(ratios, 1)}
