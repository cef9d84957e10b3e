"""What a job is, whoever starts it: one run of `sinklab` on some hosts; and the jobs of a sweep."""

import dataclasses
import itertools
import re
from collections.abc import Mapping

from sinklab.escape import join_shell, quote_shell
from sinklab.supervisor.exit_status import EXIT_CAUSES

# What a scheduler starts again: a run that says so, and a process that a signal has ended. All else is final.
RETRY_SIGNALS = {'SIGABRT': 6, 'SIGBUS': 7, 'SIGKILL': 9, 'SIGSEGV': 11, 'SIGTERM': 15}
RETRY_EXIT_CODES = (
    *sorted({code for kind, code in EXIT_CAUSES.values() if kind == 'lost'}),
    *(128 + n for n in RETRY_SIGNALS.values()),
)
# What is not for a user to say to a run -> what to do instead.
RESERVED_OPTIONS = {
    **{name: f'give --{name} before it' for name in ('workdir', 'grace', 'compiled', 'restarts')},
    **dict.fromkeys(('coordinator', 'processes', 'process'), 'leave it out, the scheduler says it'),
}
JOB_NAME_PATTERN = r'[a-z]([a-z0-9-]{0,38}[a-z0-9])?'  # what a VM, a pod and a job of SLURM may be called
BUCKET_PREFIXES = ('gs://', 's3://')


class UserError(ValueError):
    """An error of the user, in one line: what was given, what is allowed, what to do."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One run: what is asked of `sinklab`, where, and for how long it is tried again."""

    name: str
    arguments: tuple[str, ...]
    workdir: str
    environment: Mapping[str, str]
    max_restarts: int
    grace_seconds: int
    compilation_cache: str

    @property
    def argv(self) -> list[str]:
        run_flags = [
            f'--workdir={self.workdir}',
            f'--grace={self.grace_seconds}',
            f'--compiled={self.compilation_cache}',
        ]
        return ['sinklab', *self.arguments, *run_flags]

    def make_script(self, folder: str, secret_file: str = '') -> str:
        """Return Bash that becomes this run, in an environment that INSTALL_SCRIPT made in a folder.

        Args:
            secret_file: a file with the secret of the run, by which its processes know each other.
        """
        read_secret = f'SINKLAB_RUN_SECRET=$(< {quote_shell(secret_file)}) || exit 1'
        exports = [read_secret, 'export SINKLAB_RUN_SECRET'] if secret_file else []
        exports += [f'export {quote_shell(f"{name}={value}")}' for name, value in self.environment.items()]
        program, *rest = self.argv
        exec_line = f'exec {join_shell([f"./env/bin/{program}", *rest])}'
        return '\n'.join(['#!/bin/bash', *exports, f'cd {quote_shell(folder)} || exit 1', exec_line, ''])


def check_job_name(name: str) -> str:
    if not re.fullmatch(JOB_NAME_PATTERN, name):
        suggestion = re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')[:40].rstrip('-')
        hint = f', e.g. {suggestion}' if re.fullmatch(JOB_NAME_PATTERN, suggestion) else ''
        raise UserError(
            f'the name {name!r} must begin with a letter and be of a-z, 0-9 and -, 40 at most{hint}; schedulers '
            'allow no more'
        )
    return name


def find_option(arguments: tuple[str, ...], name: str) -> str | None:
    """The value of the last --name=VALUE or --name VALUE."""
    value = None
    for argument, next_argument in itertools.pairwise((*arguments, None)):
        if argument == f'--{name}':
            value = next_argument
        elif argument.startswith(f'--{name}='):
            value = argument.partition('=')[2]
    return value


def check_train_arguments(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The arguments of `sinklab`, if it is a run that they ask for and nothing that is said elsewhere."""
    if arguments[:1] != ('train',):
        command_line = join_shell(arguments) or 'nothing'
        raise UserError(
            f'after -- stands what is asked of sinklab, and {command_line} is given; e.g. -- train --config=FILE:ROW'
        )
    for name, remedy in RESERVED_OPTIONS.items():
        if any(argument == f'--{name}' or argument.startswith(f'--{name}=') for argument in arguments):
            raise UserError(f'--{name} stands after --; {remedy}')
    return arguments


def expand_sweep(job: Job, rows: list[str], seeds: list[int]) -> list[Job]:
    """A job for each row with each seed, in folders as `sinklab sweep` has them; without rows, the job itself."""
    if not rows:
        if seeds:
            raise UserError('--seeds are of rows; give --rows=ROW,... too, and --config=FILE without one')
        return [job]
    config = find_option(job.arguments, 'config') or ''
    if job.arguments and (not config or ':' in config):
        problem = f'--config={config} names a row' if config else 'no --config=FILE is given'
        raise UserError(f'--rows are of a config file, and {problem}; give -- train --config=FILE')
    jobs = [make_row_job(job, row, seed) for seed in seeds or [0] for row in rows]
    duplicates = {row_job.name for row_job in jobs if [other_job.name for other_job in jobs].count(row_job.name) > 1}
    if duplicates:
        raise UserError(f'two of these rows and seeds are called {min(duplicates)}; give them one after another')
    return jobs


def make_row_job(job: Job, row: str, seed: int) -> Job:
    return dataclasses.replace(
        job,
        name=check_job_name(f'{job.name}-{row}-{seed}'.lower().replace('_', '-')),
        arguments=add_row_arguments(job.arguments, row, seed) if job.arguments else (),
        workdir=job.workdir and f'{job.workdir.rstrip("/")}/{row}-{seed}',
    )


def add_row_arguments(arguments: tuple[str, ...], row: str, seed: int) -> tuple[str, ...]:
    verb, *rest = remove_option(arguments, 'config')
    config = f'--config={find_option(arguments, "config")}:{row}'
    return (verb, config, *rest, f'--config.seed={seed}', f'--config.data.seed={seed}')


def remove_option(arguments: tuple[str, ...], name: str) -> list[str]:
    remaining = [argument for argument in arguments if not argument.startswith(f'--{name}=')]
    while f'--{name}' in remaining:
        index = remaining.index(f'--{name}')
        del remaining[index : index + 2]
    return remaining


def make_sibling_path(workdir: str, *parts: str) -> str:
    """A path in the folder of a run folder."""
    return '/'.join([workdir.rstrip('/').rpartition('/')[0], *parts])


def check_reachable(name: str, path: str, path_prefixes: tuple[str, ...]) -> str:
    """The path that an option gives, if every host of a job reaches it."""
    if not path.startswith(path_prefixes):
        raise UserError(
            f'--{name}: {path} is not seen by the hosts of a job; give a path that begins with '
            f'{" or ".join(path_prefixes)}'
        )
    return path
