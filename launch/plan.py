"""Plans of files to write and commands to run, to be executed or printed as a shell script."""

import collections
import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from sinklab.errors import UserError, format_extra_command

INSTALL_HINTS = {
    'gcloud': 'install it from https://cloud.google.com/sdk/docs/install',
    'kubectl': 'install it with gcloud components install kubectl gke-gcloud-auth-plugin',
    'uv': 'install it with pip install uv',
    'sinklab': f'activate the environment in which it is installed, or install it with {format_extra_command("gcs")}',
}
SLURM_HINT = 'run this command on the login node of the cluster'
# {pattern of an error message of a scheduler: remedy}.
ERROR_HINTS = {
    r'quota|RESOURCE_EXHAUSTED': (
        'ask for more at https://console.cloud.google.com/iam-admin/quotas, or use another --zone, --spot or a '
        'smaller --accelerator'
    ),
    r'no more capacity|stockout|not enough resources': 'no capacity is available; use another --zone, or wait',
    r'QOS|AssocMaxSubmitJobLimit|AssocGrp': 'a limit of your account; see sacctmgr show associations user=$USER',
    r'already exists|ALREADY_EXISTS': 'see its state with the verb status; stop it, or use another name',
    r'PERMISSION_DENIED|Forbidden|does not have permission': 'gcloud auth list prints the account in use',
    r'NOT_FOUND|NotFound': 'see what exists with the verb status',
    r'connection .*refused|Unable to connect': 'configure kubectl: gcloud container clusters get-credentials CLUSTER',
}


@dataclasses.dataclass(frozen=True)
class File:
    """A file to write. If `is_private` (it may hold values of --env), only its owner can read it."""

    path: str
    text: str
    is_private: bool = False


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of a plan.

    Attributes:
        argv: The argument list.
        is_optional: Whether the plan continues when the command fails.
        is_interactive: Whether the command inherits stderr, so that the plan does not read it.
    """

    argv: tuple[str, ...]
    is_optional: bool = False
    is_interactive: bool = False

    def __str__(self) -> str:
        return shlex.join(self.argv) + (' || true' if self.is_optional else '')


def make_command(*argv: str, is_optional: bool = False) -> Command:
    return Command(tuple(argv), is_optional)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Files to write, then commands to run, in their order. `+` joins two plans."""

    files: tuple[File, ...] = ()
    commands: tuple[Command, ...] = ()

    def __add__(self, other: 'Plan') -> 'Plan':
        return Plan((*self.files, *other.files), (*self.commands, *other.commands))

    def as_interactive(self) -> 'Plan':
        return Plan(self.files, tuple(dataclasses.replace(planned, is_interactive=True) for planned in self.commands))

    def __str__(self) -> str:
        """Return the shell script that executes the plan."""
        return '\n'.join(
            ['#!/bin/bash', 'set -eu', *map(format_write_script, self.files), *map(str, self.commands), '']
        )

    def execute(self) -> None:
        """Execute the plan up to the first command that fails; nothing if a program is missing."""
        for program in dict.fromkeys(planned.argv[0] for planned in self.commands):
            if not shutil.which(program):
                raise UserError(f'{program} is not installed; {INSTALL_HINTS.get(program, SLURM_HINT)}')
        for file in self.files:
            write_file(file)
        for number, planned in enumerate(self.commands):
            code, stderr_lines = run_command(planned)
            if code and not planned.is_optional:
                raise UserError(format_failure(planned, code, stderr_lines, len(self.commands) - number - 1))


def write_file(file: File) -> None:
    path = Path(file.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if file.is_private:  # create the file with mode 0600 before writing, even if a readable file existed
        path.unlink(missing_ok=True)
        path.touch(mode=0o600, exist_ok=False)
    path.write_text(file.text, encoding='utf-8')


def format_write_script(file: File) -> str:
    """Return a Bash script that writes a file as `write_file` does."""
    delimiter = 'END'
    while delimiter in file.text.splitlines():
        delimiter += '_'
    path = shlex.quote(file.path)
    body = file.text if file.text.endswith('\n') else f'{file.text}\n'
    folder = shlex.quote(os.path.dirname(file.path) or '.')
    create_private = f'rm -f {path} && (umask 077 && : > {path})\n' if file.is_private else ''
    return f"mkdir -p {folder}\n{create_private}cat > {path} <<'{delimiter}'\n{body}{delimiter}"


def run_command(command_to_run: Command) -> tuple[int, list[str]]:
    """Run a command whose output goes to the terminal; return its exit code and last lines of stderr.

    The lines are [] for an interactive command, whose stderr is not captured.
    """
    print(f'$ {command_to_run}', file=sys.stderr, flush=True)
    if command_to_run.is_interactive:
        return subprocess.run(command_to_run.argv).returncode, []
    stderr_lines = collections.deque(maxlen=20)
    with subprocess.Popen(command_to_run.argv, stderr=subprocess.PIPE, text=True, errors='replace') as process:
        for line in process.stderr:
            sys.stderr.write(line)
            stderr_lines.append(line.strip())
    return process.returncode, [line for line in stderr_lines if line]


def format_failure(failed_command: Command, code: int, stderr_lines: list[str], num_remaining: int) -> str:
    text = '\n'.join(stderr_lines)
    hint = next(
        (hint for pattern, hint in ERROR_HINTS.items() if re.search(pattern, text, re.IGNORECASE)), 'see above'
    )
    remainder = f'; {num_remaining} more commands were not run' if num_remaining else ''
    last_line = stderr_lines[-1] if stderr_lines else 'no message'
    return f'{shlex.join(failed_command.argv[:4])} ... exits with {code} ({last_line}): {hint}{remainder}'
