"""Jobs on TPUs of Google Kubernetes Engine: a JobSet with one pod per host and automatic restarts."""

import argparse
import json
import sys

from launch import tpu_slices
from launch.code_bundle import PYTHON_VERSION, get_local_folder, make_code_bundle, make_row_checks
from launch.command_line import DEFAULT_GRACE_SECONDS, Scheduler, main, make_job_verb, require_options
from launch.job import Job
from launch.shell import fill_template, make_command, write_file
from sinklab.exit_status import FINAL_EXIT_CODES

SPOT_GRACE_SECONDS = 25  # longest time from SIGTERM to SIGKILL for pods on spot nodes
INSTALL_FOLDER = '/opt/sinklab'


def add_options(parser: argparse.ArgumentParser) -> None:
    tpu_slices.add_options(parser)
    parser.add_argument('--image', metavar='PATH:TAG', help='container image to build with this code')
    account_help = 'service account of the pods (default: default)'
    parser.add_argument('--service_account', default='default', metavar='NAME', help=account_help)


def make_manifest(job: Job, args: argparse.Namespace) -> str:
    """Return the JobSet manifest of a job: one pod per host, and each slice on the hosts of one node pool."""
    tpu_slice = tpu_slices.parse_slice(args.accelerator)
    program, *arguments = job.argv
    node_selector = {
        'cloud.google.com/gke-tpu-accelerator': tpu_slice.kind.gke_accelerator,
        'cloud.google.com/gke-tpu-topology': tpu_slice.topology,
        **({'cloud.google.com/gke-spot': 'true'} if args.spot else {}),
    }
    values = dict(
        name=job.name,
        restarts=job.max_restarts,
        slices=args.slices,
        hosts=tpu_slice.num_hosts,
        chips=tpu_slice.chips_per_host,
        final=[code for code in FINAL_EXIT_CODES if code],
        service_account=args.service_account,
        grace=job.grace_seconds,
        node_selector=node_selector,
        image=args.image,
        folder=INSTALL_FOLDER,
        program=f'{INSTALL_FOLDER}/env/bin/{program}',
        arguments=[escape_dollars(argument) for argument in arguments],
        environment=[{'name': name, 'value': escape_dollars(value)} for name, value in job.environment.items()],
    )
    return fill_template('jobset.json', **{name: json.dumps(value) for name, value in values.items()})


def escape_dollars(text: str) -> str:
    """Escape $ for Kubernetes, which expands $(NAME) to a variable and $$ to $."""
    return text.replace('$', '$$')


def submit(jobs: list[Job], args: argparse.Namespace) -> list[str]:
    """Build an image of the code, and create the JobSet."""
    require_options(args, accelerator='v5e-256', image='europe-west4-docker.pkg.dev/PROJECT/sinklab/sinklab:1')
    image_folder = f'{get_local_folder(args.name)}/image'
    manifests = [write_file(f'{get_local_folder(job.name)}/jobset.json', make_manifest(job, args)) for job in jobs]
    return [
        *make_row_checks(jobs),
        write_file(
            f'{image_folder}/Dockerfile', fill_template('Dockerfile', python=PYTHON_VERSION, folder=INSTALL_FOLDER)
        ),
        *make_code_bundle(jobs[0], image_folder, 'tpu'),
        make_command('gcloud', 'builds', 'submit', f'--tag={args.image}', image_folder),
        *manifests,
        *(APPLY_COMMAND.format(name=job.name) for job in jobs),
    ]


APPLY_COMMAND = f'kubectl apply --filename={get_local_folder("{name}")}/jobset.json'
DELETE_COMMAND = 'kubectl delete jobset --ignore-not-found --cascade=foreground --wait=true {name}'
FIRST_POD_SELECTOR = (
    '--selector=jobset.sigs.k8s.io/jobset-name={name},batch.kubernetes.io/job-completion-index=0,'
    'jobset.sigs.k8s.io/job-index=0'
)
SCHEDULER = Scheduler(
    module='launch.jobset',
    summary=__doc__,
    add_options=add_options,
    path_prefix='gs://',
    get_grace_seconds=lambda args: SPOT_GRACE_SECONDS if args.spot else DEFAULT_GRACE_SECONDS,
    verbs=dict(
        submit=submit,
        status=make_job_verb('Print its state and number of starts.', 'kubectl get jobset --output=wide {name}'),
        logs=make_job_verb('Print the output of process 0.', f'kubectl logs --follow --tail=50 {FIRST_POD_SELECTOR}'),
        preempt=make_job_verb(
            'Delete a pod: all processes save and restart.', f'kubectl delete pod --wait=false {FIRST_POD_SELECTOR}'
        ),
        resume=make_job_verb(
            'Delete the JobSet, which cannot restart once it has ended, and create it again.',
            DELETE_COMMAND,
            APPLY_COMMAND,
        ),
        stop=make_job_verb('Stop the job: all processes save.', DELETE_COMMAND),
    ),
)

if __name__ == '__main__':
    sys.exit(main(SCHEDULER))
