"""Jobs on TPU VMs of Google Cloud: a queued resource, one service a host, made again when it is taken away."""

import argparse
import os
import sys

from launch import tpus
from launch.command import Scheduler, Verb, code, main, needed
from launch.job import AGAIN, SIGNALS, Job, Refusal
from launch.plan import Command, File, Plan, command
from launch.shipping import here, shipped
from sinklab.escape import quote_shell

SPOT = 30  # seconds from the notice to the end of a spot VM
FOLDER = '/opt/sinklab'
BOOT = """#!/bin/bash
# At every boot of a host: the code, its environment, the run. run.sh has the values of --env: all is for root alone.
set -eu
umask 077
export HOME=/root
mkdir -p {folder}
gcloud storage rsync --recursive {code} {folder}
# Without the secret of the run (docs/guides/network.md) its processes would trust whoever reaches their port.
if ! [[ -s {folder}/secret ]]; then
  echo {code}/secret 'is missing or empty; submit the job again' >&2
  exit 1
fi
command -v uv > /dev/null || python3 -m pip install --quiet uv
bash {folder}/install.sh
cp {folder}/sinklab.service /run/systemd/system/
systemctl daemon-reload
systemctl start --no-block sinklab
"""
# Made once for a job: hosts of a run under way have read it, and one that boots later must get the same. A command
# makes it, and it is no file of the plan, so that what a launcher prints does not hold it.
MAKE_SECRET = (
    'set -e; umask 077; '
    '[[ -s "$1" ]] || "$0" -c "import secrets; print(secrets.token_hex(32))" > "$1"; '
    'chmod 600 "$1"'
)
SERVICE = """[Unit]
Description=A run of sinklab
StartLimitIntervalSec=infinity
StartLimitBurst={starts}

[Service]
ExecStart=/bin/bash {folder}/run.sh
RestartForceExitStatus={again}
RestartSec=15
TimeoutStopSec={grace}
KillMode=mixed
"""
# Asks as long as the run is not over, and makes the resource again when it is taken away. A run that is over costs on
# as long as its machines stand, so they are given back.
KEEP = """#!/bin/bash
set -u
left={restarts}
unanswered=0
while true; do
  if state=$({describe}); then
    unanswered=0
  elif (((unanswered += 1) >= 5)); then
    echo 'it is not there, or cannot be asked'
    exit 1
  fi
  case $state in
    ACTIVE)
      said=$({ask})
      if [[ $said =~ StartTimestampMonotonic=[1-9] && $said =~ ActiveState=(inactive|failed) ]]; then
        printf 'the run is over\\n%s\\n' "$said"
        {delete}
        [[ $said == *ExecMainStatus=0* ]]
        exit
      fi
      ;;
    SUSPENDED | FAILED)
      if ((left == 0)); then
        echo 'taken away once more than --restarts allows'
        exit 1
      fi
      left=$((left - 1))
      {delete}
      {create}
      ;;
  esac
  sleep "${{EVERY:-60}}"
done
"""
PROPERTIES = 'ActiveState,Result,ExecMainStatus,ExecMainStartTimestampMonotonic,NRestarts'


def options(parser: argparse.ArgumentParser) -> None:
    tpus.options(parser)
    parser.add_argument('--runtime', metavar='VERSION', help='of the VMs; the usual one of the chips')
    parser.add_argument('--reserved', action='store_true', help='of a reservation of yours')
    parser.add_argument('--service_account', metavar='EMAIL', help='of the VMs')
    parser.add_argument('--project', default=os.environ.get('CLOUDSDK_CORE_PROJECT'), metavar='ID')
    parser.add_argument('--zone', default=os.environ.get('CLOUDSDK_COMPUTE_ZONE'), metavar='ZONE')


def check(given: argparse.Namespace) -> None:
    if given.verb not in ('follow', 'fetch'):
        needed(given, project='my-project', zone='europe-west4-b')
    tpus.check(given)
    if given.spot and given.reserved:
        raise Refusal('--spot and --reserved are both given; a reservation is not taken away, leave one out')


def place(given: argparse.Namespace) -> tuple[str, str]:
    return f'--project={given.project}', f'--zone={given.zone}'


def queued(given: argparse.Namespace, *words: str, optional: bool = False) -> Command:
    return command('gcloud', 'compute', 'tpus', 'queued-resources', *words, *place(given), optional=optional)


def nodes(job: Job, given: argparse.Namespace) -> list[str]:
    """The names of a job's slices."""
    return [job.name] if given.slices == 1 else [f'{job.name}-{number}' for number in range(given.slices)]


def ssh(node: str, given: argparse.Namespace, worker: str, words: str, optional: bool = False) -> Command:
    told = (*place(given), f'--worker={worker}', f'--command={words}')
    return command('gcloud', 'compute', 'tpus', 'tpu-vm', 'ssh', node, *told, optional=optional)


def of_first(job: Job, given: argparse.Namespace, words: str) -> Command:
    """On the host of process 0."""
    return ssh(nodes(job, given)[0], given, '0', words)


