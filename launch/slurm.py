"""Jobs on SLURM clusters: one batch script, one process per host, requeued for a retry."""

import argparse
import re
import shlex
import sys
from collections.abc import Callable

from launch.code_bundle import plan_code_bundle, plan_row_checks
from launch.command_line import (
    Scheduler,
    Verb,
    check_layout,
    check_minimum,
    get_code_folder,
    main,
    require_options,
)
from launch.job import Job
from launch.plan import File, Plan, make_command
from sinklab.errors import UserError
from sinklab.exit_status import FINAL_EXIT_CODES

PATH_PREFIXES = ('/', 'gs://')
# SLURM requeues a job by itself after a preemption or the loss of a host. It requeues by exit code only if the
# administrator has set RequeueExit. The script therefore calls `scontrol requeue` itself, which needs no setting of
# the cluster. The signal before the time limit goes to the job steps only. A TERM to the script concerns the whole
# job; SLURM then decides whether the job runs again, so the script does not requeue it.
JOB_SCRIPT = """#!/bin/bash
{directives}
ended=
trap ended=1 TERM
code=0
srun --kill-on-bad-exit=0 --wait={grace} bash {code}/run-"${{SLURM_ARRAY_TASK_ID:-0}}".sh || code=$?
case $code in
  {final}) ;;
  *)
    if [[ -z "$ended" && "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]]; then
      # The number of a job alone may be that of its whole array.
      scontrol requeue "${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}"
    fi
    ;;
esac
exit "$code"
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--nodes', type=int, default=1, metavar='N', help='number of hosts (default: %(default)s)')
    parser.add_argument(
        '--gpus', type=int, default=8, metavar='N', help='GPUs of each host (default: %(default)s; 0: none)'
    )
    parser.add_argument('--partition', metavar='NAME', help='partition of the hosts (default: that of the cluster)')
    parser.add_argument('--account', metavar='NAME', help='account that is charged (default: that of your user)')
    parser.add_argument('--time', metavar='[D-]H:M:S', help='time limit, at which the job saves and is requeued')
    parser.add_argument('--at_once', type=int, metavar='N', help='maximum number of concurrent jobs of a sweep')


def check_options(args: argparse.Namespace) -> None:
    check_minimum(args, nodes=1, gpus=0, at_once=1)


def make_directives(jobs: list[Job], args: argparse.Namespace, folder: str) -> dict[str, str | None]:
    """Return the options of `sbatch` by name."""
    job, is_array = jobs[0], len(jobs) > 1
    max_running = f'%{args.at_once}' if args.at_once else ''
    log = folder.replace('%', '%%') + ('/%x-%A_%a.log' if is_array else '/%x-%j.log')
    options = {
        'job-name': args.name,
        'array': f'0-{len(jobs) - 1}{max_running}' if is_array else None,
        'nodes': args.nodes,
        'ntasks-per-node': 1,
        'gpus-per-node': args.gpus or None,
        'exclusive': '',
        'partition': args.partition,
        'account': args.account,
        'time': args.time,
        'signal': f'TERM@{job.grace_seconds}',
        'requeue': '',
        'open-mode': 'append',
        'output': log,
    }
    return {name: str(value) for name, value in options.items() if value is not None}


def make_job_script(jobs: list[Job], args: argparse.Namespace, folder: str) -> str:
    options = make_directives(jobs, args, folder)
    lines = [f'#SBATCH --{name}{f"={quote_directive(value)}" if value else ""}' for name, value in options.items()]
    return JOB_SCRIPT.format(
        directives='\n'.join(lines),
        grace=jobs[0].grace_seconds,
        code=shlex.quote(folder),
        final='|'.join(map(str, FINAL_EXIT_CODES)),
        restarts=jobs[0].max_restarts,
    )


def quote_directive(value: str) -> str:
    """Quote a value for an #SBATCH line.

    Raises:
        UserError: the value has a backslash, which sbatch treats as an escape within quotes, or a line break, which
            ends the line.
    """
    if re.search(r'[\\\n]', value):
        raise UserError(f'{value!r} contains a backslash or a line break, which sbatch cannot read; use another')
    return shlex.quote(value)


def plan_submit(jobs: list[Job], args: argparse.Namespace) -> Plan:
    require_options(args, time='1-00:00:00')
    if args.at_once and len(jobs) == 1:
        raise UserError(f'--at_once={args.at_once} needs several jobs; give --rows=ROW,... too, or remove it')
    if args.gpus:
        check_layout(jobs[0].arguments, args.nodes * args.gpus, f'{args.nodes} x {args.gpus} GPUs')
    folder = get_shared_code_folder(args)
    run_scripts = [
        File(f'{folder}/run-{number}.sh', job.make_script(folder), is_private=True) for number, job in enumerate(jobs)
    ]
    bundle_plan = plan_code_bundle(
        jobs[0], folder, 'gpu', *run_scripts, File(f'{folder}/job.sh', make_job_script(jobs, args, folder))
    )
    install = Plan(commands=(make_command('bash', f'{folder}/install.sh'),))
    return plan_row_checks(jobs) + bundle_plan + install + plan_resume(jobs, args)


def get_shared_code_folder(args: argparse.Namespace) -> str:
    """Return the code folder, on a file system that this machine and all hosts share."""
    return get_code_folder(args, ('/',))


def plan_resume(jobs: list[Job], args: argparse.Namespace) -> Plan:
    return Plan(commands=(make_command('sbatch', f'{get_shared_code_folder(args)}/job.sh'),))


def make_plan_by_name(*commands: tuple[str, ...]) -> Callable[[list[Job], argparse.Namespace], Plan]:
    """Make a plan function that runs commands on all jobs of a name."""
    return lambda jobs, args: Plan(commands=tuple(make_command(*words, f'--name={args.name}') for words in commands))


def plan_logs(jobs: list[Job], args: argparse.Namespace) -> Plan:
    tail_command = 'exec tail --follow=name --lines=50 "$1"/"$2"-*.log'
    return Plan(commands=(make_command('bash', '-c', tail_command, 'logs', get_shared_code_folder(args), args.name),))


STATUS_COMMAND = ('squeue', '--me', '--format=%i %T %r %M %l %R')
TERM_COMMAND = ('scancel', '--me', '--signal=TERM')
CANCEL_PENDING_COMMAND = ('scancel', '--me', '--state=PENDING')
# --batch signals the batch script only, which then does not requeue the job. --full would signal srun as well, and
# srun would kill the processes.
TERM_SCRIPT_COMMAND = (*TERM_COMMAND, '--batch')
SCHEDULER = Scheduler(
    module='launch.slurm',
    summary=__doc__,
    add_options=add_options,
    check_options=check_options,
    path_prefixes=PATH_PREFIXES,
    get_max_grace_seconds=lambda given: 65535,  # limit of --signal; a preemption has GraceTime of the partition
    verbs={
        'submit': Verb(
            'copy the code, create its environment, and submit the job', plan_submit, ('workdir', 'arguments')
        ),
        'resume': Verb('submit the same job again, with the copied code', plan_resume, ('workdir',)),
        'status': Verb('print its place in the queue', make_plan_by_name(STATUS_COMMAND)),
        'logs': Verb('print the output of the job', plan_logs, ('workdir',), is_single_job=True),
        'preempt': Verb('stop it as at its time limit: it saves and is requeued', make_plan_by_name(TERM_COMMAND)),
        'stop': Verb(
            'stop it: it saves',
            make_plan_by_name(CANCEL_PENDING_COMMAND, TERM_SCRIPT_COMMAND, TERM_COMMAND),
        ),
    },
)

if __name__ == '__main__':
    sys.exit(main(SCHEDULER))
