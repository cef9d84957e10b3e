"""Problems for the tests of GPU kernels, and their solution with whole matrices."""

import jax.numpy as jnp
import numpy as np
from attention_cases import compute_alibi_bias

from sinklab.attn.pallas.kernel_interface import MASK_VALUE, KernelSpec, LinearReduction, ScoreSpec, SoftmaxReduction

LENGTH = 384


def weigh_squares(score):
    """Return the weight and two masses, one of which is the weight itself."""
    weight = jnp.where(score > 0, score + 1, jnp.exp(jnp.minimum(score, 0)))
    return weight, (weight, weight**2)


REDUCTIONS = {
    'softmax': SoftmaxReduction(),
    'sigmoid': LinearReduction(lambda score: (0.5 * jnp.tanh(0.5 * score) + 0.5, ())),
    'squares': LinearReduction(weigh_squares),
}


def make_problem(mask, width=64, length=LENGTH, bias_function=compute_alibi_bias, groups=1, seed=0, positions=None):
    """Make (problem, [query_BHTK, key_BGSK, value_BGSV]) with arrays in bfloat16."""
    rng = np.random.default_rng(seed)
    batch, heads = len(mask.start_BT), 2
    shapes = (batch, heads, length, width), (batch, groups, length, width), (batch, groups, length, width)
    arrays = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]
    parameter_HP = jnp.asarray(rng.uniform(0.01, 0.1, (heads, int(bias_function is not None))), jnp.float32)
    return KernelSpec(
        ScoreSpec(width**-0.5, -0.5, bias_function, is_learned=True), mask, positions, parameter_HP
    ), arrays


def solve_with_matrices(reduction, problem, query, key, value, parameter_HP):
    """Compute with whole matrices what the kernels must return."""
    heads, length, keys, score_spec = query.shape[1], query.shape[2], key.shape[2], problem.score_spec
    key, value = (jnp.repeat(array, heads // array.shape[1], 1) for array in (key, value))
    query_BT, key_BS = problem.positions or (np.arange(length)[None], np.arange(keys)[None])
    distance_BTS = jnp.maximum(query_BT[:, :, None] - key_BS[:, None, :], 0).astype(query.dtype)
    score = score_spec.scale * jnp.einsum('bhtk,bhsk->bhts', query, key) + score_spec.offset
    if score_spec.bias_function is not None:
        score += score_spec.bias_function(list(parameter_HP.T[:, None, :, None, None]), distance_BTS[:, None])
    visible = problem.mask.materialize(keys)[:, None]
    if reduction != SoftmaxReduction():
        weight, masses = reduction.weigh_and_sum(score)
        output = jnp.einsum('bhts,bhsk->bhtk', jnp.where(visible, weight, 0), value)
        return output, tuple(jnp.where(visible, mass, 0).sum(-1) for mass in masses)
    has_keys = visible.any(-1)
    largest = jnp.where(has_keys, jnp.where(visible, score, -jnp.inf).max(-1), 0)
    weight = jnp.where(visible, jnp.exp(jnp.where(visible, score, 0) - largest[..., None]), 0)
    total = jnp.where(has_keys, weight.sum(-1), 1)
    output = jnp.einsum('bhts,bhsk->bhtk', weight / total[..., None], value)
    return output, (jnp.where(has_keys, largest + jnp.log(total), MASK_VALUE),)
