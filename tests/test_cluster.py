"""Process index, count and coordinator from flags or from faked cluster variables."""

import os
import subprocess
import sys

import pytest

from sinklab.errors import UserError
from sinklab.install_commands import format_package_command
from sinklab.supervisor import cluster
from sinklab.supervisor.cluster import ProcessInfo

SLURM_STEP = dict(
    SLURM_JOB_ID='4711', SLURM_STEP_NODELIST='node[07-08]', SLURM_NTASKS='4', SLURM_PROCID='3', SLURM_LOCALID='1'
)
KUBERNETES_POD = dict(KUBERNETES_SERVICE_HOST='10.0.0.1', JOB_COMPLETION_INDEX='1')
OPEN_MPI_RANK = dict(OMPI_COMM_WORLD_SIZE='2', OMPI_COMM_WORLD_RANK='1', OMPI_COMM_WORLD_LOCAL_RANK='1')
OPEN_MPI_ADDRESS = dict(OMPI_MCA_orte_hnp_uri='1531576320.0;tcp://10.96.0.1,10.148.0.1:34911')

INVALID_ADDRESSES = 'a', 'a:', ':80', 'a:0', 'a:65536', 'a b:80', 'fe80::1:80', 'a:8x', ''


@pytest.fixture(autouse=True)
def set_environment(monkeypatch):
    """Remove all cluster variables and return a function that sets variables."""
    for name in os.environ:
        if name.startswith(('SLURM_', 'OMPI_', 'TPU_', 'KUBERNETES_', 'JOB_', 'MEGASCALE_')):
            monkeypatch.delenv(name)
    monkeypatch.setattr(cluster, 'TPU_DEVICE_PATTERNS', ())
    return lambda **values: [monkeypatch.setenv(*item) for item in values.items()]


def resolve_process(coordinator=None, processes=None, process=None):
    return cluster.resolve_process_info(coordinator, processes, process, 5.0)


def test_process_without_flags_is_single_and_does_not_import_jax():
    assert resolve_process() == resolve_process(None, 1) == ProcessInfo(0, 1)
    code = 'import sys; from sinklab.supervisor import cluster; cluster.resolve_process_info(None, None, None, 5.0)\n'
    code += 'assert not {"jax", "numpy"} & sys.modules.keys()'
    subprocess.run([sys.executable, '-c', code], check=True)


@pytest.mark.parametrize(
    ('coordinator', 'address'),
    [('10.0.0.1:80', '10.0.0.1:80'), ('node-1.local:8476', 'node-1.local:8476'), ('[fe80::1]:80', '[fe80::1]:80')],
)
def test_flags_set_process_index_count_and_address(coordinator, address):
    process = resolve_process(coordinator, 4, 3)
    assert (process.index, process.count, process.address) == (3, 4, address)
    assert process.format_address(81) == address.rpartition(':')[0] + ':81'


@pytest.mark.parametrize(
    ('given', 'message'),
    [
        (('a:80', None, None), '--coordinator=a:80 without --processes and --process; give all three, or none'),
        ((None, 2, None), '--processes=2 without --coordinator and --process'),
        ((None, None, 0), '--process=0 without --coordinator and --processes'),
        (('a:80', 2, 2), '--process=2 must be a whole number from 0 to 1'),
        (('a:80', 2, -1), '--process=-1 must be a whole number from 0 to 1'),
        (('a:80', 0, 0), '--processes=0 must be a whole number of at least 1'),
        *(((given, 2, 0), f'--coordinator={given} is not HOST:PORT') for given in INVALID_ADDRESSES),
    ],
)
def test_flags_that_are_incomplete_or_invalid_are_rejected(given, message):
    with pytest.raises(UserError) as error:
        resolve_process(*given)
    assert str(error.value).startswith(message)


def test_slurm_step_matches_jax_detection(set_environment):
    set_environment(**SLURM_STEP)
    assert resolve_process() == ProcessInfo(3, 4, 'node07', 61440 + 4711 % 4096, [1])


def test_slurm_process_alone_on_host_gets_all_devices(set_environment):
    set_environment(**SLURM_STEP, SLURM_STEP_TASKS_PER_NODE='1(x4)')
    assert resolve_process().devices is None
    set_environment(SLURM_STEP_TASKS_PER_NODE='2(x2)')
    assert resolve_process().devices == [1]


