"""The backend of a run: chosen once, on the host, and never replaced unsaid."""

import dataclasses

from sinklab.attend.backends import BACKENDS
from sinklab.attend.rule import AttentionProblem
from sinklab.attend.verification import MAX_RELATIVE_ERROR, UnsupportedBackendError, measure_error
from sinklab.record import UserError

PREFERRED_BACKENDS = {'tpu': ('tpu', 'chunked'), 'gpu': ('cudnn', 'gpu', 'chunked')}  # by platform; elsewhere chunked


@dataclasses.dataclass(frozen=True)
class BackendChoice:
    """A backend, and why those that would have come first were not taken.

    Attributes:
        passed: Backend -> why it was not taken.
        failed: Those of `passed` that cover the case, and that failed or were wrong on these devices.
    """

    backend: str
    rejection_reasons: dict[str, str] = dataclasses.field(default_factory=dict)
    failed_backends: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.backend + ''.join(f' (not {name}: {reason})' for name, reason in self.rejection_reasons.items())

    def describe_fallback(self) -> str | None:
        """Return a line that says which backends failed and what was used instead; None where none failed."""
        if not self.failed_backends:
            return None
        reasons = '; '.join(f'{name}: {self.rejection_reasons[name]}' for name in self.failed_backends)
        return f'attention was computed by the fall-back {self.backend} ({reasons}); see sinklab doctor --kernels'


def select_backend(requested: str, platform: str, problem: AttentionProblem, verify: bool = True) -> BackendChoice:
    """`wanted` or, for auto, the first of the platform's backends that can and, where it is `here`, is right.

    Raises Refusal.
    """
    rejection_reasons = {}
    for name in PREFERRED_BACKENDS.get(platform, ('chunked',)) if requested == 'auto' else (requested,):
        reason = explain_unusable(name, platform, problem) if verify else explain_unsupported(name, platform, problem)
        if reason is None:
            failed_backends = tuple(other for other in rejection_reasons if explain_unsupported(other, platform, problem) is None)
            return BackendChoice(name, rejection_reasons, failed_backends)
        rejection_reasons[name] = reason
    others = ', '.join(name for name in BACKENDS if name not in rejection_reasons and explain_unsupported(name, platform, problem) is None)
    raise UserError(f'--attention={requested} is not to be had: {rejection_reasons[requested]}; here are auto, {others}')


def explain_unusable(name: str, platform: str, problem: AttentionProblem) -> str | None:
    """None, or why a backend is not to be used; what is for one platform alone shows there that it is right."""
    reason = explain_unsupported(name, platform, problem)
    if reason or BACKENDS[name].platform is None:
        return reason
    try:
        relative_error = measure_error(name, problem)
    except UnsupportedBackendError as failure:  # anything else is a bug in the backend, which a fall-back would hide
        return f'it fails on these devices ({failure})'
    return None if relative_error <= MAX_RELATIVE_ERROR else f'wrong on these devices by {relative_error:.1e} of the largest entry'


def explain_unsupported(name: str, platform: str, problem: AttentionProblem) -> str | None:
    """None, or why a backend is not for a platform or a case."""
    backend = BACKENDS[name]
    if backend.platform not in (None, platform):
        return f'it is for {backend.platform}, and the devices here are {platform}'
    return backend.explain_unsupported(problem)
