"""Rewriting of traced functions into primitives that Mosaic GPU can lower."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal


def logistic(x):
    """Compute 1 / (1 + e^-x) without tanh.approx, whose error of 2^-11 would exceed small weights."""
    root = lax.rsqrt(1 + jnp.exp(-x))
    return root * root


def log1p(x):
    """Compute log(1 + x) with the digits that 1 + x rounds off (Kahan)."""
    one_plus_x = 1 + x
    rounded_x = one_plus_x - 1
    return jnp.where(rounded_x == 0, x, jnp.log(one_plus_x) * (x / jnp.where(rounded_x == 0, 1.0, rounded_x)))


def expm1(x):
    """Compute e^x - 1, by its series where e^x would round digits off."""
    series = x * (1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x / 720)))))
    return jnp.where(jnp.abs(x) < 0.3, series, jnp.exp(x) - 1)


def power(x, y):
    """Return x^y of an array x and a scalar y: for x < 0, nan unless y is a whole number.

    Mosaic GPU does not lower a selection whose predicate is a scalar, so y is broadcast first.
    """
    y = jnp.broadcast_to(y, x.shape)
    magnitude = jnp.exp2(y * jnp.log2(jnp.abs(x)))
    half = y / 2
    odd = floor(half) != half
    signed = jnp.where(odd, -magnitude, magnitude)
    return jnp.where(x >= 0, magnitude, jnp.where(floor(y) == y, signed, jnp.nan))


def floor(x):
    toward_zero = x.astype(jnp.int32).astype(x.dtype)
    return jnp.where(toward_zero > x, toward_zero - 1, toward_zero)


# Primitives of weigh and bias functions: those that Mosaic GPU can lower, and (in REWRITES) those rewritten for it.
ARITHMETIC = {'abs', 'add', 'div', 'integer_pow', 'max', 'min', 'mul', 'neg', 'round', 'sign', 'square', 'sub'}
SELECTIONS = {'and', 'clamp', 'eq', 'ge', 'gt', 'le', 'lt', 'ne', 'not', 'or', 'select_n'}
FUNCTIONS = {'cos', 'erf', 'exp', 'exp2', 'log', 'log2', 'rsqrt', 'sin', 'sqrt'}
SUPPORTED_PRIMITIVES = {'broadcast_in_dim', 'convert_element_type'} | ARITHMETIC | SELECTIONS | FUNCTIONS
REWRITES = {
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


MAX_BIAS_PARAMETERS = 64  # passed to bias functions of an unknown number of parameters, which read the first ones
CALL_PRIMITIVES = {'pjit', 'jit', 'closed_call', 'core_call', 'custom_jvp_call', 'custom_vjp_call'}


def make_lowerable(function: Callable) -> Callable:
    """Inline a function of arrays, and rewrite the primitives in it that Mosaic GPU cannot lower."""

    def run(*arguments):
        closed_jaxpr, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
        outputs = evaluate_jaxpr(closed_jaxpr, jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return run


def evaluate_jaxpr(closed_jaxpr, inputs):
    values = dict(zip(closed_jaxpr.jaxpr.constvars, closed_jaxpr.consts, strict=True))
    values |= zip(closed_jaxpr.jaxpr.invars, inputs, strict=True)

    def read(variable):
        return variable.val if isinstance(variable, Literal) else values[variable]

    for equation in closed_jaxpr.jaxpr.eqns:
        name = equation.primitive.name
        arguments = [read(var) for var in equation.invars]
        called_jaxpr = get_called_jaxpr(equation)
        if called_jaxpr is not None:
            outputs = evaluate_jaxpr(called_jaxpr, arguments)
        elif name in REWRITES:
            outputs = [REWRITES[name](*arguments)]
        else:
            outputs = equation.primitive.bind(*arguments, **equation.params)
            outputs = outputs if equation.primitive.multiple_results else [outputs]
        values |= zip(equation.outvars, outputs, strict=True)
    return [read(var) for var in closed_jaxpr.jaxpr.outvars]


def get_called_jaxpr(equation):
    """Return the jaxpr that an equation calls, or None if the equation is no plain call."""
    if equation.primitive.name not in CALL_PRIMITIVES:
        return None
    return equation.params.get('jaxpr') or equation.params.get('call_jaxpr')


def find_unsupported_ops(bias_function: Callable | None, weigh_functions: Sequence[Callable]) -> set[str]:
    """Return the primitives of bias and weigh functions, and of their slopes, that kernels do not support."""
    scalar = jnp.float32(1)
    block = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    jaxprs = [jax.make_jaxpr(functools.partial(value_and_derivative, weigh))(block) for weigh in weigh_functions]
    if bias_function is not None:

        def compute_bias_slopes(parameter, distance):
            return value_and_derivative(lambda x: bias_function([x] * MAX_BIAS_PARAMETERS, distance), parameter)

        jaxprs.append(jax.make_jaxpr(compute_bias_slopes)(scalar, block))
    return set().union(*map(find_unsupported_in_jaxpr, jaxprs))


def find_unsupported_in_jaxpr(closed_jaxpr) -> set[str]:
    unsupported = {'an array' for constant in closed_jaxpr.consts if jnp.ndim(constant)}
    for equation in closed_jaxpr.jaxpr.eqns:
        name = equation.primitive.name
        called_jaxpr = get_called_jaxpr(equation)
        unsupported |= (
            find_unsupported_in_jaxpr(called_jaxpr)
            if called_jaxpr is not None
            else {name} - SUPPORTED_PRIMITIVES - REWRITES.keys()
        )
    return unsupported


def value_and_derivative(function: Callable, x):
    """Return (values, derivatives) of an elementwise function."""
    return jax.jvp(function, (x,), (jnp.ones_like(x),))
