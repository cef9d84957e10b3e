"""Jobs on TPUs of Google Kubernetes Engine: a JobSet with one pod per host and automatic restarts."""

import argparse
import json
import sys
from typing import Any

from launch import tpu_slices
from launch.code_bundle import PYTHON_VERSION, get_local_folder, plan_code_bundle, plan_row_checks
from launch.command_line import (
    Scheduler,
    Verb,
    main,
    require_options,
)
from launch.job import Job
from launch.plan import (
    Command,
    File,
    Plan,
    make_command,
)
from sinklab.exit_status import FINAL_EXIT_CODES

SPOT_GRACE_SECONDS = 25  # longest time from SIGTERM to SIGKILL for pods on spot nodes
INSTALL_FOLDER = '/opt/sinklab'
DOCKERFILE = f"""FROM python:{PYTHON_VERSION}-slim
RUN pip install --no-cache-dir uv
WORKDIR {INSTALL_FOLDER}
COPY . .
RUN bash install.sh
"""
FIRST_POD_SELECTOR = 'batch.kubernetes.io/job-completion-index=0,jobset.sigs.k8s.io/job-index=0'
NODEPOOL_LABEL = 'cloud.google.com/gke-nodepool'


def add_options(parser: argparse.ArgumentParser) -> None:
    tpu_slices.add_options(parser)
    parser.add_argument('--project', metavar='ID', help='project of Google Cloud that builds the image')
    parser.add_argument('--image', metavar='PATH:TAG', help='container image to build with this code')
    parser.add_argument('--built', action='store_true', help='the image exists already')
    parser.add_argument('--context', metavar='NAME', help='context of kubectl (default: the current one)')
    parser.add_argument(
        '--namespace', default='default', metavar='NAME', help='namespace of the JobSet (default: %(default)s)'
    )
    parser.add_argument(
        '--service_account',
        default='default',
        metavar='NAME',
        help='service account of the pods (default: %(default)s)',
    )
    parser.add_argument('--queue', metavar='NAME', help='queue of Kueue')


