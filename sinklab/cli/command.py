"""The command line of this program."""

import shlex
import sys
from pathlib import Path


def program() -> list[str]:
    return [sys.argv[0]] if Path(sys.argv[0]).name == 'sinklab' else [sys.executable, '-m', 'sinklab']


def again() -> str:
    """The command line that was given, to be given again."""
    return shlex.join([*program(), *sys.argv[1:]])
