"""Attacks on the ports of a run by somebody who is not one of its processes.

`python tests/attacker.py` makes each attack on a run of two processes without jax. PYTHONPATH names its code.
The output has the exit codes of both processes: (0, 0) means that the attack had no effect.
"""

import contextlib
import json
import os
import random
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from processes import TESTS_FOLDER, start_run

MEGABYTE = 1 << 20
OLD_HELLO = dict(kind='hello', process=1, count=2, host='forged', pid=1)
FAKE_DIGEST = 'f' * 64
TLS = bytes.fromhex('16030100750100007103035f') + bytes(110)
HTTP2 = b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n' + bytes.fromhex('000000040000000000')


def encode_message(**content):
    return json.dumps(content).encode() + b'\n'


@contextlib.contextmanager
def open_connection(address):
    connection = socket.create_connection(address, 5)
    try:
        yield connection
    finally:
        with contextlib.suppress(OSError):
            connection.close()


def make_attack(*texts, stay=0.0):
    """Return an attack that sends each text on its own connection, then waits `stay` seconds without reading."""

    def attack(address, stop_event):
        with contextlib.ExitStack() as stack:
            for text in texts:
                with contextlib.suppress(OSError):
                    connection = stack.enter_context(open_connection(address))
                    connection.sendall(text)
            stop_event.wait(stay)

    return attack


def send_without_reading(address, stop_event):
    """Send many greetings with a process number that is refused, and read none of the refusals."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.settimeout(0.2)
        with contextlib.suppress(OSError):
            connection.connect(address)
            for _ in range(200):
                connection.sendall(encode_message(**OLD_HELLO | dict(process=7)) * 500)
        stop_event.wait(15)


def send_single_bytes(address, stop_event):
    """Send one byte at a time, so that no message is ever complete."""
    with contextlib.suppress(OSError), open_connection(address) as connection:
        while not stop_event.wait(0.3):
            connection.sendall(b'{')


def forge_greetings(address, stop_event):
    """Greet as process 1 without the secret, in the old and the new protocol, and continue as if accepted."""
    for hello in (OLD_HELLO, OLD_HELLO | dict(nonce=FAKE_DIGEST, proof=FAKE_DIGEST)):
        with contextlib.suppress(OSError), open_connection(address) as connection:
            with contextlib.suppress(TimeoutError):
                connection.settimeout(0.3)
                connection.recv(1000)
            connection.sendall(encode_message(**hello))
            for _ in range(20):
                connection.sendall(
                    encode_message(kind='beat') + encode_message(kind='end', generation=1, end=dict(cause='crashed'))
                )
                if stop_event.wait(0.1):
                    return


def open_many_connections(address, stop_event, count=100):
    """Open more connections than the run may have descriptors, and keep them open."""
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
            connection.sendall(b'{"kind"')
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))


NO_DESCRIPTORS = 'more connections than descriptors'
HELLO_WITH_LIST = b'{"kind":"hello","process":[],"count":2,"host":"x","pid":1}\n'
ATTACKS = {
    'hello of process []': make_attack(HELLO_WITH_LIST),
    '{}': make_attack(b'{}\n', b'[]\n', b'null\n', b'5\n', b'"x"\n', b'{"kind":{}}\n', b'\n'),
    'garbage': make_attack(
        *(random.Random(seed).randbytes(4000) for seed in range(5)), TLS, HTTP2, b'GET / HTTP/1.1\r\n\r\n'
    ),
    'half a message': make_attack(b'{"kind":"hello","process":1,', b'{', b'\xe2\x82', stay=15),
    '10 MB in one line': make_attack(
        b'x' * 10 * MEGABYTE, b'[' * 10 * MEGABYTE + b'\n', b'1' * 10 * MEGABYTE + b'\n'
    ),
    '10 MB in many lines': make_attack(b'{"kind":"beat"}\n' * (10 * MEGABYTE // 16), b'\n' * 10 * MEGABYTE),
    'deep nesting, huge numbers': make_attack(
        b'[' * 3000 + b'\n',
        encode_message(**OLD_HELLO | dict(process=10**30)),
        encode_message(**OLD_HELLO | dict(count=1e308)),
    ),
    'messages of others': make_attack(
        *(
            encode_message(kind=kind, generation=1)
            for kind in ('at', 'gather', 'end', 'go', 'over', 'welcome', 'refused')
        ),
        encode_message(kind='over', end=dict(cause='done', words='', trace='', orderly=False)),
    ),
    'silence': make_attack(b'', b'', b'', stay=15),
    'one byte at a time': send_single_bytes,
    'never reading': send_without_reading,
    'forged hello of process 1': forge_greetings,
    NO_DESCRIPTORS: open_many_connections,
    'resets': reset_connections,
}
SLOW_SCRIPT = """
while not all(group.gather('x', (folder.path / 'go').exists())):
  group.report_progress('step', 1, None)
  time.sleep(0.05)
"""
TOUCH_SCRIPT = "(folder.path / f'here-{index}').touch()\n"


def attack_run(run, names, descriptors=64, seconds=3.0):
    """Attack a run of two processes, before process 1 starts and afterwards.

    Process 0 is limited to `descriptors` open files. For NO_DESCRIPTORS it has none left until process 1 starts.

    Returns:
        [(exit code, lines of stderr)] of both processes.
    """
    stop_event = threading.Event()
    run.start(TOUCH_SCRIPT + SLOW_SCRIPT, (0,))
    process = run.started[0]
    address = '127.0.0.1', run.port
    wait_for_port(address)
    hard_limit = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (3 if NO_DESCRIPTORS in names else descriptors, hard_limit))
    threads = []
    for number in range(2):
        threads += [threading.Thread(target=ATTACKS[name], args=(address, stop_event)) for name in names]
        for thread in threads[number * len(names) :]:
            thread.start()
        time.sleep(0.5)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (descriptors, hard_limit))
        if not number:
            run.start(TOUCH_SCRIPT + SLOW_SCRIPT, (1,))
            with contextlib.suppress(AssertionError):
                run.wait_for('here-1', 10)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    (run.folder / 'go').touch()
    try:
        return run.ended()
    finally:
        stop_event.set()
        for thread in threads:
            thread.join()


def wait_for_port(address, seconds=20):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), open_connection(address):
            return
        time.sleep(0.05)


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
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)


def list_process_tree(pid):
    children = []
    with contextlib.suppress(OSError):
        for thread in Path(f'/proc/{pid}/task').iterdir():
            children += [int(child) for child in (thread / 'children').read_text().split()]
    return [pid, *(descendant for child in children for descendant in list_process_tree(child))]


def main():
    for name in sys.argv[1:] or ATTACKS:
        with tempfile.TemporaryDirectory() as folder:
            runs = start_run(Path(folder))
            start = time.monotonic()
            try:
                results = attack_run(next(runs), [name])
            except subprocess.TimeoutExpired:
                results = [('hangs', []), ('hangs', [])]
            with contextlib.suppress(StopIteration):
                next(runs)
        message = next((lines[-1] for code, lines in results if code), '')
        codes = tuple(code for code, _ in results)
        print(f'{name:35} {codes!s:20} {time.monotonic() - start:5.1f} s  {message[:150]}', flush=True)


if __name__ == '__main__':
    sys.path.insert(0, str(TESTS_FOLDER))
    main()
