"""Command line of all launchers: VERB NAME [options] [-- train ...]."""

import argparse
import dataclasses
import math
import os
import re
import sys
from collections.abc import Callable, Sequence

from launch import shell
from launch.job import Job, check_job_name, expand_sweep, find_option, make_sibling_path
from sinklab.cli.flag_types import non_negative_int, positive_int
from sinklab.config.seed_list import SEEDS_HELP, parse_seeds
from sinklab.errors import UserError

DEFAULT_GRACE_SECONDS = 120
# Options of `sinklab train` that the launcher or the scheduler sets.
RESERVED_OPTIONS = 'workdir', 'grace', 'compiled', 'coordinator', 'processes', 'process'
# {option of `sinklab train` that names input data: pattern whose group is the path in its value}. What hf: and gguf:
# name cannot be in a bucket.
PATH_OPTIONS = {
    'from': r'(?:params:|(?:hf|gguf):(?=/))?(.+)',
    'config.data.source': r'(?:store|text|chat|mixture):(.+)',
    'config.data.tokenizer': r'(.*/.*)',
}

# Function of the jobs and the options that returns the statements of a verb, with its help as docstring.
MakeStatements = Callable[[list[Job], argparse.Namespace], list[str]]


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """The scheduler-specific parts of a launcher."""

    module: str
    summary: str
    add_options: Callable[[argparse.ArgumentParser], None]
    path_prefixes: tuple[str, ...]  # prefixes of paths that all hosts can reach
    get_max_grace_seconds: Callable[[argparse.Namespace], int]  # longest time between SIGTERM and SIGKILL
    verbs: dict[str, MakeStatements]


