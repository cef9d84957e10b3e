"""What kernels compute and differentiate: softmax (o, lse) and linear (sum of weights times values, sums of masses).

Everything else about attention is ordinary jnp on these (epilogue.py), so their backward passes take the cotangents
of the statistics as well.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from sinklab import sharding
from sinklab.attend.mask import Mask

NOTHING = -1e30  # lse of a query that sees nothing

Weigh = Callable[[jax.Array], tuple[jax.Array, Sequence[jax.Array]]]  # score -> (weight, masses)


@dataclasses.dataclass(frozen=True)
class Softmax:
    """o_i = sum_j e^(s_ij - lse_i) v_j, and the statistic lse_i = log sum_j e^s_ij."""

    statistics = 1

    def residuals(self, output: jax.Array, statistics: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """What the backward pass wants of the forward one."""
        return output, *statistics

    def rows(self, saved, d_output: jax.Array, d_statistics: Sequence[jax.Array]) -> list[jax.Array]:
        """(lse, dlse - sum dO * O), by which dS = e^(s - lse) * (dO V^T + dlse - sum dO * O)."""
        output, lse_BHT = saved
        dot_BHT = jnp.sum(d_output.astype(jnp.float32) * output.astype(jnp.float32), -1)
        return [lse_BHT, d_statistics[0] - dot_BHT]


@dataclasses.dataclass(frozen=True)
class Linear:
    """u_i = sum_j w(s_ij) v_j, and a statistic sum_j m(s_ij) for each mass m: `weigh` gives w and all m."""

    weigh: Weigh

    @property
    def statistics(self) -> int:
        return len(jax.eval_shape(self.weigh, jax.ShapeDtypeStruct((1, 1), jnp.float32))[1])

    def residuals(self, output: jax.Array, statistics: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        return ()

    def rows(self, saved, d_output: jax.Array, d_statistics: Sequence[jax.Array]) -> list[jax.Array]:
        """The cotangents c_n, by which dS = w' dO V^T + sum_n m_n' c_n."""
        return list(d_statistics)


Sums = Softmax | Linear


@dataclasses.dataclass(frozen=True)
class Scores:
    """s_ij = scale <q_i, k_j> + curve(parameters of the head, distance_ij) + offset."""

    scale: float
    offset: float = 0.0
    curve: Callable | None = None
    learned: bool = False  # whether the parameters of the curve want a gradient

    def __mul__(self, factor: float) -> 'Scores':
        curve = self.curve and (lambda parameters, distance: factor * self.curve(parameters, distance))
        return Scores(self.scale * factor, self.offset * factor, curve, self.learned)


@dataclasses.dataclass(frozen=True)
class Problem:
    """What kernels are told beside arrays and sums."""

    scores: Scores
    mask: Mask
    positions: tuple[jax.Array, jax.Array] | None = None  # query_BT and key_BS, wanted by a curve
    parameter_HP: jax.Array | None = None  # of the curve; H may be 1


class Kernels(Protocol):
    """Those of a platform, as a module: arrays come heads first, in lengths that `block` divides."""

    def block(self, length: int) -> int:
        """What so many queries or keys are padded to a multiple of."""

    def covers(self, sums: Sums, scores: Scores, query_BHTK, key_BGSK, value_BGSV) -> str | None:
        """None, or what these kernels cannot do."""

    def forward(self, sums: Sums, problem: Problem, query_BHTK, key_BGSK, value_BGSV):
        """(output_BHTV, statistics_BHT); the output is in float32 where kernels leave it so."""

    def backward(self, sums: Sums, problem: Problem, query_BHTK, key_BGSK, value_BGSV, d_output_BHTV, rows_BHT):
        """(d_query, d_key, d_value, d_parameter_HP), from what `sums.rows` gives."""


def primitive(
    kernels: Kernels, sums: Sums, problem: Problem, query_BTHK: jax.Array, key_BSGK: jax.Array, value_BSGV: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """(output_BTHV, statistics_BHT) of the text. Padded, laid out, sharded."""
    length, keys, heads = query_BTHK.shape[1], key_BSGK.shape[1], query_BTHK.shape[2]
    after = more, extra = -length % kernels.block(length), -keys % kernels.block(keys)
    mask, parameter_HP = problem.mask.pad(after=more), problem.parameter_HP
    parameter_HP = jnp.zeros((1, 0)) if parameter_HP is None else jnp.asarray(parameter_HP, jnp.float32)
    parameter_HP = jnp.broadcast_to(parameter_HP, (heads, parameter_HP.shape[1]))
    positions = zip(problem.positions or (), after, strict=False)
    rows = [] if mask.static else [mask.start_BT, mask.end_BT]
    rows += [jnp.pad(jnp.asarray(at_BT, jnp.int32), ((0, 0), (0, n))) for at_BT, n in positions]
    arrays = [heads_first(query_BTHK, more), heads_first(key_BSGK, extra), heads_first(value_BSGV, extra)]
    run = differentiable(kernels, sums, dataclasses.replace(problem, mask=mask))
    output_BHTV, statistics = over_mesh(run, arrays, parameter_HP, rows)(*arrays, parameter_HP, rows)
    return jnp.swapaxes(output_BHTV[:, :, :length], 1, 2), tuple(row[..., :length] for row in statistics)


def heads_first(array_BTHK: jax.Array, after: int) -> jax.Array:
    """array_BHTK with so many rows more."""
    return jnp.pad(jnp.swapaxes(array_BTHK, 1, 2), ((0, 0), (0, 0), (0, after), (0, 0)))


def differentiable(kernels: Kernels, sums: Sums, problem: Problem) -> Callable:
    """run(query_BHTK, key_BGSK, value_BGSV, parameter_HP, rows) -> (output_BHTV, statistics), with its gradient."""
    static, hull_2T = problem.mask.static, problem.mask.hull_2T

    def with_arrays(parameter_HP, rows) -> Problem:
        """With this device's mask and positions; a static mask is closed over, so that kernels can look at it."""
        edges, positions = ((), rows) if static else (rows[:2], rows[2:])
        mask = problem.mask if static else Mask(*edges, hull_2T)
        return Problem(problem.scores, mask, tuple(positions) or None, parameter_HP)

    def forward(query, key, value, parameter_HP, rows):
        found = kernels.forward(sums, with_arrays(parameter_HP, rows), query, key, value)
        output, statistics = checkpoint_name(found, 'attention')  # both are wanted by the backward pass
        residuals = query, key, value, parameter_HP, rows, sums.residuals(output, statistics)
        return (output, statistics), residuals

    def backward(residuals, cotangents):
        query, key, value, parameter_HP, rows, saved = residuals
        d_output, d_statistics = cotangents
        of_rows = sums.rows(saved, d_output, d_statistics)
        d_output = d_output.astype(value.dtype)
        return *kernels.backward(sums, with_arrays(parameter_HP, rows), query, key, value, d_output, of_rows), None

    @jax.custom_vjp
    def run(*arrays):
        return forward(*arrays)[0]

    run.defvjp(forward, backward)
    return run


def over_mesh(
    run: Callable, arrays: Sequence[jax.Array], parameter_HP: jax.Array, rows: Sequence[jax.Array]
) -> Callable:
    """`run` on every device's own sequences and heads, under a mesh; kernels know of none."""
    batch, heads, *_ = sharding.compilers(arrays[1].shape, ('batch', 'heads', None, None))
    of_array, of_row = PartitionSpec(batch, heads), PartitionSpec(batch, heads, None)
    of_rows = [PartitionSpec(batch if len(row) > 1 else None) for row in rows]
    statistics = jax.eval_shape(run, *arrays, parameter_HP, list(rows))[1]
    return sharding.on_each_part(
        run,
        sharding.compilers_axes(),
        (of_array, of_array, of_array, PartitionSpec(heads), of_rows),
        (of_array, tuple(of_row for _ in statistics)),
    )
