"""Attention operations: similarities (score to weight) and normalizers (row sums to Z), in two tables.

A shifted similarity receives scores minus m, the largest visible score of their row, so that exponentials stay
finite. The factor exp(-m) of weight and mass cancels in their ratio. A constant 1 before the shift becomes `unit` =
exp(-m); where `unit` is used, m is at least 0. Every similarity has a finite slope at 0, because hidden scores are
weighed as 0 and then dropped.
"""

# Functions in the table have the type `WeighFunction`; their definitions do not repeat it.
# mypy: allow-untyped-defs

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from sinklab.config import spec

Function = Callable[[jax.Array], jax.Array]  # element-wise
WeighFunction = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Similarity:
    """An entry of `SIMILARITIES`: the function from scores to weights.

    Attributes:
        weigh: Element-wise function (score, unit) -> (weight, mass), with a finite slope at 0. The weight is the
            numerator of attention, the mass is what the normalizer sums; most similarities return one array twice.
        is_shifted: The largest score that the query sees is subtracted from scores, so that exponentials stay finite.
            The factor must cancel between weight and sum, so such a similarity needs a normalizer that reads the sum.
        uses_unit: `weigh` reads `unit`, the value of a constant 1 (next to e^s) after the shift.
        weigh_by_tanh: The same function with errors of up to 6e-8, for kernels on TPUs whose weights are not divided
            by their sum; tanh is one operation there.
        weigh_by_logistic: The same function for kernels on GPUs, which compute the logistic function in their own
            way. Its derivative costs two operations.
    """

    weigh: WeighFunction
    is_shifted: bool = False
    uses_unit: bool = False
    weigh_by_tanh: WeighFunction | None = None
    weigh_by_logistic: WeighFunction | None = None


def use_as_weight_and_mass(function: Function) -> WeighFunction:
    """Return the `WeighFunction` whose weight and mass are both function(score)."""

    def weigh(score, unit):
        weight = function(score)
        return weight, weight

    return weigh


def weigh_by_softpick(score, unit):
    """Return relu(e^s - 1) and |e^s - 1| (Zuhri et al., 2025)."""
    weight_with_sign = jnp.exp(score) - unit
    return jax.nn.relu(weight_with_sign), jnp.abs(weight_with_sign)


def attach_derivative(function: Function, derivative: Function) -> Function:
    """Return an element-wise function whose derivative is computed from its value."""
    differentiable = jax.custom_jvp(function)
    differentiable.defjvps(lambda tangent, value, x: derivative(value) * tangent)
    return differentiable


# Two forms of the sigmoid, whose derivative w - w^2 is one multiply-add; that of `jax.nn.sigmoid` is w (1 - w). The
# first has an absolute error of 6e-8.
sigmoid_by_tanh = attach_derivative(lambda x: 0.5 * jnp.tanh(0.5 * x) + 0.5, lambda weight: weight - weight * weight)
sigmoid_by_logistic = attach_derivative(jax.nn.sigmoid, lambda weight: weight - weight * weight)

# elu(x) + 1: x + 1 above 0, e^x below. (e^x - 1) + 1 would lose all digits below 0.
elu_plus_one = attach_derivative(
    lambda x: jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0))), lambda weight: jnp.minimum(weight, 1)
)

SIMILARITIES = {
    'exp': Similarity(use_as_weight_and_mass(jnp.exp), is_shifted=True),
    'softpick': Similarity(weigh_by_softpick, is_shifted=True, uses_unit=True),
    'sigmoid': Similarity(
        use_as_weight_and_mass(jax.nn.sigmoid),
        weigh_by_tanh=use_as_weight_and_mass(sigmoid_by_tanh),
        weigh_by_logistic=use_as_weight_and_mass(sigmoid_by_logistic),
    ),
    'elu1': Similarity(use_as_weight_and_mass(elu_plus_one)),
    'relu': Similarity(use_as_weight_and_mass(jax.nn.relu)),
    'identity': Similarity(use_as_weight_and_mass(lambda score: score)),
}


EPSILON = 1e-8  # as in the paper's released code


@dataclasses.dataclass(frozen=True)
class RowSums:
    """Sums over the keys that each query sees, from which a normalizer computes Z.

    Attributes:
        total: Sum of the masses, or of their powers if `power` is not None.
        count: Number of visible keys, without learned keys.
        unit: Value of a constant 1 (next to the masses) after scores were shifted.
        power: The p of `p_norm`, or None.
    """

    total: jax.Array
    count: jax.Array
    unit: jax.Array
    power: float | None


