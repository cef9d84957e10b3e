"""Scheduler-independent jobs: one run of `sinklab` on some hosts, and the jobs of a sweep."""

import argparse
import dataclasses
import re
import shlex
from collections.abc import Mapping

from sinklab.errors import UserError

JOB_NAME_PATTERN = r'[a-z]([a-z0-9-]{0,38}[a-z0-9])?'  # valid as the name of a VM, a pod and a SLURM job


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of `sinklab` under a scheduler."""

    name: str  # at the scheduler
    arguments: tuple[str, ...]  # of `sinklab`, from `train` on, without those that `argv` adds
    workdir: str  # the run folder
    environment: Mapping[str, str]
    max_restarts: int
    grace_seconds: int  # from SIGTERM to SIGKILL
    compilation_cache: str  # folder of compiled programs

    @property
    def argv(self) -> list[str]:
        run_flags = [
            f'--workdir={self.workdir}',
            f'--grace={self.grace_seconds}',
            f'--compiled={self.compilation_cache}',
        ]
        return ['sinklab', *self.arguments, *run_flags]

    def make_script(self, folder: str) -> str:
        """Return a Bash script that executes this run in a folder in which install.sh ran."""
        exports = [f'export {shlex.quote(f"{name}={value}")}' for name, value in self.environment.items()]
        program, *rest = self.argv
        exec_line = f'exec {shlex.join([f"./env/bin/{program}", *rest])}'
        return '\n'.join(['#!/bin/bash', *exports, f'cd {shlex.quote(folder)} || exit 1', exec_line, ''])


def check_job_name(name: str) -> str:
    if not re.fullmatch(JOB_NAME_PATTERN, name):
        raise UserError(
            f'the name {name!r} must begin with a letter and have at most 40 of a-z, 0-9 and -; schedulers allow no '
            'others'
        )
    return name


def parse_option(arguments: tuple[str, ...], name: str) -> tuple[str | None, list[str]]:
    """Return the value of the option --NAME, None without it, and the other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(f'--{name}', nargs='?', dest='value')
    options, others = parser.parse_known_args(arguments)
    return options.value, others


def expand_sweep(job: Job, rows: list[str], seeds: list[int]) -> list[Job]:
    """Return one job for each row and seed, in run folders named as by `sinklab sweep`.

    Args:
        job: The job to expand.
        rows: Rows of the config file; without rows, the result is the job itself.
        seeds: Seeds of each row; an empty list stands for seed 0.

    Raises:
        UserError: There are seeds without rows, or a --config that names a row or is missing.
    """
    if not rows:
        if seeds:
            raise UserError('--seeds need --rows; give --rows=ROW,... too, and --config=FILE without a row')
        return [job]
    config, _ = parse_option(job.arguments, 'config')
    if job.arguments and (not config or ':' in config):
        given = f', not {config}' if config else ''
        raise UserError(f'--rows need a config file without a row{given}; give -- train --config=FILE')
    return [make_row_job(job, row, seed) for seed in seeds or [0] for row in rows]


def make_row_job(job: Job, row: str, seed: int) -> Job:
    arguments = job.arguments
    if arguments:
        config, (verb, *rest) = parse_option(arguments, 'config')
        seed_flags = f'--config.seed={seed}', f'--config.data.seed={seed}'
        arguments = (verb, f'--config={config}:{row}', *rest, *seed_flags)
    return dataclasses.replace(
        job,
        name=check_job_name(f'{job.name}-{re.sub("[^a-z0-9]+", "-", row.lower())}-{seed}'),
        arguments=arguments,
        workdir=job.workdir and f'{job.workdir.rstrip("/")}/{row}-{seed}',
    )


def make_sibling_path(workdir: str, *parts: str) -> str:
    """Return a path in the parent folder of a run folder."""
    return '/'.join([workdir.rstrip('/').rpartition('/')[0], *parts])
