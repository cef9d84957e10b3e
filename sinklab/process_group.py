"""Processes of a run: how they meet, exchange JSON values, and raise the errors of one on all."""

import dataclasses
import faulthandler
import glob
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from sinklab.config.differences import format_differences
from sinklab.errors import UserError, format_error

T = TypeVar('T')
FLAGS_HINT = 'give --coordinator=HOST:PORT --processes=N --process=I to each process, or --processes=1 for only one'
# jax aborts all processes this long after it has lost one. It waits as long for the others when one exits.
HEARTBEAT_SECONDS = 10
# Environment variables by which jax detects a cluster: SLURM, Kubernetes, Open MPI, TPU pods, several TPU slices.
CLUSTER_VARIABLES = {
    'SLURM_STEP_NODELIST',
    'JOB_COMPLETION_INDEX',
    'OMPI_MCA_orte_hnp_uri',
    'TPU_PROCESS_ADDRESSES',
    'MEGASCALE_COORDINATOR_ADDRESS',
}
TPU_DEVICE_PATTERNS = '/dev/accel[0-9]*', '/dev/vfio/[0-9]*'


@dataclasses.dataclass(frozen=True)
class ProcessGroup:
    """The processes of a run, and the index of this one."""

    process_index: int = 0
    process_count: int = 1

    def all_gather(self, value: Any) -> list[Any]:
        """All-gather a JSON value: wait for all processes, and return their values in the order of their indices.

        Raises:
            UserError: Processes have different numbers of devices, with which jax gathers nothing.
        """
        if self.process_count == 1:
            return [value]
        import jax
        from jax.experimental import multihost_utils

        num_devices = [len(jax.local_devices(process_index=index)) for index in range(self.process_count)]
        for index, count in enumerate(num_devices):
            if count != num_devices[0]:
                raise UserError(
                    f'process {index} has {count} devices and process 0 has {num_devices[0]}; give all the same'
                )
        data = np.frombuffer(json.dumps(value).encode(), np.uint8)
        sizes = multihost_utils.process_allgather(np.int32(data.size))
        padded = np.zeros(1 << int(sizes.max()).bit_length(), np.uint8)  # few sizes, thus few compiled programs
        padded[: data.size] = data
        rows = multihost_utils.process_allgather(padded)
        return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def join_processes(
    coordinator: str | None, processes: int | None, process: int | None, timeout: float
) -> ProcessGroup:
    """Connect to the other processes of a run, by flags or as jax detects the cluster.

    If a process is lost later, jax aborts the others.

    Args:
        coordinator: HOST:PORT of process 0; None: not given.
        processes: The number of processes; None: not given.
        process: The index of this process; None: not given.
        timeout: Seconds to wait for the other processes.

    Returns:
        The group; that of a single process outside a cluster.

    Raises:
        UserError: A flag is invalid, some flags are given without the others, or the processes cannot connect.
    """
    flags = {'--coordinator': coordinator, '--processes': processes, '--process': process}
    missing = [name for name, value in flags.items() if value is None]
    if (processes == 1 and coordinator is None) or (len(missing) == 3 and not is_in_cluster(os.environ)):
        return ProcessGroup()
    if 0 < len(missing) < 3:
        given = ' '.join(f'{name}={value}' for name, value in flags.items() if value is not None)
        raise UserError(f'{given} without {" and ".join(missing)}; give all three, or none')
    if not missing and not 0 <= process < processes:
        raise UserError(f'--process={process} --processes={processes}: give whole numbers, 0 <= process < processes')
    if coordinator and not re.fullmatch(r'(\[[0-9a-fA-F:.]+\]|[^\s:\[\]]+):\d{1,5}', coordinator):
        raise UserError(f'--coordinator={coordinator} is not HOST:PORT; give e.g. --coordinator=10.0.0.1:8476')
    import jax

    # Its service would catch SIGTERM. The train step distributes requests to stop, for SIGINT as well.
    jax.config.update('jax_enable_preemption_service', False)
    is_local = re.match(r'(127\.|localhost:|\[::1\])', coordinator or '')
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            local_device_ids=list_local_devices(os.environ),
            cluster_detection_method='deactivate' if not missing else None,
            coordinator_bind_address=coordinator if is_local else None,
            initialization_timeout=int(timeout),
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except Exception as error:  # of any type: detection queries servers through other packages
        if missing and 'coordinator_address should be defined' in str(error):  # jax detects no cluster
            return ProcessGroup()
        reason = format_error(error, with_type=True)
        raise UserError(f'the processes cannot connect ({reason}); {FLAGS_HINT}') from error
    # Private: jax.process_index() would start the devices, whose number the layout sets later.
    from jax._src.distributed import global_state

    return ProcessGroup(global_state.process_id, global_state.num_processes)


