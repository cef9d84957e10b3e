"""Scheduler-independent jobs: one run of `sinklab` on some hosts, and the jobs of a sweep."""

import dataclasses
import itertools
import re
import shlex
from collections.abc import Mapping

from sinklab.errors import UserError

# {option that a user may not give after --: remedy in the error message}. The launcher or the scheduler sets them.
RESERVED_OPTIONS = {
    **{name: f'give --{name} before it' for name in ('workdir', 'grace', 'compiled')},
    **dict.fromkeys(('coordinator', 'processes', 'process'), 'remove it, the scheduler sets it'),
}
JOB_NAME_PATTERN = r'[a-z]([a-z0-9-]{0,38}[a-z0-9])?'  # valid as the name of a VM, a pod and a SLURM job


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of `sinklab` under a scheduler.

    Attributes:
        name: The name of the job at the scheduler.
        arguments: The arguments of `sinklab`, from `train` on, without the options of RESERVED_OPTIONS.
        workdir: The run folder.
        environment: Environment variables of the run.
        max_restarts: The number of restarts that the scheduler attempts.
        grace_seconds: Seconds from SIGTERM to SIGKILL.
        compilation_cache: The folder of compiled programs, or `none`.
    """

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

    def make_script(self, folder: str) -> str:
        """Return a Bash script that executes this run in the environment that INSTALL_SCRIPT created.

        Args:
            folder: the folder in which INSTALL_SCRIPT ran.
        """
        exports = [f'export {shlex.quote(f"{name}={value}")}' for name, value in self.environment.items()]
        program, *rest = self.argv
        exec_line = f'exec {shlex.join([f"./env/bin/{program}", *rest])}'
        return '\n'.join(['#!/bin/bash', *exports, f'cd {shlex.quote(folder)} || exit 1', exec_line, ''])


def check_job_name(name: str) -> str:
    if not re.fullmatch(JOB_NAME_PATTERN, name):
        suggestion = replace_invalid_characters(name).strip('-')[:40].rstrip('-')
        hint = f', e.g. {suggestion}' if re.fullmatch(JOB_NAME_PATTERN, suggestion) else ''
        raise UserError(
            f'the name {name!r} must begin with a letter and have at most 40 of a-z, 0-9 and -{hint}; schedulers '
            'allow no others'
        )
    return name


def replace_invalid_characters(name: str) -> str:
    """Replace the characters of a text that a job name may not have by -."""
    return re.sub(r'[^a-z0-9]+', '-', name.lower())


def find_option(arguments: tuple[str, ...], name: str) -> str | None:
    """Return the value of the last --name=VALUE or --name VALUE; None if the option is missing."""
    value = None
    for argument, next_argument in itertools.pairwise((*arguments, None)):
        if argument == f'--{name}':
            value = next_argument
        elif argument.startswith(f'--{name}='):
            value = argument.partition('=')[2]
    return value


def check_train_arguments(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Return the arguments of `sinklab` after checking them.

    Raises:
        UserError: the command is not `train`, or an option of RESERVED_OPTIONS is given.
    """
    if arguments[:1] != ('train',):
        command_line = shlex.join(arguments) or 'nothing'
        raise UserError(
            f'after --, give a sinklab train command, not {command_line}; e.g. -- train --config=FILE:ROW'
        )
    for name, remedy in RESERVED_OPTIONS.items():
        if any(argument == f'--{name}' or argument.startswith(f'--{name}=') for argument in arguments):
            raise UserError(f'--{name} is not allowed after --; {remedy}')
    return arguments


def expand_sweep(job: Job, rows: list[str], seeds: list[int]) -> list[Job]:
    """Return one job for each row and seed, in run folders named as by `sinklab sweep`.

    Args:
        job: the job to expand.
        rows: rows of the config file; without rows, the result is the job itself.
        seeds: seeds of each row; an empty list stands for seed 0.

    Raises:
        UserError: seeds without rows, a --config that names a row or is missing, or two jobs of one name.
    """
    if not rows:
        if seeds:
            raise UserError('--seeds need --rows; give --rows=ROW,... too, and --config=FILE without a row')
        return [job]
    config = find_option(job.arguments, 'config') or ''
    if job.arguments and (not config or ':' in config):
        problem = f'--config={config} names a row' if config else 'no --config=FILE is given'
        raise UserError(f'--rows need a config file, but {problem}; give -- train --config=FILE')
    jobs = [make_row_job(job, row, seed) for seed in seeds or [0] for row in rows]
    duplicates = {row_job.name for row_job in jobs if [other_job.name for other_job in jobs].count(row_job.name) > 1}
    if duplicates:
        raise UserError(f'two of these rows and seeds have the job name {min(duplicates)}; submit them separately')
    return jobs


def make_row_job(job: Job, row: str, seed: int) -> Job:
    return dataclasses.replace(
        job,
        name=check_job_name(replace_invalid_characters(f'{job.name}-{row}-{seed}')),
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
    """Return a path in the parent folder of a run folder."""
    return '/'.join([workdir.rstrip('/').rpartition('/')[0], *parts])


def check_reachable(name: str, path: str, path_prefixes: tuple[str, ...]) -> str:
    """Return the path of an option.

    Raises:
        UserError: the path does not begin with one of `path_prefixes`, so the hosts of a job cannot reach it.
    """
    if not path.startswith(path_prefixes):
        raise UserError(
            f'--{name}: {path} is not accessible to the hosts of a job; give a path that begins with '
            f'{" or ".join(path_prefixes)}'
        )
    return path
