"""Which process of how many this is: as the command line says, or the environment of a cluster."""

import dataclasses
import glob
import ipaddress
import os
import re
import warnings
from collections.abc import Mapping

from sinklab.install import format_package_command
from sinklab.record import Refusal

BY_HAND = 'give --coordinator=HOST:PORT --processes=N --process=I to each process, or --processes=1 to be alone'
# Variables, of which all are there -> what is started by jax's own detection. A look at them spares its import.
MARKS = [
    ('SLURM_JOB_ID', 'SLURM_STEP_NODELIST'),
    ('KUBERNETES_SERVICE_HOST', 'JOB_COMPLETION_INDEX'),
    ('OMPI_MCA_orte_hnp_uri',),
    ('TPU_WORKER_HOSTNAMES',),
    ('TPU_PROCESS_ADDRESSES',),
    ('MEGASCALE_COORDINATOR_ADDRESS',),
]
TPU_DEVICES = '/dev/accel[0-9]*', '/dev/vfio/[0-9]*'
# Of a host with a single process, all devices are its own; jax would take the first.
ONE_PER_HOST = {'SLURM_STEP_TASKS_PER_NODE': r'1(\(x\d+\))?', 'OMPI_COMM_WORLD_LOCAL_SIZE': '1'}


@dataclasses.dataclass(frozen=True)
class Seat:
    """The number of a process among all, where process 0 is to be found, and which devices are its own."""

    index: int = 0
    count: int = 1
    host: str = ''
    port: int = 0
    devices: list[int] | None = None  # all that there are
    is_one_machine: bool = False  # a cluster says that all processes are on this machine

    @property
    def is_local(self) -> bool:
        """Whether all processes are known to be on this machine."""
        return self.is_one_machine or is_loopback(self.host)

    @property
    def address(self) -> str:
        return self.beside(self.port)

    def beside(self, port: int) -> str:
        """Another port of the host of process 0."""
        return f'[{self.host}]:{port}' if ':' in self.host else f'{self.host}:{port}'


def seat(coordinator: str | None, processes: int | None, process: int | None, timeout: float) -> Seat:
    """As given, or as found."""
    given = {'--coordinator': coordinator, '--processes': processes, '--process': process}
    if processes == 1 and coordinator is None and process in (None, 0):
        return Seat()
    if all(value is None for value in given.values()):
        return found(os.environ, timeout)
    if missing := [name for name, value in given.items() if value is None]:
        there = ' '.join(f'{name}={value}' for name, value in given.items() if value is not None)
        raise Refusal(f'{there} without {" and ".join(missing)}; give all three, or none')
    if processes < 1:
        raise Refusal(f'--processes={processes} must be a whole number of at least 1')
    if not 0 <= process < processes:
        raise Refusal(f'--process={process} must be a whole number from 0 to {processes - 1}, below --processes')
    return Seat(process, processes, *address('--coordinator', coordinator))


def address(name: str, given: str) -> tuple[str, int]:
    parts = re.fullmatch(r'(\[[0-9a-fA-F:.]+\]|[^\s:\[\]]+):(\d{1,5})', given)
    if not parts or not 0 < int(parts[2]) < 65536 or not can_be_host(parts[1]):
        raise Refusal(f'{name}={given} is no HOST:PORT with a port from 1 to 65535, e.g. {name}=10.0.0.1:8476')
    return parts[1].strip('[]'), int(parts[2])


def can_be_host(name: str) -> bool:
    """Return whether a name can be asked for: sockets raise UnicodeError of one that is too long, or is not UTF-8."""
    try:
        return bool(name.encode('idna'))
    except UnicodeError:
        return False


def found(environment: Mapping[str, str], timeout: float) -> Seat:
    """What a cluster says, in jax's own reading; alone where there is none."""
    refuse_one_of_many(environment)
    if not any(set(mark) <= environment.keys() for mark in MARKS) and not any(map(glob.glob, TPU_DEVICES)):
        return Seat()
    try:
        from jax._src.clusters import ClusterEnv  # private: jax.distributed.initialize alone reads clusters in public

        with warnings.catch_warnings(action='ignore'):
            where, count, index, devices = ClusterEnv.auto_detect_unset_distributed_params(
                None, None, None, None, None, int(timeout)
            )
    except Exception as error:  # of any kind: it asks servers, through packages of their own
        reason = f'{type(error).__name__}: {" ".join(str(error).split())}'
        raise Refusal(f'the environment of this cluster cannot be read ({reason}); {BY_HAND}') from error
    if where is None or count == 1:
        return Seat()
    whole = any(re.fullmatch(pattern, environment.get(name, '')) for name, pattern in ONE_PER_HOST.items())
    return Seat(
        index,
        count,
        *address('the address of process 0', where),
        devices=None if whole else devices,
        is_one_machine=is_one_machine(environment, count),
    )


def is_one_machine(environment: Mapping[str, str], count: int) -> bool:
    """Return whether SLURM or Open MPI says that all processes are on this machine."""
    return read_count(environment, 'SLURM_STEP_NUM_NODES') == 1 or (
        read_count(environment, 'OMPI_COMM_WORLD_LOCAL_SIZE') == count
    )


def read_count(environment: Mapping[str, str], name: str) -> int | None:
    """Return a variable of a cluster that says how many there are of something; None if it is not set.

    Raises:
        Refusal: it is no whole number of at least 1.
    """
    given = environment.get(name)
    if given is None:
        return None
    if not re.fullmatch('0*[1-9][0-9]{0,8}', given.strip()):
        raise Refusal(
            f'{name}={given!r} in the environment must be a whole number of at least 1, below 10^9; unset it if no '
            f'cluster has set it, or {BY_HAND}'
        )
    return int(given)


def is_loopback(host: str) -> bool:
    """Return whether a name or address reaches this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == 'localhost'


def refuse_one_of_many(environment: Mapping[str, str]) -> None:
    """Where a cluster has started many processes, or is about to, none of them takes itself for the only one."""
    tasks = max(read_count(environment, name) or 1 for name in ('SLURM_NTASKS', 'SLURM_JOB_NUM_NODES'))
    if 'SLURM_JOB_ID' in environment and 'SLURM_STEP_NODELIST' not in environment and tasks > 1:
        raise Refusal(
            f'SLURM has {tasks} processes or hosts for this job, and this command is not one of a step; start it by '
            'srun, or give --processes=1 to be alone'
        )
    ranks = read_count(environment, 'OMPI_COMM_WORLD_SIZE') or 1
    if ranks > 1 and 'OMPI_MCA_orte_hnp_uri' not in environment:
        raise Refusal(f'this Open MPI has {ranks} processes and does not say where the first is; {BY_HAND}')
    indexed = {'KUBERNETES_SERVICE_HOST', 'JOB_COMPLETION_INDEX'} <= environment.keys()
    if indexed and not {'TPU_WORKER_HOSTNAMES', 'TPU_PROCESS_ADDRESSES'} & environment.keys():
        try:
            import kubernetes  # noqa: F401
        except ImportError as error:
            raise Refusal(
                'this is a pod of an indexed job, and the package that asks for the others is missing; install it: '
                f'{format_package_command("kubernetes")}, or {BY_HAND}'
            ) from error