def is_in_cluster(environment: Mapping[str, str]) -> bool:
    """Return whether this process belongs to a cluster that jax detects.

    Raises:
        UserError: SLURM has several tasks for this job, and this process is not part of a step.
    """
    num_tasks = environment.get('SLURM_NTASKS', '1')
    if {'SLURM_JOB_ID', 'SLURM_STEP_NODELIST'} & environment.keys() == {'SLURM_JOB_ID'} and num_tasks != '1':
        raise UserError(
            f'SLURM has {num_tasks} tasks for this job, but this command is not in a job step; start it with srun, '
            'or give --processes=1 for one process'
        )
    has_several_tpu_hosts = ',' in environment.get('TPU_WORKER_HOSTNAMES', '')
    has_variables = not CLUSTER_VARIABLES.isdisjoint(environment)
    return has_several_tpu_hosts or has_variables or any(map(glob.glob, TPU_DEVICE_PATTERNS))


def list_local_devices(environment: Mapping[str, str]) -> list[int] | None:
    """Return the GPUs of a process that SLURM has started alone on its host; None: jax decides.

    jax would use one GPU for each process.
    """
    is_alone = re.fullmatch(r'1(\(x\d+\))?', environment.get('SLURM_STEP_TASKS_PER_NODE', ''))
    num_gpus = len(glob.glob('/dev/nvidia[0-9]*'))
    return list(range(num_gpus)) if is_alone and num_gpus else None


def limit_shutdown(exit_code: int) -> None:
    """End this process with an exit code if jax's shutdown waits for processes that do not end, too.

    jax would abort the process after HEARTBEAT_SECONDS, with an exit code of its own.
    """
    if 'jax' in sys.modules and sys.modules['jax'].distributed.is_initialized():
        timer = threading.Timer(HEARTBEAT_SECONDS / 2, os._exit, [exit_code])
        timer.daemon = True
        timer.start()


def set_hang_timer(seconds: float) -> None:
    """End this process, with the stacks of its threads, unless this is called again within `seconds`; 0: never."""
    if seconds:
        faulthandler.register(signal.SIGALRM, file=2, chain=True)  # works while C++ code runs, too
    signal.setitimer(signal.ITIMER_REAL, seconds)


def all_gather_or_raise(group: ProcessGroup, function: Callable[[], Any]) -> list[Any]:
    """Call a function on each process, and all-gather its results, JSON values, in the order of process indices.

    Raises:
        UserError: The function raised it on any process; then all processes raise the first message. It begins with
            the index of the process unless all have the same.
    """
    try:
        own_answer: tuple[Any, str | None] = function(), None
    except UserError as error:
        own_answer = None, str(error)
    values, errors = zip(*group.all_gather(own_answer), strict=True)
    for index, message in enumerate(errors):
        if message:
            raise UserError(message if set(errors) == {message} else f'process {index}: {message}')
    return list(values)


def run_on_all_or_raise(group: ProcessGroup, function: Callable[[], T]) -> T:
    """Call a function on each process, and return its local result, which may be of any type.

    Raises:
        UserError: The function raised it on any process; then all processes raise it.
    """
    results = []
    all_gather_or_raise(group, lambda: results.append(function()))
    return results[0]


def broadcast_from_primary(group: ProcessGroup, function: Callable[[], Any]) -> Any:
    """Call a function on process 0 only, and broadcast its result, a JSON value, to all processes.

    Raises:
        UserError: The function raised it; then all processes raise it.
    """
    return all_gather_or_raise(group, function if group.process_index == 0 else lambda: None)[0]


def check_equal_on_all(group: ProcessGroup, values: dict[str, Any]) -> None:
    """Raise UserError if the values, {what the user reads: its JSON value}, differ between processes."""
    first, *others = group.all_gather(values)
    for index, other in enumerate(others, 1):
        if differences := format_differences(first, other):
            raise UserError(
                f'process {index} differs from process 0 in {differences[0]}; start all of them with the same options'
            )
