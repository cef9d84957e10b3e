"""Tests of coordinator failures, which end the run in the same way for all processes."""

import socket
import sys
import threading

import pytest
from processes import SHORT_TIMEOUTS, find_free_port

from sinklab.cli.process_flags import supervise_run
from sinklab.errors import UserError
from sinklab.run_dir import RunDir
from sinklab.supervisor import coordinator, supervisor
from sinklab.supervisor import coordinator as coordinator_module
from sinklab.supervisor.cluster import ProcessInfo
from sinklab.supervisor.exit_status import ExitStatus
from sinklab.supervisor.messages import (
    FROM_COORDINATOR_DECODER,
    Challenge,
    Hello,
    MessageChannel,
    ProgressReport,
    RunExit,
    Timeouts,
    WorkerExit,
)

PATIENCE = Timeouts(**SHORT_TIMEOUTS | dict(join=10.0, silence=5.0))


def raise_error(error):
    def function(*_, **__):
        raise error

    return function


class Group:
    """Coordinator with client connections that send the messages of a test."""

    def __init__(self, judge=lambda end, able: (end, False), count=2):
        self.hub = coordinator.Coordinator(count, PATIENCE, judge)
        self.secret = self.hub.secret = coordinator_module.RunSecret('a secret of the tests')
        port = find_free_port()
        self.hub.open('127.0.0.1', port)
        own, other = socket.socketpair()
        self.hub.attach_local(other)
        self.hub.thread.start()
        links = [own, *(socket.create_connection(('127.0.0.1', port)) for _ in range(count - 1))]
        self.wires = [MessageChannel(link, PATIENCE.silence, FROM_COORDINATOR_DECODER) for link in links]
        self.ends, self.welcomed = {}, threading.Barrier(count + 1)
        self.threads = [threading.Thread(target=self.listen, args=(index,)) for index in range(count)]
        for thread in self.threads:
            thread.start()

    def listen(self, index):
        wire, nonce = self.wires[index], f'{index}' * 64
        for message in wire:
            match message:
                case Challenge():
                    proof = self.secret.prove('process', message.nonce, nonce, index, len(self.wires))
                    wire.send(Hello(index, len(self.wires), 'host', 1, nonce, proof))
                case coordinator.StartWorkers():
                    self.welcomed.wait(5)
                case RunExit(end=end):
                    self.ends[index] = end
                    wire.close()
                    return

    def ended(self):
        """Wait for the coordinator to finish and return the exit status of each process."""
        for thread in [*self.threads, self.hub.thread]:
            thread.join(10)
            assert not thread.is_alive()
        return [self.ends.get(index) for index in range(len(self.wires))]


def assert_crashed(ends):
    assert [end and end.cause for end in ends] == ['crashed'] * len(ends)
    for end in ends:
        assert end.words == "KeyError: 'bug'"
        assert 'Traceback' in end.trace
        assert 'test_coordinator.py' in end.trace, 'the traceback names the file'


@pytest.mark.slow
def test_error_in_restart_decision_crashes_all_processes():
    group = Group(judge=raise_error(KeyError('bug')))
    group.welcomed.wait(5)
    group.wires[1].send(WorkerExit(ExitStatus('crashed'), generation=1))
    assert_crashed(group.ended())


@pytest.mark.slow
def test_error_after_lost_connection_crashes_remaining_processes():
    group = Group(judge=raise_error(KeyError('bug')), count=3)
    group.welcomed.wait(5)
    group.wires[1].close()
    assert_crashed([group.ended()[index] for index in (0, 2)])


def test_error_in_message_handler_crashes_all_processes(monkeypatch):
    monkeypatch.setattr(coordinator.WorkerState, 'update_progress', raise_error(KeyError('bug')))
    group = Group()
    group.welcomed.wait(5)
    group.wires[1].send(ProgressReport('step', 1, None, 0.0, generation=1))
    assert_crashed(group.ended())


def test_error_in_hang_detection_crashes_all_processes(monkeypatch):
    monkeypatch.setattr(coordinator, 'find_hung_worker', raise_error(KeyError('bug')))
    group = Group()
    group.welcomed.wait(5)
    assert_crashed(group.ended())


def test_user_error_in_coordinator_is_reported_to_all_processes(monkeypatch):
    monkeypatch.setattr(coordinator, 'find_free_port', raise_error(UserError('no port of this machine is free')))
    assert Group().ended() == [ExitStatus('refused', 'no port of this machine is free')] * 2


def test_error_in_asyncio_callback_crashes_all_processes(monkeypatch):
    group = Group()
    group.welcomed.wait(5)
    monkeypatch.setattr(coordinator.Coordinator, 'challenge_connection', raise_error(KeyError('bug')))
    with socket.create_connection(('127.0.0.1', group.hub.port)):
        assert_crashed(group.ended())


def supervised(folder, *script):
    (folder / 'config.json').write_text('{}')
    command = [sys.executable, '-c', '\n'.join(script)]
    return supervise_run(command, ProcessInfo(), PATIENCE, RunDir(folder), lambda: True, 0)


@pytest.mark.parametrize(
    ('error', 'code', 'words'),
    [(KeyError('bug'), 70, "KeyError: 'bug'"), (UserError('damaged'), 1, 'damaged')],
    ids=['an error', 'a refusal'],
)
def test_coordinator_failure_sets_exit_code_and_message(monkeypatch, capsys, tmp_path, error, code, words):
    monkeypatch.setattr(supervisor.RestartPolicy, 'decide_restart', raise_error(error))
    assert supervised(tmp_path, 'raise SystemExit(3)') == code
    said = capsys.readouterr().err
    assert said.splitlines()[-1] == f'sinklab train: {words}'
    assert ('Traceback' in said) == (code == 70)


def test_coordinator_startup_failure_ends_run(monkeypatch, tmp_path, capsys):
    def run(coroutine):
        coroutine.close()
        raise OSError(24, 'Too many open files')

    monkeypatch.setattr(coordinator.asyncio, 'run', run)
    assert supervised(tmp_path) == 70
    assert 'OSError: [Errno 24] Too many open files' in capsys.readouterr().err.splitlines()[-1]
