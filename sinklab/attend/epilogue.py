"""From what kernels sum over the text to attention: columns, normalizer and gain."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from sinklab.attend import dense
from sinklab.attend.dense import Attended
from sinklab.attend.kernels.primitive import NOTHING, Kernels, Linear, Problem, Scores, Softmax, Sums, primitive
from sinklab.attend.mask import Mask
from sinklab.attend.normalizer import Row, to_power
from sinklab.attend.operation import Operation
from sinklab.attend.rule import Rule

OverText = Callable[[Sums, Problem], tuple[jax.Array, tuple[jax.Array, ...]]]


def attend(
    kernels: Kernels,
    query_BTHK: jax.Array,
    key_BSGK: jax.Array,
    value_BSGK: jax.Array,
    rule: Rule,
    measured: bool = False,
) -> Attended:
    """By the kernels of a platform; the mass of rows is summed only if `measured`."""
    operation, columns, power = rule.operation, rule.columns, rule.operation.power
    text = query_BTHK, key_BSGK[:, columns:], value_BSGK[:, columns:]
    column_BHTC = column_scores(query_BTHK, key_BSGK[:, :columns], rule)

    def over_text(kind: Sums, asked: Problem):
        return primitive(kernels, kind, asked, *text)

    kind, asked = sums(operation, measured), problem(rule, query_BTHK.shape[-1])
    numerator, total, mass, shift = PARTS[type(kind)](over_text, kind, asked, operation, column_BHTC)

    unit = jnp.exp(-shift)
    weight_BHTC, mass_BHTC = operation.similarity.weigh(column_BHTC - shift, unit)
    value_BCHK = dense.per_query_head(value_BSGK[:, :columns], query_BTHK.shape[2])
    numerator += jnp.einsum('BHTC,BCHK->BTHK', weight_BHTC, value_BCHK.astype(jnp.float32))
    total += to_power(mass_BHTC, power).sum(-1, keepdims=True)
    mass += jnp.abs(weight_BHTC).sum(-1, keepdims=True)

    row = Row(total, count(rule.mask, key_BSGK.shape[1] - columns), unit, power)
    z_BHT1 = operation.normalizer.close(row) / operation.gain
    output_BTHK = (numerator / jnp.swapaxes(z_BHT1, 1, 2)).astype(value_BSGK.dtype)
    rows = (jnp.broadcast_to(x, mass.shape)[..., 0] for x in (shift, z_BHT1, mass / jnp.abs(z_BHT1)))
    return Attended(output_BTHK, jax.lax.stop_gradient(dense.Rows(*rows)))


def sums(operation: Operation, measured: bool = False) -> Sums:
    """What kernels sum for an operation: softmax of scores that a maximum shifts, else as many masses as are read."""
    if operation.similarity.shifted:
        return Softmax()
    total, similarity = operation.normalizer.uses_total, operation.similarity
    weigh = similarity.weigh if total or similarity.rounded is None else similarity.rounded

    def masses(score):
        weight, mass = weigh(score, 1.0)
        wanted = ((total, lambda: to_power(mass, operation.power)), (measured, lambda: jnp.abs(weight)))
        return weight, tuple(make() for is_wanted, make in wanted if is_wanted)

    return Linear(masses)


def problem(rule: Rule, width: int) -> Problem:
    """The text's part of a rule."""
    bias, scale = rule.bias, rule.operation.scale
    scores = Scores(width**-0.5 if scale is None else scale, rule.operation.offset)
    if bias.curve is None:
        return Problem(scores, rule.mask)
    scores = dataclasses.replace(scores, curve=bias.curve.function, learned=bias.curve.learned)
    return Problem(scores, rule.mask, (bias.query_BT, bias.key_BS[:, rule.columns :]), bias.curve.parameter_HP)


def exponentials(over_text: OverText, kind: Softmax, asked: Problem, operation: Operation, column_BHTC: jax.Array):
    """(numerator_BTHK, total_BHT1, mass_BHT1, shift_BHT1) of the text, from softmax: o and lse less the shift."""
    output_BTHK, (lse_BHT,) = over_text(kind, asked)
    power, lse = operation.power or 1.0, lse_BHT[..., None]
    powers = lse
    if operation.power is not None:
        _, (raised_BHT,) = over_text(kind, dataclasses.replace(asked, scores=asked.scores * power))
        powers = raised_BHT[..., None]
    # The total is then between 1 and the number of columns + 1, whatever the power.
    shift = jnp.max(jnp.concatenate([powers / power, column_BHTC], -1), -1, keepdims=True)
    shift = jnp.where((lse > NOTHING / 2) | (column_BHTC.shape[-1] > 0), shift, 0.0)
    shift = jax.lax.stop_gradient(jnp.maximum(shift, 0.0) if operation.uses_unit else shift)
    mass, total = jnp.exp(lse - shift), jnp.exp(powers - power * shift)
    return output_BTHK.astype(jnp.float32) * jnp.swapaxes(mass, 1, 2), total, mass, shift


def weights(over_text: OverText, kind: Linear, asked: Problem, operation: Operation, column_BHTC: jax.Array):
    """The same from the linear primitive, whose mass is 0 where nobody wants it."""
    output_BTHK, statistics = over_text(kind, asked)
    nothing = jnp.zeros((*column_BHTC.shape[:-1], 1))
    rows = iter([row_BHT[..., None] for row_BHT in statistics])
    total = next(rows) if operation.normalizer.uses_total else nothing
    return output_BTHK.astype(jnp.float32), total, next(rows, nothing), nothing


PARTS = {Softmax: exponentials, Linear: weights}


def column_scores(query_BTHK: jax.Array, key_BCGK: jax.Array, rule: Rule) -> jax.Array:
    batch, queries, heads, _ = query_BTHK.shape
    if not rule.columns:
        return jnp.zeros((batch, heads, queries, 0))
    score_BHTC = dense.scores(query_BTHK, dense.per_query_head(key_BCGK, heads), rule.operation.scale)
    return score_BHTC + rule.column_bias()


def count(mask: Mask, keys: int) -> jax.Array:
    """How many keys of the text each query sees, as BHT1."""
    seen_BT = jnp.minimum(mask.end_BT, keys) - jnp.maximum(mask.start_BT, 0)
    return jnp.maximum(seen_BT, 0)[:, None, :, None]
