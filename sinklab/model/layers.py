"""Layers: RMSNorm and its placements, feature maps, gates, the feed-forward network, and initializations."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from sinklab.attn.operations import elu_plus_one
from sinklab.config import spec
from sinklab.errors import UserError
from sinklab.parallel.param_einsum import param_einsum
from sinklab.parallel.sharding import constrain_sharding

# (config, number of inputs of the linear map) -> standard deviation
StdFunction = Callable[[spec.ModelConfig, int], float]


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


def gpt2_std(model: spec.ModelConfig, inputs: int) -> float:
    return 0.02


def gpt2_residual_std(model: spec.ModelConfig, inputs: int) -> float:
    return 0.02 / (2 * model.layers) ** 0.5


INITIALIZATIONS = {
    'released': Initialization(fan_in_std, fan_in_std, fan_in_std, released_ffn_std),  # sail-sg/Attention-Sink
    'released_even': Initialization(fan_in_std, fan_in_std, fan_in_std, depth_scaled_std),
    'gpt2': Initialization(gpt2_std, gpt2_std, gpt2_residual_std, gpt2_residual_std),  # Radford et al., 2019
    # The standard deviations of PyTorch's defaults.
    'torch': Initialization(lambda *_: 1.0, torch_linear_std, torch_linear_std, torch_linear_std),
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


class RMSNorm(nnx.Module):
    """RMSNorm over the last axis: x / sqrt(mean(x^2) + epsilon) * gain.

    It is computed in float32 and returned in the dtype of x.
    """

    def __init__(self, width: int, epsilon: float):
        self.epsilon = epsilon
        self.gain_D = nnx.Param(jnp.ones(width), axes=(None,), inputs=None)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        x = x_BTD.astype(jnp.float32)
        x *= jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + self.epsilon)
        return (x * self.gain_D[...]).astype(x_BTD.dtype)


class Identity(nnx.Module):
    """The identity, in place of a norm or a bias that the config switches off."""

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return x_BTD


@dataclasses.dataclass(frozen=True)
class NormPlacement:
    before: bool = False  # norm of the input of a branch
    after: bool = False  # norm of the output of a branch
    joined: bool = False  # norm of the sum of branch output and residual stream
    final: bool = True  # norm of the residual stream before the head


NORM_PLACEMENTS = {
    'pre': NormPlacement(before=True),
    'post': NormPlacement(joined=True, final=False),
    'sandwich': NormPlacement(before=True, after=True),
    'res_post': NormPlacement(after=True),
}


class GatedNorm(RMSNorm):
    """RMSNorm n times sigmoid(swish(n W_in) W_out), a gate of rank 16 (Qiu et al., 2601.22966)."""

    def __init__(self, model: spec.ModelConfig, rngs: nnx.Rngs):
        super().__init__(model.width, model.norm_epsilon)
        std = INITIALIZATIONS[model.initialization].linear
        shape = model.width, GATED_NORM_RANK
        self.in_DR = make_normal_param(rngs, shape, std(model, shape[0]), ('embed', None), inputs=1)
        self.out_RD = make_normal_param(rngs, shape[::-1], std(model, shape[1]), (None, 'embed'), inputs=1)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        normed_BTD = super().__call__(x_BTD)
        hidden_BTR = jax.nn.silu(param_einsum('BTD,DR->BTR', normed_BTD, self.in_DR))
        return normed_BTD * jax.nn.sigmoid(param_einsum('BTR,RD->BTD', hidden_BTR, self.out_RD))


class DynamicTanh(nnx.Module):
    """DynamicTanh: gain * tanh(alpha x) + bias, with one alpha for all dimensions (Zhu et al., 2503.10622)."""

    def __init__(self, model: spec.ModelConfig, rngs: nnx.Rngs):
        self.alpha = nnx.Param(jnp.full(1, 0.5), axes=(None,), inputs=None)
        self.gain_D = nnx.Param(jnp.ones(model.width), axes=(None,), inputs=None)
        self.bias_D = nnx.Param(jnp.zeros(model.width), axes=(None,), inputs=None)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        x = jnp.tanh(self.alpha[...] * x_BTD.astype(jnp.float32))
        return (x * self.gain_D[...] + self.bias_D[...]).astype(x_BTD.dtype)


GATED_NORM_RANK = 16
NORMS = {
    'rms': lambda model, rngs: RMSNorm(model.width, model.norm_epsilon),
    'gated_rms': GatedNorm,
    'dynamic_tanh': DynamicTanh,
}


def make_norm(enabled: bool, model: spec.ModelConfig, rngs: nnx.Rngs) -> nnx.Module:
    """Make a norm of the residual stream or of a branch."""
    return NORMS[model.norm_kind](model, rngs) if enabled else Identity()


def make_head_norm(enabled: bool, model: spec.ModelConfig, width: int) -> RMSNorm | Identity:
    """Make a norm of queries, keys or outputs of each head."""
    return RMSNorm(width, model.norm_epsilon) if enabled else Identity()


class BranchNorms(nnx.Module):
    """The norms of one branch: joined(x + after(f(before(x))))."""

    def __init__(self, model: spec.ModelConfig, rngs: nnx.Rngs):
        placement = NORM_PLACEMENTS[model.norm]
        self.before = make_norm(placement.before, model, rngs)
        self.after = make_norm(placement.after, model, rngs)
        self.joined = make_norm(placement.joined, model, rngs)


class Elu1Map(nnx.Module):
    """The feature map elu(x) + 1."""

    def __call__(self, x_BTHK: jax.Array) -> jax.Array:
        return elu_plus_one(x_BTHK)


class MLPMap(nnx.Module):
    """The feature map relu(x W_in) W_out, shared by queries, keys and all heads of a layer."""

    def __init__(self, model, rngs):
        std = INITIALIZATIONS[model.initialization].linear(model, model.head_width)
        shape = (model.head_width, model.head_width)
        self.in_KK = make_normal_param(rngs, shape, std, (None, None), inputs=1)
        self.out_KK = make_normal_param(rngs, shape, std, (None, None), inputs=1)

    def __call__(self, x_BTHK):
        hidden_BTHJ = jax.nn.relu(param_einsum('BTHK,KJ->BTHJ', x_BTHK, self.in_KK))
        return param_einsum('BTHJ,JK->BTHK', hidden_BTHJ, self.out_KK)


FEATURE_MAPS = {
    'identity': lambda model, rngs: Identity(),
    'elu1': lambda model, rngs: Elu1Map(),
    'mlp': MLPMap,
}


@dataclasses.dataclass(frozen=True)
class GateKind:
    input: Literal['x', 'value']  # input of the gate: the layer's normed input, or the token's own value
    target: Literal['value', 'output']  # the array that the gate multiplies
    is_elementwise: bool  # one gate for each dimension of a head, or one for the whole head
    is_shared: bool = False  # the same for all heads


GATES = {
    'none': None,
    'elementwise': GateKind('x', 'output', is_elementwise=True),  # Qiu et al., 2025, as the next three; their G1
    'headwise': GateKind('x', 'output', is_elementwise=False),
    'shared': GateKind('x', 'output', is_elementwise=True, is_shared=True),
    'value': GateKind('x', 'value', is_elementwise=True),  # their G2
    'value_state': GateKind('value', 'output', is_elementwise=False),  # Bu et al., 2025
}


def get_gate_shape(model: spec.ModelConfig, value_width: int) -> tuple[int, int, int]:
    """Return the shape DHK of the weight of a gate; zeros if the model has no gate."""
    kind = GATES[model.gate]
    if kind is None:
        return 0, 0, 0
    inputs = model.width if kind.input == 'x' else value_width
    return inputs, 1 if kind.is_shared else model.heads, value_width if kind.is_elementwise else 1


class Gate(nnx.Module):
    def __init__(self, model: spec.ModelConfig, value_width: int, rngs: nnx.Rngs):
        self.kind = kind = GATES[model.gate]
        if kind is None:
            return
        shape = get_gate_shape(model, value_width)
        axes = ('embed' if kind.input == 'x' else None, None if kind.is_shared else 'heads', None)
        std = INITIALIZATIONS[model.initialization].linear(model, shape[0])
        self.weight_DHK = make_normal_param(rngs, shape, std, axes, inputs=1)

    def __call__(self, target: str, array_BTHK: jax.Array, x_BTD: jax.Array, value_BTHK: jax.Array) -> jax.Array:
        """Multiply an array by the gate if the gate is for `target`; return the array itself otherwise."""
        if self.kind is None or self.kind.target != target:
            return array_BTHK
        return array_BTHK * self.compute(x_BTD, value_BTHK)

    def compute(self, x_BTD: jax.Array, value_BTHK: jax.Array) -> jax.Array:
        """Compute the gate, from 0 to 1."""
        if self.kind.input == 'x':
            return jax.nn.sigmoid(param_einsum('BTD,DHK->BTHK', x_BTD, self.weight_DHK))
        return jax.nn.sigmoid(param_einsum('BTHD,DHK->BTHK', value_BTHK, self.weight_DHK))


class Exclusion(nnx.Module):
    """Exclusive self-attention: y - share (y . v) v / |v|^2, with the value v of the query's own token.

    The share is 1 (Zhai, 2603.09078), or a parameter of each head that is 0 at first.
    """

    def __init__(self, model: spec.ModelConfig):
        self.kind = model.exclusive
        if self.kind == 'gated':
            self.share_H = nnx.Param(jnp.zeros(model.heads), axes=('heads',), inputs=None)

    def __call__(self, head_BTHK: jax.Array, value_BTHK: jax.Array) -> jax.Array:
        if self.kind == 'none':
            return head_BTHK
        head = head_BTHK.astype(jnp.float32)
        value = value_BTHK.astype(jnp.float32)
        component = (head * value).sum(-1, keepdims=True) / jnp.maximum((value**2).sum(-1, keepdims=True), 1e-12)
        share = self.share_H[...][:, None] if self.kind == 'gated' else 1
        return (head - share * component * value).astype(head_BTHK.dtype)


exact_gelu = functools.partial(jax.nn.gelu, approximate=False)
FFN_ACTIVATIONS = {  # activation, whether it is a gate
    'relu': (jax.nn.relu, False),
    'gelu': (exact_gelu, False),
    'swish': (jax.nn.silu, False),
    'reglu': (jax.nn.relu, True),
    'geglu': (exact_gelu, True),
    'geglu_tanh': (jax.nn.gelu, True),  # by default, gelu is approximated by tanh
    'swiglu': (jax.nn.silu, True),
}


def register_ffn_activation(name: str, activation: Callable[[jax.Array], jax.Array], is_gated: bool = False) -> None:
    """Add an activation of your own, or replace it: `model.ffn=NAME` of a config selects it.

    Args:
        name: Its name.
        activation: An element-wise function of jax arrays.
        is_gated: Whether the FFN is (activation(x W_gate) * x W_in) W_out, as SwiGLU.

    Raises:
        UserError: An activation of sinklab has the name.
    """
    if name in FFN_ACTIVATIONS:
        if f'FFN activation {name}' not in spec.REGISTERED:
            raise UserError(f'the FFN activation {name} exists already; choose another name')
        jax.clear_caches()  # compiled programs have the function that is replaced
    spec.REGISTERED.add(f'FFN activation {name}')
    FFN_ACTIVATIONS[name] = activation, is_gated
    spec.FFN_NAMES[:] = FFN_ACTIVATIONS


class FFN(nnx.Module):
    """Feed-forward network: activation(x W_in) W_out, or (activation(x W_gate) * x W_in) W_out.

    The second form is gated (Shazeer, 2020).
    """

    def __init__(self, model: spec.ModelConfig, rngs: nnx.Rngs):
        init = INITIALIZATIONS[model.initialization]
        input_args = (model.width, model.ffn_width), init.linear(model, model.width), ('embed', 'ffn')
        self.activation, is_gated = FFN_ACTIVATIONS[model.ffn]
        self.gate_DF = make_normal_param(rngs, *input_args, inputs=1) if is_gated else None
        self.in_DF = make_normal_param(rngs, *input_args, inputs=1)
        std = init.ffn_output(model, model.ffn_width)
        self.out_FD = make_normal_param(rngs, (model.ffn_width, model.width), std, ('ffn', 'embed'), inputs=1)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        in_BTF = checkpoint_name(param_einsum('BTD,DF->BTF', x_BTD, self.in_DF), 'ffn')
        gate_BTF = (
            None if self.gate_DF is None else checkpoint_name(param_einsum('BTD,DF->BTF', x_BTD, self.gate_DF), 'ffn')
        )
        hidden_BTF = constrain_sharding(activate(self.activation, in_BTF, gate_BTF), 'batch', None, 'ffn')
        return param_einsum('BTF,FD->BTD', hidden_BTF, self.out_FD)


@functools.partial(jax.checkpoint, static_argnums=0, prevent_cse=False)  # the scan over layers already prevents CSE
def activate(activation: Callable, in_BTF: jax.Array, gate_BTF: jax.Array | None) -> jax.Array:
    """Compute activation(in), or activation(gate) * in; the backward pass recomputes intermediate results."""
    return activation(in_BTF) if gate_BTF is None else in_BTF * activation(gate_BTF)
