"""Exit of all processes of a run: real supervisors and workers, which do not train."""

import os
import re
import signal
import time
from textwrap import indent

import pytest
from processes import (
    ENDLESS_SCRIPT,
    LISTENING_SCRIPT,
    TOUCH_SCRIPT,
    Run,
    get_child_pid,
    get_single_line,
    make_run,
    manage_run,
    wait_for_exit,
)

from sinklab.run_dir import RunDir
from sinklab.supervisor.cluster import ProcessInfo
from sinklab.supervisor.exit_status import STOPPING_MESSAGE
from sinklab.supervisor.supervisor import WorkerProcess
from sinklab.supervisor.worker import Timeouts

pytestmark = pytest.mark.slow
SAVE_SCRIPT = """
from sinklab.checkpoint import digests
step = len([*folder.path.glob('checkpoints/*')])
for parent in (folder.checkpoint_dir, folder.digest_dir):
    (parent / str(step)).mkdir(parents=True)
(folder.checkpoint_dir / str(step) / 'file').touch()
digests.write_digests(folder, step, 0, 1, seconds=1.0)
"""


@pytest.fixture
def run(tmp_path):
    yield from manage_run(tmp_path)


def test_all_gather_returns_values_of_all_processes(run):
    script = (
        'for turn in range(3):\n  values = group.all_gather("x", [index, turn])\n'
        '  (folder.path / f"{index}-{turn}").write_text(repr(values))'
    )
    assert run.start(script, (0, 1, 2), 3).wait_for_results() == [(0, [])] * 3
    for turn in range(3):
        texts = {(run.folder / f'{index}-{turn}').read_text() for index in range(3)}
        assert texts == {repr([[0, turn], [1, turn], [2, turn]])}
    assert not (run.folder / 'processes').exists()


# Action of process 1 while process 0 waits -> exit code, message of all processes, kind in outcome.json.
FAILURES = {
    "raise UserError('no such row')": (1, r'process 1 \(host .*\): no such row', None),
    "raise OSError(5, 'Input/output error')": (42, r'process 1 .*: OSError: \[Errno 5\] .*; start the same', 'lost'),
    'import jax; raise jax.errors.JaxRuntimeError("gloo")': (42, 'process 1 .*: .*gloo; start', 'lost'),
    "exit_status = ExitStatus('diverged', 'loss is nan', orderly=True)": (3, 'process 1 .*: loss is nan', 'diverged'),
}


@pytest.mark.parametrize(
    ('action', 'exit_code', 'pattern', 'kind'),
    [
        pytest.param(action, *expected, marks=pytest.mark.exhaustive if number > 2 else ())
        for number, (action, expected) in enumerate(FAILURES.items())
    ],
)
def test_failure_of_one_process_ends_all_with_its_exit_code(run, action, exit_code, pattern, kind):
    start_time = time.monotonic()
    results = run.start(
        f'if index: {action}\nelse:\n  while True: time.sleep(0.1)', orderly_exit=1.0
    ).wait_for_results()
    assert [code for code, _ in results] == [exit_code] * 2
    assert re.match(pattern, get_single_line(results))
    assert results[0][1] == results[1][1]
    assert time.monotonic() - start_time < 15
    if kind:
        assert {'kind': kind, 'exit_code': exit_code}.items() <= RunDir(run.folder).read_json('outcome').items()
    else:
        assert not (run.folder / 'outcome.json').exists()


# Action of process 1 -> its exit code and message. It sends nothing to the others; jax reports that it is lost.
SILENT_FAILURES = {
    'os.kill(os.getpid(), signal.SIGKILL)': (42, r'process 1 \(host .*, pid \d+\): killed by SIGKILL'),
    'os.abort()': (42, r'process 1 \(host .*, pid \d+\): aborted \(SIGABRT\)'),
    "os.write(2, b'no such module'); os._exit(9)": (42, 'process 1 .*: exit code 9'),
}


@pytest.mark.parametrize('action', SILENT_FAILURES)
def test_process_that_ends_without_exit_status_is_lost_for_others(run, action):
    first, second = run.start(f'if index: {action}\n' + ENDLESS_SCRIPT).wait_for_results()
    exit_code, pattern = SILENT_FAILURES[action]
    assert (first[0], len(first[1])) == (42, 1)
    assert re.search(r'process 1 \(host .*, pid \d+\): .* 3 s', first[1][0])
    assert second[0] == exit_code
    assert re.search(pattern, second[1][-1])
    assert RunDir(run.folder).read_json('outcome')['kind'] == 'lost'
    if 'no such module' in action:
        assert 'no such module' in (run.folder / 'processes' / '1.log').read_text()


