"""How the supervisors of a run meet, and whom they turn away."""

import contextlib
import re
import signal
import socket
import threading
import time

import pytest
from processes import FOREVER, TOUCH, Run, only, run_of, started, wait_for_ears

from sinklab.supervisor.coordinator import find_free_port

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path):
    yield from started(tmp_path)


def test_a_number_that_is_taken_and_another_count_are_turned_away_and_the_run_goes_on(run):
    run.start(TOUCH + "while not (folder.path / 'go').exists(): time.sleep(0.1)")
    run.wait_for('here-1')
    strangers = run_of([*Run.start(run, '', (1,)).started[2:], *Run.start(run, '', (2,), 3).started[3:]])
    (code, lines), (other, others) = strangers.ended()
    assert (code, other) == (1, 1)
    assert re.search(r'--process=1 is used by process 1 \(host .*, pid \d+\); give', lines[0])
    assert 'has --processes=3, but process 0 has 2; give the same number to all' in others[0]
    (run.folder / 'go').touch()
    assert run_of(run.started[:2]).ended() == [(0, [])] * 2


def test_a_port_that_is_taken_and_nobody_who_answers_are_refused_in_one_line(run):
    with socket.create_server(('', run.port)):
        line = only(run.start('', (0,)).ended())
    assert 'cannot be opened for the other processes (Address already in use)' in line
    started = Run(run.folder).start('', (1,), join=1.0).ended()
    assert started[0][0] == 1
    assert re.match(r'no answer from 127.0.0.1:\d+ within 1 s .*; start process 0 on that host', only(started))


def test_a_port_that_a_run_at_its_end_still_has_is_waited_for(run):
    with socket.create_server(('', run.port)):
        wait_for_ears(run.start('').started[0])
        time.sleep(0.5)
    assert run.ended() == [(0, [])] * 2


def test_who_waits_for_its_port_can_be_stopped(run):
    with socket.create_server(('', run.port)):
        (started,) = run.start('', (0,), shutdown=20.0).started
        wait_for_ears(started)
        started.send_signal(signal.SIGTERM)
        ((code, lines),) = run.ended()
    assert (code, len(lines)) == (42, 1)


def test_who_did_not_come_is_named(run):
    said = run.start('', (0, 2), 4, join=2.0).ended()
    assert {code for code, _ in said} == {1}
    assert only(said) == 'process 1, 3 of 4 did not connect within 2 s; start all of them'


def test_strangers_do_not_disturb_the_meeting(run):
    run.start('group.gather("x", 0)', (0,))
    address = '127.0.0.1', run.port
    for said in (b'GET / HTTP/1.1\r\n\r\n', b'{"kind": "hello"}\n', b'{"kind": "end"}\n', b'[]\n', b'\xff\n'):
        for _ in range(100):
            with (
                contextlib.suppress(ConnectionRefusedError),
                socket.create_connection(address) as other,
            ):
                other.sendall(said)
                break
            time.sleep(0.1)
    run.start('group.gather("x", 0)', (1,))
    assert run.ended() == [(0, [])] * 2


def test_who_comes_again_before_the_end_of_its_run_waits_for_that_and_is_one_of_the_next(run):
    """Its scheduler was faster than the others, in each of which it has to be seen that it was gone."""
    run.start(TOUCH + FOREVER, settle=1.0)
    run.wait_for('here-1')
    run.started[1].kill()
    again = Run(run.folder)
    again.port = run.port
    again.start('group.gather("x", 0)', (1,))
    assert run_of(run.started[:1]).ended()[0][0] == 42
    again.start('group.gather("x", 0)', (0,))
    try:
        assert again.ended() == [(0, [])] * 2
    finally:
        run.started += again.started


def test_what_hangs_up_is_tried_again_and_refused_at_last(run):
    came = []

    def hang_up():
        with contextlib.suppress(OSError):  # the end of the test
            while True:
                server.accept()[0].close()
                came.append(1)

    with socket.create_server(('127.0.0.1', run.port)) as server:
        threading.Thread(target=hang_up, daemon=True).start()
        said = run.start('', (1,), join=1.0).ended()
    assert said[0][0] == 1
    assert len(came) > 2
    assert re.match(r'the program at 127.0.0.1:\d+ is not process 0 of a run; give the address', only(said))


def test_jobs_with_neighbouring_ports_do_not_take_each_others():
    """A port is let go again before jax opens it, and the other job may not yet have opened its own."""
    mine = [8476 + number for number in range(8)]
    theirs = [find_free_port(port) for port in mine]
    assert not {*theirs} & {*mine}
    assert len({*theirs}) == len(mine)
    assert 1024 <= find_free_port(65535) < 65535
