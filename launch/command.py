"""The command line that the launchers have in common: VERB NAME [options] [-- train ...]."""

import argparse
import dataclasses
import math
import os
import re
import sys
from collections.abc import Callable, Sequence

from launch import flags
from launch.job import Job, Refusal, asked, beside, named, option, reached, sweep
from launch.plan import Plan, command
from sinklab.escape import escape_control
from sinklab.seeds import SEEDS_HELP, parse_seeds

GRACE = 120  # seconds, where nothing is said
MARGIN = 10  # seconds that a stop takes beside the save, which may just have begun when it is told
# Options of `sinklab train` that name what it reads -> the path in their values.
READ = {
    'from': r'(?:params:)?(.+)',
    'config.data.source': r'(?:store|text|chat|mixture):(.+)',
    'config.data.tokenizer': r'(.*/.*)',
}
# How a run folder is copied from where it lies.
FETCH = {
    'gs://': lambda there, here: [command('gcloud', 'storage', 'rsync', '--recursive', there, here)],
    's3://': lambda there, here: [command('aws', 's3', 'sync', there, here)],
    '/': lambda there, here: [command('cp', '--recursive', '--no-target-directory', there, here)],
}


@dataclasses.dataclass(frozen=True)
class Verb:
    """An action on the jobs of a command line."""

    summary: str
    plan: Callable[[list[Job], argparse.Namespace], Plan]
    needs: tuple[str, ...] = ()  # what must be given: workdir, arguments
    one: bool = False  # of a single job at a time, which has the terminal


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """The parts in which a launcher differs from the others."""

    module: str
    summary: str
    options: Callable[[argparse.ArgumentParser], None]
    check: Callable[[argparse.Namespace], None]  # refuses options that do not fit
    roots: tuple[str, ...]  # how paths begin that all hosts reach
    limit: Callable[[argparse.Namespace], float]  # seconds that the scheduler waits at most
    verbs: dict[str, Verb]


def follow(jobs: list[Job], given: argparse.Namespace) -> Plan:
    return Plan(commands=(command('sinklab', 'tail', jobs[0].workdir),))


def fetch(jobs: list[Job], given: argparse.Namespace) -> Plan:
    return sum((fetched(job, f'{given.out}/{job.name}') for job in jobs), Plan())


def fetched(job: Job, here: str) -> Plan:
    (copy,) = (copy for root, copy in FETCH.items() if job.workdir.startswith(root))
    return Plan(commands=(command('mkdir', '-p', here), *copy(job.workdir, here)))


COMMON = {
    'follow': Verb('the run in the words of its own terminal, from anywhere', follow, ('workdir',), one=True),
    'fetch': Verb('a copy of the run folder, in --out', fetch, ('workdir',)),
}


