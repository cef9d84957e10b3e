"""What somebody who is no process of a run may do to its ports.

`python tests/attacker.py` tries each of it on a run of two processes without jax, of the tree that PYTHONPATH names,
and prints how both ended: (0, 0) is a run that nothing happened to.
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

from processes import HERE, started

MEGABYTE = 1 << 20
OLD_HELLO = dict(kind='hello', process=1, count=2, host='forged', pid=1)
DIGEST = 'f' * 64
TLS = bytes.fromhex('16030100750100007103035f') + bytes(110)
HTTP2 = b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n' + bytes.fromhex('000000040000000000')


def line(**content):
    return json.dumps(content).encode() + b'\n'


@contextlib.contextmanager
def connected(address):
    connection = socket.create_connection(address, 5)
    try:
        yield connection
    finally:
        with contextlib.suppress(OSError):
            connection.close()


def say(*texts, stay=0.0):
    """Send each text on a connection of its own, and stay for some seconds without reading."""

    def act(address, ended):
        with contextlib.ExitStack() as stack:
            for text in texts:
                with contextlib.suppress(OSError):
                    connection = stack.enter_context(connected(address))
                    connection.sendall(text)
            ended.wait(stay)

    return act


def never_read(address, ended):
    """Greet again and again with a number that is refused, and read none of the refusals."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.settimeout(0.2)
        with contextlib.suppress(OSError):
            connection.connect(address)
            for _ in range(200):
                connection.sendall(line(**OLD_HELLO | dict(process=7)) * 500)
        ended.wait(15)


def drip(address, ended):
    """Say one byte at a time, which is never a message."""
    with contextlib.suppress(OSError), connected(address) as connection:
        while not ended.wait(0.3):
            connection.sendall(b'{')


def forge(address, ended):
    """Greet as process 1, as the version before and this one do, without the secret; go on as if it were accepted."""
    for hello in (OLD_HELLO, OLD_HELLO | dict(nonce=DIGEST, proof=DIGEST)):
        with contextlib.suppress(OSError), connected(address) as connection:
            with contextlib.suppress(TimeoutError):
                connection.settimeout(0.3)
                connection.recv(1000)
            connection.sendall(line(**hello))
            for _ in range(20):
                connection.sendall(line(kind='beat') + line(kind='end', generation=1, end=dict(cause='crashed')))
                if ended.wait(0.1):
                    return


def many(address, ended, count=100):
    """Open more connections than the run may have descriptors, and stay."""
    held = []
    for _ in range(count):
        if not ended.is_set():
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(address, 0.2))
    ended.wait(15)
    for connection in held:
        connection.close()


def reset(address, ended):
    """Connect and reset at once, many times."""
    for _ in range(200):
        with contextlib.suppress(OSError), connected(address) as connection:
            connection.sendall(b'{"kind"')
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))


