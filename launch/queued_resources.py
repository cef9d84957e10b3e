"""Jobs on TPU VMs of Google Cloud: a queued resource, one service per host, recreated if preempted."""

import argparse
import os
import shlex
import sys

from launch import tpu_slices
from launch.code_bundle import get_local_folder, plan_code_bundle, plan_row_checks
from launch.command_line import (
    Scheduler,
    Verb,
    get_code_folder,
    main,
    require_options,
)
from launch.job import (
    Job,
)
from launch.plan import (
    Command,
    File,
    Plan,
    make_command,
)
from sinklab.errors import UserError
from sinklab.exit_status import FINAL_EXIT_CODES

SPOT_GRACE_SECONDS = 30  # from the preemption notice to the end of a spot VM
INSTALL_FOLDER = '/opt/sinklab'
BOOT_SCRIPT = """#!/bin/bash
# Installs the code and starts the run at every boot. run.sh contains the values of --env, so only root can read it.
set -eu
umask 077
export HOME=/root
mkdir -p {folder}
gcloud storage rsync --recursive {code} {folder}
command -v uv > /dev/null || python3 -m pip install --quiet uv
bash {folder}/install.sh
cp {folder}/sinklab.service /run/systemd/system/
systemctl daemon-reload
systemctl start --no-block sinklab
"""
SERVICE_UNIT = """[Unit]
Description=A run of sinklab
StartLimitIntervalSec=infinity
StartLimitBurst={starts}

[Service]
ExecStart=/bin/bash {folder}/run.sh
Restart=always
RestartPreventExitStatus={final}
RestartSec=15
TimeoutStopSec={grace}
KillMode=mixed
"""
MAX_POLLS_WITHOUT_START = 30
# Polls until the run ends, and recreates the resource after a preemption. The TPUs cost money until the resource is
# deleted, so the script deletes it when the run ends or does not start, and repeats a deletion that fails. A run that
# has started may continue while ssh does not work, so a poll without an answer counts only before the first start.
KEEP_SCRIPT = """#!/bin/bash
set -u
poll_seconds=${{POLL_SECONDS:-60}}
restarts_left={restarts}
polls_not_found=0
polls_without_start=0
has_started=

# gcloud can also fail for a reason that says nothing about the resource, such as an expired login.
is_missing() {{
  [[ $({describe} 2>&1) == *NOT_FOUND* ]]
}}

delete_resource() {{
  until {delete} || is_missing; do
    echo 'the queued resource is not deleted, and its TPUs cost money; trying again'
    sleep "$poll_seconds"
  done
}}

while true; do
  if state=$({describe}); then
    polls_not_found=0
  elif is_missing && (((polls_not_found += 1) >= 5)); then
    echo 'the queued resource does not exist; create it with the verb resume'
    exit 1
  fi
  case $state in
    ACTIVE)
      unit_status=$({query_unit})
      if [[ $unit_status =~ StartTimestampMonotonic=[1-9] ]]; then
        has_started=1
        polls_without_start=0
        if [[ $unit_status =~ ActiveState=(inactive|failed) ]]; then
          printf 'the run has ended\\n%s\\n' "$unit_status"
          delete_resource
          [[ $unit_status == *ExecMainStatus=0* ]]
          exit
        fi
      elif [[ -n $unit_status || -z $has_started ]] && (((polls_without_start += 1) >= {max_polls})); then
        echo 'the run was not started in {max_polls} polls, and its TPUs are deleted; correct what its log reports:'
        {print_log}
        delete_resource
        exit 1
      fi
      ;;
    SUSPENDED | FAILED)
      if ((restarts_left == 0)); then
        echo 'preempted more often than --restarts allows'
        exit 1
      fi
      restarts_left=$((restarts_left - 1))
      delete_resource
      {create}
      polls_without_start=0
      has_started=
      ;;
  esac
  sleep "$poll_seconds"
done
"""
LOG_OPTIONS = '--lines=50 --unit=google-startup-scripts --unit=sinklab'  # of journalctl
SERVICE_PROPERTIES = 'ActiveState,Result,ExecMainStatus,ExecMainStartTimestampMonotonic,NRestarts'


