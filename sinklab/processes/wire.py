"""Messages between processes: JSON, a line each, over a stream socket.

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

from sinklab.processes.ending import End

LONGEST = 1 << 24  # bytes of a message between processes that know each other
GREETING = 1 << 12  # bytes of a message before that
STRANGE = 'no process of a run'

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


class Refused(Message, tag='refused'):
    """The hub's answer to a greeting that it refuses for good."""

    words: str


class Later(Message, tag='later'):
    """The hub's answer to who comes while its run is ending; it may come again."""

    words: str


class Beat(Message, tag='beat'):
    """A sign of life."""


class At(Message, tag='at'):
    """Where a child is. Its supervisor adds which child of which generation that is."""

    place: Name
    step: Count
    usual: Seconds | None
    seconds: Seconds
    listens: bool = False
    generation: Count = 0
    child: Count | None = None


class Gather(Message, tag='gather'):
    """What a child brings to the n-th meeting of all: JSON in a text, which only other children read."""

    number: Count
    name: Name
    value: str
    generation: Count = 0


class Gathered(Message, tag='gathered'):
    """What all have brought, by their numbers."""

    values: list[str]
    generation: Count = 0


class Ended(Message, tag='end'):
    """How a child has ended."""

    end: End
    generation: Count = 0


class Go(Message, tag='go'):
    """The hub has all supervisors start their children, at first or after an end."""

    generation: Count
    port: Port | None
    after: End | None


class Over(Message, tag='over'):
    """How all have ended."""

    end: End


TO_HUB = msgspec.json.Decoder(Hello | Beat | At | Gather | Ended)
FROM_HUB = msgspec.json.Decoder(Challenge | Welcome | Refused | Later | Beat | Go | Gathered | Over)
BETWEEN = msgspec.json.Decoder(Beat | At | Gather | Gathered | Ended)  # a supervisor and its child
INVALID = msgspec.MsgspecError, ValueError, RecursionError


def encode(message: Message) -> bytes:
    return msgspec.json.encode(message) + b'\n'


def host_name() -> str:
    """Return the name of this machine, as far as it is printable ASCII."""
    return re.sub('[^ -~]', '?', socket.gethostname())[:255]


class Wire:
    """One end of a connection that threads read and write, over which something must come every so often."""

    def __init__(self, connection: socket.socket, silence: float | None, decoder: msgspec.json.Decoder):
        connection.settimeout(silence)
        self.connection, self.silence, self.decoder, self.why = connection, silence, decoder, ''
        self.sending = threading.Lock()

    def send(self, message: Message) -> None:
        """Sends, or leaves it to who receives to find that nobody is there any more."""
        line = encode(message)
        try:
            with self.sending:
                self.connection.sendall(line)
        except OSError:
            self.close()

    def __iter__(self) -> Iterator[Message]:
        """Messages until the other end is gone; `why` then says how that was seen."""
        why = 'gone'
        try:
            with self.connection.makefile('rb') as lines:
                while line := lines.readline(LONGEST):
                    yield self.decoder.decode(line)
        except TimeoutError:
            why = f'not heard of for {self.silence:.0f} s'
        except OSError:
            pass
        except INVALID:
            why = STRANGE
        finally:
            self.why = self.why or why
            self.close()

    def reject(self) -> None:
        """Ends a connection to somebody who is not what it should be."""
        self.why = self.why or STRANGE
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()
