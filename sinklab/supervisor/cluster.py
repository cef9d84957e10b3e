"""Index and count of this process, from the command line or from the environment of a cluster."""

import dataclasses
import glob
import ipaddress
import os
import re
import warnings
from collections.abc import Mapping

from sinklab.errors import UserError, format_error
from sinklab.install_commands import format_package_command

FLAGS_HINT = 'give --coordinator=HOST:PORT --processes=N --process=I to each process, or --processes=1 for only one'
# Sets of environment variables. jax detects a cluster if all variables of a set exist. Checking them here avoids the
# import of jax outside clusters.
CLUSTER_VARIABLES = [
    ('SLURM_JOB_ID', 'SLURM_STEP_NODELIST'),
    ('KUBERNETES_SERVICE_HOST', 'JOB_COMPLETION_INDEX'),
    ('OMPI_MCA_orte_hnp_uri',),
    ('TPU_WORKER_HOSTNAMES',),
    ('TPU_PROCESS_ADDRESSES',),
    ('MEGASCALE_COORDINATOR_ADDRESS',),
]
TPU_DEVICE_PATTERNS = '/dev/accel[0-9]*', '/dev/vfio/[0-9]*'
# Values that mean one process per host. Such a process uses all devices of its host; jax would use only the first.
ONE_PER_HOST_PATTERNS = {'SLURM_STEP_TASKS_PER_NODE': r'1(\(x\d+\))?', 'OMPI_COMM_WORLD_LOCAL_SIZE': '1'}


@dataclasses.dataclass(frozen=True)
class ProcessInfo:
    """The index of a process, the number of processes, the address of process 0, and the devices."""

    index: int = 0
    count: int = 1
    host: str = ''
    port: int = 0
    devices: list[int] | None = None  # local device ids; None: all devices of the host

    @property
    def address(self) -> str:
        return self.format_address(self.port)

    def format_address(self, port: int) -> str:
        """Return the address of another port of the host of process 0."""
        return f'[{self.host}]:{port}' if ':' in self.host else f'{self.host}:{port}'


def resolve_process_info(
    coordinator: str | None, processes: int | None, process: int | None, timeout: float
) -> ProcessInfo:
    """Return the process info from the flags or, if none is given, from the environment of a cluster.

    Args:
        coordinator: HOST:PORT of process 0; None: not given.
        processes: The number of processes; None: not given.
        process: The index of this process; None: not given.
        timeout: Seconds that jax's cluster detection may take.

    Raises:
        UserError: A flag is invalid, some flags are given without the others, or the cluster cannot be detected.
    """
    flags = {'--coordinator': coordinator, '--processes': processes, '--process': process}
    if processes == 1 and coordinator is None and process in (None, 0):
        return ProcessInfo()
    if all(value is None for value in flags.values()):
        return detect_process_info(os.environ, timeout)
    if missing := [name for name, value in flags.items() if value is None]:
        given_flags = ' '.join(f'{name}={value}' for name, value in flags.items() if value is not None)
        raise UserError(f'{given_flags} without {" and ".join(missing)}; give all three, or none')
    if processes < 1:
        raise UserError(f'--processes={processes} must be a whole number of at least 1')
    if not 0 <= process < processes:
        raise UserError(f'--process={process} must be a whole number from 0 to {processes - 1}, below --processes')
    return ProcessInfo(process, processes, *parse_address('--coordinator', coordinator))


def parse_address(name: str, text: str) -> tuple[str, int]:
    parts = re.fullmatch(r'(\[[0-9a-fA-F:.]+\]|[^\s:\[\]]+):(\d{1,5})', text)
    if not parts or not 0 < int(parts[2]) < 65536 or not is_valid_host(parts[1]):
        raise UserError(f'{name}={text} is not HOST:PORT with a port from 1 to 65535, e.g. {name}=10.0.0.1:8476')
    return parts[1].strip('[]'), int(parts[2])


