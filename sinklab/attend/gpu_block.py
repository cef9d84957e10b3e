"""What GPU kernels do with the scores of one block, in plain jnp."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from sinklab.attend.primitive import NOTHING, Scores, Weigh

LOG2E = math.log2(math.e)


def logistic(x):
    """1 / (1 + e^-x); tanh.approx, which is off by 2^-11, would leave nothing of small weights."""
    root = lax.rsqrt(1 + jnp.exp(-x))
    return root * root


def log1p(x):
    """log(1 + x) with the digits that 1 + x rounds off (Kahan)."""
    more = 1 + x
    off = more - 1
    return jnp.where(off == 0, x, jnp.log(more) * (x / jnp.where(off == 0, 1.0, off)))


def expm1(x):
    """e^x - 1, by its series where e^x rounds digits off."""
    series = x * (1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x / 720)))))
    return jnp.where(jnp.abs(x) < 0.3, series, jnp.exp(x) - 1)


def power(x, y):
    """|x|^y, below 0 with the sign of an odd whole power, and nothing for others."""
    size, half = jnp.exp2(y * jnp.log2(jnp.abs(x))), y / 2
    odd = floor(half) != half
    signed = jnp.where(odd, -size, size)
    return jnp.where(x >= 0, size, jnp.where(floor(y) == y, signed, jnp.nan))


def floor(x):
    toward_zero = x.astype(jnp.int32).astype(x.dtype)
    return jnp.where(toward_zero > x, toward_zero - 1, toward_zero)


# What Mosaic GPU lowers, of what weights and curves are made of, and what is said in other words.
KNOWN = {'abs', 'add', 'and', 'broadcast_in_dim', 'clamp', 'convert_element_type', 'cos', 'div', 'eq', 'erf', 'exp'}
KNOWN |= {'exp2', 'ge', 'gt', 'integer_pow', 'le', 'log', 'log2', 'lt', 'max', 'min', 'mul', 'ne', 'neg', 'not', 'or'}
KNOWN |= {'round', 'rsqrt', 'select_n', 'sign', 'sin', 'sqrt', 'square', 'sub'}
REWRITTEN = {
    'add_any': jnp.add,
    'copy': lambda x: x,
    'expm1': expm1,
    'floor': floor,
    'log1p': log1p,
    'logistic': logistic,
    'pow': power,
    'stop_gradient': lambda x: x,
    'tanh': lambda x: 2 * logistic(2 * x) - 1,
}


CALLS = {'pjit', 'jit', 'closed_call', 'core_call', 'custom_jvp_call', 'custom_vjp_call'}


def lowerable(function: Callable) -> Callable:
    """The same function of arrays, without calls and what kernels do not know by name."""

    def run(*given):
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*given)
        return jax.tree.unflatten(jax.tree.structure(shape), evaluate(closed, jax.tree.leaves(given)))

    return run


def evaluate(closed, given):
    values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values |= zip(closed.jaxpr.invars, given, strict=True)
    read = lambda variable: variable.val if isinstance(variable, Literal) else values[variable]  # noqa: E731
    for equation in closed.jaxpr.eqns:
        name, arguments, called = equation.primitive.name, [read(one) for one in equation.invars], call(equation)
        if called is not None:
            found = evaluate(called, arguments)
        elif name in REWRITTEN:
            found = [REWRITTEN[name](*arguments)]
        else:
            found = equation.primitive.bind(*arguments, **equation.params)
            found = found if equation.primitive.multiple_results else [found]
        values |= zip(equation.outvars, found, strict=True)
    return [read(one) for one in closed.jaxpr.outvars]


def call(equation):
    """What an equation does nothing but call."""
    if equation.primitive.name not in CALLS:
        return None
    return equation.params.get('jaxpr') or equation.params.get('call_jaxpr')


def unknown(curve: Callable | None, weigh: Weigh | None) -> set[str]:
    """What a curve or a weight does that a kernel cannot."""
    scalar, block = jnp.float32(1), jax.ShapeDtypeStruct((1, 1), jnp.float32)
    traced = [] if weigh is None else [jax.make_jaxpr(functools.partial(slopes, weigh))(block)]
    if curve is not None:
        traced.append(
            jax.make_jaxpr(lambda x, distance: slopes(lambda p: curve([p] * 64, distance), x))(scalar, block)
        )
    return set().union(*map(strange, traced))


def strange(closed) -> set[str]:
    found = {'an array' for constant in closed.consts if jnp.ndim(constant)}
    for equation in closed.jaxpr.eqns:
        name, called = equation.primitive.name, call(equation)
        found |= strange(called) if called is not None else {name} - KNOWN - REWRITTEN.keys()
    return found


def slopes(function: Callable, at):
    """(values, derivatives) of an elementwise function."""
    return jax.jvp(function, (at,), (jnp.ones_like(at),))


def across(row, shape: tuple[int, int], axis: int):
    """As many of a row or a column as fill a block."""
    return lax.broadcast_in_dim(row, shape, (axis,))


class Softmax:
    """o = sum e^(s - lse) v and lse, online, in powers of two."""

    name, statistics = 'softmax', 1

    def __init__(self, scores: Scores):
        self.scores, self.scale = scores, scores.scale * LOG2E

    def start(self, queries: int):
        """(largest, total)."""
        return jnp.full((queries,), NOTHING, jnp.float32), jnp.zeros((queries,), jnp.float32)

    def add(self, product_QS, rows, bias_QS, hide: Callable):
        """(weight_QS, what is kept of earlier sums, rows)."""
        (largest, total), score, scale = rows, product_QS, self.scale
        if bias_QS is not None or scale <= 0:  # else the multiply-add of the exponential scales
            score, scale = self.scale * product_QS, 1.0
        if bias_QS is not None:
            score += LOG2E * bias_QS
        score = hide(score, -jnp.inf)
        larger = jnp.maximum(largest, scale * score.max(1))
        weight_QS = jnp.exp2(scale * score - across(larger, score.shape, 0))
        kept = jnp.exp2(largest - larger)
        return weight_QS, kept, (larger, kept * total + weight_QS.sum(1))

    def finish(self, sum_QV, rows):
        largest, total = rows
        sees = total > 0
        total = jnp.where(sees, total, 1.0)
        output_QV = sum_QV * across(1 / total, sum_QV.shape, 0)
        return output_QV, [jnp.where(sees, (largest + jnp.log2(total)) / LOG2E + self.scores.offset, NOTHING)]

    def differentiated(self, product, bias, row: Callable, hide: Callable):
        """(weight, dS of dA); row(0) is lse in powers of two and row(1) the cotangent of the mass, of each score."""
        score = self.scale * product - (row(0) - LOG2E * self.scores.offset)
        weight = hide(jnp.exp2(score if bias is None else score + LOG2E * bias), 0.0)
        return weight, lambda d_weight: weight * (d_weight + row(1))


class Linear:
    """sum w(s) v, and sum m(s) for each mass."""

    name = 'linear'

    def __init__(self, scores: Scores, weigh: Weigh):
        self.scores, self.weigh = scores, weigh
        self.statistics = len(jax.eval_shape(weigh, jax.ShapeDtypeStruct((1, 1), jnp.float32))[1])

    def score(self, product, bias):
        score = product if self.scores.scale == 1 else self.scores.scale * product
        score = score if bias is None else score + bias
        return score + self.scores.offset if self.scores.offset else score

    def start(self, queries: int):
        return tuple(jnp.zeros((queries,), jnp.float32) for _ in range(self.statistics))

    def add(self, product_QS, rows, bias_QS, hide: Callable):
        weight_QS, masses = lowerable(self.weigh)(self.score(product_QS, bias_QS))
        sums = tuple(row + hide(mass, 0.0).sum(1) for row, mass in zip(rows, masses, strict=True))
        return hide(weight_QS, 0.0), None, sums

    def finish(self, sum_QV, rows):
        return sum_QV, list(rows)

    def differentiated(self, product, bias, row: Callable, hide: Callable):
        """(weight, dS of dA); row(n) is the cotangent of mass n, of each score."""
        (weight, _), (slope, of_masses) = lowerable(functools.partial(slopes, self.weigh))(self.score(product, bias))
        like_weight = [n for n, of_mass in enumerate(of_masses) if of_mass is slope]
        given = [row(n) * of_mass for n, of_mass in enumerate(of_masses) if n not in like_weight]

        def differentiate(d_weight):
            d_score = slope * sum(map(row, like_weight), d_weight)
            return hide(sum(given, d_score), 0.0)

        return hide(weight, 0.0), differentiate


def sums(scores: Scores, weigh: Weigh | None) -> Softmax | Linear:
    """What a primitive sums: softmax without `weigh`."""
    return Softmax(scores) if weigh is None else Linear(scores, weigh)