def make_manifest(job: Job, args: argparse.Namespace) -> dict[str, Any]:
    """Return the JobSet manifest of a job."""
    return {
        'apiVersion': 'jobset.x-k8s.io/v1alpha2',
        'kind': 'JobSet',
        'metadata': {
            'name': job.name,
            'namespace': args.namespace,
            'labels': {'kueue.x-k8s.io/queue-name': args.queue} if args.queue else {},
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
    failures = [code for code in FINAL_EXIT_CODES if code]
    final_exit_codes = {'containerName': 'sinklab', 'operator': 'In', 'values': failures}
    return {
        'parallelism': tpu_slice.num_hosts,
        'completions': tpu_slice.num_hosts,
        'backoffLimit': 0,
        'podFailurePolicy': {'rules': [{'action': 'FailJob', 'onExitCodes': final_exit_codes}]},
        'template': {'spec': make_pod_spec(job, args)},
    }


def make_pod_spec(job: Job, args: argparse.Namespace) -> dict[str, Any]:
    tpu_slice = tpu_slices.parse_slice(args.accelerator)
    spot_selector = {'cloud.google.com/gke-spot': 'true'} if args.spot else {}
    return {
        'restartPolicy': 'Never',
        'hostNetwork': True,
        'dnsPolicy': 'ClusterFirstWithHostNet',
        'serviceAccountName': args.service_account,
        'terminationGracePeriodSeconds': job.grace_seconds,
        'nodeSelector': {
            'cloud.google.com/gke-tpu-accelerator': tpu_slice.kind.gke_accelerator,
            'cloud.google.com/gke-tpu-topology': tpu_slice.topology,
            **spot_selector,
        },
        'containers': [make_container(job, args, tpu_slice.chips_per_host)],
    }


def make_container(job: Job, args: argparse.Namespace, chips: int) -> dict[str, Any]:
    program, *arguments = job.argv
    return {
        'name': 'sinklab',
        'image': args.image,
        'workingDir': INSTALL_FOLDER,
        'command': [f'{INSTALL_FOLDER}/env/bin/{program}'],
        'args': [escape_dollars(argument) for argument in arguments],
        'env': make_variables(job),
        'securityContext': {'privileged': True},
        'resources': {'limits': {'google.com/tpu': chips}},
    }


def make_variables(job: Job) -> list[dict[str, Any]]:
    """Return the environment variables of a pod."""
    return [{'name': name, 'value': escape_dollars(value)} for name, value in job.environment.items()]


def escape_dollars(text: str) -> str:
    """Escape $ for Kubernetes, which expands $(NAME) to a variable and $$ to $."""
    return text.replace('$', '$$')


def plan_submit(jobs: list[Job], args: argparse.Namespace) -> Plan:
    tpu_slices.check_run(jobs[0].arguments, args)
    require_options(args, image='europe-west4-docker.pkg.dev/PROJECT/sinklab/sinklab:1')
    image = Plan() if args.built else plan_image_build(jobs, args)
    return image + Plan(files=tuple(make_manifest_files(jobs, args))) + plan_apply(jobs, args)


def plan_image_build(jobs: list[Job], args: argparse.Namespace) -> Plan:
    require_options(args, project='my-project')
    folder = f'{get_local_folder(args.name)}/image'
    bundle_plan = plan_code_bundle(jobs[0], folder, 'tpu', File(f'{folder}/Dockerfile', DOCKERFILE))
    build_flags = (f'--project={args.project}', f'--tag={args.image}', folder)
    build_image = make_command('gcloud', 'builds', 'submit', *build_flags)
    return plan_row_checks(jobs) + bundle_plan + Plan(commands=(build_image,))


def make_manifest_files(jobs: list[Job], args: argparse.Namespace) -> list[File]:
    return [
        File(get_manifest_path(job), json.dumps(make_manifest(job, args), indent=2) + '\n', is_private=True)
        for job in jobs
    ]


def get_manifest_path(job: Job) -> str:
    return f'{get_local_folder(job.name)}/jobset.json'


def make_kubectl_command(args: argparse.Namespace, *words: str) -> Command:
    context = [f'--context={args.context}'] if args.context else []
    return make_command('kubectl', *context, f'--namespace={args.namespace}', *words)


def plan_apply(jobs: list[Job], args: argparse.Namespace) -> Plan:
    return Plan(
        commands=tuple(make_kubectl_command(args, 'apply', f'--filename={get_manifest_path(job)}') for job in jobs)
    )


def plan_stop(jobs: list[Job], args: argparse.Namespace) -> Plan:
    return plan_for_each(jobs, args, 'delete', 'jobset', '--ignore-not-found', '--cascade=foreground', '--wait=true')


def plan_for_each(jobs: list[Job], args: argparse.Namespace, *words: str) -> Plan:
    return Plan(commands=tuple(make_kubectl_command(args, *words, job.name) for job in jobs))


def plan_resume(jobs: list[Job], args: argparse.Namespace) -> Plan:
    """Plan to delete the JobSets and create them again; a JobSet that has ended cannot be restarted."""
    return plan_stop(jobs, args) + plan_apply(jobs, args)


def plan_status(jobs: list[Job], args: argparse.Namespace) -> Plan:
    return plan_for_each(jobs, args, 'get', 'jobset', '--output=wide')


def plan_for_first_pods(jobs: list[Job], args: argparse.Namespace, *words: str) -> Plan:
    """Plan a kubectl command for the pod of process 0 of each job."""
    selectors = [f'--selector=jobset.sigs.k8s.io/jobset-name={job.name},{FIRST_POD_SELECTOR}' for job in jobs]
    return Plan(commands=tuple(make_kubectl_command(args, *words, selector) for selector in selectors))


def plan_logs(jobs: list[Job], args: argparse.Namespace) -> Plan:
    return plan_for_first_pods(jobs, args, 'logs', '--follow', '--tail=50')


def plan_preempt(jobs: list[Job], args: argparse.Namespace) -> Plan:
    return plan_for_first_pods(jobs, args, 'delete', 'pod', '--wait=false')


SCHEDULER = Scheduler(
    module='launch.jobset',
    summary=__doc__,
    add_options=add_options,
    check_options=tpu_slices.check_options,
    path_prefixes=('gs://',),
    get_max_grace_seconds=lambda given: SPOT_GRACE_SECONDS if given.spot else 3600,
    verbs={
        'submit': Verb('build an image of the code, and create the JobSet', plan_submit, ('workdir', 'arguments')),
        'resume': Verb('create the same JobSet again, as submitted', plan_resume),
        'status': Verb('print its state and number of starts', plan_status),
        'logs': Verb('print the output of process 0', plan_logs, is_single_job=True),
        'preempt': Verb('delete a pod: all processes save and restart', plan_preempt),
        'stop': Verb('stop the job: all processes save', plan_stop),
    },
)

if __name__ == '__main__':
    sys.exit(main(SCHEDULER))
