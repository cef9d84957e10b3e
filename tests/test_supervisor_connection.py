"""Tests of the connection of supervisors of one run, and of rejected connections."""

import contextlib
import re
import signal
import socket
import threading
import time

import pytest
from processes import (
    ENDLESS_SCRIPT,
    TOUCH_SCRIPT,
    Run,
    get_single_line,
    make_run,
    start_run,
    wait_for_sigterm_handler,
)

from sinklab.supervisor.coordinator import find_free_port

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path):
    yield from start_run(tmp_path)


def test_taken_process_index_and_wrong_count_are_rejected_and_run_continues(run):
    run.start(TOUCH_SCRIPT + "while not (folder.path / 'go').exists(): time.sleep(0.1)")
    run.wait_for('here-1')
    strangers = make_run([*Run.start(run, '', (1,)).started[2:], *Run.start(run, '', (2,), 3).started[3:]])
    (code, lines), (other_code, other_lines) = strangers.ended()
    assert (code, other_code) == (1, 1)
    assert re.search(r'--process=1 .*\(host .*, pid \d+\)', lines[0])
    assert re.search(r'--processes=3\b.*\b2\b', other_lines[0])
    (run.folder / 'go').touch()
    assert make_run(run.started[:2]).ended() == [(0, [])] * 2


def test_occupied_port_and_unreachable_coordinator_are_rejected_with_one_line(run):
    with socket.create_server(('', run.port)):
        line = get_single_line(run.start('', (0,)).ended())
    assert 'Address already in use' in line
    results = Run(run.folder).start('', (1,), join=1.0).ended()
    assert results[0][0] == 1
    assert re.search(r'127.0.0.1:\d+ .*\b1 s\b', get_single_line(results))


def test_coordinator_waits_for_port_of_ending_run(run):
    with socket.create_server(('', run.port)):
        wait_for_sigterm_handler(run.start('').started[0])
        time.sleep(0.5)
    assert run.ended() == [(0, [])] * 2


def test_sigterm_stops_coordinator_waiting_for_port(run):
    with socket.create_server(('', run.port)):
        (process,) = run.start('', (0,), shutdown=20.0).started
        wait_for_sigterm_handler(process)
        process.send_signal(signal.SIGTERM)
        ((code, lines),) = run.ended()
    assert (code, len(lines)) == (42, 1)


def test_missing_processes_are_listed_after_join_timeout(run):
    results = run.start('', (0, 2), 4, join=2.0).ended()
    assert {code for code, _ in results} == {1}
    assert re.search(r'\b1, 3 of 4 .*\b2 s\b', get_single_line(results))


def test_invalid_connections_do_not_affect_run(run):
    run.start('group.gather("x", 0)', (0,))
    address = '127.0.0.1', run.port
    for content in (b'GET / HTTP/1.1\r\n\r\n', b'{"kind": "hello"}\n', b'{"kind": "end"}\n', b'[]\n', b'\xff\n'):
        for _ in range(100):
            with (
                contextlib.suppress(ConnectionRefusedError),
                socket.create_connection(address) as connection,
            ):
                connection.sendall(content)
                break
            time.sleep(0.1)
    run.start('group.gather("x", 0)', (1,))
    assert run.ended() == [(0, [])] * 2


def test_restarted_process_waits_for_end_of_run_and_joins_next_run(run):
    """Restart one process before the others have noticed its end."""
    run.start(TOUCH_SCRIPT + ENDLESS_SCRIPT, settle=1.0)
    run.wait_for('here-1')
    run.started[1].kill()
    restarted_run = Run(run.folder)
    restarted_run.port = run.port
    restarted_run.start('group.gather("x", 0)', (1,))
    assert make_run(run.started[:1]).ended()[0][0] == 42
    restarted_run.start('group.gather("x", 0)', (0,))
    try:
        assert restarted_run.ended() == [(0, [])] * 2
    finally:
        run.started += restarted_run.started


def test_closing_server_is_retried_and_rejected_after_timeout(run):
    connections = []

    def hang_up():
        with contextlib.suppress(OSError):  # the end of the test
            while True:
                server.accept()[0].close()
                connections.append(1)

    with socket.create_server(('127.0.0.1', run.port)) as server:
        threading.Thread(target=hang_up, daemon=True).start()
        results = run.start('', (1,), join=1.0).ended()
    assert results[0][0] == 1
    assert len(connections) > 2
    assert re.search(r'127.0.0.1:\d+ .*process 0', get_single_line(results))


def test_find_free_port_does_not_collide_for_neighboring_ports():
    """Test ports that are released again before JAX opens them."""
    ports = [8476 + number for number in range(8)]
    free_ports = [find_free_port(port) for port in ports]
    assert not {*free_ports} & {*ports}
    assert len({*free_ports}) == len(ports)
    assert 1024 <= find_free_port(65535) < 65535