def service(job: Job) -> str:
    codes = [*(str(code) for code in AGAIN), *SIGNALS]
    return SERVICE.format(folder=FOLDER, starts=job.restarts + 1, again=' '.join(codes), grace=job.grace)


def there(job: Job, given: argparse.Namespace) -> str:
    return f'{code(given, SCHEDULER.roots)}/{job.name}'


def create(job: Job, given: argparse.Namespace) -> Command:
    size = tpus.slice_of(given.accelerator)
    many = (f'--node-count={given.slices}', f'--node-prefix={job.name}')
    asked = {'spot': given.spot, 'reserved': given.reserved}
    return queued(
        given,
        'create',
        job.name,
        *((f'--node-id={job.name}',) if given.slices == 1 else many),
        f'--accelerator-type={size.queued}',
        f'--runtime-version={given.runtime or size.kind.runtime}',
        *(f'--{name}' for name, wanted in asked.items() if wanted),
        *([f'--service-account={given.service_account}'] if given.service_account else []),
        f'--metadata-from-file=startup-script={here(job.name)}/boot.sh',
    )


def delete(job: Job, given: argparse.Namespace, optional: bool = False) -> Command:
    return queued(given, 'delete', job.name, '--force', '--quiet', optional=optional)


def describe(job: Job, given: argparse.Namespace) -> Command:
    return queued(given, 'describe', job.name, '--format=value(state.state)')


def keep_script(job: Job, given: argparse.Namespace) -> str:
    ask = of_first(job, given, f'systemctl show --property={PROPERTIES} sinklab')
    parts = dict(describe=describe(job, given), ask=ask, delete=delete(job, given), create=create(job, given))
    return KEEP.format(restarts=job.restarts, **parts)


def submit(jobs: list[Job], given: argparse.Namespace) -> Plan:
    tpus.check_run(jobs[0].arguments, given)
    return sum((submitted(job, given) for job in jobs), Plan())


def submitted(job: Job, given: argparse.Namespace) -> Plan:
    texts = {
        'boot.sh': BOOT.format(folder=FOLDER, code=quote_shell(there(job, given))),
        'run.sh': job.script(FOLDER, secret=f'{FOLDER}/secret'),
        'sinklab.service': service(job),
        'create.sh': f'#!/bin/bash\nexec {create(job, given)}\n',
        'keep.sh': keep_script(job, given),
    }
    files = [File(f'{here(job.name)}/{name}', text, private=name == 'run.sh') for name, text in texts.items()]
    secret = command('bash', '-c', MAKE_SECRET, sys.executable, f'{here(job.name)}/secret')
    upload = command('gcloud', 'storage', 'rsync', '--recursive', here(job.name), there(job, given))
    return shipped(job, here(job.name), 'tpu', *files) + Plan(commands=(secret, upload, create(job, given)))


def resume(jobs: list[Job], given: argparse.Namespace) -> Plan:
    """Plan to delete the suspended resource of each job and to create one of the same name."""
    made = [(delete(job, given, optional=True), command('bash', f'{here(job.name)}/create.sh')) for job in jobs]
    return Plan(commands=tuple(one for pair in made for one in pair))


def keep(jobs: list[Job], given: argparse.Namespace) -> Plan:
    return Plan(commands=(command('bash', f'{here(jobs[0].name)}/keep.sh'),))


def status(jobs: list[Job], given: argparse.Namespace) -> Plan:
    return Plan(commands=tuple(describe(job, given) for job in jobs))


def logs(jobs: list[Job], given: argparse.Namespace) -> Plan:
    words = 'sudo journalctl --follow --lines=50 --unit=google-startup-scripts --unit=sinklab'
    return Plan(commands=(of_first(jobs[0], given, words),))


def preempt(jobs: list[Job], given: argparse.Namespace) -> Plan:
    return Plan(commands=tuple(of_first(job, given, 'sudo systemctl kill --signal=TERM sinklab') for job in jobs))


def stop(jobs: list[Job], given: argparse.Namespace) -> Plan:
    """Saved first, if it stands, and given back."""
    return sum((stopped(job, given) for job in jobs), Plan())


def stopped(job: Job, given: argparse.Namespace) -> Plan:
    told = [ssh(node, given, 'all', 'sudo systemctl stop sinklab', optional=True) for node in nodes(job, given)]
    return Plan(commands=(*told, delete(job, given)))


SCHEDULER = Scheduler(
    module='launch.queued_resources',
    summary=__doc__,
    options=options,
    check=check,
    roots=('gs://',),
    limit=lambda given: SPOT if given.spot else 3600,
    verbs={
        'submit': Verb(
            'the code in a bucket, and the TPUs, which begin by themselves', submit, ('workdir', 'arguments')
        ),
        'keep': Verb('made again when it is taken away, given back when it is over', keep, one=True),
        'resume': Verb('made again, with the code that was shipped', resume),
        'status': Verb('how the queued resource is', status),
        'logs': Verb('what the first host has said', logs, one=True),
        'preempt': Verb('told to stop as by a preemption: it saves, and comes back', preempt),
        'stop': Verb('ended for good: it saves, and the TPUs are given back', stop),
    },
)

if __name__ == '__main__':
    sys.exit(main(SCHEDULER))
