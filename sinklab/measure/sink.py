"""Attention sinks (Gu et al., ICLR 2025, section 3; science of the indicator: per sequence, then averaged)."""

import jax.numpy as jnp
import numpy as np

EPSILON = 1e-8  # of the released code


def mass(attention_TS):
    """Raw row sums _T: 1 under a normalizer `sum`; what a proxy hides."""
    return jnp.abs(attention_TS).sum(-1)


def proxy(attention_TS):
    """|A_ij| / sum_j |A_ij|: rows that sum to 1, for operations whose rows do not; itself for those that do."""
    return jnp.abs(attention_TS) / (mass(attention_TS)[..., None] + EPSILON)


def importance(attention_TS, keys: int, columns: int = 0):
    """alpha_k = sum_{i >= k} A_ik / (T - k + 1) for the tokens k = 1..keys; token 1 is column number `columns`."""
    length = attention_TS.shape[-2]
    received_K = attention_TS[..., columns : columns + keys].sum(-2)
    return received_K / (length - jnp.arange(keys))


def rate(alpha, threshold: float = 0.3) -> float:
    """Sink_k in percent: how often alpha_k is above (strictly) a threshold over sequences, layers and heads."""
    return 100 * float(np.mean(np.asarray(alpha) > threshold))


def floor(length: int) -> float:
    """alpha_1 of uniform causal attention: the harmonic number of T, over T (0.0741 at T = 64)."""
    return float(np.sum(1 / np.arange(1, length + 1)) / length)


def numbers(alpha_LPHK, mass_LPH, length: int, thresholds=(0.2, 0.4, 0.5)) -> dict[str, float]:
    """sink/k and alpha/k for every key given, Sink_1 at other thresholds, alpha_1's floor, the mean row mass."""
    keys = range(alpha_LPHK.shape[-1])
    return {
        **{f'sink/{k + 1}': rate(alpha_LPHK[..., k]) for k in keys},
        **{f'sink/1@{threshold}': rate(alpha_LPHK[..., 0], threshold) for threshold in thresholds},
        **{f'alpha/{k + 1}': float(np.mean(alpha_LPHK[..., k])) for k in keys},
        'alpha/floor': floor(length),
        'mass/row': float(np.mean(mass_LPH)),
    }
