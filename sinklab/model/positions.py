"""Positions: what tells a query where a key stands. A position acts at one or more of the three hooks below."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sinklab import spec
from sinklab.attend.bias import Curve
from sinklab.model.initialization import INITIALIZATIONS, normal
from sinklab.model.parameter import spread, whole
from sinklab.spec import FARTHEST

BUCKETS = 32  # of the relative positions: those of T5 and of the released code


class Position(nnx.Module):
    """No position: every hook leaves things as they are. B of position_BT is 1 or the batch."""

    def __init__(self, model: spec.Model, length: int, rngs: nnx.Rngs):
        pass

    def embed(self, x_BTD: jax.Array, position_BT: jax.Array) -> jax.Array:
        return x_BTD

    def rotate(self, x_BTHK: jax.Array, position_BT: jax.Array) -> jax.Array:
        """Queries and keys alike."""
        return x_BTHK

    def curve(self) -> Curve | None:
        """What is added to the scaled scores, as a function of distance: how far a key lies before a query, or 0."""
        return None


class Absolute(Position):
    """Sinusoids (Vaswani et al., 2017), all sines left of all cosines, as released."""

    base = 10_000.0

    def embed(self, x_BTD, position_BT):
        angle = position_BT[..., None] * frequencies(x_BTD.shape[-1], self.base)
        return x_BTD + jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1).astype(x_BTD.dtype)


class Learned(Position):
    """A vector for each place."""

    def __init__(self, model, length, rngs):
        std = INITIALIZATIONS[model.initialization].embedding(model, model.width)
        self.table_TD = normal(rngs, (length, model.width), std, (None, 'embed'), inputs=None)

    def embed(self, x_BTD, position_BT):
        return x_BTD + spread(whole(self.table_TD)[position_BT], x_BTD.shape, x_BTD.dtype)


class Rotary(Position):
    """RoPE (Su et al., 2021), half-split: dimensions i and i + K/2 turn by t * base^(-2i/K), or slower."""

    def __init__(self, model, length, rngs):
        self.rotary = model.rotary

    def rotate(self, x_BTHK, position_BT):
        frequency_K = frequencies(x_BTHK.shape[-1], self.rotary.base)
        angle = (position_BT[..., None] * SCALINGS[self.rotary.scaling](frequency_K, self.rotary))[:, :, None]
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        left, right = jnp.split(x_BTHK.astype(jnp.float32), 2, -1)
        turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)
        return turned.astype(x_BTHK.dtype)


class Alibi(Position):
    """-slope_h * distance (Press et al., 2022), slope_h = 2^(-8h/H) where H is a power of 2."""

    def __init__(self, model, length, rngs):
        self.heads = model.heads

    def curve(self):
        return Curve(lambda slope, distance: -slope[0] * distance, slopes(self.heads)[:, None])


class RelativePaperCode(Position):
    """The number of the distance's bucket, 0 to 31, unlearned (sail-sg/Attention-Sink, model_relpos.py)."""

    def curve(self):
        return Curve(lambda _, distance: buckets(distance), np.zeros((1, 0)))


class RelativePaperPrinted(Position):
    """Equation 7 of the paper, whose floor is taken before the multiplication."""

    def curve(self):
        return Curve(lambda _, distance: buckets(distance, floor_first=True), np.zeros((1, 0)))


class RelativePaperNegative(Position):
    """The number of the distance's bucket with a minus sign, which favours the nearest keys."""

    def curve(self):
        return Curve(lambda _, distance: -buckets(distance), np.zeros((1, 0)))


class RelativeT5(Position):
    """A learned number for each bucket and head, the same in all layers (Raffel et al., 2020)."""

    def __init__(self, model, length, rngs):
        std = INITIALIZATIONS[model.initialization].linear(model, model.width)
        self.table_RH = normal(rngs, (BUCKETS, model.heads), std, (None, 'heads'), inputs=None)

    def curve(self):
        def look_up(number_R: Sequence[jax.Array], distance_B1TS: jax.Array) -> jax.Array:
            table_RH = jnp.stack(number_R)[:, :, 0, 0]
            return jnp.moveaxis(table_RH[buckets(distance_B1TS[:, 0]).astype(jnp.int32)], -1, 1)

        return Curve(look_up, self.table_RH[...].T, elementwise=False)


def frequencies(width: int, base: float) -> jax.Array:
    """base^(-2i/width) for i below width/2."""
    return base ** (-jnp.arange(0, width, 2) / width)


def unscaled(frequency_K: jax.Array, rotary: spec.Rotary) -> jax.Array:
    return frequency_K


def linear(frequency_K: jax.Array, rotary: spec.Rotary) -> jax.Array:
    """Positions between those that were trained (Chen et al., 2023)."""
    return frequency_K / rotary.factor


def llama3(frequency_K: jax.Array, rotary: spec.Rotary) -> jax.Array:
    """f / factor of what turns less than `slow` times in `length`, f of what turns more than `fast` times, between
    them what lies between (Llama 3.1)."""
    turns_K = rotary.length * frequency_K / (2 * np.pi)
    share_K = jnp.clip((turns_K - rotary.slow) / (rotary.fast - rotary.slow), 0, 1)
    return (1 - share_K) * frequency_K / rotary.factor + share_K * frequency_K


def buckets(distance: jax.Array, floor_first: bool = False) -> jax.Array:
    """Each distance below 16 by itself, those up to 128 by their logarithm, the rest together; in float32."""
    exact = BUCKETS // 2
    octave = jnp.log(jnp.maximum(distance, exact) / exact) / np.log(FARTHEST / exact)
    beyond = jnp.floor(octave) * exact if floor_first else jnp.floor(octave * exact)
    return jnp.where(distance < exact, distance, jnp.minimum(exact + beyond, BUCKETS - 1))


def slopes(heads: int) -> np.ndarray:
    """2^(-8h/H); other H take those of the power of 2 below, then every other one of the power above."""
    power = 2 ** int(np.log2(heads))
    own = 2.0 ** (-8 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-8 * np.arange(1, 2 * power, 2) / (2 * power))
    return np.concatenate([own, between[: heads - power]]).astype(np.float32)


SCALINGS = {'none': unscaled, 'linear': linear, 'llama3': llama3}
POSITIONS = {
    'none': Position,
    'absolute': Absolute,
    'learned': Learned,
    'relative_paper_code': RelativePaperCode,
    'relative_paper_printed': RelativePaperPrinted,
    'relative_paper_negative': RelativePaperNegative,
    'relative_t5': RelativeT5,
    'alibi': Alibi,
    'rotary': Rotary,
}
