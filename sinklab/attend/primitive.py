"""What kernels compute and differentiate: softmax (o, lse) and linear (sum of weights times values, sums of masses).

Everything else about attention is ordinary jnp on these (epilogue.py), so their backward passes take the cotangents
of the statistics as well.
"""

import dataclasses
from collections.abc import Callable, Sequence
from types import ModuleType

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from sinklab import sharding
from sinklab.attend.bias import Bias
from sinklab.attend.mask import Mask

NOTHING = -1e30  # lse of a query that sees nothing

Weigh = Callable[[jax.Array], tuple[jax.Array, Sequence[jax.Array]]]  # score -> (weight, masses)


@dataclasses.dataclass(frozen=True)
class Scores:
    """s_ij = scale <q_i, k_j> + curve(parameters of the head, distance_ij) + offset."""

    scale: float
    offset: float
    curve: Callable | None
    learned: bool = False  # whether the parameters of the curve want a gradient

    def __mul__(self, factor: float) -> 'Scores':
        curve = self.curve and (lambda parameters, distance: factor * self.curve(parameters, distance))
        return Scores(self.scale * factor, self.offset * factor, curve, self.learned)


def primitive(
    kernels: ModuleType,
    scores: Scores,
    weigh: Weigh | None,
    query_BTHK: jax.Array,
    key_BSGK: jax.Array,
    value_BSGV: jax.Array,
    mask: Mask,
    bias: Bias,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """(output_BTHV, statistics_BHT of the text): softmax without `weigh`, else linear. Padded, laid out, sharded.

    The output is in float32 where kernels leave it so.
    """
    length, keys = query_BTHK.shape[1], key_BSGK.shape[1]
    more, extra = -length % kernels.block(length), -keys % kernels.block(keys)
    mask = mask.padded(after=more)
    parameter_HP = jnp.zeros((1, 0)) if bias.curve is None else jnp.asarray(bias.curve.parameter_HP, jnp.float32)
    parameter_HP = jnp.broadcast_to(parameter_HP, (query_BTHK.shape[2], parameter_HP.shape[1]))
    rows = [] if mask.static else [mask.start_BT, mask.end_BT]
    if scores.curve is not None:
        places = (bias.query_BT, more), (bias.key_BS[:, -keys:], extra)
        rows += [jnp.pad(jnp.asarray(at_BT, jnp.int32), ((0, 0), (0, n))) for at_BT, n in places]
    heads_first = lambda x, n: jnp.pad(jnp.swapaxes(x, 1, 2), ((0, 0), (0, 0), (0, n), (0, 0)))  # noqa: E731
    arrays = heads_first(query_BTHK, more), heads_first(key_BSGK, extra), heads_first(value_BSGV, extra)
    run = sharded(differentiable(kernels, scores, weigh, mask), arrays, parameter_HP, rows)
    output_BHTV, statistics = run(*arrays, parameter_HP, rows)
    return jnp.swapaxes(output_BHTV[:, :, :length], 1, 2), tuple(row[..., :length] for row in statistics)


def differentiable(kernels: ModuleType, scores: Scores, weigh: Weigh | None, mask: Mask) -> Callable:
    """run(query_BHTK, key_BGSK, value_BGSV, parameter_HP, rows) -> (output_BHTV, statistics), with its gradient."""

    def placed(rows):
        """The mask and the positions; a static mask is closed over, so that kernels can look at it."""
        edges, positions = ((), rows) if mask.static else (rows[:2], rows[2:])
        return Mask(*edges, mask.hull_2T) if edges else mask, tuple(positions) or None

    def forward(query, key, value, parameter_HP, rows):
        output, statistics = kernels.forward(scores, weigh, query, key, value, *placed(rows), parameter_HP)
        saved = (output, *statistics) if weigh is None else ()
        return (output, statistics), (query, key, value, parameter_HP, rows, saved)

    def backward(residuals, cotangents):
        query, key, value, parameter_HP, rows, saved = residuals
        d_output, d_statistics = cotangents
        shift = None
        if weigh is None:  # dS = A * (dO V^T + dlse - sum dO * O)
            output, shift = saved
            dot_BHT = jnp.sum(d_output.astype(jnp.float32) * output.astype(jnp.float32), -1)
            d_statistics = (d_statistics[0] - dot_BHT,)
        *gradients, d_parameter_HP = kernels.backward(
            scores,
            weigh,
            query,
            key,
            value,
            *placed(rows),
            parameter_HP,
            shift,
            d_output.astype(value.dtype),
            d_statistics,
        )
        return *gradients, d_parameter_HP, None

    @jax.custom_vjp
    def run(*arrays):
        return forward(*arrays)[0]

    run.defvjp(forward, backward)
    return run


def sharded(
    run: Callable, arrays: Sequence[jax.Array], parameter_HP: jax.Array, rows: Sequence[jax.Array]
) -> Callable:
    """`run` on every device's own sequences and heads, under a mesh; kernels know of none."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh._any_axis_manual:
        return run
    groups = arrays[1].shape
    batch, heads, *_ = sharding.dividing(mesh, groups, sharding.partition('batch', 'heads', None, None))
    of_array, of_row = PartitionSpec(batch, heads), PartitionSpec(batch, heads, None)
    of_rows = [PartitionSpec(batch if len(row) > 1 else None) for row in rows]
    statistics = jax.eval_shape(run, *arrays, parameter_HP, list(rows))[1]
    return jax.shard_map(
        run,
        in_specs=(of_array, of_array, of_array, PartitionSpec(heads), of_rows),
        out_specs=(of_array, tuple(of_row for _ in statistics)),
        check_vma=False,
    )