def add_options(parser: argparse.ArgumentParser) -> None:
    tpu_slices.add_options(parser)
    parser.add_argument(
        '--runtime', metavar='VERSION', help='runtime version of the VMs (default: that of the chips)'
    )
    parser.add_argument('--reserved', action='store_true', help='use a reservation')
    parser.add_argument('--service_account', metavar='EMAIL', help='service account of the VMs')
    parser.add_argument(
        '--project',
        default=os.environ.get('CLOUDSDK_CORE_PROJECT'),
        metavar='ID',
        help='project of Google Cloud (default: $CLOUDSDK_CORE_PROJECT)',
    )
    parser.add_argument(
        '--zone',
        default=os.environ.get('CLOUDSDK_COMPUTE_ZONE'),
        metavar='ZONE',
        help='zone of the TPUs (default: $CLOUDSDK_COMPUTE_ZONE)',
    )


def check_options(args: argparse.Namespace) -> None:
    if args.verb not in ('follow', 'fetch'):
        require_options(args, project='my-project', zone='europe-west4-b')
    tpu_slices.check_options(args)
    if args.spot and args.reserved:
        raise UserError('--spot and --reserved are both given; remove one')


def make_location_flags(args: argparse.Namespace) -> tuple[str, str]:
    return f'--project={args.project}', f'--zone={args.zone}'


def make_queued_resource_command(args: argparse.Namespace, *words: str, is_optional: bool = False) -> Command:
    return make_command(
        'gcloud', 'compute', 'tpus', 'queued-resources', *words, *make_location_flags(args), is_optional=is_optional
    )


def list_node_names(job: Job, args: argparse.Namespace) -> list[str]:
    """Return the node names of the slices of a job."""
    return [job.name] if args.slices == 1 else [f'{job.name}-{number}' for number in range(args.slices)]


def make_ssh_command(
    node: str, args: argparse.Namespace, worker: str, remote_command: str, is_optional: bool = False
) -> Command:
    # Without --quiet, the first ssh of a user asks whether to create a key.
    flags = ('--quiet', *make_location_flags(args), f'--worker={worker}', f'--command={remote_command}')
    return make_command('gcloud', 'compute', 'tpus', 'tpu-vm', 'ssh', node, *flags, is_optional=is_optional)


def make_first_host_command(job: Job, args: argparse.Namespace, remote_command: str) -> Command:
    """Return the command that runs a remote command by ssh on the host of process 0."""
    return make_ssh_command(list_node_names(job, args)[0], args, '0', remote_command)


def make_service_unit(job: Job) -> str:
    return SERVICE_UNIT.format(
        folder=INSTALL_FOLDER,
        starts=job.max_restarts + 1,
        final=' '.join(map(str, FINAL_EXIT_CODES)),
        grace=job.grace_seconds,
    )


def get_bucket_folder(job: Job, args: argparse.Namespace) -> str:
    return f'{get_code_folder(args, SCHEDULER.path_prefixes)}/{job.name}'


def make_create_command(job: Job, args: argparse.Namespace) -> Command:
    tpu_slice = tpu_slices.parse_slice(args.accelerator)
    slice_flags = (f'--node-count={args.slices}', f'--node-prefix={job.name}')
    switches = {'spot': args.spot, 'reserved': args.reserved}
    return make_queued_resource_command(
        args,
        'create',
        job.name,
        *((f'--node-id={job.name}',) if args.slices == 1 else slice_flags),
        f'--accelerator-type={tpu_slice.accelerator_type}',
        f'--runtime-version={args.runtime or tpu_slice.kind.runtime_version}',
        *(f'--{name}' for name, is_enabled in switches.items() if is_enabled),
        *([f'--service-account={args.service_account}'] if args.service_account else []),
        f'--metadata-from-file=startup-script={get_local_folder(job.name)}/boot.sh',
    )


def make_delete_command(job: Job, args: argparse.Namespace, is_optional: bool = False) -> Command:
    return make_queued_resource_command(args, 'delete', job.name, '--force', '--quiet', is_optional=is_optional)


def make_describe_command(job: Job, args: argparse.Namespace) -> Command:
    return make_queued_resource_command(args, 'describe', job.name, '--format=value(state.state)')


def make_keep_script(job: Job, args: argparse.Namespace) -> str:
    query_unit_command = make_first_host_command(job, args, f'systemctl show --property={SERVICE_PROPERTIES} sinklab')
    commands = dict(
        describe=make_describe_command(job, args),
        query_unit=query_unit_command,
        print_log=make_first_host_command(job, args, f'sudo journalctl {LOG_OPTIONS}'),
        delete=make_delete_command(job, args),
        create=make_create_command(job, args),
    )
    return KEEP_SCRIPT.format(restarts=job.max_restarts, max_polls=MAX_POLLS_WITHOUT_START, **commands)


