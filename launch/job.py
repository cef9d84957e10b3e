"""What a job is, whoever starts it: one run of `sinklab` on some hosts; and the jobs of a sweep."""

import dataclasses
import itertools
import re
from collections.abc import Mapping

from sinklab.escape import join_shell, quote_shell
from sinklab.processes.ending import CAUSES

# What a scheduler starts again: a run that says so, and a process that a signal has ended. All else is final.
SIGNALS = {'SIGABRT': 6, 'SIGBUS': 7, 'SIGKILL': 9, 'SIGSEGV': 11, 'SIGTERM': 15}
AGAIN = (*sorted({code for kind, code in CAUSES.values() if kind == 'lost'}), *(128 + n for n in SIGNALS.values()))
# What is not for a user to say to a run -> what to do instead.
OURS = {
    **{name: f'give --{name} before it' for name in ('workdir', 'grace', 'compiled', 'restarts')},
    **dict.fromkeys(('coordinator', 'processes', 'process'), 'leave it out, the scheduler says it'),
}
NAME = r'[a-z]([a-z0-9-]{0,38}[a-z0-9])?'  # what a VM, a pod and a job of SLURM may be called
BUCKETS = ('gs://', 's3://')


class Refusal(ValueError):
    """An error of the user, in one line: what was given, what is allowed, what to do."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One run: what is asked of `sinklab`, where, and for how long it is tried again."""

    name: str
    arguments: tuple[str, ...]
    workdir: str
    environment: Mapping[str, str]
    restarts: int
    grace: int
    compiled: str

    @property
    def command(self) -> list[str]:
        own = [f'--workdir={self.workdir}', f'--grace={self.grace}', f'--compiled={self.compiled}']
        return ['sinklab', *self.arguments, *own]

    def script(self, folder: str, secret: str = '') -> str:
        """Return Bash that becomes this run, in an environment made by `install` in a folder.

        Args:
            secret: a file with the secret of the run, by which its processes know each other.
        """
        read = f'SINKLAB_RUN_SECRET=$(< {quote_shell(secret)}) || exit 1'
        exports = [read, 'export SINKLAB_RUN_SECRET'] if secret else []
        exports += [f'export {quote_shell(f"{name}={value}")}' for name, value in self.environment.items()]
        program, *rest = self.command
        run = f'exec {join_shell([f"./env/bin/{program}", *rest])}'
        return '\n'.join(['#!/bin/bash', *exports, f'cd {quote_shell(folder)} || exit 1', run, ''])


def named(name: str) -> str:
    if not re.fullmatch(NAME, name):
        near = re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')[:40].rstrip('-')
        hint = f', e.g. {near}' if re.fullmatch(NAME, near) else ''
        raise Refusal(
            f'the name {name!r} must begin with a letter and be of a-z, 0-9 and -, 40 at most{hint}; schedulers '
            'allow no more'
        )
    return name


def option(arguments: tuple[str, ...], name: str) -> str | None:
    """The value of the last --name=VALUE or --name VALUE."""
    found = None
    for argument, following in itertools.pairwise((*arguments, None)):
        if argument == f'--{name}':
            found = following
        elif argument.startswith(f'--{name}='):
            found = argument.partition('=')[2]
    return found


def asked(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The arguments of `sinklab`, if it is a run that they ask for and nothing that is said elsewhere."""
    if arguments[:1] != ('train',):
        given = join_shell(arguments) or 'nothing'
        raise Refusal(
            f'after -- stands what is asked of sinklab, and {given} is given; e.g. -- train --config=FILE:ROW'
        )
    for name, instead in OURS.items():
        if any(argument == f'--{name}' or argument.startswith(f'--{name}=') for argument in arguments):
            raise Refusal(f'--{name} stands after --; {instead}')
    return arguments


def sweep(job: Job, rows: list[str], seeds: list[int]) -> list[Job]:
    """A job for each row with each seed, in folders as `sinklab sweep` has them; without rows, the job itself."""
    if not rows:
        if seeds:
            raise Refusal('--seeds are of rows; give --rows=ROW,... too, and --config=FILE without one')
        return [job]
    config = option(job.arguments, 'config') or ''
    if job.arguments and (not config or ':' in config):
        given = f'--config={config} names a row' if config else 'no --config=FILE is given'
        raise Refusal(f'--rows are of a config file, and {given}; give -- train --config=FILE')
    jobs = [of_row(job, row, seed) for seed in seeds or [0] for row in rows]
    twice = {one.name for one in jobs if [other.name for other in jobs].count(one.name) > 1}
    if twice:
        raise Refusal(f'two of these rows and seeds are called {min(twice)}; give them one after another')
    return jobs


def of_row(job: Job, row: str, seed: int) -> Job:
    return dataclasses.replace(
        job,
        name=named(f'{job.name}-{row}-{seed}'.lower().replace('_', '-')),
        arguments=with_row(job.arguments, row, seed) if job.arguments else (),
        workdir=job.workdir and f'{job.workdir.rstrip("/")}/{row}-{seed}',
    )


def with_row(arguments: tuple[str, ...], row: str, seed: int) -> tuple[str, ...]:
    verb, *rest = without(arguments, 'config')
    config = f'--config={option(arguments, "config")}:{row}'
    return (verb, config, *rest, f'--config.seed={seed}', f'--config.data.seed={seed}')


def without(arguments: tuple[str, ...], name: str) -> list[str]:
    left = [argument for argument in arguments if not argument.startswith(f'--{name}=')]
    while f'--{name}' in left:
        index = left.index(f'--{name}')
        del left[index : index + 2]
    return left


def beside(workdir: str, *parts: str) -> str:
    """A path in the folder of a run folder."""
    return '/'.join([workdir.rstrip('/').rpartition('/')[0], *parts])


def reached(name: str, path: str, roots: tuple[str, ...]) -> str:
    """The path that an option gives, if every host of a job reaches it."""
    if not path.startswith(roots):
        raise Refusal(
            f'--{name}: {path} is not seen by the hosts of a job; give a path that begins with {" or ".join(roots)}'
        )
    return path
