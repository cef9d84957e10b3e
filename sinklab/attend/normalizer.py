"""Normalizers: Z, what the weights of a row are divided by, from sums over its masses."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

EPSILON = 1e-8  # of the released code


@dataclasses.dataclass(frozen=True)
class RowSums:
    """What a normalizer computes Z from: sums over the keys that each query sees.

    Attributes:
        total: Sum of the masses, or of their powers where `power` is given.
        count: Number of those keys, without learned columns.
        unit: What a 1 beside the masses is after scores were shifted.
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
        close: Function Row -> Z, never 0, also where a query sees no key.
        uses_unit: `close` reads `Row.unit`.
        uses_total: `close` reads `Row.total`.
    """

    compute_z: Callable[[RowSums], jax.Array]
    uses_unit: bool = False
    uses_total: bool = True


def raise_to_power(mass: jax.Array, power: float | None) -> jax.Array:
    """mass^power, 0 where there is no mass: 0^p has no finite gradient."""
    if power is None:
        return mass
    return jnp.where(mass > 0, jnp.where(mass > 0, mass, 1.0) ** power, 0.0)


def row_sum(row: RowSums) -> jax.Array:
    return row.total + EPSILON


def p_norm(row: RowSums) -> jax.Array:
    assert row.power is not None, 'p_norm needs a power'
    return jnp.where(row.total > 0, row.total, 1.0) ** (1 / row.power)


def plus_one(row: RowSums) -> jax.Array:
    return row.total + row.unit


def clamped_sum(row: RowSums) -> jax.Array:
    return jnp.maximum(jnp.abs(row.total), row.unit)


def key_count(row: RowSums) -> jax.Array:
    return jnp.maximum(row.count, 1).astype(row.total.dtype)


def constant_one(row: RowSums) -> jax.Array:
    return jnp.ones_like(row.total)


NORMALIZERS = {
    'sum': Normalizer(row_sum),
    'p_norm': Normalizer(p_norm),
    'plus_one': Normalizer(plus_one, uses_unit=True),
    'clamped': Normalizer(clamped_sum, uses_unit=True),
    'count': Normalizer(key_count, uses_total=False),
    'none': Normalizer(constant_one, uses_total=False),
}
