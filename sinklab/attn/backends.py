"""Attention backends: the table `BACKENDS`, their verification on devices, and their selection."""

import dataclasses
import importlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from sinklab.attn import chunked, cudnn, kernel_attention, reference
from sinklab.attn.operations import SIMILARITIES
from sinklab.attn.reference import AttentionOutput
from sinklab.attn.spec import AttentionProblem
from sinklab.errors import UserError, format_error

MAX_KERNEL_POWER = 4  # of unshifted masses: (3e-10)^4 is about the smallest normal float32


@dataclasses.dataclass(frozen=True)
class Backend:
    """An attention backend.

    Attributes:
        attend: Function that computes attention as `reference.attend` does.
        explain_unsupported: Function that returns why the backend cannot compute a problem, or None.
        platform: The only platform of the backend; None: all platforms.
    """

    attend: Callable[..., AttentionOutput]
    explain_unsupported: Callable[[AttentionProblem], str | None] = lambda problem: None
    platform: str | None = None


def make_pallas_backend(platform: str) -> Backend:
    """Make the backend of a platform's Pallas kernels, imported on first use because that takes a second."""

    def import_kernels():
        return importlib.import_module(f'sinklab.attn.pallas.{platform}')

    def attend(query_BTHK, key_BSGK, value_BSGK, spec):
        return kernel_attention.attend(import_kernels(), query_BTHK, key_BSGK, value_BSGK, spec)

    def explain_unsupported(problem):
        operation, relative = problem.spec.operation, problem.spec.bias.relative
        if operation.similarity.is_shifted and operation.similarity is not SIMILARITIES['exp']:
            return f'{operation.name}: kernels support no other shifted similarity than exp'
        if operation.clip_ends is not None:
            return 'clipped weights, which need Z before values are summed'
        if not operation.similarity.is_shifted and (operation.power or 0) > MAX_KERNEL_POWER:
            return f'a power above {MAX_KERNEL_POWER}, with which whole rows may underflow'
        if relative is not None and not relative.is_elementwise:
            return 'a learned table of relative positions, or a forget gate'
        reduction = kernel_attention.choose_reduction(operation)
        score_spec = kernel_attention.make_kernel_spec(problem.spec, problem.width).score_spec
        return import_kernels().explain_unsupported(reduction, score_spec, problem)

    return Backend(attend, explain_unsupported, platform)


BACKENDS = {
    'dense': Backend(reference.attend),
    'chunked': Backend(chunked.attend),
    'tpu': make_pallas_backend('tpu'),
    'gpu': make_pallas_backend('gpu'),
    'cudnn': Backend(cudnn.attend, cudnn.explain_unsupported, 'gpu'),
}


MAX_RELATIVE_ERROR = 2e-2  # largest accepted error of a kernel in bfloat16, relative to the largest entry


def measure_error(name: str, problem: AttentionProblem) -> float:
    """Measure how far a backend is from the definition in float32, forward and backward.

    The arrays are random; the problem is the smaller one if it has one.

    Returns:
        The largest error, relative to the largest entry of its array.
    """
    problem = problem.smaller or problem
    rng = np.random.default_rng(0)
    num_keys = problem.spec.num_learned_kv + int(problem.spec.mask.bounds_2T[1].max())
    num_heads = problem.heads
    shapes = (
        (problem.num_queries, num_heads, problem.width),
        (num_keys, problem.kv_heads or num_heads, problem.width),
        (num_keys, problem.kv_heads or num_heads, problem.value_width),
    )
    random_arrays = (rng.uniform(size=(1, *shape)) - (index == 2) / 2 for index, shape in enumerate(shapes))
    arrays = [jnp.asarray(array, problem.dtype) for array in random_arrays]
    spec = dataclasses.replace(problem.spec, needs_abs_weight_sum=True)
    cotangent = jnp.asarray(rng.normal(size=(1, problem.num_queries, num_heads, problem.value_width)), jnp.float32)

    def compute_loss(arrays, backend):
        output, row_stats, _ = BACKENDS[backend].attend(*arrays, spec)
        return jnp.sum(cotangent * output.astype(jnp.float32)), (output, row_stats.abs_weight_sum_BHT)

    compute_gradient = jax.jit(jax.grad(compute_loss, has_aux=True), static_argnums=1)
    with jax.default_matmul_precision('highest'):
        expected = compute_gradient([array.astype(jnp.float32) for array in arrays], 'dense')
    relative_errors = jax.tree.map(
        lambda x, y: float(jnp.abs(x - y).max() / jnp.maximum(jnp.abs(x).max(), 1e-9)),
        expected,
        compute_gradient(arrays, name),
    )
    leaves = jax.tree.leaves(relative_errors)
    return max(leaves) if np.isfinite(leaves).all() else float('inf')  # max() may ignore NaN


