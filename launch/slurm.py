"""Jobs on a cluster of SLURM: one script, one process a host, started again when it says so."""

import argparse
import re
import shlex
import sys
from collections.abc import Callable

from launch.command import Scheduler, Verb, at_least, check_layout, code, main, needed
from launch.job import AGAIN, BUCKETS, Job, Refusal
from launch.plan import File, Plan, command
from launch.shipping import shipped
from sinklab.escape import quote_shell

ROOTS = ('/', *BUCKETS)
# SLURM starts a job again by itself after a preemption or the loss of a host. By an exit code it does only where its
# administrator has set RequeueExit, so the script asks: of that no cluster needs to know. A signal ahead of the limit
# is for the steps; one that the script gets is of the whole job, and what becomes of that SLURM decides.
SCRIPT = """#!/bin/bash
{directives}
ended=
trap ended=1 TERM
code=0
# By it the processes know each other (docs/guides/network.md). Each start has one of its own; srun hands it on.
SINKLAB_RUN_SECRET="${{SINKLAB_RUN_SECRET:-$(< /proc/sys/kernel/random/uuid)}}"
export SINKLAB_RUN_SECRET
srun --kill-on-bad-exit=0 --wait={grace} bash {code}/run-"${{SLURM_ARRAY_TASK_ID:-0}}".sh || code=$?
case $code in
  {again})
    if [[ -z "$ended" && "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]]; then
      # The number of a job alone may be that of its whole array.
      scontrol requeue "${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}"
    fi
    ;;
esac
exit "$code"
"""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--nodes', type=int, default=1, metavar='N', help='hosts; %(default)s')
    parser.add_argument('--gpus', type=int, default=8, metavar='N', help='of each host; %(default)s; 0: none')
    parser.add_argument('--partition', metavar='NAME')
    parser.add_argument('--account', metavar='NAME')
    parser.add_argument('--time', metavar='[D-]H:M:S', help='the limit, at which it saves and is queued again')
    parser.add_argument('--at_once', type=int, metavar='N', help='jobs of a sweep that run at the same time')


def check(given: argparse.Namespace) -> None:
    at_least(given, nodes=1, gpus=0, at_once=1)


def directives(jobs: list[Job], given: argparse.Namespace, folder: str) -> dict[str, str | None]:
    """Return the options of `sbatch` by name."""
    job, many = jobs[0], len(jobs) > 1
    least = f'%{given.at_once}' if given.at_once else ''
    log = folder.replace('%', '%%') + ('/%x-%A_%a.log' if many else '/%x-%j.log')
    told = {
        'job-name': given.name,
        'array': f'0-{len(jobs) - 1}{least}' if many else None,
        'nodes': given.nodes,
        'ntasks-per-node': 1,
        'gpus-per-node': given.gpus or None,
        'exclusive': '',
        'partition': given.partition,
        'account': given.account,
        'time': given.time,
        'signal': f'TERM@{job.grace}',
        'requeue': '',
        'open-mode': 'append',
        'output': log,
    }
    return {name: str(value) for name, value in told.items() if value is not None}


def script(jobs: list[Job], given: argparse.Namespace, folder: str) -> str:
    told = directives(jobs, given, folder)
    lines = [f'#SBATCH --{name}{f"={quoted(value)}" if value else ""}' for name, value in told.items()]
    return SCRIPT.format(
        directives='\n'.join(lines),
        grace=jobs[0].grace,
        code=quote_shell(folder),
        again='|'.join(map(str, AGAIN)),
        restarts=jobs[0].restarts,
    )


def quoted(value: str) -> str:
    """For `sbatch`, to which a backslash within quotes is one more way to quote, and a line break an end."""
    if re.search(r'[\\\n]', value):
        raise Refusal(f'{value!r} holds a backslash or a line break, which sbatch does not read; take another')
    return shlex.quote(value)


def submit(jobs: list[Job], given: argparse.Namespace) -> Plan:
    needed(given, time='1-00:00:00')
    if given.gpus:
        check_layout(jobs[0].arguments, given.nodes * given.gpus, f'{given.nodes} x {given.gpus} GPUs')
    folder = reachable(given)
    runs = [File(f'{folder}/run-{number}.sh', job.script(folder), private=True) for number, job in enumerate(jobs)]
    made = shipped(jobs[0], folder, 'gpu', *runs, File(f'{folder}/job.sh', script(jobs, given, folder)))
    return made + Plan(commands=(command('bash', f'{folder}/install.sh'),)) + resume(jobs, given)


def reachable(given: argparse.Namespace) -> str:
    """The folder of the code, which all hosts and this one see."""
    return code(given, ('/',))


def resume(jobs: list[Job], given: argparse.Namespace) -> Plan:
    return Plan(commands=(command('sbatch', f'{reachable(given)}/job.sh'),))


def of_name(*commands: tuple[str, ...]) -> Callable[[list[Job], argparse.Namespace], Plan]:
    """Commands about the jobs of a name."""
    return lambda jobs, given: Plan(commands=tuple(command(*words, f'--name={given.name}') for words in commands))


def logs(jobs: list[Job], given: argparse.Namespace) -> Plan:
    follow = 'exec tail --follow=name --lines=50 "$1"/"$2"-*.log'
    return Plan(commands=(command('bash', '-c', follow, 'logs', reachable(given), given.name),))


STATUS = ('squeue', '--me', '--format=%i %T %r %M %l %R')
TERM = ('scancel', '--me', '--signal=TERM')
PENDING = ('scancel', '--me', '--state=PENDING')
# The script alone, which then knows that it is the end; srun would kill the processes (--full).
SCRIPT_ALONE = (*TERM, '--batch')
SCHEDULER = Scheduler(
    module='launch.slurm',
    summary=__doc__,
    options=options,
    check=check,
    roots=ROOTS,
    limit=lambda given: 65535,  # of --signal; after a preemption, GraceTime of the partition
    verbs={
        'submit': Verb('the code, its environment and the job', submit, ('workdir', 'arguments')),
        'resume': Verb('the same job again, as it was shipped', resume, ('workdir',)),
        'status': Verb('where it is in the queue', of_name(STATUS)),
        'logs': Verb('what the job has said', logs, ('workdir',), one=True),
        'preempt': Verb('told to stop as ahead of its limit: it saves, and comes back', of_name(TERM)),
        'stop': Verb('told to stop for good: it saves', of_name(PENDING, SCRIPT_ALONE, TERM)),
    },
)

if __name__ == '__main__':
    sys.exit(main(SCHEDULER))
