"""Whether a backend computes here what the definition says."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sinklab.attend.backends import BACKENDS
from sinklab.attend.rule import AttentionProblem

MAX_RELATIVE_ERROR = 2e-2  # of the largest entry, in bfloat16, for a kernel to be trusted
NUM_CHECKED_TOKENS = 4096  # a length at which every kernel has several blocks, interior ones too
NUM_CHECKED_HEADS = 2
NO_CUDNN_MESSAGE = 'cuDNN is not detected'  # what jax's RuntimeError says while `jax.nn.dot_product_attention` is traced


class UnsupportedBackendError(Exception):
    """A backend that jax, its compilers or the devices here cannot run; the cause is what they raised."""


def measure_error(name: str, problem: AttentionProblem) -> float:
    """How far a backend is from the definition in float32, forward and backward, in units of the largest entry.

    On random arrays, under the first queries, keys and heads of the case's own rule.

    Raises:
        Unsupported: the backend cannot be lowered, compiled or executed here. Whatever else a backend raises is a
            bug in it and passes through.
    """
    problem = truncate_problem(problem, NUM_CHECKED_TOKENS)
    rng = np.random.default_rng(0)
    num_keys, num_heads = problem.spec.num_learned_kv + problem.spec.mask.num_keys, problem.heads
    shapes = (problem.num_queries, problem.width), (num_keys, problem.width), (num_keys, problem.value_width)
    random_arrays = (rng.uniform(size=(1, length, num_heads, width)) - (index == 2) / 2 for index, (length, width) in enumerate(shapes))
    arrays = [jnp.asarray(array, problem.dtype) for array in random_arrays]
    cotangent = jnp.asarray(rng.normal(size=(1, problem.num_queries, num_heads, problem.value_width)), jnp.float32)

    def compute_loss(arrays, backend):
        output, row_stats, _ = BACKENDS[backend].attend(*arrays, problem.spec, needs_mass=True)
        return jnp.sum(cotangent * output.astype(jnp.float32)), (output, row_stats.mass_BHT)

    compute_gradient = jax.jit(jax.grad(compute_loss, has_aux=True), static_argnums=1)
    with jax.default_matmul_precision('highest'):
        expected = compile_and_execute(compute_gradient, [array.astype(jnp.float32) for array in arrays], 'dense')
    relative_errors = jax.tree.map(
        lambda x, y: float(jnp.abs(x - y).max() / jnp.maximum(jnp.abs(x).max(), 1e-9)),
        expected,
        compile_and_execute(compute_gradient, arrays, name),
    )
    leaves = jax.tree.leaves(relative_errors)
    return max(leaves) if np.isfinite(leaves).all() else float('inf')  # max() would pass over what is no number


def compile_and_execute(jitted: Callable, arrays: list[jax.Array], backend: str) -> Any:
    """Trace, lower, compile and execute a jitted function of (arrays, backend), and wait for what it returns.

    Which errors say that the backend cannot run here, and which are bugs, depends on the stage that raises them:
    jax and Pallas raise the same types for both.
    """
    with translate_unsupported_errors(is_unsupported_by_tracing):
        traced = jitted.trace(arrays, backend)
    # No code of this project runs in here: kernels are Python functions that tracing has called. The lowering rules
    # of Pallas (Mosaic for TPU and for GPU) raise NotImplementedError, ValueError, TypeError, IndexError and classes
    # of their own, which are private, for what they do not support.
    with translate_unsupported_errors(lambda failure: True):
        lowered = traced.lower()
    # XLA, Mosaic and ptxas, as well as the device when it executes, raise JaxRuntimeError and nothing else.
    with translate_unsupported_errors(lambda failure: isinstance(failure, jax.errors.JaxRuntimeError)):
        return jax.block_until_ready(lowered.compile()(arrays))


def is_unsupported_by_tracing(failure: Exception) -> bool:
    """Return whether an error of a backend's own Python code says that jax does not support a program.

    NotImplementedError is what jax and Pallas raise for that; JaxRuntimeError comes of constants that are computed on
    the device. ValueError, TypeError and the like are raised for shapes, dtypes and indices that do not fit: those
    of a kernel are ours, and what a kernel does not cover is for its `covers` to say.
    """
    unsupported = isinstance(failure, NotImplementedError | jax.errors.JaxRuntimeError)
    return unsupported or (type(failure) is RuntimeError and NO_CUDNN_MESSAGE in str(failure))


@contextlib.contextmanager
def translate_unsupported_errors(is_unsupported: Callable[[Exception], bool]) -> Iterator[None]:
    """Raise Unsupported from those errors for which `is_unsupported` is true."""
    try:
        yield
    except Exception as failure:
        if not is_unsupported(failure):
            raise
        raise UnsupportedBackendError(f'{type(failure).__name__}: {(str(failure).splitlines() or [""])[0]}') from failure


def truncate_problem(problem: AttentionProblem, length: int) -> AttentionProblem:
    """At most so many tokens of a case, and two heads."""
    spec = problem.spec.truncate(min(problem.num_queries, length))
    bias, relative = spec.bias, spec.bias.relative
    if relative is not None:
        relative = dataclasses.replace(relative, parameter_HP=relative.parameter_HP[:NUM_CHECKED_HEADS])
    if bias.learned_HC is not None:
        bias = dataclasses.replace(bias, column_HC=bias.learned_HC[:NUM_CHECKED_HEADS])
    spec = dataclasses.replace(spec, bias=dataclasses.replace(bias, curve=relative))
    return dataclasses.replace(problem, rule=spec, heads=NUM_CHECKED_HEADS)