def test_error_common_to_all_processes_is_reported_without_process_prefix(run):
    results = run.start("group.all_gather('x', 0)\nraise UserError('no such row')").wait_for_results()
    assert (get_single_line(results), {exit_code for exit_code, _ in results}) == ('no such row', {1})


def test_unexpected_exception_exits_with_70_and_logs_traceback(run):
    first, second = run.start('if index: 1 / 0\n' + ENDLESS_SCRIPT).wait_for_results()
    assert first[0] == second[0] == 70
    assert 'ZeroDivisionError' in '\n'.join(first[1][:-1])
    assert len(second[1]) == 1
    assert 'ZeroDivisionError' in (run.folder / 'processes' / '1.log').read_text()
    assert 'File' in (run.folder / 'processes' / '0.log').read_text()  # stack trace of the other process


def test_root_cause_is_reported_instead_of_secondary_failure(run):
    """Process 0 reports a lost connection before process 1 is killed."""
    script = 'if index:\n  group.all_gather("x", 0); time.sleep(0.3); os.kill(os.getpid(), signal.SIGKILL)\n'
    script += (
        'else:\n  import jax; group.all_gather("x", 0); raise jax.errors.JaxRuntimeError("Connection closed by peer")'
    )
    assert 'process 1' in get_single_line(run.start(script).wait_for_results())


def test_supervisor_death_ends_its_child_and_all_processes(run):
    for victim in (0, 1):
        next_run = Run(run.folder)
        next_run.start(TOUCH_SCRIPT + ENDLESS_SCRIPT)
        for index in (0, 1):
            next_run.wait_for(f'here-{index}')
            (run.folder / f'here-{index}').unlink()
        child_pid = get_child_pid(next_run.processes[victim])
        next_run.processes[victim].kill()
        exit_code, lines = next_run.wait_for_results(10)[1 - victim]
        assert exit_code == 42
        assert re.search(rf'process {victim} \(host .*\): (gone|no heartbeat)', lines[0])
        assert wait_for_exit(child_pid)


def test_suspended_child_is_named_by_pid(run):
    run.start(TOUCH_SCRIPT + ENDLESS_SCRIPT)
    run.wait_for('here-1')
    child_pid = get_child_pid(run.processes[1])
    os.kill(child_pid, signal.SIGSTOP)
    results = run.wait_for_results()
    assert [(exit_code, len(lines)) for exit_code, lines in results] == [(42, 1)] * 2
    for _, (line,) in results:
        assert re.search(rf'process 1 \(host .*, pid {child_pid}\): .* 3 s', line)


def test_suspended_supervisor_does_not_disturb_run(run):
    run.start(TOUCH_SCRIPT + "while not (folder.path / 'go').exists(): time.sleep(0.1)")
    run.wait_for('here-1')
    run.processes[1].send_signal(signal.SIGSTOP)
    time.sleep(5)
    (run.folder / 'go').touch()
    assert make_run(run.processes[:1]).wait_for_results() == [(0, [])]
    run.processes[1].send_signal(signal.SIGCONT)
    assert make_run(run.processes[1:]).wait_for_results() == [(0, [])]


def test_process_that_blocks_all_its_threads_is_ended(run):
    """Call a C function that keeps the interpreter's lock."""
    script = 'import ctypes\nctypes.PyDLL(None).sleep(60)'
    ((exit_code, lines),) = run.start(script, (0,), 1, unresponsive=2.0).wait_for_results()
    assert (exit_code, len(lines)) == (42, 1)
    assert 'Timeout' in (run.folder / 'processes' / '0.log').read_text()  # stack traces


# Action of process 1 while process 0 waits in step 3 -> message about it; None: all processes succeed.
STEP_ACTIONS = {
    "group.report_progress('reading its batch', 3); time.sleep(60)": (
        r'process 1 .* did not arrive \(reading its batch of step 3'
    ),
    "group.report_progress('step', 2, 0.05); time.sleep(60)": r'process 1 .* did not arrive \(in step 2 for \d s\)',
    "group.report_progress('step', 3, 0.05); time.sleep(60)": '',
    "group.report_progress('saving', 3); time.sleep(3); group.all_gather('x', 0)": None,
}


@pytest.mark.parametrize('action', STEP_ACTIONS)
def test_hung_step_names_missing_process_but_slow_save_is_allowed(run, action):
    script = f"if index: {action}\nelse:\n  group.report_progress('step', 3, 0.05); group.all_gather('x', 0)"
    results = run.start(script, min_step=1.0, step_multiple=2.0).wait_for_results()
    if STEP_ACTIONS[action] is None:
        assert results == [(0, [])] * 2
        return
    assert {exit_code for exit_code, _ in results} == {42}
    assert re.match(rf'.*step 3 .*\d s.* 0\.05 s.*{STEP_ACTIONS[action]}', get_single_line(results))
    assert 'gather' in (run.folder / 'processes' / '0.log').read_text()  # stack traces