NO_DESCRIPTORS = 'more connections than descriptors'
HELLO_OF_A_LIST = b'{"kind":"hello","process":[],"count":2,"host":"x","pid":1}\n'
ATTACKS = {
    'hello of process []': say(HELLO_OF_A_LIST),
    '{}': say(b'{}\n', b'[]\n', b'null\n', b'5\n', b'"x"\n', b'{"kind":{}}\n', b'\n'),
    'garbage': say(
        *(random.Random(seed).randbytes(4000) for seed in range(5)), TLS, HTTP2, b'GET / HTTP/1.1\r\n\r\n'
    ),
    'half a message': say(b'{"kind":"hello","process":1,', b'{', b'\xe2\x82', stay=15),
    '10 MB in one line': say(b'x' * 10 * MEGABYTE, b'[' * 10 * MEGABYTE + b'\n', b'1' * 10 * MEGABYTE + b'\n'),
    '10 MB in many lines': say(b'{"kind":"beat"}\n' * (10 * MEGABYTE // 16), b'\n' * 10 * MEGABYTE),
    'deep nesting, huge numbers': say(
        b'[' * 3000 + b'\n', line(**OLD_HELLO | dict(process=10**30)), line(**OLD_HELLO | dict(count=1e308))
    ),
    'messages of others': say(
        *(line(kind=kind, generation=1) for kind in ('at', 'gather', 'end', 'go', 'over', 'welcome', 'refused')),
        line(kind='over', end=dict(cause='done', words='', trace='', orderly=False)),
    ),
    'silence': say(b'', b'', b'', stay=15),
    'one byte at a time': drip,
    'never reading': never_read,
    'forged hello of process 1': forge,
    NO_DESCRIPTORS: many,
    'resets': reset,
}
SLOW = """
while not all(group.gather('x', (folder.path / 'go').exists())):
  group.report_progress('step', 1, None)
  time.sleep(0.05)
"""
TOUCHED = "(folder.path / f'here-{index}').touch()\n"


def attacked(run, names, descriptors=64, seconds=3.0):
    """Have a run of two processes meet attacks, before process 1 comes and afterwards.

    Process 0 may have few file descriptors; for NO_DESCRIPTORS it has none left until process 1 comes.

    Returns:
        [(exit code, lines of stderr)] of both processes.
    """
    ended = threading.Event()
    run.start(TOUCHED + SLOW, (0,))
    process = run.started[0]
    address = '127.0.0.1', run.port
    wait_for_port(address)
    hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (3 if NO_DESCRIPTORS in names else descriptors, hard))
    threads = []
    for number in range(2):
        threads += [threading.Thread(target=ATTACKS[name], args=(address, ended)) for name in names]
        for thread in threads[number * len(names) :]:
            thread.start()
        time.sleep(0.5)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (descriptors, hard))
        if not number:
            run.start(TOUCHED + SLOW, (1,))
            with contextlib.suppress(AssertionError):
                run.wait_for('here-1', 10)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    (run.folder / 'go').touch()
    try:
        return run.ended()
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def wait_for_port(address, seconds=20):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(OSError), connected(address):
            return
        time.sleep(0.05)


def ports_of(pid):
    """The addresses on which a process and its children listen."""
    found = set()
    for each in tree(pid):
        inodes = set()
        with contextlib.suppress(OSError):
            for descriptor in Path(f'/proc/{each}/fd').iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(descriptor).removeprefix('socket:[').removesuffix(']'))
        for name in ('tcp', 'tcp6'):
            with contextlib.suppress(OSError):
                for row in Path(f'/proc/{each}/net/{name}').read_text().splitlines()[1:]:
                    fields = row.split()
                    if fields[3] == '0A' and fields[9] in inodes:
                        host, port = fields[1].split(':')
                        found.add((address_of(host), int(port, 16)))
    return found


def address_of(text):
    """An address as /proc writes it: words of four bytes, each in the order of this machine."""
    packed = b''.join(bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8))
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)


def tree(pid):
    children = []
    with contextlib.suppress(OSError):
        for thread in Path(f'/proc/{pid}/task').iterdir():
            children += [int(child) for child in (thread / 'children').read_text().split()]
    return [pid, *(each for child in children for each in tree(child))]


def main():
    for name in sys.argv[1:] or ATTACKS:
        with tempfile.TemporaryDirectory() as folder:
            runs = started(Path(folder))
            begun = time.monotonic()
            try:
                said = attacked(next(runs), [name])
            except subprocess.TimeoutExpired:
                said = [('hangs', []), ('hangs', [])]
            with contextlib.suppress(StopIteration):
                next(runs)
        words = next((lines[-1] for code, lines in said if code), '')
        codes = tuple(code for code, _ in said)
        print(f'{name:35} {codes!s:20} {time.monotonic() - begun:5.1f} s  {words[:150]}', flush=True)


if __name__ == '__main__':
    sys.path.insert(0, str(HERE))
    main()
