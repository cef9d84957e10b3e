"""Tests of how the processes of a run connect, and of the port that they use."""

import inspect
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import pytest
from attacker import ATTACKS, list_listening_addresses
from processes import (
    ENDLESS_SCRIPT,
    TOUCH_SCRIPT,
    Run,
    find_free_port,
    get_single_line,
    make_run,
    manage_run,
    wait_for_sigterm_handler,
)

from sinklab.errors import UserError
from sinklab.supervisor.cluster import ProcessInfo
from sinklab.supervisor.supervisor import choose_bind_address

WAIT_SCRIPT = TOUCH_SCRIPT + "while not (folder.path / 'go').exists(): time.sleep(0.05)"


@pytest.fixture
def run(tmp_path):
    yield from manage_run(tmp_path)


@pytest.mark.slow
def test_second_process_with_same_index_ends_run_and_is_named(run):
    run.start(TOUCH_SCRIPT + ENDLESS_SCRIPT)
    run.wait_for('here-1')
    run.start('', (1,), join=1.0)
    results = run.wait_for_results()
    assert [code for code, _ in results[:2]] == [42, 42]
    assert all('process 1' in lines[-1] for _, lines in results[:2])


def make_certificate(folder):
    """Make a certificate and its own authority; return the environment variables of jax with their paths."""
    (folder / 'extensions').write_text('subjectAltName=URI:spiffe://sinklab/run')
    for command in (
        'req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 2 -subj /CN=ca',
        'req -newkey rsa:2048 -nodes -keyout run.key -out run.csr -subj /CN=run',
        'x509 -req -in run.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out run.pem -days 2 -extfile extensions',
    ):
        subprocess.run(['openssl', *command.split()], cwd=folder, check=True, capture_output=True)
    files = dict(CERT_FILE='run.pem', KEY_FILE='run.key', CA_FILE='ca.pem')
    paths = {f'JAX_MTLS_{name}': str(folder / file) for name, file in files.items()}
    return paths | {'JAX_MTLS_PEER_URI_PREFIX': 'spiffe://sinklab/'}


