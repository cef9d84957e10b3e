"""The runs of a sweep one after another, and how each has ended."""

from collections.abc import Callable

from sinklab.lease import Lease
from sinklab.processes.ending import CAUSES, KIND_OF, OF_SIGNAL, of_exit
from sinklab.sweep.plan import Run
from sinklab.sweep.process import Relay

SIGNAL_OF = {CAUSES[cause][1]: number for number, cause in OF_SIGNAL.items()}  # of an exit code
FAILED = {'lost': 'crashed'}  # to a sweep, which goes on with the next run, they are the same


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
                relay.received.append(SIGNAL_OF.get(code, -code))
            elif kind in ('done', 'diverged') or not relay.received:
                run.outcome, run.reason = kind, message
    return relay.received[0] if relay.received and any(run.outcome == 'to do' for run in runs) else None


def ending(written: dict, code: int, said: str) -> tuple[str, str]:
    """(kind, message) as the run has written them; of one that could not, its exit code and its last line."""
    if written:
        kind, message = written['kind'], written['message']
    elif code < 0:
        end = of_exit(code, begun=False, noise='')
        kind, message = end.kind, end.words
    else:
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        kind = KIND_OF.get(code, 'crashed')
        message = lines[-1] if lines else f'exit code {code}, without a word'
    return FAILED.get(kind, kind), message
