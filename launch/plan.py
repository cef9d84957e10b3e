"""A plan: files to write, then commands to run. It is printed as the shell script that does the same, or executed."""

import collections
import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from launch.job import Refusal
from sinklab.escape import escape_control, join_shell, quote_shell
from sinklab.install import format_extra_command

TOOLS = {
    'gcloud': 'install it from https://cloud.google.com/sdk/docs/install',
    'kubectl': 'install it by gcloud components install kubectl gke-gcloud-auth-plugin',
    'uv': 'install it by pip install uv',
    'sinklab': f'activate the environment in which it is installed, or install it by {format_extra_command("gcs")}',
    'aws': 'install it by pip install awscli',
}
SLURM = 'give this command where jobs of the cluster are given, its login node'
# What schedulers say when they refuse -> what to do about it.
HINTS = {
    r'quota|RESOURCE_EXHAUSTED': (
        'ask for more at https://console.cloud.google.com/iam-admin/quotas, or take another --zone, --spot or a '
        'smaller --accelerator'
    ),
    r'no more capacity|stockout|not enough resources': 'nothing is free there; take another --zone, or wait',
    r'QOS|AssocMaxSubmitJobLimit|AssocGrp': 'a limit of your account; see sacctmgr show associations user=$USER',
    r'already exists|ALREADY_EXISTS': 'the verb status says how it is; stop it, or take another name',
    r'PERMISSION_DENIED|Forbidden|does not have permission': 'gcloud auth list says as whom you ask',
    r'NOT_FOUND|NotFound': 'the verb status says what is there',
    r'connection .*refused|Unable to connect': 'gcloud container clusters get-credentials CLUSTER has kubectl ask it',
}


@dataclasses.dataclass(frozen=True)
class File:
    """A text to write; of what is `private`, which may hold values of --env, only its owner can read the file."""

    path: str
    text: str
    private: bool = False


@dataclasses.dataclass(frozen=True)
class Command:
    """An argument list; if it is `optional` and fails, the plan goes on; if it is `live`, the terminal is its own."""

    argv: tuple[str, ...]
    optional: bool = False
    live: bool = False

    def __str__(self) -> str:
        return join_shell(self.argv) + (' || true' if self.optional else '')


def command(*argv: str, optional: bool = False) -> Command:
    return Command(tuple(argv), optional)


@dataclasses.dataclass(frozen=True)
class Plan:
    files: tuple[File, ...] = ()
    commands: tuple[Command, ...] = ()

    def __add__(self, other: 'Plan') -> 'Plan':
        return Plan((*self.files, *other.files), (*self.commands, *other.commands))

    def live(self) -> 'Plan':
        return Plan(self.files, tuple(dataclasses.replace(one, live=True) for one in self.commands))

    def __str__(self) -> str:
        """A script that does all of it."""
        return '\n'.join(['#!/bin/bash', 'set -eu', *map(written, self.files), *map(str, self.commands), ''])

    def execute(self) -> None:
        """All of it, up to the first command that fails; nothing, where a program is missing."""
        for program in dict.fromkeys(one.argv[0] for one in self.commands):
            if not shutil.which(program):
                raise Refusal(f'{program} is not there; {TOOLS.get(program, SLURM)}')
        for file in self.files:
            write(file)
        for number, one in enumerate(self.commands):
            code, said = executed(one)
            if code and not one.optional:
                raise Refusal(failed(one, code, said, len(self.commands) - number - 1))


def write(file: File) -> None:
    path = Path(file.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if file.private:  # from its first byte on, also where an earlier one was readable
        path.unlink(missing_ok=True)
        path.touch(mode=0o600, exist_ok=False)
    path.write_text(file.text, encoding='utf-8')


def written(file: File) -> str:
    """Return Bash that does what `write` does."""
    end = 'END'
    while end in file.text.splitlines():
        end += '_'
    path = quote_shell(file.path)
    body = file.text if file.text.endswith('\n') else f'{file.text}\n'
    folder = quote_shell(os.path.dirname(file.path) or '.')
    private = f'rm -f {path} && (umask 077 && : > {path})\n' if file.private else ''
    return f"mkdir -p {folder}\n{private}cat > {path} <<'{end}'\n{body}{end}"


def executed(one: Command) -> tuple[int, list[str]]:
    """(exit code, the last lines of stderr) of a command, which speaks for itself meanwhile."""
    print(f'$ {one}', file=sys.stderr, flush=True)
    if one.live:
        return subprocess.run(one.argv).returncode, []
    said = collections.deque(maxlen=20)
    with subprocess.Popen(one.argv, stderr=subprocess.PIPE, text=True, errors='replace') as process:
        for line in process.stderr:
            sys.stderr.write(escape_control(line, keep='\t\n'))
            said.append(line.strip())
    return process.returncode, [line for line in said if line]


def failed(one: Command, code: int, said: list[str], left: int) -> str:
    text = '\n'.join(said)
    hint = next((hint for pattern, hint in HINTS.items() if re.search(pattern, text, re.IGNORECASE)), 'see above')
    rest = f'; {left} more to run were not' if left else ''
    last = escape_control(said[-1]) if said else 'without a word'
    return f'{join_shell(one.argv[:4])} ... exits with {code} ({last}): {hint}{rest}'
