"""The backend of a run: chosen once, on the host, and never replaced unsaid."""

import dataclasses

from sinklab.attend.backends import BACKENDS
from sinklab.attend.rule import Case
from sinklab.attend.verification import ACCURACY, Unsupported, error
from sinklab.record import Refusal

PREFERRED = {'tpu': ('tpu', 'chunked'), 'gpu': ('cudnn', 'gpu', 'chunked')}  # by platform; elsewhere chunked


@dataclasses.dataclass(frozen=True)
class Choice:
    """A backend, and why those that would have come first were not taken.

    Attributes:
        passed: Backend -> why it was not taken.
        failed: Those of `passed` that cover the case, and that failed or were wrong on these devices.
    """

    backend: str
    passed: dict[str, str] = dataclasses.field(default_factory=dict)
    failed: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.backend + ''.join(f' (not {name}: {reason})' for name, reason in self.passed.items())

    def describe_fallback(self) -> str | None:
        """Return a line that says which backends failed and what was used instead; None where none failed."""
        if not self.failed:
            return None
        reasons = '; '.join(f'{name}: {self.passed[name]}' for name in self.failed)
        return f'attention was computed by the fall-back {self.backend} ({reasons}); see sinklab doctor --kernels'


def choose(wanted: str, platform: str, case: Case, here: bool = True) -> Choice:
    """`wanted` or, for auto, the first of the platform's backends that can and, where it is `here`, is right.

    Raises Refusal.
    """
    passed = {}
    for name in PREFERRED.get(platform, ('chunked',)) if wanted == 'auto' else (wanted,):
        reason = lacks(name, platform, case) if here else cannot(name, platform, case)
        if reason is None:
            failed = tuple(other for other in passed if cannot(other, platform, case) is None)
            return Choice(name, passed, failed)
        passed[name] = reason
    others = ', '.join(name for name in BACKENDS if name not in passed and cannot(name, platform, case) is None)
    raise Refusal(f'--attention={wanted} is not to be had: {passed[wanted]}; here are auto, {others}')


def lacks(name: str, platform: str, case: Case) -> str | None:
    """None, or why a backend is not to be used; what is for one platform alone shows there that it is right."""
    reason = cannot(name, platform, case)
    if reason or BACKENDS[name].platform is None:
        return reason
    try:
        found = error(name, case)
    except Unsupported as failure:  # anything else is a bug in the backend, which a fall-back would hide
        return f'it fails on these devices ({failure})'
    return None if found <= ACCURACY else f'wrong on these devices by {found:.1e} of the largest entry'


def cannot(name: str, platform: str, case: Case) -> str | None:
    """None, or why a backend is not for a platform or a case."""
    backend = BACKENDS[name]
    if backend.platform not in (None, platform):
        return f'it is for {backend.platform}, and the devices here are {platform}'
    return backend.lacks(case)
