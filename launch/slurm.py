"""Jobs on SLURM clusters: one batch script, one process per host, requeued for a retry."""

import argparse
import shlex
import sys

from launch.code_bundle import make_code_bundle, make_row_checks
from launch.command_line import (
    DEFAULT_GRACE_SECONDS,
    Scheduler,
    get_code_folder,
    main,
    make_job_verb,
    require_options,
)
from launch.job import Job
from launch.shell import fill_template, make_command, write_file
from sinklab.cli.flag_types import non_negative_int, positive_int
from sinklab.exit_status import FINAL_EXIT_CODES


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
    return fill_template(
        'slurm_job.sh',
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


def print_logs(jobs: list[Job], args: argparse.Namespace) -> list[str]:
    """Print the output of the job."""
    return [f'tail --follow=name --lines=50 {shlex.quote(f"{get_code_folder(args)}/{args.name}")}-*.log']


SCHEDULER = Scheduler(
    module='launch.slurm',
    summary=__doc__,
    add_options=add_options,
    path_prefix='/',
    get_grace_seconds=lambda args: DEFAULT_GRACE_SECONDS,  # a preemption has GraceTime of the partition
    verbs=dict(
        submit=submit,
        status=make_job_verb(
            'Print its place in the queue.', "squeue --me '--format=%i %T %r %M %l %R' --name={args_name}"
        ),
        logs=print_logs,
        preempt=make_job_verb(
            'Stop it as at its time limit: it saves and is requeued.', 'scancel --me --signal=TERM --name={args_name}'
        ),
        resume=resume,
        # --batch signals the batch script only, which then does not requeue the job. --full would also signal srun,
        # which would kill the processes.
        stop=make_job_verb(
            'Stop it: it saves.',
            'scancel --me --state=PENDING --name={args_name}',
            'scancel --me --signal=TERM --batch --name={args_name}',
            'scancel --me --signal=TERM --name={args_name}',
        ),
    ),
)

if __name__ == '__main__':
    sys.exit(main(SCHEDULER))
