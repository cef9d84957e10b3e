"""Commands of sinklab in the process of a test, and config files for them."""

import os
from pathlib import Path

from sinklab.cli.main import main


def run_command(capsys, *arguments):
    """Run a command, and return (exit code, stdout, stderr)."""
    return main([str(argument) for argument in arguments]), *capsys.readouterr()


def get_error_line(capsys, *arguments):
    """Run a command that must be refused, and return its only line of output."""
    code, out, err = run_command(capsys, *arguments)
    assert (code, out, err.count('\n'), 'Traceback' in err) == (1, '', 1, False), (out, err)
    return err.strip()


def write_config(path: Path, **changes) -> str:
    """Write a config file of a tiny model, as a user would, and return its path."""
    path.write_text(
        f'import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n'
        'from tiny_specs import make_tiny_config\n'
        f'def get_config(row=None):\n    return make_tiny_config(**{changes!r})\n'
    )
    return str(path)


def write_table(path: Path, rows: dict) -> Path:
    """Write a config file of rows, and return its path."""
    path.write_text(f'from sinklab.configs.table import table\nROWS = {rows!r}\nget_config = table(ROWS)\n')
    return path