def is_valid_host(name: str) -> bool:
    """Return whether sockets accept a host name.

    They raise UnicodeError for a name that is too long or not UTF-8.
    """
    try:
        return bool(name.encode('idna'))
    except UnicodeError:
        return False


def detect_process_info(environment: Mapping[str, str], timeout: float) -> ProcessInfo:
    """Return the process info of a cluster, as jax detects it; a single process outside a cluster.

    Raises:
        UserError: The cluster cannot be detected, or `check_not_one_of_many` raises it.
    """
    check_not_one_of_many(environment)
    if not any(set(variables) <= environment.keys() for variables in CLUSTER_VARIABLES) and not any(
        map(glob.glob, TPU_DEVICE_PATTERNS)
    ):
        return ProcessInfo()
    try:
        from jax._src.clusters import ClusterEnv  # private: jax offers detection only in distributed.initialize

        with warnings.catch_warnings(action='ignore'):
            coordinator, count, index, devices = ClusterEnv.auto_detect_unset_distributed_params(
                None, None, None, None, None, int(timeout)
            )
    except Exception as error:  # of any type: detection queries servers through other packages
        reason = format_error(error, with_type=True)
        raise UserError(f'the environment of this cluster cannot be read ({reason}); {FLAGS_HINT}') from error
    if coordinator is None or count == 1:
        return ProcessInfo()
    is_one_per_host = any(
        re.fullmatch(pattern, environment.get(name, '')) for name, pattern in ONE_PER_HOST_PATTERNS.items()
    )
    return ProcessInfo(
        index,
        count,
        *parse_address('the address of process 0', coordinator),
        devices=None if is_one_per_host else devices,
    )


def read_count(environment: Mapping[str, str], name: str) -> int | None:
    """Return a count from an environment variable of a cluster; None if the variable is not set.

    Raises:
        UserError: The value is not a whole number of at least 1 and below 10^9.
    """
    text = environment.get(name)
    if text is None:
        return None
    if not re.fullmatch('0*[1-9][0-9]{0,8}', text.strip()):
        raise UserError(
            f'{name}={text!r} in the environment must be a whole number of at least 1, below 10^9; unset it outside '
            f'a cluster, or {FLAGS_HINT}'
        )
    return int(text)


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is a loopback address, which reaches this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == 'localhost'


def check_not_one_of_many(environment: Mapping[str, str]) -> None:
    """Refuse to run as the only process if a cluster has started several, or is about to.

    Raises:
        UserError: SLURM allocated several tasks or hosts and this process is not part of a step; Open MPI runs
            several ranks and does not give the address of the first; or this is a pod of an indexed job of Kubernetes
            and the package `kubernetes` is missing.
    """
    num_tasks = max(read_count(environment, name) or 1 for name in ('SLURM_NTASKS', 'SLURM_JOB_NUM_NODES'))
    if 'SLURM_JOB_ID' in environment and 'SLURM_STEP_NODELIST' not in environment and num_tasks > 1:
        raise UserError(
            f'SLURM has {num_tasks} processes or hosts for this job, but this command is not in a job step; start it '
            'with srun, or give --processes=1 for one process'
        )
    num_ranks = read_count(environment, 'OMPI_COMM_WORLD_SIZE') or 1
    if num_ranks > 1 and 'OMPI_MCA_orte_hnp_uri' not in environment:
        raise UserError(f'this Open MPI has {num_ranks} processes but no address of the first; {FLAGS_HINT}')
    is_indexed_job = {'KUBERNETES_SERVICE_HOST', 'JOB_COMPLETION_INDEX'} <= environment.keys()
    if is_indexed_job and not {'TPU_WORKER_HOSTNAMES', 'TPU_PROCESS_ADDRESSES'} & environment.keys():
        try:
            import kubernetes  # noqa: F401
        except ImportError as error:
            raise UserError(
                'this is a pod of an indexed job, but the package that finds the other pods is missing; install it: '
                f'{format_package_command("kubernetes")}, or {FLAGS_HINT}'
            ) from error
