"""Initialisations, as the standard deviations of their normal distributions, and parameters with named axes."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from sinklab import spec

Deviation = Callable[[spec.Model, int], float]  # of a map with so many inputs


@dataclasses.dataclass(frozen=True)
class Initialization:
    embedding: Deviation  # its inputs are its width
    linear: Deviation
    attention_output: Deviation
    ffn_output: Deviation


def fan_in(model: spec.Model, inputs: int) -> float:
    return (2 / (5 * inputs)) ** 0.5


def shallow(model: spec.Model, inputs: int) -> float:
    return inputs**-0.5 / model.layers


def as_released(model: spec.Model, inputs: int) -> float:
    """The released code scales by depth where the FFN is SwiGLU, and only there."""
    return shallow(model, inputs) if model.ffn == 'swiglu' else fan_in(model, inputs)


def torch_linear(model: spec.Model, inputs: int) -> float:
    return (3 * inputs) ** -0.5


def one(model: spec.Model, inputs: int) -> float:
    return 1.0


def constant(model: spec.Model, inputs: int) -> float:
    return 0.02


def residual(model: spec.Model, inputs: int) -> float:
    return 0.02 / (2 * model.layers) ** 0.5


INITIALIZATIONS = {
    'released': Initialization(fan_in, fan_in, fan_in, as_released),  # sail-sg/Attention-Sink, model.py
    'released_even': Initialization(fan_in, fan_in, fan_in, shallow),
    'gpt2': Initialization(constant, constant, residual, residual),  # Radford et al., 2019
    'torch': Initialization(one, torch_linear, torch_linear, torch_linear),  # the deviations of PyTorch's defaults
}


def normal(
    rngs: nnx.Rngs, shape: tuple[int, ...], std: float, axes: tuple[str | None, ...], *, inputs: int | None
) -> nnx.Param:
    """N(0, std^2) of `shape`, each dimension named by a logical axis of sharding.RULES.

    `inputs` says how many of them a map reads, which come first; None: no map (a vector, a table, the head).
    """
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes, inputs=inputs)
