"""Flags of a run with several processes, and the line that says how a run has ended."""

import argparse
import shlex
import sys
from pathlib import Path

from sinklab.cli.flag_types import add_options, positive_float, positive_int
from sinklab.exit_status import ExitStatus
from sinklab.storage.folder_lock import DEFAULT_GRACE_SECONDS

RECOVERY_HINTS = {
    'stopped': '; resume with: {command}',
    'lost': '; start the same command again',
    'diverged': '; the run has diverged: sinklab checkpoint ls lists what it has saved',
}


OPTIONS = {
    'coordinator': (str, 'HOST:PORT', 'address of process 0, if a run has several processes, such as host0:8476'),
    'processes': (int, 'N', 'number of processes (default: as the cluster reports; 1: do not ask the cluster)'),
    'process': (int, 'I', 'number of this process, from 0'),
    'join_timeout': (positive_int, 'SECONDS', 'wait for all processes at the start (default: %(default)s)'),
    'step_timeout': (positive_float, 'SECONDS', 'limit of a step of several processes (default: %(default)g)'),
    'grace': (positive_float, 'SECONDS', 'wait for a job that still uses the folder (default: %(default)g)'),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, OPTIONS)
    parser.set_defaults(join_timeout=300, step_timeout=600.0, grace=DEFAULT_GRACE_SECONDS)


def format_exit_status(exit_status: ExitStatus) -> str:
    """Format the exit status for the user, with a hint on how to resume."""
    return exit_status.message + RECOVERY_HINTS.get(exit_status.kind, '').format(command=format_command_line())


def get_program_argv() -> list[str]:
    return [sys.argv[0]] if Path(sys.argv[0]).name == 'sinklab' else [sys.executable, '-m', 'sinklab']


def format_command_line() -> str:
    """Format the command line of this process so that the user can run it again."""
    return shlex.join([*get_program_argv(), *sys.argv[1:]])