def plan_submit(jobs: list[Job], args: argparse.Namespace) -> Plan:
    tpu_slices.check_run(jobs[0].arguments, args)
    return sum((plan_submit_job(job, args) for job in jobs), plan_row_checks(jobs))


def plan_submit_job(job: Job, args: argparse.Namespace) -> Plan:
    texts = {
        'boot.sh': BOOT_SCRIPT.format(folder=INSTALL_FOLDER, code=shlex.quote(get_bucket_folder(job, args))),
        'run.sh': job.make_script(INSTALL_FOLDER),
        'sinklab.service': make_service_unit(job),
        'create.sh': f'#!/bin/bash\nexec {make_create_command(job, args)}\n',
        'keep.sh': make_keep_script(job, args),
    }
    files = [
        File(f'{get_local_folder(job.name)}/{name}', text, is_private=name == 'run.sh')
        for name, text in texts.items()
    ]
    upload_command = make_command(
        'gcloud', 'storage', 'rsync', '--recursive', get_local_folder(job.name), get_bucket_folder(job, args)
    )
    return plan_code_bundle(job, get_local_folder(job.name), 'tpu', *files) + Plan(
        commands=(upload_command, make_create_command(job, args))
    )


def plan_resume(jobs: list[Job], args: argparse.Namespace) -> Plan:
    """Plan to delete the suspended resource of each job and to create one of the same name."""
    command_pairs = [
        (
            make_delete_command(job, args, is_optional=True),
            make_command('bash', f'{get_local_folder(job.name)}/create.sh'),
        )
        for job in jobs
    ]
    return Plan(commands=tuple(planned for pair in command_pairs for planned in pair))


def plan_keep(jobs: list[Job], args: argparse.Namespace) -> Plan:
    return Plan(commands=(make_command('bash', f'{get_local_folder(jobs[0].name)}/keep.sh'),))


def plan_status(jobs: list[Job], args: argparse.Namespace) -> Plan:
    return Plan(commands=tuple(make_describe_command(job, args) for job in jobs))


def plan_logs(jobs: list[Job], args: argparse.Namespace) -> Plan:
    return Plan(commands=(make_first_host_command(jobs[0], args, f'sudo journalctl --follow {LOG_OPTIONS}'),))


def plan_preempt(jobs: list[Job], args: argparse.Namespace) -> Plan:
    return Plan(
        commands=tuple(
            make_first_host_command(job, args, 'sudo systemctl kill --signal=TERM sinklab') for job in jobs
        )
    )


def plan_stop(jobs: list[Job], args: argparse.Namespace) -> Plan:
    """Plan to stop the runs, which save on SIGTERM, and to delete their queued resources.

    A resource is deleted even if its service cannot be stopped, for example because its VMs are gone.
    """
    return sum((plan_stop_job(job, args) for job in jobs), Plan())


def plan_stop_job(job: Job, args: argparse.Namespace) -> Plan:
    stop_commands = [
        make_ssh_command(node, args, 'all', 'sudo systemctl stop sinklab', is_optional=True)
        for node in list_node_names(job, args)
    ]
    return Plan(commands=(*stop_commands, make_delete_command(job, args)))


SCHEDULER = Scheduler(
    module='launch.queued_resources',
    summary=__doc__,
    add_options=add_options,
    check_options=check_options,
    path_prefixes=('gs://',),
    get_max_grace_seconds=lambda given: SPOT_GRACE_SECONDS if given.spot else 3600,
    verbs={
        'submit': Verb(
            'upload the code and request the TPUs, which start the run', plan_submit, ('workdir', 'arguments')
        ),
        'keep': Verb('recreate it when it is preempted, delete it when the run ends', plan_keep, is_single_job=True),
        'resume': Verb('delete it, and create it again with the uploaded code', plan_resume),
        'status': Verb('print the state of the queued resource', plan_status),
        'logs': Verb('print the output of the first host', plan_logs, is_single_job=True),
        'preempt': Verb('stop the run as in a preemption: it saves and restarts', plan_preempt),
        'stop': Verb('stop the run: it saves, and the TPUs are deleted', plan_stop),
    },
)

if __name__ == '__main__':
    sys.exit(main(SCHEDULER))
