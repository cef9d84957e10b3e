"""Whether a backend computes here what the definition says."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sinklab.attend.backends import BACKENDS
from sinklab.attend.rule import Case

ACCURACY = 2e-2  # of the largest entry, in bfloat16, for a kernel to be trusted
SHOWN = 4096  # a length at which every kernel has several blocks, interior ones too
HEADS = 2
NO_CUDNN = 'cuDNN is not detected'  # what jax's RuntimeError says while `jax.nn.dot_product_attention` is traced


class Unsupported(Exception):
    """A backend that jax, its compilers or the devices here cannot run; the cause is what they raised."""


def error(name: str, case: Case) -> float:
    """How far a backend is from the definition in float32, forward and backward, in units of the largest entry.

    On random arrays, under the first queries, keys and heads of the case's own rule.

    Raises:
        Unsupported: the backend cannot be lowered, compiled or executed here. Whatever else a backend raises is a
            bug in it and passes through.
    """
    case = beginning(case, SHOWN)
    rng = np.random.default_rng(0)
    keys, heads = case.rule.columns + case.rule.mask.keys, case.heads
    shapes = (case.length, case.width), (keys, case.width), (keys, case.value_width)
    drawn = (rng.uniform(size=(1, n, heads, width)) - (at == 2) / 2 for at, (n, width) in enumerate(shapes))
    arrays = [jnp.asarray(array, case.dtype) for array in drawn]
    cotangent = jnp.asarray(rng.normal(size=(1, case.length, heads, case.value_width)), jnp.float32)

    def total(arrays, backend):
        output, rows, _ = BACKENDS[backend].attend(*arrays, case.rule, measured=True)
        return jnp.sum(cotangent * output.astype(jnp.float32)), (output, rows.mass_BHT)

    run = jax.jit(jax.grad(total, has_aux=True), static_argnums=1)
    with jax.default_matmul_precision('highest'):
        right = execute(run, [array.astype(jnp.float32) for array in arrays], 'dense')
    far = jax.tree.map(
        lambda x, y: float(jnp.abs(x - y).max() / jnp.maximum(jnp.abs(x).max(), 1e-9)),
        right,
        execute(run, arrays, name),
    )
    leaves = jax.tree.leaves(far)
    return max(leaves) if np.isfinite(leaves).all() else float('inf')  # max() would pass over what is no number


def execute(run: Callable, arrays: list[jax.Array], backend: str) -> Any:
    """Trace, lower, compile and execute a jitted function of (arrays, backend), and wait for what it returns.

    Which errors say that the backend cannot run here, and which are bugs, depends on the stage that raises them:
    jax and Pallas raise the same types for both.
    """
    with raising_unsupported(is_unsupported_by_tracing):
        traced = run.trace(arrays, backend)
    # No code of this project runs in here: kernels are Python functions that tracing has called. The lowering rules
    # of Pallas (Mosaic for TPU and for GPU) raise NotImplementedError, ValueError, TypeError, IndexError and classes
    # of their own, which are private, for what they do not support.
    with raising_unsupported(lambda failure: True):
        lowered = traced.lower()
    # XLA, Mosaic and ptxas, as well as the device when it executes, raise JaxRuntimeError and nothing else.
    with raising_unsupported(lambda failure: isinstance(failure, jax.errors.JaxRuntimeError)):
        return jax.block_until_ready(lowered.compile()(arrays))


def is_unsupported_by_tracing(failure: Exception) -> bool:
    """Return whether an error of a backend's own Python code says that jax does not support a program.

    NotImplementedError is what jax and Pallas raise for that; JaxRuntimeError comes of constants that are computed on
    the device. ValueError, TypeError and the like are raised for shapes, dtypes and indices that do not fit: those
    of a kernel are ours, and what a kernel does not cover is for its `covers` to say.
    """
    unsupported = isinstance(failure, NotImplementedError | jax.errors.JaxRuntimeError)
    return unsupported or (type(failure) is RuntimeError and NO_CUDNN in str(failure))


@contextlib.contextmanager
def raising_unsupported(is_unsupported: Callable[[Exception], bool]) -> Iterator[None]:
    """Raise Unsupported from those errors for which `is_unsupported` is true."""
    try:
        yield
    except Exception as failure:
        if not is_unsupported(failure):
            raise
        raise Unsupported(f'{type(failure).__name__}: {(str(failure).splitlines() or [""])[0]}') from failure


def beginning(case: Case, length: int) -> Case:
    """At most so many tokens of a case, and two heads."""
    rule = case.rule.first(min(case.length, length))
    bias, curve = rule.bias, rule.bias.curve
    if curve is not None:
        curve = dataclasses.replace(curve, parameter_HP=curve.parameter_HP[:HEADS])
    if bias.column_HC is not None:
        bias = dataclasses.replace(bias, column_HC=bias.column_HC[:HEADS])
    rule = dataclasses.replace(rule, bias=dataclasses.replace(bias, curve=curve))
    return dataclasses.replace(case, rule=rule, heads=HEADS)