@dataclasses.dataclass(frozen=True)
class Normalizer:
    """An entry of `NORMALIZERS`: the function from a row's sums to Z, by which its weights are divided.

    Attributes:
        compute_z: Function RowSums -> Z, which is never 0, even if a query sees no key.
        uses_unit: `compute_z` reads `RowSums.unit`.
        uses_total: `compute_z` reads `RowSums.total`.
    """

    compute_z: Callable[[RowSums], jax.Array]
    uses_unit: bool = False
    uses_total: bool = True


def raise_to_power(mass: jax.Array, power: float | None) -> jax.Array:
    """Return mass^power, and 0 where the mass is 0, because 0^p has no finite gradient."""
    if power is None:
        return mass
    return jnp.where(mass > 0, jnp.where(mass > 0, mass, 1.0) ** power, 0.0)


def compute_p_norm_z(row: RowSums) -> jax.Array:
    assert row.power is not None, 'p_norm needs a power'
    return jnp.where(row.total > 0, row.total, 1.0) ** (1 / row.power)


NORMALIZERS = {
    'sum': Normalizer(lambda row: row.total + EPSILON),
    'p_norm': Normalizer(compute_p_norm_z),
    'plus_one': Normalizer(lambda row: row.total + row.unit, uses_unit=True),
    'clamped': Normalizer(lambda row: jnp.maximum(jnp.abs(row.total), row.unit), uses_unit=True),
    'count': Normalizer(lambda row: jnp.maximum(row.count, 1).astype(row.total.dtype), uses_total=False),
    'none': Normalizer(lambda row: jnp.ones_like(row.total), uses_total=False),
}


@dataclasses.dataclass(frozen=True)
class Operation:
    """An attention operation: `A_ij = gain * weight(s_ij) / Z(sum_l mass(s_il))`.

    The scores are `s_ij = scale * <q_i, k_j> + bias_ij + offset`. Softmax is the similarity `exp` with the normalizer
    `sum`. docs/guides/add_an_operation.md adds one.

    Attributes:
        name: Name in messages.
        similarity: Entry of `SIMILARITIES`; it gives weight and mass.
        normalizer: Entry of `NORMALIZERS`; it gives Z.
        gain: Factor of all weights.
        power: The p of the normalizer `p_norm`; None for the others.
        offset: Number that is added to every score.
        clip_ends: (gamma, zeta) of clipped softmax (Bondarenko et al., 2306.12929), whose weights are
            clip((zeta - gamma) A + gamma, 0, 1) with the A above; None for A itself.
        scale: Factor of the products of queries and keys; None for 1 / sqrt(K). Kernels take a number, `dense` and
            `chunked` also take an array of one number that jax traces.
    """

    name: str
    similarity: Similarity
    normalizer: Normalizer
    gain: float = 1.0
    power: float | None = None
    offset: float = 0.0
    scale: float | jax.Array | None = None
    clip_ends: tuple[float, float] | None = None

    def clip(self, attention: jax.Array) -> jax.Array:
        """Stretch and clip weights that are divided by Z."""
        if self.clip_ends is None:
            return attention
        gamma, zeta = self.clip_ends
        return jnp.clip((zeta - gamma) * attention + gamma, 0, 1)

    @property
    def uses_unit(self) -> bool:
        """Return whether the similarity or the normalizer reads `unit` (see `Similarity.uses_unit`)."""
        return self.similarity.uses_unit or self.normalizer.uses_unit


def resolve_operation(attention: spec.AttentionConfig, length: int) -> Operation:
    """Return the operation of a config's `model.attention`, for windows of `length` tokens.

    Args:
        attention: The `model.attention` of a config; its offset is in units of log(length).
        length: Number of tokens of a training window.
    """
    return Operation(
        f'{attention.similarity} with {attention.normalizer}',
        SIMILARITIES[attention.similarity],
        NORMALIZERS[attention.normalizer],
        attention.gain,
        attention.power,
        attention.offset * math.log(length),
        clip_ends=None if (attention.gamma, attention.zeta) == (0, 1) else (attention.gamma, attention.zeta),
    )
