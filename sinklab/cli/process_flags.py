"""Flags of a run with several processes, and the line that says how a run has ended."""

import argparse
import shlex
import sys
from pathlib import Path

from sinklab.cli.flag_types import positive_float, positive_int
from sinklab.exit_status import ExitStatus
from sinklab.storage.folder_lock import DEFAULT_GRACE_SECONDS

RECOVERY_HINTS = {
    'stopped': '; resume with: {command}',
    'lost': '; start the same command again',
    'diverged': '; the run has diverged: sinklab checkpoint ls lists what it has saved',
}


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
        type=positive_int,
        default=300,
        metavar='SECONDS',
        help='seconds to wait for all processes at the start (default: %(default)s)',
    )
    parser.add_argument(
        '--step_timeout',
        type=positive_float,
        default=600.0,
        metavar='SECONDS',
        help='seconds without the end of a step, after which a run of several processes ends (default: %(default)g)',
    )
    parser.add_argument(
        '--grace',
        type=positive_float,
        default=DEFAULT_GRACE_SECONDS,
        metavar='SECONDS',
        help='seconds to wait for a job that still uses the folder, such as one that saves (default: %(default)g)',
    )


def format_exit_status(exit_status: ExitStatus) -> str:
    """Format the exit status for the user, with a hint on how to resume."""
    return exit_status.message + RECOVERY_HINTS.get(exit_status.kind, '').format(command=format_command_line())


def get_program_argv() -> list[str]:
    return [sys.argv[0]] if Path(sys.argv[0]).name == 'sinklab' else [sys.executable, '-m', 'sinklab']


def format_command_line() -> str:
    """Format the command line of this process so that the user can run it again."""
    return shlex.join([*get_program_argv(), *sys.argv[1:]])
