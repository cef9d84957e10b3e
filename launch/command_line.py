"""Command line of all launchers: VERB NAME [options] [-- train ...]."""

import argparse
import dataclasses
import math
import os
import re
import sys
from collections.abc import Callable, Sequence

from launch import xla_flags
from launch.job import (
    Job,
    check_job_name,
    check_reachable,
    check_train_arguments,
    expand_sweep,
    find_option,
    make_sibling_path,
)
from launch.plan import Plan, make_command
from sinklab.config.seed_list import SEEDS_HELP, parse_seeds
from sinklab.errors import UserError

DEFAULT_GRACE_SECONDS = 120  # without --grace and --save
# Seconds that a stop takes in addition to its save. A save may just have begun when the stop signal arrives.
STOP_MARGIN_SECONDS = 10
# {option of `sinklab train` that names input data: pattern whose group is the path in its value}. What hf: and gguf:
# name cannot be in a bucket.
PATH_OPTIONS = {
    'from': r'(?:params:|(?:hf|gguf):(?=/))?(.+)',
    'config.data.source': r'(?:store|text|chat|mixture):(.+)',
    'config.data.tokenizer': r'(.*/.*)',
}
# {prefix of a run folder: function that returns the commands to copy the folder}.
COPY_COMMANDS = {
    'gs://': lambda there, here: [make_command('gcloud', 'storage', 'rsync', '--recursive', there, here)],
    '/': lambda there, here: [make_command('cp', '--recursive', '--no-target-directory', there, here)],
}


@dataclasses.dataclass(frozen=True)
class Verb:
    """An action on jobs, such as submit or stop."""

    summary: str
    make_plan: Callable[[list[Job], argparse.Namespace], Plan]
    required_options: tuple[str, ...] = ()  # of 'workdir' and 'arguments'
    is_single_job: bool = False  # accepts one job only, whose commands use the terminal


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """The scheduler-specific parts of a launcher."""

    module: str
    summary: str
    add_options: Callable[[argparse.ArgumentParser], None]
    check_options: Callable[[argparse.Namespace], None]  # raises UserError for invalid combinations of options
    path_prefixes: tuple[str, ...]  # prefixes of paths that all hosts can reach
    get_max_grace_seconds: Callable[[argparse.Namespace], float]  # longest time between SIGTERM and SIGKILL
    verbs: dict[str, Verb]


def plan_follow(jobs: list[Job], args: argparse.Namespace) -> Plan:
    return Plan(commands=(make_command('sinklab', 'tail', jobs[0].workdir),))


def plan_fetch(jobs: list[Job], args: argparse.Namespace) -> Plan:
    return sum((plan_fetch_job(job, f'{args.out}/{job.name}') for job in jobs), Plan())


def plan_fetch_job(job: Job, target_folder: str) -> Plan:
    (make_commands,) = (
        make_commands for root, make_commands in COPY_COMMANDS.items() if job.workdir.startswith(root)
    )
    return Plan(commands=(make_command('mkdir', '-p', target_folder), *make_commands(job.workdir, target_folder)))


COMMON_VERBS = {
    'follow': Verb('print the output of the run, from any machine', plan_follow, ('workdir',), is_single_job=True),
    'fetch': Verb('copy the run folder to --out', plan_fetch, ('workdir',)),
}


