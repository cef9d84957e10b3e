"""The runs of a sweep one after another, and how each has ended."""

import signal
from collections.abc import Callable

from sinklab.lease import Lease
from sinklab.sweep.plan import Run
from sinklab.sweep.process import Relay

STOPPED = {42: signal.SIGTERM, -signal.SIGTERM: signal.SIGTERM, 130: signal.SIGINT, -signal.SIGINT: signal.SIGINT}
KINDS = {0: 'done', 1: 'refused', 3: 'diverged', **dict.fromkeys(STOPPED, 'stopped')}


def train(
    runs: list[Run],
    command: Callable[[Run], list[str]],
    say: Callable[[str], None],
    held: Lease,
) -> int | None:
    """Runs what is to do, each in its own process; returns the signal that has ended it before its time."""
    with Relay(held.stopping) as relay:
        for number, run in enumerate(runs, 1):
            at = f'[{number}/{len(runs)}] {run}'
            if run.outcome != 'to do':
                say(f'{at}: {run.outcome} before; to run it again, delete {run.folder}')
                continue
            if relay.received:
                break
            held.check()
            say(at)
            run.forget()
            code, said = relay.run(command(run))
            kind, message = ending(run.last_outcome(), code, said)
            if kind == 'stopped':
                relay.received.append(STOPPED.get(code, signal.SIGINT))
            elif kind in ('done', 'diverged') or not relay.received:
                run.outcome, run.reason = kind, message
    return relay.received[0] if relay.received and any(run.outcome == 'to do' for run in runs) else None


def ending(written: dict, code: int, said: str) -> tuple[str, str]:
    """(kind, message) as the run has written them; of one that could not, its exit code and its last line."""
    if written:
        return 'crashed' if written['kind'] == 'lost' else written['kind'], written['message']
    if code < 0 and code not in STOPPED:
        return 'crashed', f'killed by {signal.Signals(-code).name}'
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return KINDS.get(code, 'crashed'), lines[-1] if lines else f'exit code {code}, without a word'