def parser(scheduler: Scheduler) -> argparse.ArgumentParser:
    verbs = COMMON | scheduler.verbs
    made = argparse.ArgumentParser(
        prog=f'python -m {scheduler.module}',
        description=scheduler.summary,
        usage='%(prog)s VERB NAME [options] [-- train --config=FILE:ROW ...]',
        epilog='\n'.join(['verbs:', *(f'  {name:8} {verb.summary}' for name, verb in verbs.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.error = refuse
    made.add_argument('verb', choices=verbs, metavar='VERB')
    made.add_argument('name', metavar='NAME', help='of the job, and what jobs of rows begin with')
    made.add_argument('--execute', action='store_true', help='do it; else it is printed, as a script that does it')
    made.add_argument('--workdir', default='', metavar='DIR', help='the run folder; of rows, the folder of theirs')
    made.add_argument('--rows', default='', metavar='ROW,...', help='a job for each of these rows of --config=FILE')
    made.add_argument(
        '--seeds',
        default='',
        metavar='N | SEED,...',
        help=f'... with each seed: {SEEDS_HELP}',
    )
    made.add_argument(
        '--restarts', type=int, default=50, metavar='N', help='how often it is tried again; %(default)s'
    )
    made.add_argument('--save', type=float, default=0.0, metavar='SECONDS', help='what a save takes, as measured')
    made.add_argument(
        '--grace', type=int, metavar='SECONDS', help='from SIGTERM to SIGKILL; by --save, else what fits'
    )
    made.add_argument('--compiled', metavar='DIR', help='of compiled programs, for all jobs; beside the run folder')
    made.add_argument('--code', metavar='DIR', help='where the hosts find the code; beside the run folder')
    made.add_argument(
        '--flags', default='none', metavar='NAME', help=f'for the compiler: {", ".join(flags.PROFILES)}'
    )
    made.add_argument(
        '--env',
        action='append',
        default=[],
        metavar='NAME[=VALUE]',
        help='a variable of the run; NAME alone: as it is here',
    )
    made.add_argument('--out', default='runs', metavar='DIR', help='of what is fetched; %(default)s')
    scheduler.options(made)
    return made


def refuse(message: str) -> None:
    raise Refusal(f'{message}; see --help')


def main(scheduler: Scheduler, argv: Sequence[str] | None = None) -> int:
    """Prints or executes what a command line asks for. Exit codes: 0 done, 1 refused or failed, 130 after Ctrl-C."""
    try:
        given, plan = planned(scheduler, sys.argv[1:] if argv is None else argv)
        plan.execute() if given.execute else print(plan, end='')
    except Refusal as refusal:
        print(f'{scheduler.module}: {escape_control(refusal)}', file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def planned(scheduler: Scheduler, argv: Sequence[str]) -> tuple[argparse.Namespace, Plan]:
    ours, arguments = split(list(argv))
    given = parser(scheduler).parse_args(ours)
    verb = (COMMON | scheduler.verbs)[given.verb]
    scheduler.check(given)
    jobs = sweep(job(scheduler, verb, given, tuple(arguments)), listed(given.rows), seeds(given.seeds))
    if verb.one and len(jobs) > 1:
        names = ', '.join(f'{one.name} in {one.workdir}' for one in jobs)
        raise Refusal(f'{given.verb} is of one job, and these are {names}; give NAME and --workdir of one')
    plan = verb.plan(jobs, given)
    return given, plan.live() if verb.one else plan


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split the arguments at the first --."""
    index = argv.index('--') if '--' in argv else len(argv)
    return argv[:index], argv[index + 1 :]


def job(scheduler: Scheduler, verb: Verb, given: argparse.Namespace, arguments: tuple[str, ...]) -> Job:
    """The job that is given, of which a sweep makes several."""
    name = named(given.name)
    if 'workdir' in verb.needs and not given.workdir:
        raise Refusal(f'{given.verb} needs --workdir=DIR, the run folder')
    if 'arguments' in verb.needs:
        arguments = asked(arguments)
        check_paths(arguments, scheduler.roots)
    if given.workdir:
        reached('workdir', given.workdir, scheduler.roots)
    compiled = given.compiled or beside(given.workdir, 'compiled')
    if given.workdir and compiled != 'none':
        reached('compiled', compiled, scheduler.roots)
    at_least(given, restarts=0)
    return Job(
        name=name,
        arguments=arguments,
        workdir=given.workdir,
        environment=flags.profile(given.flags) | variables(given.env),
        restarts=given.restarts,
        grace=grace(given, scheduler.limit(given)),
        compiled=compiled,
    )


def grace(given: argparse.Namespace, limit: float) -> int:
    """Seconds to save in: as given, else as a save needs them, within what the scheduler allows."""
    need = math.ceil(given.save) + MARGIN if given.save else 0
    at_least(given, grace=1)
    chosen = given.grace if given.grace is not None else min(limit, max(need, GRACE))
    if chosen < need:
        raise Refusal(
            f'{chosen:g} s are left to save in, and a save of {given.save:g} s needs {need}; give --grace={need} '
            'where the scheduler can wait so long, or save often (checkpoint.every_minutes) and give no --save'
        )
    if chosen > limit:
        raise Refusal(f'--grace={chosen:g}: what runs there is ended {limit:g} s after it is told; give no more')
    return int(chosen)


def variables(given: list[str]) -> dict[str, str]:
    """Return the variables of --env. A name alone has the value that it has here, which no process list shows."""
    for text in given:
        name, equals, _ = text.partition('=')
        if not re.fullmatch(r'[A-Za-z_]\w*', name):
            raise Refusal(f'--env={text} is no NAME=VALUE')
        if not equals and name not in os.environ:
            raise Refusal(f'--env={name} has no value, and {name} is not set here; export it, or give NAME=VALUE')
    parts = [text.partition('=') for text in given]
    return {name: value if equals else os.environ[name] for name, equals, value in parts}


def listed(given: str) -> list[str]:
    return given.split(',') if given else []


def seeds(given: str) -> list[int]:
    """Return the seeds that --seeds stands for, as `sinklab sweep` reads them; none where it is not given."""
    try:
        return parse_seeds(given) if given else []
    except ValueError as error:
        raise Refusal(str(error)) from error


def check_paths(arguments: tuple[str, ...], roots: tuple[str, ...]) -> None:
    """Refuses what lies here alone and is read there."""
    for name, pattern in READ.items():
        found = re.fullmatch(pattern, option(arguments, name) or '')
        if found:
            reached(name, found[1], roots)


def check_layout(arguments: tuple[str, ...], devices: int, what: str) -> None:
    """Refuses sizes that would leave devices without work, or miss some; those not said follow from the devices."""
    said = {name: size for name in ('data', 'fsdp', 'tensor') if (size := option(arguments, name)) is not None}
    if not all(re.fullmatch('[1-9][0-9]*', size) for size in said.values()):
        return  # of which sinklab has its own words
    wanted = math.prod(map(int, said.values()))
    if wanted != devices and (devices % wanted or {'data', 'fsdp'} <= said.keys()):
        sizes = ' '.join(f'--{name}={size}' for name, size in said.items())
        raise Refusal(
            f'{sizes} cannot be laid on the {devices} devices of {what}; give sizes whose product is {devices}, or '
            'leave them out: then they follow from the devices'
        )


def at_least(given: argparse.Namespace, **least: int) -> None:
    """Refuses numbers that are too small."""
    for name, allowed in least.items():
        value = getattr(given, name)
        if value is not None and value < allowed:
            raise Refusal(f'--{name}={value} must be a whole number of at least {allowed}')


def needed(given: argparse.Namespace, **examples: str) -> None:
    """Refuses a command that lacks options, each with an example of its value."""
    for name, example in examples.items():
        if not getattr(given, name):
            raise Refusal(f'--{name} is not given; give it, e.g. --{name}={example}')


def code(given: argparse.Namespace, roots: tuple[str, ...]) -> str:
    """The folder of the code of a job, that its hosts reach."""
    return reached('code', given.code or beside(given.workdir, 'code', given.name), roots)
