"""Supervisors that meet, children that talk through them, and how all of them end: real processes, without jax."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sinklab.folder import Folder

HERE = Path(__file__).parent
QUICK = dict(join=20.0, silence=2.0, busy=20.0, settle=0.5, beat=0.2, orderly=10.0, parting=2.0)
FOREVER = "group.at('step', 1, None)\nwhile True: time.sleep(0.1)\n"
LISTENING = 'heard = []\nsignal.signal(signal.SIGTERM, lambda number, _: heard.append(number))\n'


def free_port():
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        return listener.getsockname()[1]


class Run:
    """Some processes of one run, started as a scheduler starts them."""

    def __init__(self, folder):
        self.folder, self.port, self.started = folder, free_port(), []

    def start(self, script, indices=(0, 1), count=2, restarts=0, **patience):
        for index in indices:
            given = dict(index=index, count=count, port=self.port, folder=str(self.folder), script=script)
            given |= dict(patience={**QUICK, **patience}, restarts=restarts)
            process = subprocess.Popen(
                [sys.executable, str(HERE / 'supervised.py'), json.dumps(given)],
                env={**os.environ, 'PYTHONPATH': str(HERE.parent)},
                stderr=subprocess.PIPE,
                text=True,
            )
            self.started.append(process)
        return self

    def ended(self, timeout=30):
        """[(exit code, lines of stderr)] of each."""
        said = [process.communicate(timeout=timeout)[1].splitlines() for process in self.started]
        return [(process.returncode, lines) for process, lines in zip(self.started, said, strict=True)]

    def wait_for(self, name, seconds=20):
        """Until the children have touched a file."""
        start = time.monotonic()
        while not (self.folder / name).exists():
            assert time.monotonic() - start < seconds, name
            time.sleep(0.05)


@pytest.fixture
def run(tmp_path):
    (tmp_path / 'config.json').write_text('{}')
    run = Run(tmp_path)
    yield run
    for process in run.started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()


TOUCH = "(folder.path / f'here-{index}').touch()\n"


def pid_of_child(process):
    return int(Path(f'/proc/{process.pid}/task/{process.pid}/children').read_text().split()[0])


def test_all_gather_what_each_has_and_end_well(run):
    script = (
        "for turn in range(3): (folder.path / f'{index}-{turn}').write_text(repr(group.gather('x', [index, turn])))"
    )
    assert run.start(script, (0, 1, 2), 3).ended() == [(0, [])] * 3
    for turn in range(3):
        texts = {(run.folder / f'{index}-{turn}').read_text() for index in range(3)}
        assert texts == {repr([[0, turn], [1, turn], [2, turn]])}
    assert not (run.folder / 'processes').exists()


def only(said):
    """The one line that each process has said."""
    assert all(len(lines) == 1 for _, lines in said), said
    assert all(lines[0].startswith('sinklab train: ') for _, lines in said), said
    return said[0][1][0].removeprefix('sinklab train: ')


# What process 1 does while process 0 waits -> exit code, what all say of it, kind in outcome.json.
ENDS = [
    ("raise Refusal('no such row')", 1, r'process 1 \(host .*\): no such row', None),
    ("end = End('diverged', 'loss is nan', orderly=True)", 3, 'process 1 .*: loss is nan', 'diverged'),
    ("raise OSError(5, 'Input/output error')", 42, r'process 1 .*: OSError: \[Errno 5\] .*; start the same', 'lost'),
    (
        "from jax.errors import JaxRuntimeError; raise JaxRuntimeError('gloo')",
        42,
        'process 1 .*: .*gloo; start',
        'lost',
    ),
    ('os.kill(os.getpid(), signal.SIGKILL)', 42, 'process 1 .*: killed by SIGKILL; start', 'lost'),
    ('os.abort()', 42, 'process 1 .*: aborted by the runtime of jax; start', 'lost'),
    ('os._exit(9)', 70, 'process 1 .*: exit code 9, without a word', 'crashed'),
]


@pytest.mark.parametrize(('act', 'code', 'words', 'kind'), ENDS, ids=[act.split(';')[-1][:30] for act, *_ in ENDS])
def test_all_end_as_the_one_that_fails_and_say_so_in_one_line(run, act, code, words, kind):
    start = time.monotonic()
    said = run.start(f'if index: {act}\nelse:\n  while True: time.sleep(0.1)', orderly=1.0).ended()
    assert [ended for ended, _ in said] == [code] * 2
    assert re.match(words, only(said))
    assert said[0][1] == said[1][1]
    assert time.monotonic() - start < 15
    if kind:
        assert {'kind': kind, 'exit_code': code}.items() <= Folder(run.folder).read('outcome').items()
    else:
        assert not (run.folder / 'outcome.json').exists()


def test_what_all_refuse_is_said_as_one_has_said_it(run):
    said = run.start("group.gather('x', 0)\nraise Refusal('no such row')").ended()
    assert (only(said), {code for code, _ in said}) == ('no such row', {1})


def test_a_bug_is_70_with_its_traceback_at_process_0_and_in_the_log(run):
    first, second = run.start('if index: 1 / 0\n' + FOREVER).ended()
    assert first[0] == second[0] == 70
    assert 'ZeroDivisionError' in '\n'.join(first[1][:-1])
    assert len(second[1]) == 1
    assert 'ZeroDivisionError' in (run.folder / 'processes' / '1.log').read_text()
    assert 'File' in (run.folder / 'processes' / '0.log').read_text()  # where the other was


def test_of_several_ends_the_cause_is_told_and_not_what_came_of_it(run):
    """Process 0 sees first that process 1 is gone, as its collectives do."""
    script = 'if index:\n  group.gather("x", 0); time.sleep(0.3); os.kill(os.getpid(), signal.SIGKILL)\n'
    script += 'else:\n  group.gather("x", 0); raise OSError("Connection closed by peer")'
    assert 'process 1' in only(run.start(script).ended())


def gone(pid):
    """Whether a process ends within seconds."""
    for _ in range(50):
        if not Path(f'/proc/{pid}').exists():
            return True
        time.sleep(0.1)
    return False


def test_the_death_of_a_supervisor_ends_its_child_and_all_others(run):
    for victim in (0, 1):
        again = Run(run.folder)
        again.start(TOUCH + FOREVER)
        for index in (0, 1):
            again.wait_for(f'here-{index}')
            (run.folder / f'here-{index}').unlink()
        child = pid_of_child(again.started[victim])
        again.started[victim].kill()
        code, lines = again.ended(10)[1 - victim]
        assert code == 42
        assert re.search(f'process {victim} .*gone; start the same command again', lines[0])
        assert gone(child)


def test_a_child_that_is_stopped_is_named(run):
    run.start(TOUCH + FOREVER)
    run.wait_for('here-1')
    child = pid_of_child(run.started[1])
    os.kill(child, signal.SIGSTOP)
    said = run.ended()
    assert {code for code, _ in said} == {42}
    assert re.match(rf'process 1 \(host .*, pid {child}\): not heard of for . s, as if it were stopped;', only(said))


def test_a_supervisor_that_is_stopped_is_named(run):
    run.start(TOUCH + FOREVER)
    run.wait_for('here-1')
    run.started[1].send_signal(signal.SIGSTOP)
    code, lines = run_of(run.started[:1]).ended()[0]
    assert code == 42
    assert re.search(r'process 1 .*: not heard of for 2 s; start', lines[0])


def run_of(started):
    part = Run(None)
    part.started = started
    return part


# What process 1 does in the time in which process 0 waits in step 3 -> what is said of it; None: all end well.
STEPS = {
    "group.at('reading', 3); time.sleep(60)": r'process 1 .* did not arrive \(reading its batch of step 3 for \d s\)',
    "group.at('step', 2, 0.05); time.sleep(60)": r'process 1 .* did not arrive \(in step 2 for \d s\)',
    "group.at('step', 3, 0.05); time.sleep(60)": 'all are there',
    "group.at('saving', 3); time.sleep(3); group.gather('x', 0)": None,
}


@pytest.mark.parametrize('act', STEPS)
def test_a_step_that_does_not_end_names_who_did_not_arrive_but_a_save_may_take_its_time(run, act):
    script = f"if index: {act}\nelse:\n  group.at('step', 3, 0.05); group.gather('x', 0)"
    said = run.start(script, floor=1.0, multiple=2.0).ended()
    if not STEPS[act]:
        assert said == [(0, [])] * 2
        return
    assert {code for code, _ in said} == {42}
    assert re.match(rf'in step 3 for \d s, usual 0.05 s: {STEPS[act]}; start', only(said))
    assert 'gather' in (run.folder / 'processes' / '0.log').read_text()  # the stacks


def test_a_process_that_has_begun_stops_as_it_will_and_all_with_it(run):
    script = LISTENING + TOUCH + "while not any(group.gather('x', len(heard))): time.sleep(0.1)\n"
    script += "end = End('stopped', 'saved at step 7', orderly=True)"
    run.start(script)
    run.wait_for('here-1')
    time.sleep(0.6)  # it is known to listen
    run.started[1].terminate()
    said = run.ended()
    assert [code for code, _ in said] == [42, 42]
    assert said[1][1].pop(0) == 'sinklab train: stopping after this step; once more to stop at once'
    assert only(said).startswith('saved at step 7; go on with: ')


@pytest.mark.parametrize(('number', 'code'), [(signal.SIGTERM, 42), (signal.SIGINT, 130)])
def test_a_signal_before_it_has_begun_ends_all_at_once(run, number, code):
    run.start(TOUCH + FOREVER)
    run.wait_for('here-0')
    run.started[1].send_signal(number)
    said = run.ended()
    assert {code for code, _ in said} == {code}
    assert f'{number.name} came before the first step; nothing was begun' in only(said)


def test_a_second_signal_ends_all_at_once_whatever_they_do(run):
    run.start(LISTENING + TOUCH + FOREVER)
    run.wait_for('here-1')
    time.sleep(0.6)
    run.started[0].terminate()
    time.sleep(1.5)
    run.started[0].terminate()
    said = run.ended()
    assert {code for code, _ in said} == {42}
    assert 'stopped at once; what was saved before is intact' in said[1][1][0]


def test_supervisors_start_all_of_them_again_as_often_as_they_are_told(run):
    script = "(folder.path / 'checkpoints' / str(len([*folder.path.glob('checkpoints/*')]))).mkdir(parents=True)\n"
    script = f'if not index:\n  {script}  raise OSError("storage")\n' + FOREVER
    said = run.start(script, restarts=2).ended()
    assert [code for code, _ in said] == [42, 42]
    for _, lines in said:
        assert ['starting again' in line for line in lines[-3:]] == [True, True, False]
    assert len([*run.folder.glob('checkpoints/*')]) == 3


def test_after_restarts_without_a_new_checkpoint_it_is_given_up(run):
    said = run.start('if index: raise OSError("storage")\n' + FOREVER, restarts=9).ended()
    assert [code for code, _ in said] == [70, 70]
    assert 'attempt 3 in a row without a new checkpoint' in said[1][1][-1]


def test_a_scheduler_is_told_after_starts_without_a_new_checkpoint_that_it_is_a_bug(run):
    codes = []
    for _ in range(5):
        ((code, _),) = Run(run.folder).start('raise OSError("storage")', (0,), 1).ended()
        codes.append(code)
    assert codes == [42, 42, 42, 42, 70]
    assert Folder(run.folder).read('outcome')['fruitless'] == 5


def test_a_number_that_is_taken_and_another_count_are_turned_away_and_the_run_goes_on(run):
    run.start(TOUCH + "while not (folder.path / 'go').exists(): time.sleep(0.1)")
    run.wait_for('here-1')
    strangers = run_of([*Run.start(run, '', (1,)).started[2:], *Run.start(run, '', (2,), 3).started[3:]])
    (code, lines), (other, others) = strangers.ended()
    assert (code, other) == (1, 1)
    assert re.search(r'--process=1 is taken by process 1 \(host .*, pid \d+\); give', lines[0])
    assert 'came with --processes=3, process 0 with 2; give the same number to all' in others[0]
    (run.folder / 'go').touch()
    assert run_of(run.started[:2]).ended() == [(0, [])] * 2


def test_a_port_that_is_taken_and_nobody_who_answers_are_refused_in_one_line(run):
    with socket.create_server(('', run.port)):
        line = only(run.start('', (0,)).ended())
    assert 'cannot be opened for the other processes (Address already in use)' in line
    started = Run(run.folder).start('', (1,), join=1.0).ended()
    assert started[0][0] == 1
    assert re.match(r'nobody answers at 127.0.0.1:\d+ for 1 s .*; start process 0 on that host', only(started))


def test_who_did_not_come_is_named(run):
    said = run.start('', (0, 2), 4, join=2.0).ended()
    assert {code for code, _ in said} == {1}
    assert only(said) == 'process 1, 3 of 4 did not come within 2 s; start all of them'


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
