"""How a process that is looked after speaks with the others: by way of its supervisor."""

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

from sinklab import startup
from sinklab.group import Alone, Group
from sinklab.processes.ending import End
from sinklab.processes.wire import BETWEEN, At, Ended, Gather, Gathered, Wire
from sinklab.streams import SafeStream

VARIABLE = 'SINKLAB_SUPERVISED'
# XLA for CPUs otherwise begins independent collectives in any order, and processes meet in different ones.
IN_ORDER = '--xla_cpu_enable_concurrency_optimized_scheduler=false'
BIND = 'JAX_COORDINATOR_BIND_ADDRESS'  # of jax itself, for whoever wants another interface
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux


def supervised() -> bool:
    return VARIABLE in os.environ


def group() -> Group:
    """The group of this process, as its supervisor has put it into the environment."""
    given = os.environ.pop(VARIABLE, None)
    return Link(**json.loads(given)) if given else Alone()


class Link:
    """All processes of a run, reached through this one's supervisor; without it, this process ends."""

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
        self.coordinator, self.bind, self.devices, self.timeout = coordinator, bind, devices, join
        self.beat, self.gathered, self.answers = beat, 0, queue.SimpleQueue()
        self.place, self.heard, self.wake = ('starting', 0, None, time.monotonic()), False, threading.Event()
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
        faulthandler.enable(file=2)
        faulthandler.register(signal.SIGUSR1, file=2)
        for name, descriptor in zip(('stdout', 'stderr'), terminal, strict=False):
            stream = os.fdopen(descriptor, 'w', buffering=1, errors='backslashreplace')
            setattr(sys, name, SafeStream(stream))
        self.wire = Wire(socket.socket(fileno=link), silence, BETWEEN)
        for target in (self.listen, self.tell):
            threading.Thread(target=target, daemon=True).start()

    def gather(self, name: str, value: Any) -> list[Any]:
        self.gathered += 1
        self.wire.send(Gather(self.gathered, name, json.dumps(value)))
        return self.answers.get()

    def at(self, place: str, step: int = 0, usual: float | None = None) -> None:
        self.place = place, int(step), None if usual is None else float(usual), time.monotonic()
        if listens() != self.heard:
            self.wake.set()

    def join(self) -> None:
        """All processes have met before: jax aborts where one is missing."""
        import jax

        flags = os.environ.get('XLA_FLAGS', '')
        if IN_ORDER.partition('=')[0] not in flags:
            os.environ['XLA_FLAGS'] = f'{flags} {IN_ORDER}'.strip()
        jax.config.update('jax_enable_preemption_service', False)  # it swallows SIGTERM
        jax.distributed.initialize(
            self.coordinator,
            self.count,
            self.index,
            local_device_ids=self.devices,
            cluster_detection_method='deactivate',
            coordinator_bind_address=None if BIND in os.environ else self.bind,
            initialization_timeout=int(self.timeout),
            heartbeat_timeout_seconds=3600,  # supervisors see within seconds who is gone, and say so
        )

    def end(self, end: End) -> NoReturn:
        """Leaves, at once: an orderly end of jax waits for processes that may be gone."""
        self.wire.send(Ended(end))
        if end.code == 0:
            self.at('ending', self.place[1])
            self.gather('end', None)  # who leaves first takes the others with it
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(end.code)

    def listen(self) -> None:
        for message in self.wire:
            if isinstance(message, Gathered):
                self.answers.put([json.loads(value) for value in message.values])
        os._exit(End('lost').code)

    def tell(self) -> None:
        """Signs of life, from another thread than the one that may wait for other processes."""
        while True:
            self.wake.clear()
            self.heard = listens()
            place, step, usual, since = self.place
            self.wire.send(At(place, step, usual, time.monotonic() - since, self.heard))
            self.wake.wait(self.beat)


def join(group: Group) -> None:
    """Makes the devices of all processes those of one run; an only process has none but its own."""
    if isinstance(group, Link) and group.count > 1:
        group.join()


def listens() -> bool:
    """Whether a signal would be heard, and not be the end."""
    return signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, startup.end_at_once, None)
