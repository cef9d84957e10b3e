"""The hub's ends of its connections, none of which can delay or end another, or hold an unbounded amount."""

import asyncio
import errno
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import NoReturn

from sinklab.processes.cluster import is_loopback
from sinklab.processes.wire import GREETING, INVALID, LONGEST, STRANGE, TO_HUB, Challenge, Message, encode
from sinklab.record import Refusal

UNREAD = 4 * LONGEST  # bytes that may wait for a process to read them, and one message more
UNREAD_STRANGER = 4 * GREETING
ELSEWHERE = errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT  # no interface of this machine has the address


class Connection(asyncio.Protocol):
    """A connection of the hub. `why` says how it has ended, and is empty before."""

    def __init__(self, silence: float, made: Callable, receive: Callable, lost: Callable):
        self.silence, self.made, self.receive, self.lost = silence, made, receive, lost
        self.why, self.is_known = '', False
        self.nonce = secrets.token_hex(32)
        self.transport, self.unfinished = None, bytearray()
        self.since = self.heard = time.monotonic()
        self.blocked = None  # since when the other end has not read what waits for it

    @property
    def longest(self) -> int:
        return LONGEST if self.is_known else GREETING

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(high=0)  # `pause_writing` comes with the first byte that waits
        self.made(self)

    def challenge(self) -> None:
        self.send(Challenge(self.nonce))

    def pause_writing(self) -> None:
        self.blocked = time.monotonic()

    def resume_writing(self) -> None:
        self.blocked = None

    def data_received(self, data: bytes) -> None:
        first, *others = data.split(b'\n')
        self.unfinished += first
        for following in others:
            line, self.unfinished = self.unfinished, bytearray(following)
            if self.why or not self.receive_line(line):
                return
        if len(self.unfinished) > self.longest:
            self.drop(STRANGE)

    def receive_line(self, line: bytearray) -> bool:
        """Hand on a message; drop this connection, and nothing else, if the message is not as its type says.

        An error of `receive` is not the fault of who sent the message: `receive` handles it.
        """
        try:
            if len(line) > self.longest:
                raise ValueError(f'{len(line)} bytes')
            message = TO_HUB.decode(line)
        except INVALID:
            self.drop(STRANGE)
            return False
        if self.is_known:  # a stranger has one silence for its greeting, whatever it says
            self.heard = time.monotonic()
        self.receive(self, message)
        return not self.why

    def connection_lost(self, error: Exception | None) -> None:
        self.why = self.why or 'gone'
        self.lost(self)

    def send(self, message: Message) -> None:
        """Send, or keep until the other end reads; drop it when too much is kept."""
        if self.why:
            return
        line, waiting = encode(message), self.transport.get_write_buffer_size()
        if waiting and waiting + len(line) > (UNREAD if self.is_known else UNREAD_STRANGER):
            self.drop('not reading what it is sent')
        else:
            self.transport.write(line)

    def check(self, now: float) -> None:
        """Drop it when it has been silent, or has not read, for too long."""
        if self.blocked is not None and now - self.blocked > self.silence:
            self.drop(f'not reading what it is sent for {self.silence:.0f} s')
        elif now - self.heard > self.silence:
            self.drop(f'not heard of for {self.silence:.0f} s')

    def close(self) -> None:
        """End it when all is sent, as far as the other end reads it at once."""
        self.why = self.why or 'gone'
        self.transport.close()

    def drop(self, why: str) -> None:
        """End it at once. `lost` is called afterwards, from the loop."""
        self.why = self.why or why
        self.unfinished = bytearray()
        self.transport.abort()


def open_listeners(host: str, port: int, backlog: int) -> tuple[list[socket.socket], str]:
    """Listen on the interface of an address alone, or on all where no interface is known to have it.

    Args:
        host: a name or address of process 0, as the other processes are given it.

    Returns:
        The sockets, and why they are those of all interfaces; '' if they are not.

    Raises:
        Refusal: the port is taken, or not for this user. Its cause is the OSError.
    """
    try:
        found = dict.fromkeys(
            (family, address) for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
    except OSError as error:
        return listen_everywhere(port, backlog), f'{host} has no address here ({error.strerror})'
    if not is_loopback(host) and all(is_loopback(address[0]) for _, address in found):
        return listen_everywhere(port, backlog), f'{host} is {next(iter(found))[1][0]} on this machine'
    made, reason = [], ''
    for family, address in found:
        try:
            made.append(open_listener(family, address, backlog))
        except OSError as error:
            if error.errno not in ELSEWHERE:
                for one in made:
                    one.close()
                refuse_port(port, error)
            reason = f'{address[0]}: {os.strerror(error.errno)}'
    return (made, '') if made else (listen_everywhere(port, backlog), reason)


def open_listener(family: int, address: tuple, backlog: int) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
        made.listen(backlog)
    except BaseException:
        made.close()
        raise
    return made


def listen_everywhere(port: int, backlog: int) -> list[socket.socket]:
    """Listen on all interfaces."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        return [
            socket.create_server(('', port), family=family, backlog=backlog, dualstack_ipv6=family == socket.AF_INET6)
        ]
    except OSError as error:
        refuse_port(port, error)


def refuse_port(port: int, error: OSError) -> NoReturn:
    raise Refusal(
        f'port {port} cannot be opened for the other processes ({os.strerror(error.errno)}); give another '
        'port in --coordinator to all of them, or end what has it'
    ) from error
