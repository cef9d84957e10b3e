"""Jobs on TPUs of Google Kubernetes Engine: a JobSet with one pod per host and automatic restarts."""

import argparse
import json
import sys
from typing import Any

from launch import tpu_slices
from launch.code_bundle import PYTHON_VERSION, get_local_folder, make_code_bundle, make_row_checks
from launch.command_line import DEFAULT_GRACE_SECONDS, Scheduler, main, make_job_verb, require_options
from launch.job import Job
from launch.shell import make_command, write_file
from sinklab.exit_status import FINAL_EXIT_CODES

SPOT_GRACE_SECONDS = 25  # longest time from SIGTERM to SIGKILL for pods on spot nodes
INSTALL_FOLDER = '/opt/sinklab'
DOCKERFILE = f"""FROM python:{PYTHON_VERSION}-slim
RUN pip install --no-cache-dir uv
WORKDIR {INSTALL_FOLDER}
COPY . .
RUN bash install.sh
"""
NODEPOOL_LABEL = 'cloud.google.com/gke-nodepool'


def add_options(parser: argparse.ArgumentParser) -> None:
    tpu_slices.add_options(parser)
    parser.add_argument('--image', metavar='PATH:TAG', help='container image to build with this code')
    account_help = 'service account of the pods (default: default)'
    parser.add_argument('--service_account', default='default', metavar='NAME', help=account_help)


def make_manifest(job: Job, args: argparse.Namespace) -> dict[str, Any]:
    """Return the JobSet manifest of a job."""
    return {
        'apiVersion': 'jobset.x-k8s.io/v1alpha2',
        'kind': 'JobSet',
        'metadata': {
            'name': job.name,
            # Kubernetes places all pods of a replicated job on the hosts of one TPU slice.
            'annotations': {'alpha.jobset.sigs.k8s.io/exclusive-topology': NODEPOOL_LABEL},
        },
        'spec': {
            'failurePolicy': {
                'maxRestarts': job.max_restarts,
                'rules': [{'name': 'final', 'action': 'FailJobSet', 'onJobFailureReasons': ['PodFailurePolicy']}],
            },
            'replicatedJobs': [
                {'name': 'slice', 'replicas': args.slices, 'template': {'spec': make_job_spec(job, args)}}
            ],
        },
    }


def make_job_spec(job: Job, args: argparse.Namespace) -> dict[str, Any]:
    """Return the spec of a Kubernetes Job with one pod per host; the Job fails when its first pod fails."""
    tpu_slice = tpu_slices.parse_slice(args.accelerator)
    final_exit_codes = {
        'containerName': 'sinklab',
        'operator': 'In',
        'values': [code for code in FINAL_EXIT_CODES if code],
    }
    return {
        'parallelism': tpu_slice.num_hosts,
        'completions': tpu_slice.num_hosts,
        'backoffLimit': 0,
        'podFailurePolicy': {'rules': [{'action': 'FailJob', 'onExitCodes': final_exit_codes}]},
        'template': {'spec': make_pod_spec(job, args, tpu_slice)},
    }


def make_pod_spec(job: Job, args: argparse.Namespace, tpu_slice: tpu_slices.TpuSlice) -> dict[str, Any]:
    program, *arguments = job.argv
    return {
        'restartPolicy': 'Never',
        'hostNetwork': True,
        'dnsPolicy': 'ClusterFirstWithHostNet',
        'serviceAccountName': args.service_account,
        'terminationGracePeriodSeconds': job.grace_seconds,
        'nodeSelector': {
            'cloud.google.com/gke-tpu-accelerator': tpu_slice.kind.gke_accelerator,
            'cloud.google.com/gke-tpu-topology': tpu_slice.topology,
            **({'cloud.google.com/gke-spot': 'true'} if args.spot else {}),
        },
        'containers': [
            {
                'name': 'sinklab',
                'image': args.image,
                'workingDir': INSTALL_FOLDER,
                'command': [f'{INSTALL_FOLDER}/env/bin/{program}'],
                'args': [escape_dollars(argument) for argument in arguments],
                'env': [{'name': name, 'value': escape_dollars(value)} for name, value in job.environment.items()],
                'securityContext': {'privileged': True},
                'resources': {'limits': {'google.com/tpu': tpu_slice.chips_per_host}},
            }
        ],
    }


def escape_dollars(text: str) -> str:
    """Escape $ for Kubernetes, which expands $(NAME) to a variable and $$ to $."""
    return text.replace('$', '$$')


def submit(jobs: list[Job], args: argparse.Namespace) -> list[str]:
    """Build an image of the code, and create the JobSet."""
    require_options(args, accelerator='v5e-256', image='europe-west4-docker.pkg.dev/PROJECT/sinklab/sinklab:1')
    image_folder = f'{get_local_folder(args.name)}/image'
    manifests = [
        write_file(f'{get_local_folder(job.name)}/jobset.json', json.dumps(make_manifest(job, args), indent=2) + '\n')
        for job in jobs
    ]
    return [
        *make_row_checks(jobs),
        write_file(f'{image_folder}/Dockerfile', DOCKERFILE),
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
