"""Messages between processes: JSON lines over a socket, each checked against its type.

Each message is checked against its type, with all bounds, before anything is done with it.
"""

import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from sinklab.supervisor.exit_status import ExitStatus

MAX_MESSAGE_BYTES = 1 << 24  # bytes of a message between processes that know each other
MAX_GREETING_BYTES = 1 << 12  # bytes of a message before that
NOT_A_RUN_PROCESS = 'no process of a run'

Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Index = Annotated[int, Meta(ge=0, lt=1 << 20)]
Port = Annotated[int, Meta(ge=1, lt=1 << 16)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Name = Annotated[str, Meta(max_length=1000)]
Host = Annotated[str, Meta(max_length=255, pattern=r'\A[ -~]*\Z')]
Digest = Annotated[str, Meta(pattern=r'\A[0-9a-f]{64}\Z')]  # a proof, or a nonce of the same size


class Message(msgspec.Struct, tag_field='kind', forbid_unknown_fields=True, frozen=True):
    """What all messages have in common: their type, in the field `kind`."""


class Challenge(Message, tag='challenge'):
    """The first word of the hub on a new connection."""

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
    """The hub's answer to a greeting that it accepts, with its own proof."""

    proof: Digest


class Rejection(Message, tag='refused'):
    """The hub's answer to a greeting that it refuses for good."""

    words: str


class RetryLater(Message, tag='later'):
    """The hub's answer to who comes while its run is ending; it may come again."""

    words: str


class Heartbeat(Message, tag='beat'):
    """A sign of life."""


class ProgressReport(Message, tag='at'):
    """Where a child is. Its supervisor adds which child of which generation that is."""

    place: Name
    step: Count
    usual: Seconds | None
    seconds: Seconds
    listens: bool = False
    generation: Count = 0
    child: Count | None = None


class GatherRequest(Message, tag='gather'):
    """What a child brings to the n-th meeting of all: JSON in a text, which only other children read."""

    number: Count
    name: Name
    value: str
    generation: Count = 0


class GatherResult(Message, tag='gathered'):
    """What all have brought, by their numbers."""

    values: list[str]
    generation: Count = 0


class WorkerExit(Message, tag='end'):
    """How a child has ended."""

    end: ExitStatus
    generation: Count = 0


class StartWorkers(Message, tag='go'):
    """The hub has all supervisors start their children, at first or after an end."""

    generation: Count
    port: Port | None
    after: ExitStatus | None


class RunExit(Message, tag='over'):
    """How all have ended."""

    end: ExitStatus


TO_COORDINATOR_DECODER = msgspec.json.Decoder(Hello | Heartbeat | ProgressReport | GatherRequest | WorkerExit)
FROM_COORDINATOR_DECODER = msgspec.json.Decoder(
    Challenge | Welcome | Rejection | RetryLater | Heartbeat | StartWorkers | GatherResult | RunExit
)
WORKER_DECODER = msgspec.json.Decoder(
    Heartbeat | ProgressReport | GatherRequest | GatherResult | WorkerExit
)  # a supervisor and its child
DECODE_ERRORS = msgspec.MsgspecError, ValueError, RecursionError


def encode_message(message: Message) -> bytes:
    return msgspec.json.encode(message) + b'\n'


def get_host_name() -> str:
    """Return the name of this machine, as far as it is printable ASCII."""
    return re.sub('[^ -~]', '?', socket.gethostname())[:255]


class MessageChannel:
    """One end of a connection that threads read and write, over which something must come every so often."""

    def __init__(self, sock: socket.socket, silence_seconds: float | None, decoder: msgspec.json.Decoder):
        sock.settimeout(silence_seconds)
        self.sock, self.silence_seconds, self.decoder, self.end_reason = sock, silence_seconds, decoder, ''
        self.send_lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Sends, or leaves it to who receives to find that nobody is there any more."""
        line = encode_message(message)
        try:
            with self.send_lock:
                self.sock.sendall(line)
        except OSError:
            self.close()

    def __iter__(self) -> Iterator[Message]:
        """Messages until the other end is gone; `end_reason` then says how that was seen."""
        reason = 'gone'
        try:
            with self.sock.makefile('rb') as lines:
                while line := lines.readline(MAX_MESSAGE_BYTES):
                    yield self.decoder.decode(line)
        except TimeoutError:
            reason = f'not heard of for {self.silence_seconds:.0f} s'
        except OSError:
            pass
        except DECODE_ERRORS:
            reason = NOT_A_RUN_PROCESS
        finally:
            self.end_reason = self.end_reason or reason
            self.close()

    def reject(self) -> None:
        """Ends a connection to somebody who is not what it should be."""
        self.end_reason = self.end_reason or NOT_A_RUN_PROCESS
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