def make_parser(scheduler: Scheduler) -> argparse.ArgumentParser:
    verbs = COMMON_VERBS | scheduler.verbs
    argument_parser = argparse.ArgumentParser(
        prog=f'python -m {scheduler.module}',
        description=scheduler.summary,
        usage='%(prog)s VERB NAME [options] [-- train --config=FILE:ROW ...]',
        epilog='\n'.join(['verbs:', *(f'  {name:8} {verb.summary}' for name, verb in verbs.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    argument_parser.error = raise_usage_error
    argument_parser.add_argument('verb', choices=verbs, metavar='VERB')
    argument_parser.add_argument(
        'name', metavar='NAME', help='name of the job; with --rows, prefix of the names of the jobs'
    )
    argument_parser.add_argument(
        '--execute', action='store_true', help='run the commands (default: print them as a script)'
    )
    argument_parser.add_argument(
        '--workdir', default='', metavar='DIR', help='run folder; with --rows, the folder of the run folders'
    )
    argument_parser.add_argument(
        '--rows', default='', metavar='ROW,...', help='one job for each of these rows of --config=FILE'
    )
    argument_parser.add_argument(
        '--seeds',
        default='',
        metavar='N | SEED,...',
        help=f'one job for each row and seed: {SEEDS_HELP}',
    )
    argument_parser.add_argument(
        '--restarts', type=int, default=50, metavar='N', help='maximum number of restarts (default: %(default)s)'
    )
    argument_parser.add_argument(
        '--save', type=float, default=0.0, metavar='SECONDS', help='measured duration of a save'
    )
    argument_parser.add_argument(
        '--grace', type=int, metavar='SECONDS', help='time from SIGTERM to SIGKILL (default: follows from --save)'
    )
    argument_parser.add_argument(
        '--compiled',
        metavar='DIR',
        help='folder for compiled programs of all jobs; none: no folder (default: next to the run folder)',
    )
    argument_parser.add_argument(
        '--code', metavar='DIR', help='folder of the code on the hosts (default: next to the run folder)'
    )
    argument_parser.add_argument(
        '--flags', default='none', metavar='NAME', help=f'profile of compiler flags: {", ".join(xla_flags.PROFILES)}'
    )
    argument_parser.add_argument(
        '--env',
        action='append',
        default=[],
        metavar='NAME[=VALUE]',
        help='environment variable of the run; NAME without a value: as set here',
    )
    argument_parser.add_argument(
        '--out', default='runs', metavar='DIR', help='folder for fetched runs (default: %(default)s)'
    )
    scheduler.add_options(argument_parser)
    return argument_parser


def raise_usage_error(message: str) -> None:
    raise UserError(f'{message}; see --help')


def main(scheduler: Scheduler, argv: Sequence[str] | None = None) -> int:
    """Print the plan of a command line, or execute it with --execute.

    Args:
        scheduler: the launcher.
        argv: arguments without the program name; None for those of this process.

    Returns:
        The exit code: 0 for success, 1 after a UserError, 130 after Ctrl-C.
    """
    try:
        args, plan = plan_command_line(scheduler, sys.argv[1:] if argv is None else argv)
        plan.execute() if args.execute else print(plan, end='')
    except UserError as error:
        print(f'{scheduler.module}: {error}', file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def plan_command_line(scheduler: Scheduler, argv: Sequence[str]) -> tuple[argparse.Namespace, Plan]:
    launcher_arguments, arguments = split_at_separator(list(argv))
    args = make_parser(scheduler).parse_args(launcher_arguments)
    verb = (COMMON_VERBS | scheduler.verbs)[args.verb]
    scheduler.check_options(args)
    jobs = expand_sweep(
        make_job(scheduler, verb, args, tuple(arguments)), split_list(args.rows), parse_seeds_flag(args.seeds)
    )
    if verb.is_single_job and len(jobs) > 1:
        names = ', '.join(f'{planned_job.name} in {planned_job.workdir}' for planned_job in jobs)
        raise UserError(f'{args.verb} needs one job, but these are {names}; give NAME and --workdir of one')
    plan = verb.make_plan(jobs, args)
    return args, plan.as_interactive() if verb.is_single_job else plan


def split_at_separator(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split the arguments at the first --."""
    index = argv.index('--') if '--' in argv else len(argv)
    return argv[:index], argv[index + 1 :]


def make_job(scheduler: Scheduler, verb: Verb, args: argparse.Namespace, arguments: tuple[str, ...]) -> Job:
    """Return the job that the options describe, before --rows and --seeds expand it.

    Raises:
        UserError: an option that the verb requires is missing, or a value is invalid.
    """
    name = check_job_name(args.name)
    if 'workdir' in verb.required_options and not args.workdir:
        raise UserError(f'{args.verb} needs --workdir=DIR, the run folder')
    if 'arguments' in verb.required_options:
        arguments = check_train_arguments(arguments)
        check_paths(arguments, scheduler.path_prefixes)
    if args.workdir:
        check_reachable('workdir', args.workdir, scheduler.path_prefixes)
        if re.fullmatch(r'\w+://[^/]*/*', args.workdir):
            raise UserError(
                f'--workdir={args.workdir} is a bucket; give a folder in it, such as gs://my-bucket/runs/{name}'
            )
    compilation_cache = args.compiled or make_sibling_path(args.workdir, 'compiled')
    if args.workdir and compilation_cache != 'none':
        check_reachable('compiled', compilation_cache, scheduler.path_prefixes)
    check_minimum(args, restarts=0)
    return Job(
        name=name,
        arguments=arguments,
        workdir=args.workdir,
        environment=make_environment(args),
        max_restarts=args.restarts,
        grace_seconds=choose_grace_seconds(args, scheduler.get_max_grace_seconds(args)),
        compilation_cache=compilation_cache,
    )


def choose_grace_seconds(args: argparse.Namespace, max_grace_seconds: float) -> int:
    """Return the seconds from SIGTERM to SIGKILL.

    Without --grace, this is the larger of DEFAULT_GRACE_SECONDS and the time that --save needs, limited to
    `max_grace_seconds`.

    Raises:
        UserError: --save is invalid, or the time is too short for it or longer than the scheduler allows.
    """
    if not 0 <= args.save < math.inf:  # also refuses nan
        raise UserError(f'--save={args.save:g} must be a finite number of seconds of at least 0')
    needed_seconds = math.ceil(args.save) + STOP_MARGIN_SECONDS if args.save else 0
    check_minimum(args, grace=1)
    grace_seconds = (
        args.grace if args.grace is not None else min(max_grace_seconds, max(needed_seconds, DEFAULT_GRACE_SECONDS))
    )
    if grace_seconds < needed_seconds:
        raise UserError(
            f'{grace_seconds:g} s are available for a save, but a save of {args.save:g} s needs {needed_seconds}; '
            f'give --grace={needed_seconds} if the scheduler can wait so long, or save often '
            '(checkpoint.every_minutes) and omit --save'
        )
    if grace_seconds > max_grace_seconds:
        raise UserError(
            f'--grace={grace_seconds:g}: the scheduler kills a job {max_grace_seconds:g} s after SIGTERM; '
            'give at most that'
        )
    return int(grace_seconds)


def make_environment(args: argparse.Namespace) -> dict[str, str]:
    """Return the environment variables of --flags and --env.

    Raises:
        UserError: both set the same variable.
    """
    profile, variables = xla_flags.get_profile(args.flags), parse_variables(args.env)
    for name in profile.keys() & variables.keys():
        raise UserError(
            f'--flags={args.flags} and --env both set {name}; remove --flags and give all flags in --env={name}=..., '
            f'also those of the profile: {profile[name]}'
        )
    return profile | variables


def parse_variables(assignments: list[str]) -> dict[str, str]:
    """Return the environment variables of --env.

    A name without a value takes its value from the environment of the launcher. Such a value does not appear in
    process lists.
    """
    for assignment in assignments:
        name, equals, _ = assignment.partition('=')
        if not re.fullmatch(r'[A-Za-z_]\w*', name):
            raise UserError(f'--env={assignment} is not NAME=VALUE')
        if not equals and name not in os.environ:
            raise UserError(f'--env={name} has no value, and {name} is not set here; export it, or give NAME=VALUE')
    fields = [assignment.partition('=') for assignment in assignments]
    return {name: value if equals else os.environ[name] for name, equals, value in fields}


def split_list(text: str) -> list[str]:
    return text.split(',') if text else []


def parse_seeds_flag(text: str) -> list[int]:
    """Parse --seeds with the parser of `sinklab sweep`; return [] for an empty text."""
    return parse_seeds(text) if text else []


def check_paths(arguments: tuple[str, ...], path_prefixes: tuple[str, ...]) -> None:
    """Raise UserError if an option of `sinklab train` names input data that the hosts cannot reach."""
    for name, pattern in PATH_OPTIONS.items():
        match = re.fullmatch(pattern, find_option(arguments, name) or '')
        if match:
            check_reachable(name, match[1], path_prefixes)


def check_layout(arguments: tuple[str, ...], num_devices: int, target: str) -> None:
    """Raise UserError if --data, --fsdp and --tensor do not fit the number of devices.

    `sinklab train` infers the axes that are not given. The product of the given sizes must therefore divide the
    number of devices, and must equal it if both --data and --fsdp are given.

    Args:
        arguments: the arguments of `sinklab train`.
        num_devices: the number of devices of the job.
        target: the description of the devices in the error message.
    """
    sizes = {name: size for name in ('data', 'fsdp', 'tensor') if (size := find_option(arguments, name)) is not None}
    if not all(re.fullmatch('[1-9][0-9]*', size) for size in sizes.values()):
        return  # `sinklab train` reports sizes that are not positive whole numbers
    num_requested = math.prod(map(int, sizes.values()))
    if num_requested != num_devices and (num_devices % num_requested or {'data', 'fsdp'} <= sizes.keys()):
        given_sizes = ' '.join(f'--{name}={size}' for name, size in sizes.items())
        raise UserError(
            f'{given_sizes} do not fit the {num_devices} devices of {target}; give sizes whose '
            f'product is {num_devices}, or omit them to derive them from the devices'
        )


def check_minimum(args: argparse.Namespace, **minimums: int) -> None:
    """Raise UserError if an option is below its minimum; options that are None are not checked."""
    for name, minimum in minimums.items():
        value = getattr(args, name)
        if value is not None and value < minimum:
            raise UserError(f'--{name}={value} must be a whole number of at least {minimum}')


def require_options(args: argparse.Namespace, **examples: str) -> None:
    """Raise UserError if an option is missing.

    Args:
        args: the parsed options.
        **examples: {name of a required option: example of its value for the error message}.
    """
    for name, example in examples.items():
        if not getattr(args, name):
            raise UserError(f'--{name} is missing; give it, e.g. --{name}={example}')


def get_code_folder(args: argparse.Namespace, path_prefixes: tuple[str, ...]) -> str:
    """Return the code folder of a job: --code, or by default a folder beside the run folder.

    Raises:
        UserError: the hosts of the job cannot reach the folder.
    """
    return check_reachable('code', args.code or make_sibling_path(args.workdir, 'code', args.name), path_prefixes)
