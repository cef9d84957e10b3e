"""Initialisations, as the standard deviations of their normal distributions, and parameters with named axes."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from sinklab.config import spec

StdFunction = Callable[[spec.ModelConfig, int], float]  # of a map with so many inputs


@dataclasses.dataclass(frozen=True)
class Initialization:
    embedding: StdFunction  # its inputs are its width
    linear: StdFunction
    attention_output: StdFunction
    ffn_output: StdFunction


def fan_in_std(model: spec.ModelConfig, inputs: int) -> float:
    return (2 / (5 * inputs)) ** 0.5


def depth_scaled_std(model: spec.ModelConfig, inputs: int) -> float:
    return inputs**-0.5 / model.layers


def released_ffn_std(model: spec.ModelConfig, inputs: int) -> float:
    """The released code scales by depth where the FFN is SwiGLU, and only there."""
    return depth_scaled_std(model, inputs) if model.ffn == 'swiglu' else fan_in_std(model, inputs)


def torch_linear_std(model: spec.ModelConfig, inputs: int) -> float:
    return (3 * inputs) ** -0.5


def unit_std(model: spec.ModelConfig, inputs: int) -> float:
    return 1.0


def constant_std(model: spec.ModelConfig, inputs: int) -> float:
    return 0.02


def gpt2_residual_std(model: spec.ModelConfig, inputs: int) -> float:
    return 0.02 / (2 * model.layers) ** 0.5


INITIALIZATIONS = {
    'released': Initialization(
        fan_in_std, fan_in_std, fan_in_std, released_ffn_std
    ),  # sail-sg/Attention-Sink, model.py
    'released_even': Initialization(fan_in_std, fan_in_std, fan_in_std, depth_scaled_std),
    'gpt2': Initialization(constant_std, constant_std, gpt2_residual_std, gpt2_residual_std),  # Radford et al., 2019
    'torch': Initialization(
        unit_std, torch_linear_std, torch_linear_std, torch_linear_std
    ),  # the deviations of PyTorch's defaults
}


def make_normal_param(
    rngs: nnx.Rngs, shape: tuple[int, ...], std: float, axes: tuple[str | None, ...], *, inputs: int | None
) -> nnx.Param:
    """N(0, std^2) of `shape`, each dimension named by a logical axis of sharding.RULES.

    `inputs` says how many of them a map reads, which come first; None: no map (a vector, a table, the head).
    """
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes, inputs=inputs)
