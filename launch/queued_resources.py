"""Jobs on TPU VMs of Google Cloud: a queued resource, one service per host, recreated if preempted."""

import argparse
import shlex
import sys

from launch import tpu_slices
from launch.code_bundle import get_local_folder, make_code_bundle, make_row_checks
from launch.command_line import Scheduler, get_code_folder, get_single_job, main
from launch.job import Job
from launch.shell import make_command, make_script, write_file
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


def make_queued_resource_command(*words: str) -> str:
    return make_command('gcloud', 'compute', 'tpus', 'queued-resources', *words)


def list_node_names(job: Job, args: argparse.Namespace) -> list[str]:
    """Return the node names of the slices of a job."""
    return [job.name] if args.slices == 1 else [f'{job.name}-{number}' for number in range(args.slices)]


def make_ssh_command(node: str, worker: str, remote_command: str) -> str:
    # Without --quiet, the first ssh of a user asks whether to create a key.
    flags = ('--quiet', f'--worker={worker}', f'--command={remote_command}')
    return make_command('gcloud', 'compute', 'tpus', 'tpu-vm', 'ssh', node, *flags)


def make_first_host_command(job: Job, args: argparse.Namespace, remote_command: str) -> str:
    """Return the command that runs a remote command by ssh on the host of process 0."""
    return make_ssh_command(list_node_names(job, args)[0], '0', remote_command)


def get_bucket_folder(job: Job, args: argparse.Namespace) -> str:
    return f'{get_code_folder(args, SCHEDULER.path_prefixes)}/{job.name}'


def make_create_command(job: Job, args: argparse.Namespace) -> str:
    tpu_slice = tpu_slices.parse_slice(args.accelerator)
    slice_flags = (f'--node-count={args.slices}', f'--node-prefix={job.name}')
    return make_queued_resource_command(
        'create',
        job.name,
        *((f'--node-id={job.name}',) if args.slices == 1 else slice_flags),
        f'--accelerator-type={tpu_slice.accelerator_type}',
        f'--runtime-version={args.runtime or tpu_slice.kind.runtime_version}',
        *(['--spot'] if args.spot else []),
        *(['--reserved'] if args.reserved else []),
        *([f'--service-account={args.service_account}'] if args.service_account else []),
        f'--metadata-from-file=startup-script={get_local_folder(job.name)}/boot.sh',
    )


def make_delete_command(job: Job) -> str:
    return make_queued_resource_command('delete', job.name, '--force', '--quiet')


def make_describe_command(job: Job) -> str:
    return make_queued_resource_command('describe', job.name, '--format=value(state.state)')


def submit(jobs: list[Job], args: argparse.Namespace) -> list[str]:
    """Upload the code and request the TPUs, which start the run."""
    tpu_slices.check_run(jobs[0].arguments, args)
    return [*make_row_checks(jobs), *(statement for job in jobs for statement in submit_job(job, args))]


def submit_job(job: Job, args: argparse.Namespace) -> list[str]:
    folder = get_local_folder(job.name)
    bucket_folder = get_bucket_folder(job, args)
    create_command = make_create_command(job, args)
    boot_script = BOOT_SCRIPT.format(folder=INSTALL_FOLDER, code=shlex.quote(bucket_folder))
    service_unit = SERVICE_UNIT.format(
        folder=INSTALL_FOLDER,
        starts=job.max_restarts + 1,
        final=' '.join(map(str, FINAL_EXIT_CODES)),
        grace=job.grace_seconds,
    )
    keep_script = KEEP_SCRIPT.format(
        restarts=job.max_restarts,
        max_polls=MAX_POLLS_WITHOUT_START,
        describe=make_describe_command(job),
        query_unit=make_first_host_command(job, args, f'systemctl show --property={SERVICE_PROPERTIES} sinklab'),
        print_log=make_first_host_command(job, args, f'sudo journalctl {LOG_OPTIONS}'),
        delete=make_delete_command(job),
        create=create_command,
    )
    return [
        write_file(f'{folder}/boot.sh', boot_script),
        write_file(f'{folder}/run.sh', job.make_script(INSTALL_FOLDER), is_private=True),
        write_file(f'{folder}/sinklab.service', service_unit),
        write_file(f'{folder}/create.sh', make_script([create_command])),
        write_file(f'{folder}/keep.sh', keep_script),
        *make_code_bundle(job, folder, 'tpu'),
        make_command('gcloud', 'storage', 'rsync', '--recursive', folder, bucket_folder),
        create_command,
    ]


def keep(jobs: list[Job], args: argparse.Namespace) -> list[str]:
    """Create it again when it is preempted, and delete it when the run ends."""
    return [make_command('bash', f'{get_local_folder(get_single_job(jobs).name)}/keep.sh')]


def resume(jobs: list[Job], args: argparse.Namespace) -> list[str]:
    """Delete it, and create it again with the uploaded code."""
    return [
        statement
        for job in jobs
        for statement in (
            f'{make_delete_command(job)} || true',
            make_command('bash', f'{get_local_folder(job.name)}/create.sh'),
        )
    ]


def print_status(jobs: list[Job], args: argparse.Namespace) -> list[str]:
    """Print the state of the queued resource."""
    return [make_describe_command(job) for job in jobs]


def print_logs(jobs: list[Job], args: argparse.Namespace) -> list[str]:
    """Print the output of the first host."""
    return [make_first_host_command(get_single_job(jobs), args, f'sudo journalctl --follow {LOG_OPTIONS}')]


def preempt(jobs: list[Job], args: argparse.Namespace) -> list[str]:
    """Stop the run as in a preemption: it saves and restarts."""
    return [make_first_host_command(job, args, 'sudo systemctl kill --signal=TERM sinklab') for job in jobs]


def stop(jobs: list[Job], args: argparse.Namespace) -> list[str]:
    """Stop the run, which saves, and delete the TPUs, also if their VMs are gone."""
    statements = []
    for job in jobs:
        for node in list_node_names(job, args):
            statements.append(f'{make_ssh_command(node, "all", "sudo systemctl stop sinklab")} || true')
        statements.append(make_delete_command(job))
    return statements


SCHEDULER = Scheduler(
    module='launch.queued_resources',
    summary=__doc__,
    add_options=add_options,
    path_prefixes=('gs://',),
    get_max_grace_seconds=lambda args: SPOT_GRACE_SECONDS if args.spot else 3600,
    verbs=dict(
        submit=submit, keep=keep, status=print_status, logs=print_logs, preempt=preempt, resume=resume, stop=stop
    ),
)

if __name__ == '__main__':
    sys.exit(main(SCHEDULER))
