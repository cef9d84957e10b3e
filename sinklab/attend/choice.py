"""The backend of a run: chosen once, on the host, and never replaced unsaid."""

import dataclasses

from sinklab.attend.backends import BACKENDS
from sinklab.attend.rule import Case
from sinklab.attend.verification import ACCURACY, error
from sinklab.record import Refusal

PREFERRED = {'tpu': ('tpu', 'chunked'), 'gpu': ('cudnn', 'gpu', 'chunked')}  # by platform; elsewhere chunked


@dataclasses.dataclass(frozen=True)
class Choice:
    """A backend, and why those that would have come first were not taken."""

    backend: str
    passed: dict[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return self.backend + ''.join(f' (not {name}: {reason})' for name, reason in self.passed.items())


def choose(wanted: str, platform: str, case: Case, here: bool = True) -> Choice:
    """`wanted` or, for auto, the first of the platform's backends that can and, where it is `here`, is right.

    Raises Refusal.
    """
    passed = {}
    for name in PREFERRED.get(platform, ('chunked',)) if wanted == 'auto' else (wanted,):
        reason = lacks(name, platform, case) if here else cannot(name, platform, case)
        if reason is None:
            return Choice(name, passed)
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
    except Exception as failure:  # a compiler that gives up is a reason as good as any
        return f'it fails on these devices ({type(failure).__name__}: {str(failure).splitlines()[0]})'
    return None if found <= ACCURACY else f'wrong on these devices by {found:.1e} of the largest entry'


def cannot(name: str, platform: str, case: Case) -> str | None:
    """None, or why a backend is not for a platform or a case."""
    backend = BACKENDS[name]
    if backend.platform not in (None, platform):
        return f'it is for {backend.platform}, and the devices here are {platform}'
    return backend.lacks(case)
