"""Jobs on SLURM clusters: one batch script, one process per host, requeued for a retry."""

import argparse
import shlex
import sys

from launch.code_bundle import make_code_bundle, make_row_checks
from launch.command_line import DEFAULT_GRACE_SECONDS, Scheduler, get_code_folder, main, require_options
from launch.job import Job
from launch.shell import make_command, write_file
from sinklab.cli.flag_types import non_negative_int, positive_int
from sinklab.exit_status import FINAL_EXIT_CODES

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
    add = parser.add_argument
    add('--nodes', type=positive_int, default=1, metavar='N', help='number of hosts (default: %(default)s)')
    add('--gpus', type=non_negative_int, default=8, metavar='N', help='GPUs of each host (default: 8; 0: none)')
    add('--partition', metavar='NAME', help='partition of the hosts (default: that of the cluster)')
    add('--account', metavar='NAME', help='account that is charged (default: that of your user)')
    add('--time', metavar='[D-]H:M:S', help='time limit, at which the job saves and is requeued')


def make_job_script(jobs: list[Job], args: argparse.Namespace, folder: str) -> str:
    is_array = len(jobs) > 1
    options = {
        'job-name': args.name,
        'array': f'0-{len(jobs) - 1}' if is_array else None,
        'nodes': args.nodes,
        'ntasks-per-node': 1,
        'gpus-per-node': args.gpus or None,
        'exclusive': '',
        'partition': args.partition,
        'account': args.account,
        'time': args.time,
        'signal': f'TERM@{jobs[0].grace_seconds}',
        'requeue': '',
        'open-mode': 'append',
        'output': folder + ('/%x-%A_%a.log' if is_array else '/%x-%j.log'),
    }
    directives = [
        f'#SBATCH --{name}' + (f'={shlex.quote(str(value))}' if value else '')
        for name, value in options.items()
        if value is not None
    ]
    return JOB_SCRIPT.format(
        directives='\n'.join(directives),
        grace=jobs[0].grace_seconds,
        code=shlex.quote(folder),
        final='|'.join(map(str, FINAL_EXIT_CODES)),
        restarts=jobs[0].max_restarts,
    )


def submit(jobs: list[Job], args: argparse.Namespace) -> list[str]:
    """Copy the code, create its environment, and submit the job."""
    require_options(args, time='1-00:00:00')
    folder = get_code_folder(args)
    run_scripts = [
        write_file(f'{folder}/run-{number}.sh', job.make_script(folder)) for number, job in enumerate(jobs)
    ]
    return [
        *make_row_checks(jobs),
        *run_scripts,
        write_file(f'{folder}/job.sh', make_job_script(jobs, args, folder)),
        *make_code_bundle(jobs[0], folder, 'gpu'),
        make_command('bash', f'{folder}/install.sh'),
        *resume(jobs, args),
    ]


def resume(jobs: list[Job], args: argparse.Namespace) -> list[str]:
    """Submit the same job again, with the copied code."""
    return [make_command('sbatch', f'{get_code_folder(args)}/job.sh')]


def print_status(jobs: list[Job], args: argparse.Namespace) -> list[str]:
    """Print its place in the queue."""
    return [make_command('squeue', '--me', '--format=%i %T %r %M %l %R', f'--name={args.name}')]


def print_logs(jobs: list[Job], args: argparse.Namespace) -> list[str]:
    """Print the output of the job."""
    return [f'tail --follow=name --lines=50 {shlex.quote(f"{get_code_folder(args)}/{args.name}")}-*.log']


def preempt(jobs: list[Job], args: argparse.Namespace) -> list[str]:
    """Stop it as at its time limit: it saves and is requeued."""
    return [f'scancel --me --signal=TERM --name={args.name}']


def stop(jobs: list[Job], args: argparse.Namespace) -> list[str]:
    """Stop it: it saves."""
    # --batch signals the batch script only, which then does not requeue the job. --full would signal srun as well,
    # and srun would kill the processes.
    return [
        f'scancel --me --state=PENDING --name={args.name}',
        f'scancel --me --signal=TERM --batch --name={args.name}',
        f'scancel --me --signal=TERM --name={args.name}',
    ]


SCHEDULER = Scheduler(
    module='launch.slurm',
    summary=__doc__,
    add_options=add_options,
    path_prefix='/',
    get_grace_seconds=lambda args: DEFAULT_GRACE_SECONDS,  # a preemption has GraceTime of the partition
    verbs=dict(submit=submit, status=print_status, logs=print_logs, preempt=preempt, resume=resume, stop=stop),
)

if __name__ == '__main__':
    sys.exit(main(SCHEDULER))
