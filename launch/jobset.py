"""Jobs on TPUs of Google Kubernetes Engine: a JobSet, one pod a host, started again when it says so."""

import argparse
import json
import sys
from typing import Any

from launch import tpus
from launch.command import Scheduler, Verb, main, needed
from launch.job import AGAIN, Job
from launch.plan import Command, File, Plan, command
from launch.shipping import PYTHON, here, shipped

SPOT = 25  # seconds that pods of a spot node are given at most
FOLDER = '/opt/sinklab'
DOCKERFILE = f"""FROM python:{PYTHON}-slim
RUN pip install --no-cache-dir uv
WORKDIR {FOLDER}
COPY . .
RUN bash install.sh
"""
FIRST = 'batch.kubernetes.io/job-completion-index=0,jobset.sigs.k8s.io/job-index=0'
# The secret by which processes recognise each other (docs/guides/network.md): a random number of the JobSet.
SECRET = {
    'name': 'SINKLAB_RUN_SECRET',
    'valueFrom': {'fieldRef': {'fieldPath': "metadata.labels['jobset.sigs.k8s.io/jobset-uid']"}},
}
NODEPOOL = 'cloud.google.com/gke-nodepool'


def options(parser: argparse.ArgumentParser) -> None:
    tpus.options(parser)
    parser.add_argument('--project', metavar='ID', help='of Google Cloud, where the image is built')
    parser.add_argument('--image', metavar='PATH:TAG', help='of the container, to be built with this code')
    parser.add_argument('--built', action='store_true', help='the image is there')
    parser.add_argument('--context', metavar='NAME', help='of kubectl; the current one')
    parser.add_argument('--namespace', default='default', metavar='NAME', help='%(default)s')
    parser.add_argument('--service_account', default='default', metavar='NAME', help='of the pods; %(default)s')
    parser.add_argument('--queue', metavar='NAME', help='of Kueue')


def manifest(job: Job, given: argparse.Namespace) -> dict[str, Any]:
    """The JobSet of a job."""
    return {
        'apiVersion': 'jobset.x-k8s.io/v1alpha2',
        'kind': 'JobSet',
        'metadata': {
            'name': job.name,
            'namespace': given.namespace,
            'labels': {'kueue.x-k8s.io/queue-name': given.queue} if given.queue else {},
            # The pods of a slice lie on the hosts of one slice.
            'annotations': {'alpha.jobset.sigs.k8s.io/exclusive-topology': NODEPOOL},
        },
        'spec': {
            'failurePolicy': {
                'maxRestarts': job.restarts,
                'rules': [{'name': 'final', 'action': 'FailJobSet', 'onJobFailureReasons': ['PodFailurePolicy']}],
            },
            'replicatedJobs': [
                {'name': 'slice', 'replicas': given.slices, 'template': {'spec': of_slice(job, given)}}
            ],
        },
    }


def of_slice(job: Job, given: argparse.Namespace) -> dict[str, Any]:
    """A Job: a pod for each host, all of which fail with the first."""
    size = tpus.slice_of(given.accelerator)
    final = {'containerName': 'sinklab', 'operator': 'NotIn', 'values': list(AGAIN)}
    return {
        'parallelism': size.hosts,
        'completions': size.hosts,
        'backoffLimit': 0,
        'podFailurePolicy': {'rules': [{'action': 'FailJob', 'onExitCodes': final}]},
        'template': {'spec': pod(job, given)},
    }


def pod(job: Job, given: argparse.Namespace) -> dict[str, Any]:
    size = tpus.slice_of(given.accelerator)
    spot = {'cloud.google.com/gke-spot': 'true'} if given.spot else {}
    return {
        'restartPolicy': 'Never',
        'hostNetwork': True,
        'dnsPolicy': 'ClusterFirstWithHostNet',
        'serviceAccountName': given.service_account,
        'terminationGracePeriodSeconds': job.grace,
        'nodeSelector': {
            'cloud.google.com/gke-tpu-accelerator': size.kind.gke,
            'cloud.google.com/gke-tpu-topology': size.topology,
            **spot,
        },
        'containers': [container(job, given, size.chips_of_host)],
    }


