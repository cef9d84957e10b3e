"""Furniture of the tests of GPU kernels: problems, and their contract with matrices."""

import jax.numpy as jnp
import numpy as np
from attention_cases import steep

from sinklab.attn.pallas.reductions import (
    MASK_VALUE,
    KernelSpec,
    LinearReduction,
    ScoreSpec,
    SoftmaxReduction,
)

LENGTH = 384


def squares(score):
    """Two masses, of which one is the weight itself."""
    weight = jnp.where(score > 0, score + 1, jnp.exp(jnp.minimum(score, 0)))
    return weight, (weight, weight**2)


SUMS = {
    'softmax': SoftmaxReduction(),
    'sigmoid': LinearReduction(lambda score: (0.5 * jnp.tanh(0.5 * score) + 0.5, ())),
    'squares': LinearReduction(squares),
}


def problem(shown, width=64, length=LENGTH, curve=steep, groups=1, seed=0, positions=None):
    """(Problem, [query_BHTK, key_BGSK, value_BGSV]), rounded to bfloat16."""
    rng = np.random.default_rng(seed)
    batch, heads = len(shown.start_BT), 2
    shapes = (batch, heads, length, width), (batch, groups, length, width), (batch, groups, length, width)
    arrays = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]
    parameter_HP = jnp.asarray(rng.uniform(0.01, 0.1, (heads, int(curve is not None))), jnp.float32)
    return KernelSpec(ScoreSpec(width**-0.5, -0.5, curve, is_learned=True), shown, positions, parameter_HP), arrays


def by_matrices(sums, problem, query, key, value, parameter_HP):
    """The contract of the kernels."""
    heads, length, keys, scores = query.shape[1], query.shape[2], key.shape[2], problem.score_spec
    key, value = (jnp.repeat(one, heads // one.shape[1], 1) for one in (key, value))
    query_BT, key_BS = problem.positions or (np.arange(length)[None], np.arange(keys)[None])
    distance_BTS = jnp.maximum(query_BT[:, :, None] - key_BS[:, None, :], 0).astype(query.dtype)
    score = scores.scale * jnp.einsum('bhtk,bhsk->bhts', query, key) + scores.offset
    if scores.bias_function is not None:
        score += scores.bias_function(list(parameter_HP.T[:, None, :, None, None]), distance_BTS[:, None])
    visible = problem.mask.materialize(keys)[:, None]
    if sums != SoftmaxReduction():
        weight, masses = sums.weigh(score)
        output = jnp.einsum('bhts,bhsk->bhtk', jnp.where(visible, weight, 0), value)
        return output, tuple(jnp.where(visible, mass, 0).sum(-1) for mass in masses)
    sees = visible.any(-1)
    largest = jnp.where(sees, jnp.where(visible, score, -jnp.inf).max(-1), 0)
    weight = jnp.where(visible, jnp.exp(jnp.where(visible, score, 0) - largest[..., None]), 0)
    total = jnp.where(sees, weight.sum(-1), 1)
    output = jnp.einsum('bhts,bhsk->bhtk', weight / total[..., None], value)
    return output, (jnp.where(sees, largest + jnp.log(total), MASK_VALUE),)
