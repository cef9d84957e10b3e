"""Command line of this process."""

import sys
from pathlib import Path

from sinklab.escape import join_shell


def get_program_argv() -> list[str]:
    return [sys.argv[0]] if Path(sys.argv[0]).name == 'sinklab' else [sys.executable, '-m', 'sinklab']


def is_sinklab_process() -> bool:
    """Return whether this process is the command `sinklab`, and not a program that imports sinklab."""
    path = Path(sys.argv[0])
    return path.name == 'sinklab' or path.parts[-2:] == ('sinklab', '__main__.py')


def format_command_line() -> str:
    """Format the command line of this process so that the user can run it again."""
    return join_shell([*get_program_argv(), *sys.argv[1:]])
