"""Functions of scores, in what the GPU has instructions for: they are traced, and said in other words."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal


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
    """Return x^y of an array x and a scalar y: for x < 0, nan unless y is a whole number.

    Mosaic GPU does not lower a selection whose predicate is a scalar, so y is broadcast first.
    """
    y = jnp.broadcast_to(y, x.shape)
    size, half = jnp.exp2(y * jnp.log2(jnp.abs(x))), y / 2
    odd = floor(half) != half
    signed = jnp.where(odd, -size, size)
    return jnp.where(x >= 0, size, jnp.where(floor(y) == y, signed, jnp.nan))


def floor(x):
    toward_zero = x.astype(jnp.int32).astype(x.dtype)
    return jnp.where(toward_zero > x, toward_zero - 1, toward_zero)


# Of the primitives that weights and curves are made of: those that Mosaic GPU lowers, and those rewritten for it.
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

    def read(variable):
        return variable.val if isinstance(variable, Literal) else values[variable]

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


def unknown(curve: Callable | None, weighs: Sequence[Callable]) -> set[str]:
    """What a curve or a weight does that a kernel cannot."""
    scalar, block = jnp.float32(1), jax.ShapeDtypeStruct((1, 1), jnp.float32)
    traced = [jax.make_jaxpr(functools.partial(slopes, weigh))(block) for weigh in weighs]
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
