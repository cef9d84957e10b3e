"""Position encodings: each one overrides one or more of the three hooks of `PositionEncoding`."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sinklab.attn.spec import RelativePositionBias
from sinklab.config import spec
from sinklab.config.spec import MAX_RELATIVE_DISTANCE
from sinklab.model.layers import INITIALIZATIONS, make_normal_param
from sinklab.parallel.param_einsum import all_gather_param, broadcast_and_cast, param_einsum

NUM_BUCKETS = 32  # buckets of relative positions, as in T5 and in the released code


class PositionEncoding(nnx.Module):
    """Base class, without a position encoding: hooks change nothing. B of position_BT is 1 or the batch."""

    def __init__(self, model: spec.ModelConfig, length: int, rngs: nnx.Rngs):
        pass

    def embed(self, x_BTD: jax.Array, position_BT: jax.Array) -> jax.Array:
        return x_BTD

    def rotate(self, x_BTHK: jax.Array, position_BT: jax.Array) -> jax.Array:
        """Rotate queries or keys."""
        return x_BTHK

    def make_relative_bias(self) -> RelativePositionBias | None:
        """Return the bias of scores as a function of the distance from a key to a later query, or None."""
        return None


class SinusoidalPosition(PositionEncoding):
    """Sinusoids (Vaswani et al., 2017), all sines before all cosines, as in the released code."""

    def embed(self, x_BTD, position_BT):
        angle = position_BT[..., None] * compute_frequencies(x_BTD.shape[-1], 10_000.0)
        return x_BTD + jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1).astype(x_BTD.dtype)


class LearnedPosition(PositionEncoding):
    """A learned vector for each position."""

    def __init__(self, model, length, rngs):
        std = INITIALIZATIONS[model.initialization].embedding(model, model.width)
        self.table_TD = make_normal_param(rngs, (length, model.width), std, (None, 'embed'), inputs=None)

    def embed(self, x_BTD, position_BT):
        return x_BTD + broadcast_and_cast(all_gather_param(self.table_TD)[position_BT], x_BTD.shape, x_BTD.dtype)


class RotaryPosition(PositionEncoding):
    """RoPE (Su et al., 2021), half-split: dimensions i and i + K/2 rotate by t * base^(-2i/K).

    RoPE scaling lowers these frequencies.
    """

    def __init__(self, model, length, rngs):
        self.rotary = model.rotary

    def rotate(self, x_BTHK, position_BT):
        frequency_K = compute_frequencies(x_BTHK.shape[-1], self.rotary.base)
        angle = (position_BT[..., None] * ROPE_SCALINGS[self.rotary.scaling](frequency_K, self.rotary))[:, :, None]
        return rotate_halves(x_BTHK, jnp.cos(angle), jnp.sin(angle))


def rotate_halves(x_BTHK: jax.Array, cos_BT1J: jax.Array, sin_BT1J: jax.Array) -> jax.Array:
    """Rotate dimensions (i, i + K/2) by an angle, in float32.

    With the product, the estimated step of the 1B row on v5e:16x16 takes 289, not 312 ms (benchmarks/step_cost.py).
    """
    return jax.lax.platform_dependent(
        x_BTHK, cos_BT1J, sin_BT1J, tpu=rotate_halves_by_product, default=rotate_halves_by_slices
    )


def rotate_halves_by_slices(x_BTHK: jax.Array, cos_BT1J: jax.Array, sin_BT1J: jax.Array) -> jax.Array:
    left, right = jnp.split(x_BTHK.astype(jnp.float32), 2, -1)
    rotated = jnp.concatenate([left * cos_BT1J - right * sin_BT1J, right * cos_BT1J + left * sin_BT1J], -1)
    return rotated.astype(x_BTHK.dtype)


def rotate_halves_by_product(x_BTHK: jax.Array, cos_BT1J: jax.Array, sin_BT1J: jax.Array) -> jax.Array:
    """Swap the halves with a matrix product, which is exact: slices of half a register take longer on a TPU."""
    identity_JJ = np.eye(x_BTHK.shape[-1] // 2)
    swap_KK = jnp.asarray(np.kron([[0, 1], [-1, 0]], identity_JJ), x_BTHK.dtype)  # (left, right) -> (-right, left)
    swapped_BTHK = jnp.einsum(
        '...K,KL->...L', x_BTHK, swap_KK, precision='highest', preferred_element_type=jnp.float32
    )
    cos_BT1K, sin_BT1K = (jnp.concatenate([array, array], -1) for array in (cos_BT1J, sin_BT1J))
    return (x_BTHK.astype(jnp.float32) * cos_BT1K + swapped_BTHK * sin_BT1K).astype(x_BTHK.dtype)


class AlibiPosition(PositionEncoding):
    """ALiBi: -slope_h * distance (Press et al., 2022), with slope_h = 2^(-8h/H) if H is a power of 2."""

    def __init__(self, model, length, rngs):
        self.heads = model.heads

    def make_relative_bias(self):
        return RelativePositionBias(
            lambda slope, distance: -slope[0] * distance, compute_alibi_slopes(self.heads)[:, None]
        )


class ForgetGate(nnx.Module):
    """Forget gate f = sigmoid(x w + b) of each head, whose bias is sum_{l=j+1..i} log f_l (Lin et al., 2503.02130).

    The bias is minus the distance of query and key in positions of each head, -sum_{l<=i} log f_l.
    """

    relative_bias = RelativePositionBias(lambda _, distance: -distance, np.zeros((1, 0)), is_elementwise=False)

    def __init__(self, model: spec.ModelConfig, rngs: nnx.Rngs):
        std = INITIALIZATIONS[model.initialization].linear(model, model.width)
        self.weight_DH = make_normal_param(rngs, (model.width, model.heads), std, ('embed', 'heads'), inputs=1)
        self.bias_H = nnx.Param(jnp.zeros(model.heads), axes=('heads',), inputs=None)

    def compute_positions(self, x_BTD: jax.Array) -> jax.Array:
        """Return position_BTH in float32."""
        score_BTH = param_einsum('BTD,DH->BTH', x_BTD, self.weight_DH).astype(jnp.float32) + self.bias_H[...]
        return -jnp.cumsum(jax.nn.log_sigmoid(score_BTH), 1)


class RelativePaper(PositionEncoding):
    """An unlearned bias of the distance, one of RELATIVE_BIASES."""

    def __init__(self, model, length, rngs):
        self.name = model.position

    def make_relative_bias(self):
        function = RELATIVE_BIASES[self.name]
        return RelativePositionBias(lambda _, distance: function(distance), np.zeros((1, 0)))


class RelativeT5(PositionEncoding):
    """T5 bias: a learned number for each bucket and head, shared by all layers (Raffel et al., 2020)."""

    def __init__(self, model, length, rngs):
        std = INITIALIZATIONS[model.initialization].linear(model, model.width)
        self.table_RH = make_normal_param(rngs, (NUM_BUCKETS, model.heads), std, (None, 'heads'), inputs=None)

    def make_relative_bias(self):
        def look_up(number_R: Sequence[jax.Array], distance_B1TS: jax.Array) -> jax.Array:
            table_RH = jnp.stack(number_R)[:, :, 0, 0]
            return jnp.moveaxis(table_RH[compute_buckets(distance_B1TS[:, 0]).astype(jnp.int32)], -1, 1)

        return RelativePositionBias(look_up, self.table_RH[...].T, is_elementwise=False)


def compute_frequencies(width: int, base: float) -> jax.Array:
    """Compute base^(-2i/width) for i below width/2."""
    return base ** (-jnp.arange(0, width, 2) / width)


def scale_llama3_frequencies(frequency_K: jax.Array, rotary: spec.RotaryConfig) -> jax.Array:
    """Scale low frequencies by 1 / factor, as Llama 3.1 does.

    Frequencies with fewer than `slow` turns in `length` tokens are scaled, those with more than `fast` turns are not,
    and those between are interpolated linearly in the number of turns.
    """
    turns_K = rotary.length * frequency_K / (2 * np.pi)
    unscaled_share_K = jnp.clip((turns_K - rotary.slow) / (rotary.fast - rotary.slow), 0, 1)
    return (1 - unscaled_share_K) * frequency_K / rotary.factor + unscaled_share_K * frequency_K


def compute_buckets(distance: jax.Array, floor_first: bool = False) -> jax.Array:
    """Compute buckets of distances in float32: exact below 16, logarithmic to 128, one for the rest."""
    exact = NUM_BUCKETS // 2
    log_distance = jnp.log(jnp.maximum(distance, exact) / exact) / np.log(MAX_RELATIVE_DISTANCE / exact)
    log_bucket = jnp.floor(log_distance) * exact if floor_first else jnp.floor(log_distance * exact)
    return jnp.where(distance < exact, distance, jnp.minimum(exact + log_bucket, NUM_BUCKETS - 1))


def compute_alibi_slopes(heads: int) -> np.ndarray:
    """Compute the ALiBi slopes 2^(-8h/H) of H heads.

    If H is no power of 2, these are the slopes of the next lower power of 2, followed by every other slope of the
    next higher one.
    """
    power = 2 ** int(np.log2(heads))
    first_slopes = 2.0 ** (-8 * np.arange(1, power + 1) / power)
    extra_slopes = 2.0 ** (-8 * np.arange(1, 2 * power, 2) / (2 * power))
    return np.concatenate([first_slopes, extra_slopes[: heads - power]]).astype(np.float32)


ROPE_SCALINGS = {
    'none': lambda frequency_K, rotary: frequency_K,
    'linear': lambda frequency_K, rotary: frequency_K / rotary.factor,  # position interpolation (Chen et al., 2023)
    'llama3': scale_llama3_frequencies,
}
RELATIVE_BIASES: dict[str, Callable[[jax.Array], jax.Array]] = {
    'relative_paper_code': compute_buckets,  # 0 to 31; sail-sg/Attention-Sink, model_relpos.py
    'relative_paper_printed': functools.partial(compute_buckets, floor_first=True),  # Equation 7 of the paper
    'relative_paper_negative': lambda distance: -compute_buckets(distance),  # favours the nearest keys
}
POSITIONS = {
    'none': PositionEncoding,
    'absolute': SinusoidalPosition,
    'learned': LearnedPosition,
    **dict.fromkeys(RELATIVE_BIASES, RelativePaper),
    'relative_t5': RelativeT5,
    'alibi': AlibiPosition,
    'rotary': RotaryPosition,
}
