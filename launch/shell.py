"""Statements of shell scripts: commands, and files that are written, some of them from templates."""

import re
import shlex
import subprocess
import tempfile
from pathlib import Path

END_OF_FILE = 'END_OF_FILE'  # a line of its own


def make_command(*argv: str) -> str:
    return shlex.join(argv)


def write_file(path: str, text: str) -> str:
    """Return the statements that write a text file and make its folder; the text ends with a line break.

    Only its owner can read the file, which may have values of --env.
    """
    folder = shlex.quote(path.rpartition('/')[0])
    return f"mkdir -p {folder}\n(umask 077 && cat > {shlex.quote(path)}) <<'{END_OF_FILE}'\n{text}{END_OF_FILE}"


def fill_template(file_name: str, **values: object) -> str:
    """Return a file of launch/templates, with @NAME@ replaced by the value of this name."""
    text = (Path(__file__).parent / 'templates' / file_name).read_text()
    return re.sub(r'@(\w+)@', lambda match: str(values[match[1]]), text)


def make_script(statements: list[str]) -> str:
    return '\n'.join(['#!/bin/bash', 'set -eu', *statements, ''])


def execute(script: str) -> int:
    """Execute a Bash script up to the first command that fails, print each command, and return the exit code."""
    with tempfile.NamedTemporaryFile('w', suffix='.sh') as file:  # only its owner can read it
        file.write(script)
        file.flush()
        return subprocess.run(['bash', '-x', file.name]).returncode