PREFERRED_BACKENDS = {'tpu': ('tpu', 'chunked'), 'gpu': ('cudnn', 'gpu', 'chunked')}  # by platform; elsewhere chunked


@dataclasses.dataclass(frozen=True)
class BackendChoice:
    """A selected backend, and why preferred ones were rejected.

    Attributes:
        backend: Name in `BACKENDS`.
        rejection_reasons: Name of each rejected backend -> why it was rejected.
        failed_backends: Rejected backends that support the problem, and that failed or were wrong on these devices.
    """

    backend: str
    rejection_reasons: dict[str, str] = dataclasses.field(default_factory=dict)
    failed_backends: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.backend + ''.join(f' (not {name}: {reason})' for name, reason in self.rejection_reasons.items())

    def describe_fallback(self) -> str | None:
        """Return a line that names the failed backends and the one used instead; None if none failed."""
        if not self.failed_backends:
            return None
        reasons = '; '.join(f'{name}: {self.rejection_reasons[name]}' for name in self.failed_backends)
        return f'attention was computed by the fallback {self.backend} ({reasons})'


def select_backend(requested: str, platform: str, *problems: AttentionProblem, verify: bool = True) -> BackendChoice:
    """Select a backend: `requested`, or for `auto` the first of the platform's backends that can be used.

    Args:
        requested: Name in `BACKENDS`, or `auto`.
        platform: Platform of the devices, as `jax.default_backend()` names it.
        problems: Attention problems, each of which the backend has to compute.
        verify: Compare platform-specific backends with the definition on the attached devices.

    Raises:
        UserError: `requested` cannot be used.
    """

    def find_reason(explain: Callable[[str, str, AttentionProblem], str | None], name: str) -> str | None:
        return next(filter(None, (explain(name, platform, problem) for problem in problems)), None)

    rejection_reasons: dict[str, str] = {}
    for name in PREFERRED_BACKENDS.get(platform, ('chunked',)) if requested == 'auto' else (requested,):
        reason = find_reason(verify_and_explain if verify else explain_unsupported, name)
        if reason is None:
            failed_backends = tuple(
                other for other in rejection_reasons if find_reason(explain_unsupported, other) is None
            )
            return BackendChoice(name, rejection_reasons, failed_backends)
        rejection_reasons[name] = reason
    others = ', '.join(
        name for name in BACKENDS if name not in rejection_reasons and find_reason(explain_unsupported, name) is None
    )
    raise UserError(f'--attention={requested} is not available: {rejection_reasons[requested]}; use auto, {others}')


def verify_and_explain(name: str, platform: str, problem: AttentionProblem) -> str | None:
    """Return why a backend must not be used, or None; a platform-specific one is verified on the devices."""
    reason = explain_unsupported(name, platform, problem)
    if reason or BACKENDS[name].platform is None:
        return reason
    try:
        relative_error = measure_error(name, problem)
    except Exception as failure:  # jax, Pallas and compilers raise many types for what they do not support
        return f'it fails on these devices ({format_error(failure, with_type=True)})'
    return (
        None
        if relative_error <= MAX_RELATIVE_ERROR
        else f'wrong on these devices by {relative_error:.1e} of the largest entry'
    )


def explain_unsupported(name: str, platform: str, problem: AttentionProblem) -> str | None:
    """Return why a backend does not support a platform or a problem, or None."""
    backend = BACKENDS[name]
    if backend.platform not in (None, platform):
        return f'it needs {backend.platform}, and these devices are {platform}'
    return backend.explain_unsupported(problem)
