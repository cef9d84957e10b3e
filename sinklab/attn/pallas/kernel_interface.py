"""Reductions of the kernels (softmax, linear), with custom gradients, padding and sharding.

The rest of attention is ordinary jnp on the results of these reductions (sinklab/attn/kernel_attention.py), so the
backward passes also take the cotangents of the statistics.

The module of a platform's kernels has these functions. Arrays are BHTK; their lengths are multiples of
`get_padding_multiple`.

- get_padding_multiple(length): a number; `length` queries or keys are padded to a multiple of it.
- explain_unsupported(reduction, score_spec, problem): what these kernels cannot compute, or None.
- forward(reduction, kernel_spec, query_BHTK, key_BGSK, value_BGSV): (output_BHTV, statistics_BHT); the output may be
  in float32.
- backward(reduction, kernel_spec, query_BHTK, key_BGSK, value_BGSV, d_output_BHTV, rows_BHT): (d_query, d_key,
  d_value, d_parameter_HP), from `reduction.compute_backward_rows`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from types import ModuleType

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from sinklab.attn.mask import Mask
from sinklab.parallel import sharding

MASK_VALUE = -1e30  # lse of a query that sees no key
LOG2E = math.log2(math.e)

WeighMasses = Callable[[jax.Array], tuple[jax.Array, Sequence[jax.Array]]]  # score -> (weight, masses)


@dataclasses.dataclass(frozen=True)
class SoftmaxReduction:
    """Softmax reduction: o_i = sum_j e^(s_ij - lse_i) v_j, with the statistic lse_i = log sum_j e^s_ij."""

    num_statistics = 1

    def get_residuals(self, output: jax.Array, statistics: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Return the residuals that the backward pass needs from the forward pass."""
        return output, *statistics

    def compute_backward_rows(
        self, residuals, d_output: jax.Array, d_statistics: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Return (lse, dlse - sum dO * O), with which dS = e^(s - lse) * (dO V^T + dlse - sum dO * O)."""
        output, lse_BHT = residuals
        dot_BHT = jnp.sum(d_output.astype(jnp.float32) * output.astype(jnp.float32), -1)
        return [lse_BHT, d_statistics[0] - dot_BHT]


@dataclasses.dataclass(frozen=True)
class LinearReduction:
    """Linear reduction: u_i = sum_j w(s_ij) v_j, with a statistic sum_j m(s_ij) for each mass m.

    Attributes:
        weigh_and_sum: Function that returns w and all m.
        weigh_by_logistic: The same function, if it is a sigmoid, for kernels with a logistic function of their own.
    """

    weigh_and_sum: WeighMasses
    weigh_by_logistic: WeighMasses | None = None

    @property
    def num_statistics(self) -> int:
        return len(jax.eval_shape(self.weigh_and_sum, jax.ShapeDtypeStruct((1, 1), jnp.float32))[1])

    def get_residuals(self, output: jax.Array, statistics: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        return ()

    def compute_backward_rows(
        self, residuals, d_output: jax.Array, d_statistics: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Return the cotangents c_n, with which dS = w' dO V^T + sum_n m_n' c_n."""
        return list(d_statistics)


Reduction = SoftmaxReduction | LinearReduction


@dataclasses.dataclass(frozen=True)
class ScoreSpec:
    """Scores s_ij = scale <q_i, k_j> + bias_function(parameters of the head, distance_ij) + offset."""

    scale: float
    offset: float = 0.0
    bias_function: Callable | None = None
    is_learned: bool = False  # whether parameters of the bias function need a gradient

    def __mul__(self, factor: float) -> 'ScoreSpec':
        function = self.bias_function
        bias_function = function and (lambda parameters, distance: factor * function(parameters, distance))
        return ScoreSpec(self.scale * factor, self.offset * factor, bias_function, self.is_learned)


@dataclasses.dataclass(frozen=True)
class KernelSpec:
    """Specification of a kernel call, without its reduction, queries, keys and values."""

    score_spec: ScoreSpec
    mask: Mask
    positions: tuple[jax.Array, jax.Array] | None = None  # query_BT and key_BS, needed by a bias function
    parameter_HP: jax.Array | None = None  # of the bias function; H may be 1


def run_kernels(
    kernels: ModuleType,
    reduction: Reduction,
    kernel_spec: KernelSpec,
    query_BTHK: jax.Array,
    key_BSGK: jax.Array,
    value_BSGV: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Run the kernels on the keys of the text, and return (output_BTHV, statistics_BHT).

    Arrays are padded, transposed to BHTK, and sharded over the mesh.
    """
    length = query_BTHK.shape[1]
    num_keys = key_BSGK.shape[1]
    num_heads = query_BTHK.shape[2]
    paddings = query_padding, key_padding = (
        -length % kernels.get_padding_multiple(length),
        -num_keys % kernels.get_padding_multiple(num_keys),
    )
    mask = kernel_spec.mask.pad(after=query_padding)
    parameter_HP = kernel_spec.parameter_HP
    parameter_HP = jnp.zeros((1, 0)) if parameter_HP is None else jnp.asarray(parameter_HP, jnp.float32)
    parameter_HP = jnp.broadcast_to(parameter_HP, (num_heads, parameter_HP.shape[1]))
    positions = zip(kernel_spec.positions or (), paddings, strict=False)
    row_inputs = [] if mask.is_static else [mask.start_BT, mask.end_BT]
    row_inputs += [
        jnp.pad(jnp.asarray(position_BT, jnp.int32), ((0, 0), (0, padding))) for position_BT, padding in positions
    ]
    arrays = [
        move_heads_first(query_BTHK, query_padding),
        move_heads_first(key_BSGK, key_padding),
        move_heads_first(value_BSGV, key_padding),
    ]
    run = make_differentiable(kernels, reduction, dataclasses.replace(kernel_spec, mask=mask))
    output_BHTV, statistics = shard_over_mesh(run, arrays, parameter_HP, row_inputs)(
        *arrays, parameter_HP, row_inputs
    )
    return jnp.swapaxes(output_BHTV[:, :, :length], 1, 2), tuple(row[..., :length] for row in statistics)


def move_heads_first(array_BTHK: jax.Array, padding: int) -> jax.Array:
    """Transpose an array to BHTK, and append `padding` rows of zeros."""
    return jnp.pad(jnp.swapaxes(array_BTHK, 1, 2), ((0, 0), (0, 0), (0, padding), (0, 0)))


def make_differentiable(kernels: ModuleType, reduction: Reduction, kernel_spec: KernelSpec) -> Callable:
    """Make a differentiable function from kernels.

    Returns:
        A function (query_BHTK, key_BGSK, value_BGSV, parameter_HP, row_inputs) -> (output_BHTV, statistics).
    """
    is_static, bounds_2T = kernel_spec.mask.is_static, kernel_spec.mask.bounds_2T

    def bind_arrays(parameter_HP, row_inputs) -> KernelSpec:
        """Return the kernel spec with the mask and positions of this device.

        A static mask is closed over and not passed as an array, so that kernels can inspect it.
        """
        positions = row_inputs if is_static else row_inputs[2:]
        mask = kernel_spec.mask if is_static else Mask(row_inputs[0], row_inputs[1], bounds_2T)
        return KernelSpec(kernel_spec.score_spec, mask, tuple(positions) or None, parameter_HP)

    def forward(query, key, value, parameter_HP, row_inputs):
        outputs = kernels.forward(reduction, bind_arrays(parameter_HP, row_inputs), query, key, value)
        output, statistics = checkpoint_name(outputs, 'attention')  # the backward pass needs both
        residuals = query, key, value, parameter_HP, row_inputs, reduction.get_residuals(output, statistics)
        return (output, statistics), residuals

    def backward(residuals, cotangents):
        query, key, value, parameter_HP, row_inputs, forward_residuals = residuals
        d_output, d_statistics = cotangents
        backward_rows = reduction.compute_backward_rows(forward_residuals, d_output, d_statistics)
        d_output = d_output.astype(value.dtype)
        return *kernels.backward(
            reduction, bind_arrays(parameter_HP, row_inputs), query, key, value, d_output, backward_rows
        ), None

    @jax.custom_vjp
    def run(*arrays):
        return forward(*arrays)[0]

    run.defvjp(forward, backward)
    return run


def shard_over_mesh(
    function: Callable, arrays: Sequence[jax.Array], parameter_HP: jax.Array, row_inputs: Sequence[jax.Array]
) -> Callable:
    """Shard a function over sequences and heads with shard_map, because kernels cannot be partitioned."""
    batch, heads, *_ = sharding.make_auto_partition_spec(arrays[1].shape, ('batch', 'heads', None, None))
    array_spec, row_spec = PartitionSpec(batch, heads), PartitionSpec(batch, heads, None)
    row_input_specs = [PartitionSpec(batch if len(row) > 1 else None) for row in row_inputs]
    statistics = jax.eval_shape(function, *arrays, parameter_HP, list(row_inputs))[1]
    return sharding.shard_map_auto_axes(
        function,
        sharding.get_auto_axes(),
        (array_spec, array_spec, array_spec, PartitionSpec(heads), row_input_specs),
        (array_spec, tuple(row_spec for _ in statistics)),
    )
