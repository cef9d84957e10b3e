"""Whether a backend computes here what the definition says."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sinklab.attend.backends import BACKENDS
from sinklab.attend.rule import Case

ACCURACY = 2e-2  # of the largest entry, in bfloat16, for a kernel to be trusted
SHOWN = 4096  # a length at which every kernel has several blocks, interior ones too
HEADS = 2


def error(name: str, case: Case) -> float:
    """How far a backend is from the definition in float32, forward and backward, in units of the largest entry.

    On random arrays, under the first queries, keys and heads of the case's own rule.
    """
    case = beginning(case, SHOWN)
    rng = np.random.default_rng(0)
    keys, heads = case.rule.columns + case.rule.mask.keys, case.heads
    shapes = (case.length, case.width), (keys, case.width), (keys, case.value_width)
    drawn = (rng.uniform(size=(1, n, heads, width)) - (at == 2) / 2 for at, (n, width) in enumerate(shapes))
    arrays = [jnp.asarray(array, case.dtype) for array in drawn]
    cotangent = jnp.asarray(rng.normal(size=(1, case.length, heads, case.value_width)), jnp.float32)

    def total(arrays, backend):
        output, rows, _ = BACKENDS[backend].attend(*arrays, case.rule, measured=True)
        return jnp.sum(cotangent * output.astype(jnp.float32)), (output, rows.mass_BHT)

    run = jax.jit(jax.grad(total, has_aux=True), static_argnums=1)
    with jax.default_matmul_precision('highest'):
        right = run([array.astype(jnp.float32) for array in arrays], 'dense')
    far = jax.tree.map(
        lambda x, y: float(jnp.abs(x - y).max() / jnp.maximum(jnp.abs(x).max(), 1e-9)), right, run(arrays, name)
    )
    leaves = jax.tree.leaves(far)
    return max(leaves) if np.isfinite(leaves).all() else float('inf')  # max() would pass over what is no number


def beginning(case: Case, length: int) -> Case:
    """At most so many tokens of a case, and two heads."""
    rule = case.rule.first(min(case.length, length))
    bias, curve = rule.bias, rule.bias.curve
    if curve is not None:
        curve = dataclasses.replace(curve, parameter_HP=curve.parameter_HP[:HEADS])
    if bias.column_HC is not None:
        bias = dataclasses.replace(bias, column_HC=bias.column_HC[:HEADS])
    rule = dataclasses.replace(rule, bias=dataclasses.replace(bias, curve=curve))
    return dataclasses.replace(case, rule=rule, heads=HEADS)
