"""The options of a command that is one of several processes, and its way into their group and out of it."""

import argparse
import functools
import math
import sys
from collections.abc import Callable
from typing import NoReturn

from sinklab import streams
from sinklab.checkpoint import digests
from sinklab.cli.command import again
from sinklab.escape import escape_control
from sinklab.folder import Folder
from sinklab.group import Group
from sinklab.lease import GRACE
from sinklab.processes import cluster, link
from sinklab.processes.account import Account, log
from sinklab.processes.ending import End
from sinklab.processes.patience import Patience
from sinklab.processes.supervisor import Supervisor
from sinklab.record import Refusal
from sinklab.train.outcome import of_error

HINTS = {'stopped': '; go on with: {again}', 'lost': '; start the same command again'}


def arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        '--coordinator',
        metavar='HOST:PORT',
        help='address of process 0, where one run has several processes, such as host0:8476',
    )
    verb.add_argument(
        '--processes',
        type=int,
        metavar='N',
        help='number of processes of the run (default: what the cluster says; 1: alone)',
    )
    verb.add_argument('--process', type=int, metavar='I', help='number of this process, from 0')
    verb.add_argument(
        '--join_timeout',
        type=float,
        default=Patience.join,
        metavar='SECONDS',
        help='seconds to wait for all processes at the start (default: %(default)g)',
    )
    verb.add_argument(
        '--patience',
        metavar='TIMES[,SECONDS]',
        help='end a run if a step takes so many times its usual duration, and at least so many seconds '
        f'(default: {Patience.multiple:g},{Patience.floor:g})',
    )
    verb.add_argument(
        '--grace',
        type=float,
        default=GRACE,
        metavar='SECONDS',
        help='seconds between SIGTERM and SIGKILL, in which a checkpoint is saved (default: %(default)g)',
    )
    verb.add_argument(
        '--supervise', action='store_true', help='watch a run of one process as well, and end it if a step hangs'
    )
    verb.add_argument(
        '--restarts',
        type=int,
        default=0,
        metavar='N',
        help='restart a run so many times after a failure (default: %(default)s)',
    )


def seat(given: argparse.Namespace) -> cluster.Seat:
    return cluster.seat(given.coordinator, given.processes, given.process, patience(given).join)


def patience(given: argparse.Namespace) -> Patience:
    """As the options say."""
    if given.restarts < 0:
        raise Refusal(f'--restarts={given.restarts} must be a whole number of at least 0')
    times, _, least = (given.patience or '').partition(',')
    texts = dict(multiple=times, floor=least or None) if given.patience is not None else {}
    numbers = {name: number(text) for name, text in texts.items() if text is not None}
    if not all(numbers.values()) or (given.patience or '').endswith(','):
        raise Refusal(
            f'--patience={given.patience} must be one or two numbers above 0, e.g. --patience=20,60 for 20 times the '
            'usual and no less than 60 seconds'
        )
    for name in ('join_timeout', 'grace'):
        if not number(getattr(given, name)):
            raise Refusal(f'--{name}={getattr(given, name):g} must be a number of seconds above 0')
    return Patience(join=given.join_timeout, **numbers)


def number(given: str | float) -> float | None:
    """A finite number above 0, if that is what is given."""
    try:
        return float(given) if 0 < float(given) < math.inf else None
    except ValueError:
        return None


def supervise(
    command: list[str],
    seat: cluster.Seat,
    patience: Patience,
    folder: Folder,
    ours: Callable[[], bool],
    restarts: int,
) -> int:
    """Has a command run in a child, and ends as those of all processes do. `ours`: the folder holds this run."""
    checkpoint = functools.partial(digests.newest, folder)
    account = None if seat.index else Account(folder, ours, checkpoint, restarts)
    failed = functools.partial(log, folder, seat.index)
    end = Supervisor(seat, command, patience, failed, say, account and account.judge).run()
    if account:
        account.close(end)
        show_cursor()
        if end.kind == 'crashed':
            print(end.trace.rstrip(), file=sys.stderr)
    if end.code:
        say(line(end))
    return end.code


def line(end: End) -> str:
    """What a person reads of an end, and can do."""
    return end.words + HINTS.get(end.kind, '').format(again=again())


def say(text: str) -> None:
    print(f'sinklab train: {escape_control(text)}', file=sys.stderr, flush=True)


def show_cursor() -> None:
    """A line that was live when its process was killed has left none."""
    if sys.stderr.isatty():
        streams.unescaped(sys.stderr).write('\r\x1b[K\x1b[?25h')


def child(function: Callable[[Group], End]) -> NoReturn:
    """Runs a function as one of a group, and leaves as it ends."""
    group = link.group()
    try:
        end = function(group)
    except BaseException as error:
        end = of_error(error)
    group.end(end)
