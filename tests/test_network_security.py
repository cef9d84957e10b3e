"""Tests of the authentication of processes and of attacks on the port of a run."""

import asyncio
import json
import os
import re
import socket
import sys
import threading
import time

import pytest
from attacker import ATTACKS, FAKE_DIGEST, attack_run, open_connection
from processes import TOUCH_SCRIPT, Run, find_free_port, start_run

from sinklab.errors import UserError
from sinklab.supervisor import cluster, coordinator
from sinklab.supervisor import coordinator as secrets
from sinklab.supervisor.cluster import ProcessInfo
from sinklab.supervisor.coordinator import (
    SECRET_VARIABLE,
    Connection,
    create_secret,
    find_secret,
)
from sinklab.supervisor.exit_status import ExitStatus
from sinklab.supervisor.messages import (
    DECODE_ERRORS,
    FROM_COORDINATOR_DECODER,
    MAX_MESSAGE_BYTES,
    NOT_A_RUN_PROCESS,
    TO_COORDINATOR_DECODER,
    WORKER_DECODER,
    GatherRequest,
    Welcome,
    WorkerExit,
    encode_message,
)

SECRET = 'a secret of the tests, long enough'
UNTIL_TOLD = TOUCH_SCRIPT + "while not (folder.path / 'go').exists(): time.sleep(0.05)"


@pytest.fixture
def run(tmp_path):
    yield from start_run(tmp_path)


@pytest.fixture(autouse=True)
def no_secret(monkeypatch, tmp_path_factory):
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    monkeypatch.setenv('SINKLAB_CACHE', str(tmp_path_factory.mktemp('cache')))


@pytest.mark.slow
def test_run_survives_all_attacks_on_its_port(run):
    assert_ended_well(attack_run(run, ATTACKS))


@pytest.mark.exhaustive
@pytest.mark.parametrize('name', ATTACKS)
def test_run_survives_each_attack_on_its_port(run, name):
    assert_ended_well(attack_run(run, [name]))


def assert_ended_well(results):
    """Assert that both processes exit with 0.

    Process 0 may have printed one line about a rejected process 1.
    """
    (first, lines), second = results
    assert (first, second) == (0, (0, []))
    assert ['process 1' in line for line in lines] in ([], [True])


@pytest.mark.slow
@pytest.mark.parametrize('theirs', ['another secret of the tests', ''], ids=['another', 'none'])
def test_process_with_wrong_secret_is_rejected_and_run_continues(run, monkeypatch, theirs):
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    run.start(UNTIL_TOLD, (0,))
    monkeypatch.setenv(SECRET_VARIABLE, theirs)
    monkeypatch.setenv('SINKLAB_CACHE', str(run.folder / 'another'))
    stranger = Run(run.folder)
    stranger.port = run.port
    ((code, lines),) = stranger.start(UNTIL_TOLD, (1,)).ended()
    assert (code, len(lines)) == (1, 1)
    assert SECRET_VARIABLE in lines[0]
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    run.start(UNTIL_TOLD, (1,))
    run.wait_for('here-1')
    (run.folder / 'go').touch()
    (code, lines), second = run.ended()
    assert (code, second) == (0, (0, []))
    assert ['process 1' in line for line in lines] == ([True] if theirs else [])