def container(job: Job, given: argparse.Namespace, chips: int) -> dict[str, Any]:
    program, *arguments = job.command
    return {
        'name': 'sinklab',
        'image': given.image,
        'workingDir': FOLDER,
        'command': [f'{FOLDER}/env/bin/{program}'],
        'args': [literal(argument) for argument in arguments],
        'env': variables(job),
        'securityContext': {'privileged': True},
        'resources': {'limits': {'google.com/tpu': chips}},
    }


def variables(job: Job) -> list[dict[str, Any]]:
    """Return the variables of a pod: those of the job, and the secret of its run if it has none of its own."""
    given = [{'name': name, 'value': literal(value)} for name, value in job.environment.items()]
    return given if SECRET['name'] in job.environment else [*given, SECRET]


def literal(text: str) -> str:
    """For Kubernetes, to which $(NAME) is a variable and $$ a $."""
    return text.replace('$', '$$')


def submit(jobs: list[Job], given: argparse.Namespace) -> Plan:
    tpus.check_run(jobs[0].arguments, given)
    needed(given, image='europe-west4-docker.pkg.dev/PROJECT/sinklab/sinklab:1')
    image = Plan() if given.built else build(jobs, given)
    return image + Plan(files=tuple(manifests(jobs, given))) + applied(jobs, given)


def build(jobs: list[Job], given: argparse.Namespace) -> Plan:
    needed(given, project='my-project')
    folder = f'{here(given.name)}/image'
    made = shipped(jobs[0], folder, 'tpu', File(f'{folder}/Dockerfile', DOCKERFILE))
    asked = (f'--project={given.project}', f'--tag={given.image}', folder)
    return made + Plan(commands=(command('gcloud', 'builds', 'submit', *asked),))


def manifests(jobs: list[Job], given: argparse.Namespace) -> list[File]:
    return [File(path(job), json.dumps(manifest(job, given), indent=2) + '\n', private=True) for job in jobs]


def path(job: Job) -> str:
    return f'{here(job.name)}/jobset.json'


def kubectl(given: argparse.Namespace, *words: str) -> Command:
    context = [f'--context={given.context}'] if given.context else []
    return command('kubectl', *context, f'--namespace={given.namespace}', *words)


def applied(jobs: list[Job], given: argparse.Namespace) -> Plan:
    return Plan(commands=tuple(kubectl(given, 'apply', f'--filename={path(job)}') for job in jobs))


def stop(jobs: list[Job], given: argparse.Namespace) -> Plan:
    return each(jobs, given, 'delete', 'jobset', '--ignore-not-found', '--cascade=foreground', '--wait=true')


def each(jobs: list[Job], given: argparse.Namespace, *words: str) -> Plan:
    return Plan(commands=tuple(kubectl(given, *words, job.name) for job in jobs))


def resume(jobs: list[Job], given: argparse.Namespace) -> Plan:
    """A JobSet that has ended cannot go on; another of its name can."""
    return stop(jobs, given) + applied(jobs, given)


def status(jobs: list[Job], given: argparse.Namespace) -> Plan:
    return each(jobs, given, 'get', 'jobset', '--output=wide')


def of_first(jobs: list[Job], given: argparse.Namespace, *words: str) -> Plan:
    """About the pod of process 0 of each job."""
    chosen = [f'--selector=jobset.sigs.k8s.io/jobset-name={job.name},{FIRST}' for job in jobs]
    return Plan(commands=tuple(kubectl(given, *words, one) for one in chosen))


def logs(jobs: list[Job], given: argparse.Namespace) -> Plan:
    return of_first(jobs, given, 'logs', '--follow', '--tail=50')


def preempt(jobs: list[Job], given: argparse.Namespace) -> Plan:
    return of_first(jobs, given, 'delete', 'pod', '--wait=false')


SCHEDULER = Scheduler(
    module='launch.jobset',
    summary=__doc__,
    options=options,
    check=tpus.check,
    roots=('gs://',),
    limit=lambda given: SPOT if given.spot else 3600,
    verbs={
        'submit': Verb('an image of the code, and the JobSet', submit, ('workdir', 'arguments')),
        'resume': Verb('the same JobSet again, as it was submitted', resume),
        'status': Verb('how it is, and how often it was started', status),
        'logs': Verb('what process 0 has said', logs, one=True),
        'preempt': Verb('a pod taken away: all save, and come back', preempt),
        'stop': Verb('ended for good: all save', stop),
    },
)

if __name__ == '__main__':
    sys.exit(main(SCHEDULER))
