"""Initializations (standard deviations of normal distributions), and parameters with logical axes."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from sinklab.config import spec

StdFunction = Callable[
    [spec.ModelConfig, int], float
]  # (config, number of inputs of the linear map) -> standard deviation


@dataclasses.dataclass(frozen=True)
class Initialization:
    """Standard deviations of the groups of parameters."""

    embedding: StdFunction  # its number of inputs is the embedding width
    linear: StdFunction
    attention_output: StdFunction
    ffn_output: StdFunction


def fan_in_std(model: spec.ModelConfig, inputs: int) -> float:
    return (2 / (5 * inputs)) ** 0.5


def depth_scaled_std(model: spec.ModelConfig, inputs: int) -> float:
    return inputs**-0.5 / model.layers


def released_ffn_std(model: spec.ModelConfig, inputs: int) -> float:
    """Return the std of the released code, which scales by depth only if the FFN is SwiGLU."""
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
    ),  # the standard deviations of PyTorch's defaults
}


def make_normal_param(
    rngs: nnx.Rngs, shape: tuple[int, ...], std: float, axes: tuple[str | None, ...], *, inputs: int | None
) -> nnx.Param:
    """Make a parameter with entries from N(0, std^2).

    Args:
        rngs: Random number generators.
        shape: Shape of the parameter.
        std: Standard deviation.
        axes: Logical axis of each dimension, a name of `sharding.RULES` or None.
        inputs: Number of leading dimensions that are inputs of a linear map; None if the parameter is no linear map
            (a vector, a table, the head).
    """
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes, inputs=inputs)
