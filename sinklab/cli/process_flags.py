"""Flags of a run with several or supervised processes, and the entry points of supervisor and worker."""

import argparse
import functools
import math
import sys
from collections.abc import Callable
from typing import NoReturn

from sinklab import standard_streams
from sinklab.checkpoint import digests
from sinklab.errors import UserError
from sinklab.escape import escape_control, format_command_line
from sinklab.process_group import ProcessGroup
from sinklab.run_dir import RunDir
from sinklab.storage.lease import DEFAULT_GRACE_SECONDS
from sinklab.supervisor import cluster, worker
from sinklab.supervisor.exit_status import ExitStatus
from sinklab.supervisor.supervisor import RestartPolicy, Supervisor, log_failure
from sinklab.supervisor.worker import MIN_JOIN_SECONDS, Timeouts
from sinklab.train.run_outcome import classify_error

RECOVERY_HINTS = {'stopped': '; resume with: {command}', 'lost': '; start the same command again'}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--coordinator',
        metavar='HOST:PORT',
        help='address of process 0, if a run has several processes, such as host0:8476',
    )
    parser.add_argument(
        '--processes',
        type=int,
        metavar='N',
        help='number of processes of the run (default: as the cluster reports; 1: do not ask the cluster)',
    )
    parser.add_argument('--process', type=int, metavar='I', help='number of this process, from 0')
    parser.add_argument(
        '--join_timeout',
        type=float,
        default=Timeouts.join,
        metavar='SECONDS',
        help='seconds to wait for all processes at the start (default: %(default)g)',
    )
    parser.add_argument(
        '--patience',
        metavar='TIMES[,SECONDS]',
        help='end a run if a step takes longer than TIMES its usual duration and than SECONDS '
        f'(default: {Timeouts.step_multiple:g},{Timeouts.min_step:g})',
    )
    parser.add_argument(
        '--grace',
        type=float,
        default=DEFAULT_GRACE_SECONDS,
        metavar='SECONDS',
        help='seconds between SIGTERM and SIGKILL, in which a checkpoint is saved (default: %(default)g)',
    )
    parser.add_argument(
        '--supervise', action='store_true', help='watch a run of one process as well, and end it if a step hangs'
    )
    parser.add_argument(
        '--restarts',
        type=int,
        default=0,
        metavar='N',
        help='number of restarts of a run after failures (default: %(default)s)',
    )


def parse_process_info(args: argparse.Namespace) -> cluster.ProcessInfo:
    return cluster.resolve_process_info(args.coordinator, args.processes, args.process, parse_timeouts(args).join)


def parse_timeouts(args: argparse.Namespace) -> Timeouts:
    """Parse --join_timeout and --patience.

    Raises:
        UserError: One of them, --grace or --restarts is invalid.
    """
    if args.restarts < 0:
        raise UserError(f'--restarts={args.restarts} must be a whole number of at least 0')
    multiple_text, _, floor_text = (args.patience or '').partition(',')
    texts = dict(step_multiple=multiple_text, min_step=floor_text or None) if args.patience is not None else {}
    numbers = {name: parse_positive(text) for name, text in texts.items() if text is not None}
    if not all(numbers.values()) or (args.patience or '').endswith(','):
        raise UserError(
            f'--patience={args.patience} must be one or two numbers above 0, e.g. --patience=20,60 for 20 times the '
            'usual duration and at least 60 seconds'
        )
    for name, minimum in {'join_timeout': MIN_JOIN_SECONDS, 'grace': 0}.items():
        value = getattr(args, name)
        if not parse_positive(value) or value < minimum:
            limit = f'of at least {minimum:g}' if minimum else 'above 0'
            raise UserError(f'--{name}={value:g} must be a number of seconds {limit}')
    return Timeouts(join=args.join_timeout, **numbers)


def parse_positive(value: str | float) -> float | None:
    """Parse a finite number above 0; return None if the value is not one."""
    try:
        return float(value) if 0 < float(value) < math.inf else None
    except ValueError:
        return None


def supervise_run(
    command: list[str],
    process_info: cluster.ProcessInfo,
    timeouts: Timeouts,
    run_dir: RunDir,
    is_this_run: Callable[[], bool],
    restarts: int,
) -> int:
    """Run a command in a supervised worker process, and return the exit code of the run.

    Args:
        command: The command line of the worker.
        process_info: Index of this process, number of processes and address of the coordinator.
        timeouts: The timeouts of the supervisor.
        run_dir: The run folder.
        is_this_run: Returns whether the folder holds this run: nothing is written into another one.
        restarts: How many times the run is restarted after a failure.
    """
    find_newest_step = functools.partial(digests.find_newest_step, run_dir)
    restart_policy = RestartPolicy(run_dir, is_this_run, find_newest_step, restarts)
    log_to_run_dir = functools.partial(log_failure, run_dir, process_info.index)
    exit_status = Supervisor(
        process_info, command, timeouts, log_to_run_dir, print_error, restart_policy.decide_restart
    ).run()
    if process_info.index == 0:
        restart_policy.write_outcome(exit_status)
        restore_cursor()
        if exit_status.kind == 'crashed':
            print(exit_status.trace.rstrip(), file=sys.stderr)
    if exit_status.exit_code:
        print_error(format_exit_status(exit_status))
    return exit_status.exit_code


def format_exit_status(exit_status: ExitStatus) -> str:
    """Format the exit status for the user, with a hint on how to resume."""
    return exit_status.message + RECOVERY_HINTS.get(exit_status.kind, '').format(command=format_command_line())


def print_error(text: str) -> None:
    print(f'sinklab train: {escape_control(text)}', file=sys.stderr, flush=True)


def restore_cursor() -> None:
    """Clear the live line of a killed worker on the terminal, and show the cursor again."""
    if sys.stderr.isatty():
        standard_streams.get_unescaped_stream(sys.stderr).write('\r\x1b[K\x1b[?25h')


def run_worker(function: Callable[[ProcessGroup], ExitStatus]) -> NoReturn:
    """Run a function as a worker of a process group, and exit with its exit status.

    Args:
        function: Takes the process group; an exception from it is converted to an exit status.
    """
    group = worker.make_process_group()
    try:
        group.initialize()
        exit_status = function(group)
    except BaseException as error:
        exit_status = classify_error(error)
    group.exit(exit_status)
