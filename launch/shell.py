"""Statements of shell scripts: commands, and files that are written."""

import shlex
import subprocess
import tempfile


def make_command(*argv: str) -> str:
    return shlex.join(argv)


def write_file(path: str, text: str, *, is_private: bool = False) -> str:
    """Return the statements that write a text file.

    Args:
        path: The path, whose folder is made.
        text: The text; it ends with a line break.
        is_private: Whether the text may have values of --env, so that only its owner may read the file.
    """
    delimiter = 'END'
    while delimiter in text.splitlines():
        delimiter += '_'
    quoted_path = shlex.quote(path)
    lines = [
        f'mkdir -p {shlex.quote(path.rpartition("/")[0])}',
        # An existing file would keep its mode.
        *([f'rm -f {quoted_path}', f'(umask 077 && : > {quoted_path})'] if is_private else []),
        f"cat > {quoted_path} <<'{delimiter}'\n{text}{delimiter}",
    ]
    return '\n'.join(lines)


def make_script(statements: list[str]) -> str:
    return '\n'.join(['#!/bin/bash', 'set -eu', *statements, ''])


def execute(script: str) -> int:
    """Execute a Bash script up to the first command that fails, print each command, and return the exit code."""
    with tempfile.NamedTemporaryFile('w', suffix='.sh') as file:  # only its owner can read it
        file.write(script)
        file.flush()
        return subprocess.run(['bash', '-x', file.name]).returncode