@pytest.mark.slow
def test_join_timeout_reports_process_with_wrong_secret(run, monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    run.start('', (0,), join=10.0)
    monkeypatch.setenv(SECRET_VARIABLE, 'another secret of the tests')
    for _ in range(2):  # the line is printed only once
        stranger = Run(run.folder)
        stranger.port = run.port
        assert [code for code, _ in stranger.start('', (1,)).ended()] == [1]
    ((code, (at_once, at_end)),) = run.ended()
    assert code == 1
    assert 'process 1' in at_once
    assert all(text in at_end for text in ('process 1', '10 s', SECRET_VARIABLE))


@pytest.mark.slow
def test_secret_file_is_private_and_removed_after_run(run):
    run.start(UNTIL_TOLD)
    run.wait_for('here-1')
    file = secrets.get_secret_path(run.port)
    assert len(file.read_text()) == 64
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    (run.folder / 'go').touch()
    assert run.ended() == [(0, [])] * 2
    assert not [*file.parent.iterdir()]


@pytest.mark.slow
def test_run_on_several_machines_without_secret_warns(run):
    results = run.start("group.gather('x', 0)", host=socket.gethostname()).ended()
    assert [code for code, _ in results] == [0, 0]
    assert SECRET_VARIABLE in results[0][1][-1]
    assert not results[1][1]


@pytest.mark.slow
def test_short_secret_is_rejected_without_printing_it(run, monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, 'hunter2')
    ((code, lines),) = run.start('', (0,)).ended()
    assert (code, len(lines)) == (1, 1)
    assert SECRET_VARIABLE in lines[0]
    assert 'hunter2' not in lines[0]


@pytest.mark.parametrize('given', ['', ' \n'], ids=['empty', 'blank'])
def test_empty_secret_is_rejected_on_one_and_several_machines(monkeypatch, given):
    """Test the value that a missing Kubernetes label or an unreadable file gives."""
    monkeypatch.setenv(SECRET_VARIABLE, given)
    for host in ('localhost', 'host0'):
        for read in (create_secret, find_secret):
            with pytest.raises(UserError, match=SECRET_VARIABLE):
                read(ProcessInfo(0, 2, host, 8476))


@pytest.mark.slow
def test_empty_secret_ends_run_with_one_line(run, monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, '')
    ((code, lines),) = run.start('', (0,)).ended()
    assert (code, len(lines)) == (1, 1)
    assert all(word in lines[0] for word in (SECRET_VARIABLE, 'openssl rand -hex 32', 'unset'))


def test_secret_is_created_only_for_single_machine(monkeypatch):
    local, remote = (ProcessInfo(1, 2, host, 8476) for host in ('localhost', 'host0'))
    secret = create_secret(local)
    assert find_secret(local).text == secret.text != create_secret(ProcessInfo(0, 2, '::1', 8477)).text
    assert create_secret(remote).text == find_secret(remote).text == ''
    monkeypatch.setattr(os, 'geteuid', lambda: 12345)  # the file belongs to another user
    assert find_secret(local).text == ''
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    assert create_secret(remote).text == find_secret(local).text == SECRET


@pytest.mark.parametrize('left', ['a' * 64, 'short', '', b'\xff' * 64, None], ids=repr)
@pytest.mark.parametrize('failing', ['replace', 'mkdir'])
def test_secret_is_same_on_both_sides_if_file_is_not_writable(monkeypatch, left, failing):
    """Test with the file of a killed run, with invalid files and without a file."""

    def refuse(*_, **__):
        raise OSError(30, 'Read-only file system')

    file = secrets.get_secret_path(8476)
    file.parent.mkdir(exist_ok=True)
    if left is not None:
        file.write_bytes(left if isinstance(left, bytes) else left.encode())
    monkeypatch.setattr(secrets.Path, failing, refuse)
    monkeypatch.setattr(secrets.Path, 'unlink', refuse)
    process_0, process_1 = (ProcessInfo(index, 2, '127.0.0.1', 8476) for index in (0, 1))
    secret = create_secret(process_0).text
    assert secret == find_secret(process_1).text == (left if left == 'a' * 64 else '')


def test_secret_of_killed_run_is_replaced():
    process = ProcessInfo(0, 2, '127.0.0.1', 8476)
    old_secret = create_secret(process).text
    new_secret = create_secret(process).text
    assert old_secret != new_secret == find_secret(process).text


def test_proof_depends_on_secret_role_and_nonce():
    run_secret, empty_secret = (secrets.RunSecret(text) for text in (SECRET, ''))
    proofs = {
        run_secret.prove('process', 'a', 1),
        run_secret.prove('hub', 'a', 1),
        run_secret.prove('process', 'b', 1),
    }
    assert len(proofs | {empty_secret.prove('process', 'a', 1)}) == 4
    assert SECRET not in proofs


GO = dict(kind='go', generation=1, port=1, after=None)
# Data that a server sends in place of process 0.
IMPOSTORS = {
    'go': json.dumps(GO).encode() + b'\n',
    'over': encode_message(WorkerExit(ExitStatus('done'))).replace(b'"end"', b'"over"', 1),
    'a false proof': json.dumps(dict(kind='challenge', nonce=FAKE_DIGEST)).encode()
    + b'\n'
    + encode_message(Welcome(FAKE_DIGEST)),
    '10 MB': b'x' * 10_000_000 + b'\n',
    'nesting': b'[' * 100_000 + b'\n',
}


@pytest.mark.slow
@pytest.mark.parametrize(
    'name',
    [pytest.param(name, marks=() if name == 'a false proof' else pytest.mark.exhaustive) for name in IMPOSTORS],
)
def test_impostor_of_process_0_starts_no_worker(run, name):
    with socket.create_server(('127.0.0.1', run.port)) as server:
        run.start(TOUCH_SCRIPT, (1,), join=5.0)
        thread = threading.Thread(target=answer_connections, args=(server, IMPOSTORS[name]), daemon=True)
        thread.start()
        ((code, lines),) = run.ended()
    assert code == 1
    assert re.search('process 0', lines[0])
    assert not (run.folder / 'here-1').exists()


def answer_connections(server, text):
    try:
        while True:
            connection, _ = server.accept()
            connection.sendall(text)
            connection.recv(1 << 16)
    except OSError:  # the server is closed
        return


@pytest.mark.parametrize(
    'line',
    [
        b'{}',
        b'null',
        b'[' * 100_000,
        b'{"kind":"hello","process":[],"count":2,"host":"x","pid":1}',
        b'{"kind":"beat","more":1}',
        b'{"kind":"at","place":"step","step":-1,"usual":null,"seconds":0}',
        b'{"kind":"at","place":"step","step":1e300,"usual":null,"seconds":0}',
        b'{"kind":"at","place":"step","step":1,"usual":1e999,"seconds":0}',
        b'{"kind":"end","end":{"cause":"nothing known"}}',
        b'{"kind":"end","end":{"cause":"lost","orderly":1}}',
    ],
    ids=range(10),
)
def test_decoder_rejects_message_that_does_not_match_its_schema(line):
    for decoder in (TO_COORDINATOR_DECODER, FROM_COORDINATOR_DECODER, WORKER_DECODER):
        with pytest.raises(DECODE_ERRORS):
            decoder.decode(line)


def test_decoder_escapes_control_characters_of_remote_text():
    message = WorkerExit(ExitStatus('lost', 'a\x1b[2Jb\udc80', 'one\n\ttwo\r\x07'))
    exit_status = TO_COORDINATOR_DECODER.decode(encode_message(message)).end
    assert (exit_status.words, exit_status.trace) == (r'a\x1b[2Jb\udc80', 'one\n\ttwo\\r\\x07')
    raw = b'{"kind":"end","end":{"cause":"lost","words":"\\u001b[2J"}}'
    assert TO_COORDINATOR_DECODER.decode(raw).end.words == r'\x1b[2J'


class Peer:
    """A connection of the coordinator and its other end."""

    def __init__(self, silence=60.0):
        self.heard, self.why = [], None
        self.connection = Connection(silence, lambda _: None, self.receive, self.lost)

    def receive(self, connection, message):
        self.heard.append(message)

    def lost(self, connection):
        self.why = connection.end_reason

    async def open(self):
        own_socket, self.other = socket.socketpair()
        await asyncio.get_running_loop().create_connection(lambda: self.connection, sock=own_socket)
        return self


async def wait_until_settled():
    for _ in range(20):
        await asyncio.sleep(0.01)


@pytest.mark.slow
def test_connection_that_never_reads_is_dropped_without_delay():
    async def check():
        silent_peer, other_peer = await Peer().open(), await Peer().open()
        silent_peer.connection.is_authenticated = True
        start_time, num_sent = time.monotonic(), 0
        while not silent_peer.connection.end_reason:
            silent_peer.connection.send(GatherRequest(1, 'x', 'y' * (1 << 20)))
            num_sent += 1
        other_peer.connection.send(GatherRequest(1, 'x', 'y'))
        assert time.monotonic() - start_time < 2
        assert num_sent <= (coordinator.MAX_UNREAD_BYTES >> 20) + 2
        await wait_until_settled()
        assert 'read' in silent_peer.why
        assert other_peer.why is None
        assert other_peer.other.recv(100) == encode_message(GatherRequest(1, 'x', 'y'))

    asyncio.run(check())


@pytest.mark.slow
def test_connection_with_small_backlog_is_dropped_after_timeout():
    async def check():
        silent_peer = await Peer(silence=0.1).open()
        silent_peer.connection.send(GatherRequest(1, 'x', 'y' * (1 << 20)))
        await wait_until_settled()
        silent_peer.connection.last_heard_time = time.monotonic()
        silent_peer.connection.check_timeouts(time.monotonic())
        await wait_until_settled()
        assert 'read' in silent_peer.why

    asyncio.run(check())


def test_connection_limits_message_size_by_authentication():
    async def check(authenticated, size):
        peer = await Peer().open()
        peer.connection.is_authenticated = authenticated
        threading.Thread(
            target=send_all, args=(peer.other, encode_message(GatherRequest(1, 'x', 'y' * size)))
        ).start()
        while not peer.heard and peer.why is None:
            await asyncio.sleep(0.01)
        return len(peer.heard)

    assert [asyncio.run(check(*case)) for case in ((False, 100), (False, 10_000), (True, 10_000_000))] == [1, 0, 1]
    assert asyncio.run(check(True, MAX_MESSAGE_BYTES)) == 0


def send_all(connection, content):
    try:
        connection.sendall(content)
    except OSError:  # the connection was dropped
        return


def test_connection_with_malformed_message_is_closed_alone():
    async def check():
        bad_peer, good_peer = await Peer().open(), await Peer().open()
        bad_peer.other.sendall(b'{"kind":"gather","number":-1}\n')
        good_peer.other.sendall(encode_message(GatherRequest(1, 'x', '')))
        await wait_until_settled()
        assert (bad_peer.why, good_peer.why) == (NOT_A_RUN_PROCESS, None)
        assert (len(bad_peer.heard), len(good_peer.heard)) == (0, 1)

    asyncio.run(check())


def test_listeners_bind_only_to_given_local_address():
    port = find_free_port()
    sockets, reason = coordinator.open_listeners('127.0.0.1', port, 1)
    assert [listener.getsockname()[:2] for listener in sockets] == [('127.0.0.1', port)]
    assert reason == ''
    with pytest.raises(UserError):
        coordinator.open_listeners('127.0.0.1', port, 1)
    sockets[0].close()


@pytest.mark.parametrize(
    ('host', 'found'),
    [
        ('192.0.2.1', [(socket.AF_INET, 1, 6, '', ('192.0.2.1', 0))]),  # the address of a gateway of this machine
        ('node07', [(socket.AF_INET, 1, 6, '', ('127.0.1.1', 0))]),  # as Debian resolves its own host name
        ('unknown', socket.gaierror(-2, 'Name or service not known')),
    ],
)
def test_listeners_bind_to_all_interfaces_if_address_is_not_local(monkeypatch, host, found):
    def getaddrinfo(*_, **__):
        if isinstance(found, OSError):
            raise found
        return found

    port = find_free_port()
    monkeypatch.setattr(socket, 'getaddrinfo', getaddrinfo)
    (listener,), reason = coordinator.open_listeners(host, port, 1)
    monkeypatch.undo()
    assert host in reason
    with listener, open_connection(('127.0.0.1', port)):
        assert listener.getsockname()[0] in ('::', '0.0.0.0')


def test_missing_jax_module_is_reported_with_flags(monkeypatch):
    monkeypatch.setitem(sys.modules, 'jax._src.clusters', None)
    with pytest.raises(UserError) as error:
        cluster.detect_process_info({'SLURM_JOB_ID': '1', 'SLURM_STEP_NODELIST': 'localhost', 'SLURM_NTASKS': '2'}, 5)
    assert cluster.FLAGS_HINT in str(error.value)
