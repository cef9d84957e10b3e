"""Messages and timeouts of the processes of a run.

Each message is validated against its type, including all bounds, before it is used.
"""

import contextlib
import dataclasses
import re
import socket
import threading
from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from sinklab.storage.lease import OWNER_TIMEOUT_SECONDS
from sinklab.supervisor.exit_status import ExitStatus


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """Timeouts in seconds; `step_multiple` is a factor of the usual duration of a step."""

    join: float = 300.0  # until all processes have connected
    step_multiple: float = 20.0
    min_step: float = 60.0  # the minimum timeout of a step
    untimed: float = 1800.0  # of an activity without a usual duration: starting, compiling, measuring, saving
    heartbeat: float = 1.0  # between two heartbeats
    silence: float = 10.0  # without a heartbeat until a process counts as lost
    busy_silence: float = OWNER_TIMEOUT_SECONDS  # the same, for a process that the system shows as running
    settle: float = 2.0  # after the first failure, for others that may be its cause
    orderly_exit: float = 60.0  # after the first end that all processes agreed on: others may still be saving
    shutdown: float = 5.0  # for a process to exit after it was told to

    def get_step_timeout(self, usual_seconds: float) -> float:
        return max(self.min_step, self.step_multiple * usual_seconds)


MAX_MESSAGE_BYTES = 1 << 24  # bytes of a message after authentication
MAX_GREETING_BYTES = 1 << 12  # bytes of a message before authentication
NOT_A_RUN_PROCESS = 'not a process of a run'

Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Index = Annotated[int, Meta(ge=0, lt=1 << 20)]
Port = Annotated[int, Meta(ge=1, lt=1 << 16)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Name = Annotated[str, Meta(max_length=1000)]
Host = Annotated[str, Meta(max_length=255, pattern=r'\A[ -~]*\Z')]
Digest = Annotated[str, Meta(pattern=r'\A[0-9a-f]{64}\Z')]  # a proof, or a nonce of the same size


class Message(msgspec.Struct, tag_field='kind', forbid_unknown_fields=True, frozen=True):
    """The base of all messages, which adds their type in the field `kind`."""


class Challenge(Message, tag='challenge'):
    """The first message of the coordinator on a new connection."""

    nonce: Digest


class Hello(Message, tag='hello'):
    """The greeting of a supervisor, with the proof that it knows the secret of the run."""

    process: Index
    count: Index
    host: Host
    pid: Count
    nonce: Digest
    proof: Digest


class Welcome(Message, tag='welcome'):
    """The coordinator's answer to a greeting that it accepts, with its own proof."""

    proof: Digest


class Rejection(Message, tag='refused'):
    """The coordinator's answer to a greeting that it rejects for good."""

    words: str


class RetryLater(Message, tag='later'):
    """The coordinator's answer to a greeting while its run is ending; the sender may try again."""

    words: str


class Heartbeat(Message, tag='beat'):
    """A sign of life, without fields."""


class ProgressReport(Message, tag='at'):
    """The progress of a worker. Its supervisor adds the generation."""

    place: Name
    step: Count
    usual: Seconds | None
    seconds: Seconds
    listens: bool = False
    generation: Count = 0
    child: Count | None = None


class GatherRequest(Message, tag='gather'):
    """A worker's value for the n-th gather: a JSON text, which only other workers read."""

    number: Count
    name: Name
    value: str
    generation: Count = 0


class GatherResult(Message, tag='gathered'):
    """The values of all workers of one gather, by index."""

    values: list[str]
    generation: Count = 0


class WorkerExit(Message, tag='end'):
    """How a worker has ended."""

    end: ExitStatus
    generation: Count = 0


class StartWorkers(Message, tag='go'):
    """The coordinator's request to all supervisors to start their workers, at first or again."""

    generation: Count
    port: Port | None
    after: ExitStatus | None


class RunExit(Message, tag='over'):
    """How the run has ended."""

    end: ExitStatus


TO_COORDINATOR_DECODER = msgspec.json.Decoder(Hello | Heartbeat | ProgressReport | GatherRequest | WorkerExit)
FROM_COORDINATOR_DECODER = msgspec.json.Decoder(
    Challenge | Welcome | Rejection | RetryLater | Heartbeat | StartWorkers | GatherResult | RunExit
)
WORKER_DECODER = msgspec.json.Decoder(
    Heartbeat | ProgressReport | GatherRequest | GatherResult | WorkerExit
)  # between a supervisor and its worker
DECODE_ERRORS = msgspec.MsgspecError, ValueError, RecursionError


def encode_message(message: Message) -> bytes:
    return msgspec.json.encode(message) + b'\n'


def get_host_name() -> str:
    """Return the host name in printable ASCII, with `?` for all other characters."""
    return re.sub('[^ -~]', '?', socket.gethostname())[:255]


class MessageChannel:
    """A connection that several threads use. It ends if it is silent for `silence_seconds`."""

    def __init__(self, sock: socket.socket, silence_seconds: float | None, decoder: msgspec.json.Decoder):
        sock.settimeout(silence_seconds)
        self.sock, self.silence_seconds, self.decoder, self.end_reason = sock, silence_seconds, decoder, ''
        self.send_lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Send a message; if that fails, close the channel, which ends the iteration over messages."""
        line = encode_message(message)
        try:
            with self.send_lock:
                self.sock.sendall(line)
        except OSError:
            self.close()

    def __iter__(self) -> Iterator[Message]:
        """Yield messages until the connection ends; `end_reason` then says why."""
        reason = 'gone'
        try:
            with self.sock.makefile('rb') as lines:
                while line := lines.readline(MAX_MESSAGE_BYTES):
                    yield self.decoder.decode(line)
        except TimeoutError:
            reason = f'without a heartbeat for {self.silence_seconds:.0f} s'
        except OSError:
            pass
        except DECODE_ERRORS:
            reason = NOT_A_RUN_PROCESS
        finally:
            self.end_reason = self.end_reason or reason
            self.close()

    def reject(self) -> None:
        """Close a connection to a program that is not a process of this run."""
        self.end_reason = self.end_reason or NOT_A_RUN_PROCESS
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it is closed already
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