def make_parser(scheduler: Scheduler) -> argparse.ArgumentParser:
    verb_lines = [f'  {name:8} {make_statements.__doc__}' for name, make_statements in scheduler.verbs.items()]
    parser = argparse.ArgumentParser(
        prog=f'python -m {scheduler.module}',
        description=scheduler.summary,
        usage='%(prog)s VERB NAME [options] [-- train --config=FILE:ROW ...]',
        epilog='\n'.join(['verbs:', *verb_lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = raise_usage_error
    add = parser.add_argument
    add('verb', choices=scheduler.verbs, metavar='VERB')
    add('name', metavar='NAME', help='name of the job; with --rows, prefix of the names')
    add('--execute', action='store_true', help='run the commands (default: print them as a script)')
    add('--workdir', default='', metavar='DIR', help='run folder; with --rows, the folder of the run folders')
    add('--rows', default='', metavar='ROW,...', help='one job for each of these rows of --config=FILE')
    add('--seeds', default='', metavar='N | SEED,...', help=f'one job for each row and seed: {SEEDS_HELP}')
    add(
        '--restarts',
        type=non_negative_int,
        default=50,
        metavar='N',
        help='maximum number of restarts (default: %(default)s)',
    )
    add(
        '--grace',
        type=positive_int,
        metavar='SECONDS',
        help=f'time from SIGTERM to SIGKILL, in which a run saves (default: {DEFAULT_GRACE_SECONDS}, or what the '
        'scheduler gives if that is less)',
    )
    add(
        '--compiled',
        metavar='DIR',
        help='folder for compiled programs of all jobs; none: no folder (default: next to the run folder)',
    )
    add('--code', metavar='DIR', help='folder of the code on the hosts (default: next to the run folder)')
    add(
        '--env',
        action='append',
        default=[],
        metavar='NAME[=VALUE]',
        help='environment variable of the run; NAME without a value: as set here',
    )
    scheduler.add_options(parser)
    return parser


def raise_usage_error(message: str) -> None:
    raise UserError(f'{message}; see --help')


def main(scheduler: Scheduler, argv: Sequence[str] | None = None) -> int:
    """Print the script of a command line, or execute it with --execute.

    Args:
        scheduler: The launcher.
        argv: Arguments without the program name; None for those of this process.

    Returns:
        The exit code: that of the script, 1 after a UserError, 130 after Ctrl-C.
    """
    try:
        args, script = make_script(scheduler, sys.argv[1:] if argv is None else list(argv))
        if args.execute:
            return shell.execute(script)
        print(script, end='')
    except UserError as error:
        print(f'{scheduler.module}: {error}', file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def make_script(scheduler: Scheduler, argv: list[str]) -> tuple[argparse.Namespace, str]:
    index = argv.index('--') if '--' in argv else len(argv)
    args = make_parser(scheduler).parse_args(argv[:index])
    job = make_job(scheduler, args, tuple(argv[index + 1 :]))
    jobs = expand_sweep(job, args.rows.split(',') if args.rows else [], parse_seeds(args.seeds) if args.seeds else [])
    return args, shell.make_script(scheduler.verbs[args.verb](jobs, args))


def make_job(scheduler: Scheduler, args: argparse.Namespace, arguments: tuple[str, ...]) -> Job:
    """Return the job that the options describe, before --rows and --seeds expand it; raise UserError if invalid."""
    check_job_name(args.name)
    if args.verb == 'submit':
        require_options(args, workdir=f'{scheduler.path_prefixes[0]}.../runs/{args.name}')
        check_train_arguments(arguments, scheduler.path_prefixes)
    compilation_cache = args.compiled or make_sibling_path(args.workdir, 'compiled')
    if args.workdir:
        check_reachable('workdir', args.workdir, scheduler.path_prefixes)
        if re.fullmatch(r'\w+://[^/]*/*', args.workdir):
            raise UserError(f'--workdir={args.workdir} is a bucket; give a folder in it')
        if compilation_cache != 'none':
            check_reachable('compiled', compilation_cache, scheduler.path_prefixes)
    max_grace_seconds = scheduler.get_max_grace_seconds(args)
    grace_seconds = args.grace or min(DEFAULT_GRACE_SECONDS, max_grace_seconds)
    if grace_seconds > max_grace_seconds:
        raise UserError(f'--grace={grace_seconds}: the scheduler kills a job {max_grace_seconds} s after SIGTERM')
    return Job(
        name=args.name,
        arguments=arguments,
        workdir=args.workdir,
        environment=parse_variables(args.env),
        max_restarts=args.restarts,
        grace_seconds=grace_seconds,
        compilation_cache=compilation_cache,
    )


def check_train_arguments(arguments: tuple[str, ...], path_prefixes: tuple[str, ...]) -> None:
    """Raise UserError for a command other than `train`, reserved options, or data that hosts cannot reach."""
    if arguments[:1] != ('train',):
        raise UserError(
            f'after --, give a sinklab train command, not {" ".join(arguments) or "nothing"}; e.g. -- train '
            '--config=FILE:ROW'
        )
    for name in RESERVED_OPTIONS:
        if any(argument.partition('=')[0] == f'--{name}' for argument in arguments):
            raise UserError(f'--{name} is not allowed after --; give it before, unless the scheduler sets it')
    for name, pattern in PATH_OPTIONS.items():
        if match := re.fullmatch(pattern, find_option(arguments, name) or ''):
            check_reachable(name, match[1], path_prefixes)


def check_reachable(name: str, path: str, path_prefixes: tuple[str, ...]) -> str:
    """Return the path of an option; raise UserError if the hosts of a job cannot reach it."""
    if not path.startswith(path_prefixes):
        raise UserError(
            f'--{name}: {path} is not accessible to the hosts of a job; give a path that begins with '
            f'{" or ".join(path_prefixes)}'
        )
    return path


def parse_variables(assignments: list[str]) -> dict[str, str]:
    """Return the environment variables of --env.

    A name without a value takes its value from the environment of the launcher, so that it is in no process list.
    """
    variables = {}
    for assignment in assignments:
        name, equals, value = assignment.partition('=')
        if not re.fullmatch(r'[A-Za-z_]\w*', name):
            raise UserError(f'--env={assignment} is not NAME=VALUE')
        if not equals and name not in os.environ:
            raise UserError(f'--env={name} has no value, and {name} is not set here; export it, or give NAME=VALUE')
        variables[name] = value if equals else os.environ[name]
    return variables


def check_layout(arguments: tuple[str, ...], num_devices: int, target: str) -> None:
    """Raise UserError if --data, --fsdp and --tensor do not fit the devices, before the job waits for them.

    `sinklab train` infers the axes that are not given. The product of the given sizes must therefore divide the
    number of devices, and must equal it if both --data and --fsdp are given.

    Args:
        arguments: The arguments of `sinklab train`.
        num_devices: The number of devices of the job.
        target: The description of the devices in the error message.
    """
    sizes = {name: size for name in ('data', 'fsdp', 'tensor') if (size := find_option(arguments, name)) is not None}
    if not all(re.fullmatch('[1-9][0-9]*', size) for size in sizes.values()):
        return  # `sinklab train` reports sizes that are not positive whole numbers
    num_requested = math.prod(map(int, sizes.values()))
    if num_requested != num_devices and (num_devices % num_requested or {'data', 'fsdp'} <= sizes.keys()):
        given_sizes = ' '.join(f'--{name}={size}' for name, size in sizes.items())
        raise UserError(
            f'{given_sizes} do not fit the {num_devices} devices of {target}; give sizes whose product is '
            f'{num_devices}, or omit them'
        )


def require_options(args: argparse.Namespace, **examples: str) -> None:
    """Raise UserError if one of these options is missing; the values are examples for the message."""
    for name, example in examples.items():
        if not getattr(args, name):
            raise UserError(f'--{name} is missing; give it, e.g. --{name}={example}')


def get_single_job(jobs: list[Job]) -> Job:
    """Return the job of a verb that uses the terminal; raise UserError if there are several."""
    if len(jobs) > 1:
        raise UserError(f'give NAME and --workdir of one of the jobs {", ".join(job.name for job in jobs)}')
    return jobs[0]


def get_code_folder(args: argparse.Namespace, path_prefixes: tuple[str, ...]) -> str:
    """Return the code folder of a job: --code, or by default a folder beside the run folder."""
    if not args.code:
        require_options(args, workdir=f'{path_prefixes[0]}.../runs/{args.name}')
    return check_reachable('code', args.code or make_sibling_path(args.workdir, 'code', args.name), path_prefixes)