def test_open_mpi_rank_matches_jax_detection(set_environment):
    set_environment(**OPEN_MPI_RANK, **OPEN_MPI_ADDRESS)
    assert resolve_process() == ProcessInfo(1, 2, '10.96.0.1', 61440 + 1531576320 // 4096 % 4096, [1])


KUBERNETES_MODULE = """
from types import SimpleNamespace as Thing

class config:
    load_incluster_config = staticmethod(lambda: None)

labels = {"job-name": "run-workers-0", "jobset.sigs.k8s.io/jobset-name": "run"}
owner = Thing(controller=True, kind="Job")
pod = Thing(metadata=Thing(labels=labels, owner_references=[owner], name="pod"), spec=Thing(subdomain="run"))
job = Thing(metadata=Thing(labels=labels, name="run-workers-0"), spec=Thing(parallelism=4))

class client:
    class exceptions:
        ApiException = OSError

    class CoreV1Api:
        list_namespaced_pod = staticmethod(lambda **_: Thing(items=[pod]))

    class BatchV1Api:
        read_namespaced_job = staticmethod(lambda **_: job)
"""
DETECTION_SCRIPT = """
import sys
from jax._src.clusters import K8sCluster
K8sCluster._namespace = classmethod(lambda cls: "default")  # a file that only a pod has
K8sCluster._pod = classmethod(lambda cls: __import__("kubernetes").pod)  # found by the address of this host
from sinklab.supervisor import cluster
cluster.TPU_DEVICE_PATTERNS = ()
print(cluster.resolve_process_info(None, None, None, 0))
"""


@pytest.mark.slow
def test_jobset_pod_matches_jax_detection(set_environment, tmp_path):
    set_environment(**KUBERNETES_POD)
    (tmp_path / 'kubernetes.py').write_text(KUBERNETES_MODULE)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    result = subprocess.run(
        [sys.executable, '-c', DETECTION_SCRIPT],
        env={**os.environ, 'PYTHONPATH': path},
        capture_output=True,
        text=True,
    )
    assert result.stdout.strip() == str(ProcessInfo(1, 4, 'run-workers-0-0.run', 55527)), result.stderr


@pytest.mark.parametrize(
    ('variables', 'message'),
    [
        ({'SLURM_JOB_ID': '1', 'SLURM_NTASKS': '4'}, 'SLURM has 4 processes or hosts for this job'),
        (
            {'SLURM_JOB_ID': '1', 'SLURM_JOB_NUM_NODES': '2'},
            'start it with srun, or give --processes=1 for one process',
        ),
        (KUBERNETES_POD, f'{format_package_command("kubernetes")}, or give --coordinator=HOST:PORT'),
        (OPEN_MPI_RANK, 'this Open MPI has 2 processes but no address of the first; give --coordinator'),
        (OPEN_MPI_RANK | {'OMPI_MCA_orte_hnp_uri': 'x'}, 'cannot be read (ValueError'),
    ],
    ids=['tasks', 'hosts', 'pod', 'rank', 'unreadable'],
)
def test_multi_process_environment_without_coordinator_is_rejected(set_environment, variables, message):
    set_environment(**variables)
    with pytest.raises(UserError) as error:
        resolve_process()
    assert message in str(error.value)
    assert resolve_process(None, 1) == ProcessInfo()


@pytest.mark.parametrize('value', ['x', '', '4(x2)', '1.5', '0', '-1', '٤', '1_0', '9' * 5000, '2\n3', '\x1b[2J'])
@pytest.mark.parametrize('name', ['SLURM_NTASKS', 'SLURM_JOB_NUM_NODES', 'OMPI_COMM_WORLD_SIZE'])
def test_cluster_count_that_is_invalid_is_rejected_with_one_line(set_environment, name, value):
    set_environment(**{name: value})
    with pytest.raises(UserError) as error:
        resolve_process()
    assert str(error.value).startswith(f'{name}={value!r} ')
    assert str(error.value).isprintable()
    assert resolve_process(None, 1) == ProcessInfo()


def test_missing_jax_module_is_reported_with_flags(monkeypatch):
    monkeypatch.setitem(sys.modules, 'jax._src.clusters', None)
    with pytest.raises(UserError) as error:
        cluster.detect_process_info({'SLURM_JOB_ID': '1', 'SLURM_STEP_NODELIST': 'localhost', 'SLURM_NTASKS': '2'}, 5)
    assert cluster.FLAGS_HINT in str(error.value)
