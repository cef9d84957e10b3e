"""Connections of the coordinator, with bounded buffers and timeouts, and its listening sockets."""

import asyncio
import errno
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import NoReturn

from sinklab.schema import UserError
from sinklab.supervisor.cluster import is_loopback
from sinklab.supervisor.messages import (
    DECODE_ERRORS,
    MAX_GREETING_BYTES,
    MAX_MESSAGE_BYTES,
    NOT_A_RUN_PROCESS,
    TO_COORDINATOR_DECODER,
    Challenge,
    Message,
    encode_message,
)

MAX_UNREAD_BYTES = 4 * MAX_MESSAGE_BYTES  # bytes that may wait for a process to read them, and one message more
MAX_UNREAD_GREETING_BYTES = 4 * MAX_GREETING_BYTES
NOT_LOCAL_ERRNOS = errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT  # no interface of this machine has the address


class Connection(asyncio.Protocol):
    """A connection of the coordinator. `end_reason` says how it has ended, and is empty before."""

    def __init__(self, silence_seconds: float, on_open: Callable, on_message: Callable, on_lost: Callable):
        self.silence_seconds, self.on_open, self.on_message, self.on_lost = (
            silence_seconds,
            on_open,
            on_message,
            on_lost,
        )
        self.end_reason, self.is_authenticated = '', False
        self.nonce = secrets.token_hex(32)
        self.transport, self.partial_line = None, bytearray()
        self.start_time = self.last_heard_time = time.monotonic()
        self.blocked_since = None  # since when the other end has not read what waits for it

    @property
    def max_message_bytes(self) -> int:
        return MAX_MESSAGE_BYTES if self.is_authenticated else MAX_GREETING_BYTES

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(high=0)  # `pause_writing` comes with the first byte that waits
        self.on_open(self)

    def send_challenge(self) -> None:
        self.send(Challenge(self.nonce))

    def pause_writing(self) -> None:
        self.blocked_since = time.monotonic()

    def resume_writing(self) -> None:
        self.blocked_since = None

    def data_received(self, data: bytes) -> None:
        line_end, *next_parts = data.split(b'\n')
        self.partial_line += line_end
        for next_part in next_parts:
            line, self.partial_line = self.partial_line, bytearray(next_part)
            if self.end_reason or not self.receive_line(line):
                return
        if len(self.partial_line) > self.max_message_bytes:
            self.abort(NOT_A_RUN_PROCESS)

    def receive_line(self, line: bytearray) -> bool:
        """Hand on a message; drop this connection, and nothing else, if the message is not as its type says.

        An error of `on_message` is not the fault of who sent the message: `on_message` handles it.
        """
        try:
            if len(line) > self.max_message_bytes:
                raise ValueError(f'{len(line)} bytes')
            message = TO_COORDINATOR_DECODER.decode(line)
        except DECODE_ERRORS:
            self.abort(NOT_A_RUN_PROCESS)
            return False
        if self.is_authenticated:  # an unauthenticated connection has one timeout for its greeting
            self.last_heard_time = time.monotonic()
        self.on_message(self, message)
        return not self.end_reason

    def connection_lost(self, error: Exception | None) -> None:
        self.end_reason = self.end_reason or 'gone'
        self.on_lost(self)

    def send(self, message: Message) -> None:
        """Send, or keep until the other end reads; drop it when too much is kept."""
        if self.end_reason:
            return
        line, unread_bytes = encode_message(message), self.transport.get_write_buffer_size()
        if unread_bytes and unread_bytes + len(line) > (
            MAX_UNREAD_BYTES if self.is_authenticated else MAX_UNREAD_GREETING_BYTES
        ):
            self.abort('not reading what it is sent')
        else:
            self.transport.write(line)

    def check_timeouts(self, now: float) -> None:
        """Drop the connection if it has been silent, or has not read, for too long."""
        if self.blocked_since is not None and now - self.blocked_since > self.silence_seconds:
            self.abort(f'not reading what it is sent for {self.silence_seconds:.0f} s')
        elif now - self.last_heard_time > self.silence_seconds:
            self.abort(f'not heard of for {self.silence_seconds:.0f} s')

    def close(self) -> None:
        """End it when all is sent, as far as the other end reads it at once."""
        self.end_reason = self.end_reason or 'gone'
        self.transport.close()

    def abort(self, reason: str) -> None:
        """End it at once. `on_lost` is called afterwards, from the loop."""
        self.end_reason = self.end_reason or reason
        self.partial_line = bytearray()
        self.transport.abort()


def open_listeners(host: str, port: int, backlog: int) -> tuple[list[socket.socket], str]:
    """Listen on the interface of an address alone, or on all where no interface is known to have it.

    Args:
        host: a name or address of process 0, as the other processes are given it.

    Returns:
        The sockets, and why they are those of all interfaces; '' if they are not.

    Raises:
        UserError: the port is taken, or not for this user. Its cause is the OSError.
    """
    try:
        addresses = dict.fromkeys(
            (family, address) for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
    except OSError as error:
        return listen_on_all_interfaces(port, backlog), f'{host} has no address here ({error.strerror})'
    if not is_loopback(host) and all(is_loopback(address[0]) for _, address in addresses):
        return listen_on_all_interfaces(port, backlog), f'{host} is {next(iter(addresses))[1][0]} on this machine'
    listeners, reason = [], ''
    for family, address in addresses:
        try:
            listeners.append(open_listener(family, address, backlog))
        except OSError as error:
            if error.errno not in NOT_LOCAL_ERRNOS:
                for listener in listeners:
                    listener.close()
                raise_port_error(port, error)
            reason = f'{address[0]}: {os.strerror(error.errno)}'
    return (listeners, '') if listeners else (listen_on_all_interfaces(port, backlog), reason)


def open_listener(family: int, address: tuple, backlog: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def listen_on_all_interfaces(port: int, backlog: int) -> list[socket.socket]:
    """Listen on all interfaces."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        return [
            socket.create_server(('', port), family=family, backlog=backlog, dualstack_ipv6=family == socket.AF_INET6)
        ]
    except OSError as error:
        raise_port_error(port, error)


def raise_port_error(port: int, error: OSError) -> NoReturn:
    raise UserError(
        f'port {port} cannot be opened for the other processes ({os.strerror(error.errno)}); give another '
        'port in --coordinator to all of them, or end what has it'
    ) from error
