"""Command line of all launchers: VERB NAME [options] [-- train ...]."""

import argparse
import dataclasses
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from launch import shell
from launch.job import Job, check_job_name, expand_sweep, make_sibling_path
from sinklab.cli.flag_types import non_negative_int, positive_int
from sinklab.config.seed_list import SEEDS_HELP, parse_seeds
from sinklab.errors import UserError

DEFAULT_GRACE_SECONDS = 120

# Function of the jobs and the options that returns the statements of a verb, with its help as docstring.
MakeStatements = Callable[[list[Job], argparse.Namespace], list[str]]


def make_job_verb(description: str, *commands: str) -> MakeStatements:
    """Make a verb with the same commands for each job.

    {name} stands for the name of the job, and {args_name} for that of the command line, which has all rows.
    """

    def make_statements(jobs: list[Job], args: argparse.Namespace) -> list[str]:
        statements = [command.format(name=job.name, args_name=args.name) for job in jobs for command in commands]
        return list(dict.fromkeys(statements))

    make_statements.__doc__ = description
    return make_statements


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """The scheduler-specific parts of a launcher."""

    module: str
    summary: str
    add_options: Callable[[argparse.ArgumentParser], None]
    path_prefix: str  # of the paths that all hosts can reach
    get_grace_seconds: Callable[[argparse.Namespace], int]  # default of --grace
    verbs: dict[str, MakeStatements]


class CommandParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f'{message}; see --help')


def make_parser(scheduler: Scheduler) -> argparse.ArgumentParser:
    verb_lines = [f'  {name:8} {make_statements.__doc__}' for name, make_statements in scheduler.verbs.items()]
    parser = CommandParser(
        prog=f'python -m {scheduler.module}',
        description=scheduler.summary,
        usage='%(prog)s VERB NAME [options] [-- train --config=FILE:ROW ...]',
        epilog='\n'.join(['verbs:', *verb_lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add('verb', choices=scheduler.verbs, metavar='VERB')
    add('name', metavar='NAME', help='name of the job; with --rows, prefix of the names')
    add('--execute', action='store_true', help='run the commands (default: print them as a script)')
    add('--workdir', default='', metavar='DIR', help='run folder; with --rows, the folder of the run folders')
    add('--rows', default='', metavar='ROW,...', help='one job for each of these rows of --config=FILE')
    add('--seeds', default='', metavar='N | SEED,...', help=f'one job for each row and seed: {SEEDS_HELP}')
    add('--restarts', type=non_negative_int, default=50, metavar='N', help='maximum number of restarts (default: 50)')
    grace_help = (
        f'time to save after SIGTERM (default: {DEFAULT_GRACE_SECONDS}, or what a preemption with --spot gives)'
    )
    add('--grace', type=positive_int, metavar='SECONDS', help=grace_help)
    env_help = 'environment variable of the run; NAME without a value: as set here'
    add('--env', action='append', default=[], metavar='NAME[=VALUE]', help=env_help)
    scheduler.add_options(parser)
    return parser


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
        require_options(args, workdir=f'{scheduler.path_prefix}.../runs/{args.name}')
        if arguments[:1] != ('train',):
            given = ' '.join(arguments) or 'nothing'
            raise UserError(f'after --, give a sinklab train command, not {given}; e.g. -- train --config=FILE:ROW')
    if args.workdir and not re.match(rf'{scheduler.path_prefix}[^/]*/+[^/]', args.workdir):
        raise UserError(
            f'--workdir={args.workdir} must be a folder that all hosts reach, below {scheduler.path_prefix}'
        )
    return Job(
        name=args.name,
        arguments=arguments,
        workdir=args.workdir,
        environment=parse_variables(args.env),
        max_restarts=args.restarts,
        grace_seconds=args.grace or scheduler.get_grace_seconds(args),
        compilation_cache=make_sibling_path(args.workdir, 'compiled'),
    )


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


def require_options(args: argparse.Namespace, **examples: str) -> None:
    """Raise UserError if one of these options is missing; the values are examples for the message."""
    for name, example in examples.items():
        if not getattr(args, name):
            raise UserError(f'--{name} is missing; give it, e.g. --{name}={example}')


def get_code_folder(args: argparse.Namespace) -> str:
    """Return the folder of the code on the hosts, beside the run folder."""
    require_options(args, workdir='.../runs/' + args.name)
    return make_sibling_path(args.workdir, 'code', args.name)
