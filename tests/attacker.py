"""Attacks on the ports of a run by somebody who is not one of its processes."""

import contextlib
import ipaddress
import os
import random
import socket
import struct
from pathlib import Path

MEGABYTE = 1 << 20
TLS_HELLO = bytes.fromhex('16030100750100007103035f') + bytes(110)
HTTP2_PREFACE = b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n' + bytes.fromhex('000000040000000000')  # first bytes of gRPC


@contextlib.contextmanager
def open_connection(address):
    connection = socket.create_connection(address, 5)
    try:
        yield connection
    finally:
        with contextlib.suppress(OSError):
            connection.close()


def make_attack(*texts, wait_seconds=0.0):
    """Return an attack that sends each text on its own connection, then waits `wait_seconds` without reading."""

    def attack(address, stop_event):
        with contextlib.ExitStack() as stack:
            for text in texts:
                with contextlib.suppress(OSError):
                    connection = stack.enter_context(open_connection(address))
                    connection.sendall(text)
            stop_event.wait(wait_seconds)

    return attack


def send_without_reading(address, stop_event):
    """Send many HTTP/2 pings, and read none of the answers."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.settimeout(0.2)
        with contextlib.suppress(OSError):
            connection.connect(address)
            connection.sendall(HTTP2_PREFACE)
            for _ in range(200):
                connection.sendall((bytes.fromhex('000008060000000000') + bytes(8)) * 500)
        stop_event.wait(15)


def send_single_bytes(address, stop_event):
    """Send one byte at a time, so that no message is ever complete."""
    with contextlib.suppress(OSError), open_connection(address) as connection:
        for byte in HTTP2_PREFACE * 100:
            connection.sendall(bytes([byte]))
            if stop_event.wait(0.3):
                return


def open_many_connections(address, stop_event, count=200):
    """Open many connections, and keep them open."""
    connections = []
    for _ in range(count):
        if not stop_event.is_set():
            with contextlib.suppress(OSError):
                connections.append(socket.create_connection(address, 0.2))
    stop_event.wait(15)
    for connection in connections:
        connection.close()


def reset_connections(address, stop_event):
    """Open and reset many connections."""
    for _ in range(200):
        with contextlib.suppress(OSError), open_connection(address) as connection:
            connection.sendall(HTTP2_PREFACE)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))


ATTACKS = {
    'garbage': make_attack(
        *(random.Random(seed).randbytes(4000) for seed in range(5)), TLS_HELLO, b'GET / HTTP/1.1\r\n\r\n'
    ),
    'garbage after the greeting': make_attack(
        *(HTTP2_PREFACE + random.Random(seed).randbytes(4000) for seed in range(5))
    ),
    'oversized lengths': make_attack(
        HTTP2_PREFACE + bytes.fromhex('ffffff010500000001') + b'x' * MEGABYTE,
        HTTP2_PREFACE + b'\xff' * MEGABYTE,
        b'\xff' * MEGABYTE,
    ),
    'half a message': make_attack(
        HTTP2_PREFACE[:20], HTTP2_PREFACE[:-4], HTTP2_PREFACE + b'\0\0', b'\xe2\x82', wait_seconds=15
    ),
    '10 MB': make_attack(b'x' * 10 * MEGABYTE, b'\n' * 10 * MEGABYTE),
    'silence': make_attack(b'', b'', b'', wait_seconds=15),
    'one byte at a time': send_single_bytes,
    'never reading': send_without_reading,
    'many connections': open_many_connections,
    'resets': reset_connections,
}


def list_listening_addresses(pid):
    """Return the addresses on which a process and its children listen."""
    addresses = set()
    for process_id in list_process_tree(pid):
        inodes = set()
        with contextlib.suppress(OSError):
            for descriptor in Path(f'/proc/{process_id}/fd').iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(descriptor).removeprefix('socket:[').removesuffix(']'))
        for name in ('tcp', 'tcp6'):
            with contextlib.suppress(OSError):
                for row in Path(f'/proc/{process_id}/net/{name}').read_text().splitlines()[1:]:
                    fields = row.split()
                    if fields[3] == '0A' and fields[9] in inodes:
                        host, port = fields[1].split(':')
                        addresses.add((parse_address(host), int(port, 16)))
    return addresses


def parse_address(text):
    """Parse an address as /proc writes it: words of four bytes, each in the byte order of this machine."""
    packed = b''.join(bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8))
    address = ipaddress.ip_address(packed)
    return str(getattr(address, 'ipv4_mapped', None) or address)


def list_process_tree(pid):
    children = []
    with contextlib.suppress(OSError):
        for thread in Path(f'/proc/{pid}/task').iterdir():
            children += [int(child) for child in (thread / 'children').read_text().split()]
    return [pid, *(descendant for child in children for descendant in list_process_tree(child))]
