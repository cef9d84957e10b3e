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

MAX_UNREAD_BYTES = 4 * MAX_MESSAGE_BYTES  # limit of the write buffer; an empty buffer accepts any message
MAX_UNREAD_GREETING_BYTES = 4 * MAX_GREETING_BYTES
NOT_LOCAL_ERRNOS = errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT  # no interface of this machine has the address


class Connection(asyncio.Protocol):
    """A connection of the coordinator, with timeouts and a bounded write buffer.

    `end_reason` says why the connection has ended, and is empty while it is open.

    Args:
        silence_seconds: Seconds without a message, or with unread data, after which the connection is aborted.
        on_open: Called with the connection when it is open.
        on_message: Called with the connection and each message.
        on_lost: Called with the connection when it has ended.
    """

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
        self.blocked_since = None  # since when sent data has waited for the other end; None: no data waits

    @property
    def max_message_bytes(self) -> int:
        return MAX_MESSAGE_BYTES if self.is_authenticated else MAX_GREETING_BYTES

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(high=0)  # so that the first byte that waits calls `pause_writing`
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
        """Decode a line and pass the message to `on_message`; abort this connection if it is invalid.

        `on_message` handles its own errors, since they are not the fault of the sender.

        Returns:
            Whether the connection is still open.
        """
        try:
            if len(line) > self.max_message_bytes:
                raise ValueError(f'{len(line)} bytes')
            message = TO_COORDINATOR_DECODER.decode(line)
        except DECODE_ERRORS:
            self.abort(NOT_A_RUN_PROCESS)
            return False
        if self.is_authenticated:  # before that, one timeout covers the whole greeting
            self.last_heard_time = time.monotonic()
        self.on_message(self, message)
        return not self.end_reason

    def connection_lost(self, error: Exception | None) -> None:
        self.end_reason = self.end_reason or 'gone'
        self.on_lost(self)

    def send(self, message: Message) -> None:
        """Send a message; abort the connection if too much data waits for the other end to read."""
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
        """Abort the connection if it has been silent, or has left data unread, for too long."""
        if self.blocked_since is not None and now - self.blocked_since > self.silence_seconds:
            self.abort(f'not reading what it is sent for {self.silence_seconds:.0f} s')
        elif now - self.last_heard_time > self.silence_seconds:
            self.abort(f'not heard of for {self.silence_seconds:.0f} s')

    def close(self) -> None:
        """Close the connection after its buffered data, as far as the other end reads it at once."""
        self.end_reason = self.end_reason or 'gone'
        self.transport.close()

    def abort(self, reason: str) -> None:
        """Close the connection at once, without its buffered data.

        The event loop calls `on_lost` afterwards.
        """
        self.end_reason = self.end_reason or reason
        self.partial_line = bytearray()
        self.transport.abort()


def open_listeners(host: str, port: int, backlog: int) -> tuple[list[socket.socket], str]:
    """Listen on the interface with the host's address, or on all interfaces if none is known to have it.

    Args:
        host: The host name or address of process 0, as it is given to the other processes.
        port: The port to listen on.
        backlog: The maximum number of connections that the system queues until they are accepted.

    Returns:
        The sockets, and the reason for listening on all interfaces; '' if only the host's address is used.

    Raises:
        UserError: The port is in use, or this user may not open it. The cause is the OSError.
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
    """Listen on all interfaces, for IPv4 and IPv6 if the system supports both in one socket."""
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
