"""Messages between processes: JSON, a line each, over a stream socket."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

LONGEST = 1 << 24  # bytes of a message
STRANGE = 'no process of a run'


class Wire:
    """One end of a connection, over which something must come every so often."""

    def __init__(self, connection: socket.socket, silence: float):
        connection.settimeout(silence)
        self.connection, self.silence, self.why = connection, silence, ''
        self.sending = threading.Lock()

    def send(self, kind: str, **content: Any) -> None:
        """Sends, or leaves it to who receives to find that nobody is there any more."""
        line = json.dumps({'kind': kind, **content}).encode() + b'\n'
        try:
            with self.sending:
                self.connection.sendall(line)
        except OSError:
            self.close()

    def __iter__(self) -> Iterator[dict]:
        """Messages until the other end is gone; `why` then says how that was seen."""
        try:
            with self.connection.makefile('rb') as lines:
                while line := lines.readline(LONGEST):
                    message = json.loads(line)
                    message['kind']
                    yield message
            self.why = 'gone'
        except TimeoutError:
            self.why = f'not heard of for {self.silence:.0f} s'
        except OSError:
            self.why = 'gone'
        except (ValueError, KeyError, TypeError):
            self.why = STRANGE
        finally:
            self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()
