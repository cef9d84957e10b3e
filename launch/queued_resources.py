"""Jobs on TPU VMs of Google Cloud: a queued resource, one service per host, recreated if preempted."""

import argparse
import shlex
import sys

from launch import tpu_slices
from launch.code_bundle import get_local_folder, make_code_bundle, make_row_checks
from launch.command_line import (
    DEFAULT_GRACE_SECONDS,
    MakeStatements,
    Scheduler,
    get_code_folder,
    main,
    make_job_verb,
    require_options,
)
from launch.job import Job
from launch.shell import fill_template, make_command, make_script, write_file
from sinklab.exit_status import FINAL_EXIT_CODES

SPOT_GRACE_SECONDS = 30  # from the preemption notice to the end of a spot VM
INSTALL_FOLDER = '/opt/sinklab'
SERVICE_PROPERTIES = 'ActiveState,Result,ExecMainStatus,ExecMainStartTimestampMonotonic,NRestarts'
DESCRIBE_COMMAND = "gcloud compute tpus queued-resources describe {name} '--format=value(state.state)'"
DELETE_COMMAND = 'gcloud compute tpus queued-resources delete {name} --force --quiet'
LOCAL_FOLDER = get_local_folder('{name}')


def add_options(parser: argparse.ArgumentParser) -> None:
    tpu_slices.add_options(parser)
    runtime_help = 'runtime version of the VMs (default: that of the chips)'
    parser.add_argument('--runtime', metavar='VERSION', help=runtime_help)
    parser.add_argument('--reserved', action='store_true', help='use a reservation')
    parser.add_argument('--service_account', metavar='EMAIL', help='service account of the VMs')


def list_node_names(job: Job, args: argparse.Namespace) -> list[str]:
    """Return the node names of the slices of a job."""
    return [job.name] if args.slices == 1 else [f'{job.name}-{number}' for number in range(args.slices)]


def make_ssh_command(node: str, worker: str, remote_command: str) -> str:
    # Without --quiet, the first ssh of a user asks whether to create a key.
    flags = ('--quiet', f'--worker={worker}', f'--command={remote_command}')
    return make_command('gcloud', 'compute', 'tpus', 'tpu-vm', 'ssh', node, *flags)


def make_create_command(job: Job, args: argparse.Namespace) -> str:
    tpu_slice = tpu_slices.parse_slice(args.accelerator)
    slice_flags = (f'--node-count={args.slices}', f'--node-prefix={job.name}')
    return make_command(
        *('gcloud', 'compute', 'tpus', 'queued-resources', 'create', job.name),
        *((f'--node-id={job.name}',) if args.slices == 1 else slice_flags),
        f'--accelerator-type={tpu_slice.accelerator_type}',
        f'--runtime-version={args.runtime or tpu_slice.kind.runtime_version}',
        *(['--spot'] if args.spot else []),
        *(['--reserved'] if args.reserved else []),
        *([f'--service-account={args.service_account}'] if args.service_account else []),
        f'--metadata-from-file=startup-script={get_local_folder(job.name)}/boot.sh',
    )


def submit(jobs: list[Job], args: argparse.Namespace) -> list[str]:
    """Upload the code and request the TPUs, which start the run."""
    require_options(args, accelerator='v5e-256')
    return [*make_row_checks(jobs), *(statement for job in jobs for statement in submit_job(job, args))]


def submit_job(job: Job, args: argparse.Namespace) -> list[str]:
    folder = get_local_folder(job.name)
    bucket_folder = f'{get_code_folder(args)}/{job.name}'
    create_command = make_create_command(job, args)
    boot_script = fill_template('boot.sh', folder=INSTALL_FOLDER, code=shlex.quote(bucket_folder))
    service_unit = fill_template(
        'sinklab.service',
        folder=INSTALL_FOLDER,
        starts=job.max_restarts + 1,
        final=' '.join(map(str, FINAL_EXIT_CODES)),
        grace=job.grace_seconds,
    )
    query_command = f'systemctl show --property={SERVICE_PROPERTIES} sinklab'
    keep_script = fill_template(
        'keep.sh',
        restarts=job.max_restarts,
        describe=DESCRIBE_COMMAND.format(name=job.name),
        query_unit=make_ssh_command(list_node_names(job, args)[0], '0', query_command),
        delete=DELETE_COMMAND.format(name=job.name),
        create=create_command,
    )
    return [
        write_file(f'{folder}/boot.sh', boot_script),
        write_file(f'{folder}/run.sh', job.make_script(INSTALL_FOLDER)),
        write_file(f'{folder}/sinklab.service', service_unit),
        write_file(f'{folder}/create.sh', make_script([create_command])),
        write_file(f'{folder}/keep.sh', keep_script),
        *make_code_bundle(job, folder, 'tpu'),
        make_command('gcloud', 'storage', 'rsync', '--recursive', folder, bucket_folder),
        create_command,
    ]


def make_first_host_verb(description: str, remote_command: str) -> MakeStatements:
    """Make a verb that runs a command by ssh on the host of process 0 of each job."""

    def make_statements(jobs: list[Job], args: argparse.Namespace) -> list[str]:
        return [make_ssh_command(list_node_names(job, args)[0], '0', remote_command) for job in jobs]

    make_statements.__doc__ = description
    return make_statements


def stop(jobs: list[Job], args: argparse.Namespace) -> list[str]:
    """Stop the run, which saves, and delete the TPUs, also if their VMs are gone."""
    statements = []
    for job in jobs:
        for node in list_node_names(job, args):
            statements.append(f'{make_ssh_command(node, "all", "sudo systemctl stop sinklab")} || true')
        statements.append(DELETE_COMMAND.format(name=job.name))
    return statements


SCHEDULER = Scheduler(
    module='launch.queued_resources',
    summary=__doc__,
    add_options=add_options,
    path_prefix='gs://',
    get_grace_seconds=lambda args: SPOT_GRACE_SECONDS if args.spot else DEFAULT_GRACE_SECONDS,
    verbs=dict(
        submit=submit,
        keep=make_job_verb(
            'Create it again when it is preempted, and delete it when the run ends.', f'bash {LOCAL_FOLDER}/keep.sh'
        ),
        status=make_job_verb('Print the state of the queued resource.', DESCRIBE_COMMAND),
        logs=make_first_host_verb(
            'Print the output of the first host.',
            'sudo journalctl --follow --lines=50 --unit=google-startup-scripts --unit=sinklab',
        ),
        preempt=make_first_host_verb(
            'Stop the run as in a preemption: it saves and restarts.',
            'sudo systemctl kill --signal=TERM sinklab',
        ),
        resume=make_job_verb(
            'Delete it, and create it again with the uploaded code.',
            f'{DELETE_COMMAND} || true',
            f'bash {LOCAL_FOLDER}/create.sh',
        ),
        stop=stop,
    ),
)

if __name__ == '__main__':
    sys.exit(main(SCHEDULER))
