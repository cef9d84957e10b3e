"""Flags of a run with several processes, and the line that says how a run has ended."""

import argparse
import math
import shlex
import sys
from pathlib import Path

from sinklab.errors import UserError
from sinklab.exit_status import ExitStatus
from sinklab.process_group import ProcessGroup, join_processes
from sinklab.storage.folder_lock import DEFAULT_GRACE_SECONDS

RECOVERY_HINTS = {'stopped': '; resume with: {command}', 'lost': '; start the same command again'}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--coordinator',
        metavar='HOST:PORT',
        help='address of process 0, if a run has several processes, such as host0:8476',
    )
    parser.add_argument(
        '--processes',
        type=int,
        metavar='N',
        help='number of processes of the run (default: as the cluster reports; 1: do not ask the cluster)',
    )
    parser.add_argument('--process', type=int, metavar='I', help='number of this process, from 0')
    parser.add_argument(
        '--join_timeout',
        type=float,
        default=300.0,
        metavar='SECONDS',
        help='seconds to wait for all processes at the start (default: %(default)g)',
    )
    parser.add_argument(
        '--step_timeout',
        type=float,
        default=600.0,
        metavar='SECONDS',
        help='seconds without the end of a step, after which a run of several processes ends (default: %(default)g)',
    )
    parser.add_argument(
        '--grace',
        type=float,
        default=DEFAULT_GRACE_SECONDS,
        metavar='SECONDS',
        help='seconds to wait for a job that still uses the folder, such as one that saves (default: %(default)g)',
    )


def join(args: argparse.Namespace) -> ProcessGroup:
    """Connect to the other processes of the run.

    Raises:
        UserError: A flag is invalid, or the processes cannot connect.
    """
    for name, minimum in {'join_timeout': 1, 'step_timeout': 1, 'grace': 0}.items():
        value = getattr(args, name)
        if not minimum <= value < math.inf or not value:
            limit = f'of at least {minimum}' if minimum else 'above 0'
            raise UserError(f'--{name}={value:g} must be a number of seconds {limit}')
    return join_processes(args.coordinator, args.processes, args.process, args.join_timeout)


def format_exit_status(exit_status: ExitStatus) -> str:
    """Format the exit status for the user, with a hint on how to resume."""
    return exit_status.message + RECOVERY_HINTS.get(exit_status.kind, '').format(command=format_command_line())


def get_program_argv() -> list[str]:
    return [sys.argv[0]] if Path(sys.argv[0]).name == 'sinklab' else [sys.executable, '-m', 'sinklab']


def format_command_line() -> str:
    """Format the command line of this process so that the user can run it again."""
    return shlex.join([*get_program_argv(), *sys.argv[1:]])