@pytest.mark.parametrize('signaled_index', [0, 1])
def test_sigterm_during_training_saves_and_stops_all_processes(run, signaled_index):
    """The child prints the message if it has the terminal."""
    script = 'from sinklab.train.run_outcome import collect_stop_signals\n'
    script += f'with collect_stop_signals() as heard:\n  {TOUCH_SCRIPT}'
    script += "  while not any(group.all_gather('x', len(heard))): time.sleep(0.1)\n"
    script += "exit_status = ExitStatus('stopped', 'saved at step 7', orderly=True)"
    run.start(script)
    run.wait_for('here-1')
    run.processes[signaled_index].terminate()
    results = run.wait_for_results()
    assert [exit_code for exit_code, _ in results] == [42, 42]
    lines = [line for line in results[signaled_index][1] if line]
    results[signaled_index] = 42, lines[-1:]
    assert [line.removeprefix('sinklab train: ') for line in lines[:-1]] == [STOPPING_MESSAGE]
    assert get_single_line(results).startswith('saved at step 7')


@pytest.mark.parametrize(
    ('signal_number', 'exit_code'),
    [(signal.SIGTERM, 42), pytest.param(signal.SIGINT, 130, marks=pytest.mark.exhaustive)],
)
def test_signal_before_first_step_ends_all_processes_at_once(run, signal_number, exit_code):
    run.start(TOUCH_SCRIPT + ENDLESS_SCRIPT)
    run.wait_for('here-0')
    run.processes[1].send_signal(signal_number)
    results = run.wait_for_results()
    assert {exit_code for exit_code, _ in results} == {exit_code}
    assert signal_number.name in get_single_line(results)


def test_second_signal_ends_all_processes_at_once(run):
    run.start(LISTENING_SCRIPT + TOUCH_SCRIPT + ENDLESS_SCRIPT)
    run.wait_for('here-1')
    run.processes[0].terminate()
    time.sleep(1.5)
    run.processes[0].terminate()
    results = run.wait_for_results()
    assert {exit_code for exit_code, _ in results} == {42}
    assert 'stopped' in results[1][1][0]


def test_supervisors_restart_all_processes_up_to_restart_limit(run):
    results = run.start(
        f'if not index:{indent(SAVE_SCRIPT, "  ")}  raise OSError("storage")\n' + ENDLESS_SCRIPT, restarts=2
    ).wait_for_results()
    assert [exit_code for exit_code, _ in results] == [42, 42]
    for _, lines in results:
        assert ['starting again' in line for line in lines[-3:]] == [True, True, False]
    assert len([*run.folder.glob('checkpoints/*')]) == 3


def test_restarts_end_after_attempts_without_new_checkpoint(run):
    results = run.start('if index: raise OSError("storage")\n' + ENDLESS_SCRIPT, restarts=9).wait_for_results()
    assert [exit_code for exit_code, _ in results] == [70, 70]
    assert 'attempt 3' in results[1][1][-1]


def test_scheduler_starts_without_new_checkpoint_exit_with_70(run):
    codes = []
    for _ in range(5):
        ((exit_code, _),) = Run(run.folder).start('raise OSError("storage")', (0,), 1).wait_for_results()
        codes.append(exit_code)
    assert codes == [42, 42, 42, 42, 70]
    assert RunDir(run.folder).read_json('outcome')['fruitless'] == 5


# Messages of jax 0.10.2 and earlier in the log of an aborted process -> names in the line of its supervisor.
LOST_PROCESS_NAMES = {
    'UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\n1\nThe tasks have crashed.': ['b'],
    'are unhealthy (stopped sending heartbeats):\n1\n2\nThe tasks have crashed.': ['b', 'c'],
    'are unhealthy (stopped sending heartbeats):\n/job:jax_worker/replica:0/task:2\nThe tasks': ['c'],
    'ABORTED: 2 unexpectedly tried to connect with a different incarnation.': ['c'],
    'UNAVAILABLE: Failed to send RPC to coordination service. Either the leader task was preempted': ['a'],
}


@pytest.mark.parametrize('log', LOST_PROCESS_NAMES)
def test_abort_by_jax_names_lost_processes(log):
    worker = object.__new__(WorkerProcess)
    worker.process_info, worker.timeouts, worker.names = ProcessInfo(0, 3, 'host', 1), Timeouts(), ['a:', 'b:', 'c:']
    status = worker.classify_abort(f'F1126 client.h:80] Terminating process\n{log}\n')
    assert status.cause == 'lost'
    assert [name for name in worker.names if name in status.message] == [
        f'{name}:' for name in LOST_PROCESS_NAMES[log]
    ]
