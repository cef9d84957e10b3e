"""The process group of a supervised worker: gathers of JSON values, progress and exit."""

import contextlib
import ctypes
import faulthandler
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from typing import Any, NoReturn

from sinklab import startup_signals
from sinklab.process_group import ProcessGroup, SingleProcessGroup
from sinklab.standard_streams import SafeStream
from sinklab.supervisor.exit_status import ExitStatus
from sinklab.supervisor.messages import (
    WORKER_DECODER,
    GatherRequest,
    GatherResult,
    MessageChannel,
    ProgressReport,
    WorkerExit,
)

WORKER_VARIABLE = 'SINKLAB_SUPERVISED'
BIND_VARIABLE = 'JAX_COORDINATOR_BIND_ADDRESS'  # of jax; a user may set it to choose another interface
PR_SET_PDEATHSIG = 1  # of prctl on Linux: the signal to this process when its parent ends


def is_supervised() -> bool:
    return WORKER_VARIABLE in os.environ


def make_process_group() -> ProcessGroup:
    """Return the process group of this process.

    A supervisor puts the settings into the environment. Without them the group has a single process.
    """
    settings = os.environ.pop(WORKER_VARIABLE, None)
    return WorkerClient(**json.loads(settings)) if settings else SingleProcessGroup()


class WorkerClient:
    """The process group of a run, through the supervisor. The process exits if the supervisor is lost."""

    def __init__(
        self,
        link: int,
        terminal: list[int],
        index: int,
        count: int,
        coordinator: str | None,
        bind: str | None,
        devices: list[int] | None,
        beat: float,
        silence: float,
        join: float,
    ):
        self.index, self.count = index, count
        self.coordinator_address, self.bind_address, self.devices, self.join_seconds = (
            coordinator,
            bind,
            devices,
            join,
        )
        self.heartbeat_seconds, self.num_gathers, self.gather_results = beat, 0, queue.SimpleQueue()
        self.progress, self.reported_handler, self.wake_event = (
            ('starting', 0, None, time.monotonic()),
            False,
            threading.Event(),
        )
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        faulthandler.enable(file=2)
        faulthandler.register(signal.SIGUSR1, file=2)
        for name, descriptor in zip(('stdout', 'stderr'), terminal, strict=False):
            stream = os.fdopen(descriptor, 'w', buffering=1, errors='backslashreplace')
            setattr(sys, name, SafeStream(stream))
        self.channel = MessageChannel(socket.socket(fileno=link), silence, WORKER_DECODER)
        for target in (self.receive_messages, self.send_heartbeats):
            threading.Thread(target=target, daemon=True).start()

    def gather(self, name: str, value: Any) -> list[Any]:
        self.num_gathers += 1
        self.channel.send(GatherRequest(self.num_gathers, name, json.dumps(value)))
        return self.gather_results.get()

    def report_progress(self, activity: str, step: int = 0, usual_seconds: float | None = None) -> None:
        self.progress = activity, int(step), None if usual_seconds is None else float(usual_seconds), time.monotonic()
        if has_graceful_sigterm_handler() != self.reported_handler:
            self.wake_event.set()

    def initialize_distributed(self) -> None:
        """Initialize jax.distributed.

        Call this once all processes are known to exist: jax aborts if one is missing.
        """
        import jax

        jax.config.update('jax_enable_preemption_service', False)  # its service would catch SIGTERM
        jax.distributed.initialize(
            self.coordinator_address,
            self.count,
            self.index,
            local_device_ids=self.devices,
            cluster_detection_method='deactivate',
            coordinator_bind_address=None if BIND_VARIABLE in os.environ else self.bind_address,
            initialization_timeout=int(self.join_seconds),
            heartbeat_timeout_seconds=3600,  # supervisors detect and report a lost process within seconds
        )

    def exit(self, exit_status: ExitStatus) -> NoReturn:
        """Exit at once, without jax's shutdown, which would wait for processes that may be gone."""
        self.channel.send(WorkerExit(exit_status))
        if exit_status.exit_code == 0:
            self.report_progress('ending', self.progress[1])
            self.gather('end', None)  # the first process to exit would end the others
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(exit_status.exit_code)

    def receive_messages(self) -> None:
        for message in self.channel:
            if isinstance(message, GatherResult):
                self.gather_results.put([json.loads(value) for value in message.values])
        os._exit(ExitStatus('lost').exit_code)

    def send_heartbeats(self) -> None:
        """Send heartbeats in an endless loop.

        This runs in a thread of its own, since the main thread may wait for other processes.
        """
        while True:
            self.wake_event.clear()
            self.reported_handler = has_graceful_sigterm_handler()
            activity, step, usual_seconds, start_time = self.progress
            self.channel.send(
                ProgressReport(activity, step, usual_seconds, time.monotonic() - start_time, self.reported_handler)
            )
            self.wake_event.wait(self.heartbeat_seconds)


def initialize_distributed(group: ProcessGroup) -> None:
    """Initialize jax.distributed in a run of several processes; do nothing in a single process."""
    if isinstance(group, WorkerClient) and group.count > 1:
        group.initialize_distributed()


def has_graceful_sigterm_handler() -> bool:
    """Return whether SIGTERM has a handler other than those that end the process at once."""
    return signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, startup_signals.exit_on_signal, None)