CLIENT_SCRIPT = """
import jax
jax.distributed.initialize('{}', 2, 1, cluster_detection_method='deactivate', initialization_timeout=1)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    'mtls_cert_file' not in inspect.signature(jax.distributed.initialize).parameters,
    reason=f'jax {jax.__version__} has no mutual TLS',
)
@pytest.mark.skipif(not shutil.which('openssl'), reason='the command openssl is not installed')
def test_client_without_certificate_has_no_effect(run, tmp_path, monkeypatch):
    variables = make_certificate(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    run.start(WAIT_SCRIPT)
    run.wait_for('here-1')
    for name in variables:
        monkeypatch.delenv(name)
    client = subprocess.run(
        [sys.executable, '-c', CLIENT_SCRIPT.format(f'127.0.0.1:{run.port}')], capture_output=True
    )
    assert client.returncode != 0
    (run.folder / 'go').touch()
    assert run.wait_for_results() == [(0, [])] * 2


@pytest.mark.slow
def test_different_number_of_processes_is_rejected_by_all(run):
    run.start('', (0,)).start('', (1,), 3)
    results = run.wait_for_results()
    assert [code for code, _ in results] == [1, 1]
    for _, (line,) in results:
        assert re.search(r'process 1 .*--processes=3\b.*\b2\b', line)


@pytest.mark.slow
def test_occupied_port_and_unreachable_coordinator_are_rejected_with_one_line(run):
    with socket.create_server(('127.0.0.1', run.port)):
        line = get_single_line(run.start('', (0,)).wait_for_results())
    assert 'Address already in use' in line
    results = Run(run.folder).start('', (1,), join=1.0).wait_for_results()
    assert results[0][0] == 1
    assert re.search(r'\b1 s\b.* 127.0.0.1:\d+', get_single_line(results))


@pytest.mark.slow
def test_process_0_waits_for_port_of_ending_run(run):
    with socket.create_server(('127.0.0.1', run.port)):
        wait_for_sigterm_handler(run.start('', (0,)).processes[0])
        time.sleep(0.5)
    run.start('', (1,))
    assert run.wait_for_results() == [(0, [])] * 2


@pytest.mark.slow
def test_sigterm_stops_process_0_that_waits_for_its_port(run):
    with socket.create_server(('127.0.0.1', run.port)):
        (process,) = run.start('', (0,), shutdown=20.0).processes
        wait_for_sigterm_handler(process)
        process.send_signal(signal.SIGTERM)
        ((code, lines),) = run.wait_for_results()
    assert (code, len(lines)) == (42, 1)


@pytest.mark.slow
def test_sigterm_stops_process_that_waits_for_others(run):
    (process,) = run.start('', (0,)).processes
    while ('127.0.0.1', run.port) not in list_listening_addresses(process.pid):
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    start_time = time.monotonic()
    ((code, lines),) = run.wait_for_results()
    assert (code, len(lines)) == (42, 1)
    assert time.monotonic() - start_time < 5


@pytest.mark.slow
def test_missing_processes_end_the_others_after_join_timeout(run):
    results = run.start('', (0, 2), 4, join=2.0).wait_for_results()
    assert [(code, len(lines)) for code, lines in results] == [(1, 1)] * 2
    for _, (line,) in results:
        assert {'2 s', f'127.0.0.1:{run.port}'} <= {*re.findall(r'2 s|[\d.]+:\d+', line)}


@pytest.mark.slow
def test_restarted_process_joins_next_run(run):
    """Restart one process before the others have noticed its end."""
    run.start(TOUCH_SCRIPT + ENDLESS_SCRIPT)
    run.wait_for('here-1')
    run.processes[1].kill()
    restarted_run = Run(run.folder)
    restarted_run.port = run.port
    restarted_run.start('group.all_gather("x", 0)', (1,))
    try:
        assert make_run(run.processes[:1]).wait_for_results()[0][0] == 42
        restarted_run.start('group.all_gather("x", 0)', (0,))
        assert restarted_run.wait_for_results() == [(0, [])] * 2
    finally:
        run.processes += restarted_run.processes


@pytest.mark.slow
def test_other_program_at_address_of_process_0_is_reported_after_timeout(run):
    connections = []

    def close_connections():
        while True:
            try:
                server.accept()[0].close()
            except OSError:  # the end of the test
                return
            connections.append(1)

    with socket.create_server(('127.0.0.1', run.port)) as server:
        threading.Thread(target=close_connections, daemon=True).start()
        results = run.start('', (1,), join=1.0).wait_for_results()
    assert results[0][0] == 1
    assert len(connections) > 0
    assert re.search(r'process 0 .*127.0.0.1:\d+', get_single_line(results))


@pytest.mark.slow
def test_run_survives_all_attacks_on_its_port(run):
    """Attack the port before process 1 connects, and afterwards."""
    stop_event, threads = threading.Event(), []
    run.start(WAIT_SCRIPT, (0,))
    address = ('127.0.0.1', run.port)
    deadline = time.monotonic() + 20
    while address not in list_listening_addresses(run.processes[0].pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    for indices in ((1,), ()):
        threads += [threading.Thread(target=attack, args=(address, stop_event)) for attack in ATTACKS.values()]
        for thread in threads[-len(ATTACKS) :]:
            thread.start()
        time.sleep(0.5)
        run.start(WAIT_SCRIPT, indices)
        run.wait_for('here-1')
    time.sleep(2)
    (run.folder / 'go').touch()
    try:
        assert run.wait_for_results() == [(0, [])] * 2
    finally:
        stop_event.set()
        for thread in threads:
            thread.join()


@pytest.mark.slow
def test_run_opens_only_its_port_on_given_interface(run):
    run.start(WAIT_SCRIPT)
    run.wait_for('here-1')
    addresses = [list_listening_addresses(process.pid) for process in run.processes]
    (run.folder / 'go').touch()
    assert run.wait_for_results() == [(0, [])] * 2
    assert addresses == [{('127.0.0.1', run.port)}, set()]


def test_bind_address_is_given_local_address():
    port = find_free_port()
    assert choose_bind_address(ProcessInfo(0, 2, '127.0.0.1', port)) == (f'127.0.0.1:{port}', '')
    with socket.create_server(('127.0.0.1', port)), pytest.raises(UserError):
        choose_bind_address(ProcessInfo(0, 2, '127.0.0.1', port))


@pytest.mark.parametrize(
    ('host', 'lookup_result'),
    [
        ('192.0.2.1', [(socket.AF_INET, 1, 6, '', ('192.0.2.1', 0))]),  # the address of a gateway of this machine
        ('node07', [(socket.AF_INET, 1, 6, '', ('127.0.1.1', 0))]),  # as Debian resolves its own host name
        ('unknown', socket.gaierror(-2, 'Name or service not known')),
    ],
)
def test_bind_address_is_all_interfaces_if_address_is_not_local(monkeypatch, host, lookup_result):
    def getaddrinfo(*_, **__):
        if isinstance(lookup_result, OSError):
            raise lookup_result
        return lookup_result

    monkeypatch.setattr(socket, 'getaddrinfo', getaddrinfo)
    bind_address, reason = choose_bind_address(ProcessInfo(0, 2, host, find_free_port()))
    assert bind_address is None
    assert host in reason
