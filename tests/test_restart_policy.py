"""Outcome files, failure logs and restart decisions of supervisors."""

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import threading

import pytest
from tiny_runs import write_checkpoints

from sinklab.checkpoint import digests
from sinklab.cli import process_flags
from sinklab.errors import UserError
from sinklab.run_dir import RunDir
from sinklab.storage import untrusted_files
from sinklab.storage.atomic_write import append_text
from sinklab.storage.lease import hold_lease, read_owner_token
from sinklab.storage.untrusted_files import DamagedFileError
from sinklab.supervisor.exit_status import EXIT_CAUSES, ExitStatus, combine_exit_statuses
from sinklab.supervisor.supervisor import RestartPolicy, log_failure

LOST = ExitStatus('lost', 'gone')
HOLD_LEASE_SCRIPT = """
import pathlib, time
from sinklab.storage.lease import hold_lease
with hold_lease(pathlib.Path({})):
    print('held', flush=True)
    time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / 'config.json').write_text('{}')
    return RunDir(tmp_path)


def make_policy(folder, is_this_run=True, restarts=0):
    return RestartPolicy(folder, lambda: is_this_run, lambda: digests.find_newest_step(folder), restarts)


def test_write_outcome_records_step_and_checkpoint_of_lost_run(folder):
    write_checkpoints(folder, 4)
    (folder.path / 'metrics.jsonl').write_text('{"step": 4}\n{"step": 6}\n')
    policy = make_policy(folder)
    policy.write_outcome(policy.decide_restart(LOST)[0])
    expected = dict(kind='lost', step=6, checkpoint=4, message='gone', exit_code=42, fruitless=1)
    assert folder.read_json('outcome') == expected


@pytest.mark.parametrize(
    ('exit_status', 'is_this_run'),
    [(LOST, False), (ExitStatus('refused', 'no'), True)],
    ids=['another run', 'refused'],
)
def test_write_outcome_skips_run_of_other_owner_and_rejected_start(folder, exit_status, is_this_run):
    make_policy(folder, is_this_run).write_outcome(exit_status)
    assert not (folder.path / 'outcome.json').exists()


def test_write_outcome_skips_folder_with_live_lease_but_not_with_dead_lease(folder):
    """Test a job that is lost before it holds the lease, and then a child that is killed while it holds the lease."""
    with hold_lease(folder.path):
        make_policy(folder).write_outcome(LOST)
        assert not (folder.path / 'outcome.json').exists()
    with subprocess.Popen(
        [sys.executable, '-c', HOLD_LEASE_SCRIPT.format(repr(str(folder)))], stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        child.kill()
    assert read_owner_token(folder.path)
    make_policy(folder).write_outcome(LOST)
    assert folder.read_json('outcome')['kind'] == 'lost'


def test_write_outcome_keeps_outcome_of_process_0(folder):
    folder.write_json('outcome', dict(kind='stopped', exit_code=42, message='saved at step 5'))
    make_policy(folder).write_outcome(ExitStatus('stopped', 'process 1: saved at step 5'))
    assert folder.read_json('outcome')['message'] == 'saved at step 5'


def test_write_outcome_keeps_no_fruitless_count_for_completed_run(folder):
    policy = make_policy(folder, restarts=1)
    assert policy.decide_restart(LOST) == (LOST, True)
    folder.write_json('outcome', dict(kind='done', exit_code=0))
    policy.write_outcome(ExitStatus('done'))
    assert folder.read_json('outcome') == dict(kind='done', exit_code=0)


@pytest.mark.parametrize('cause', ['done', 'refused', 'crashed', 'diverged', 'stopped'])
def test_decide_restart_is_false_for_final_exits(folder, cause):
    assert make_policy(folder, restarts=1).decide_restart(ExitStatus(cause)) == (ExitStatus(cause), False)


def test_decide_restart_is_false_after_last_restart(folder):
    policy = make_policy(folder, restarts=1)
    assert [policy.decide_restart(LOST)[1] for _ in range(2)] == [True, False]


def test_decide_restart_resets_fruitless_count_after_checkpoint(folder):
    policy = make_policy(folder, restarts=11)
    for step in range(5):
        write_checkpoints(folder, step)
        assert [policy.decide_restart(LOST)[1] for _ in range(2)] == [True, True]
    assert policy.decide_restart(LOST)[0].exit_code == 70


def test_decide_restart_ignores_incomplete_checkpoint(folder):
    write_checkpoints(folder, 4, 6)
    (folder.digest_dir / '6' / '0.json').unlink()
    policy = make_policy(folder, restarts=11)
    assert policy.newest_step == 4
    assert policy.decide_restart(LOST)[1]
    (folder.checkpoint_dir / '8').mkdir()
    policy.write_outcome(policy.decide_restart(LOST)[0])
    assert (folder.read_json('outcome')['checkpoint'], folder.read_json('outcome')['fruitless']) == (4, 2)


def test_decide_restart_counts_unreadable_disk_as_no_progress(folder):
    def find_newest_step():
        if failures.pop():
            raise OSError('stale')
        return 4

    failures = [True, False]
    policy = RestartPolicy(folder, lambda: True, find_newest_step, restarts=11)
    assert policy.newest_step == 4
    assert policy.decide_restart(LOST) == (LOST, True)
    assert (policy.newest_step, policy.num_fruitless_here) == (4, 1)


def test_poll_newest_step_ignores_damaged_digests(folder):
    write_checkpoints(folder, 4, 6)
    policy = make_policy(folder, restarts=11)
    file = folder.digest_dir / '6' / '0.json'
    file.write_text('[' * 100_000 + ']' * 100_000)
    assert policy.poll_newest_step() == 4


def test_poll_newest_step_keeps_last_step_after_user_error(folder):
    def find_newest_step():
        if failures.pop():
            raise UserError('it is damaged')
        return 4

    failures = [True, False]
    policy = RestartPolicy(folder, lambda: True, find_newest_step, restarts=11)
    assert policy.poll_newest_step() == 4


def test_log_failure_writes_only_to_run_folder_and_never_raises(folder, tmp_path):
    log_failure(folder, 1, LOST, 'thread 7')
    assert (folder.path / 'processes' / '1.log').read_text().endswith(' gone\nthread 7\n')
    log_failure(RunDir(tmp_path / 'none'), 1, LOST, '')
    assert not (tmp_path / 'none').exists()
    (folder.path / 'processes' / '2.log').mkdir()
    log_failure(folder, 2, LOST, '')


def make_irregular_file(path, kind):
    """Create something other than a regular file at a path."""
    path.parent.mkdir(exist_ok=True)
    match kind:
        case 'FIFO':
            os.mkfifo(path)
        case 'folder':
            path.mkdir()
        case 'socket':
            with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as server:  # limits path length
                server.bind(path.name)
        case 'link to a FIFO':
            os.mkfifo(path.with_suffix('.fifo'))
            path.symlink_to(path.with_suffix('.fifo'))


@pytest.mark.parametrize('kind', ['FIFO', 'folder', 'socket', 'link to a FIFO'])
def test_log_failure_does_not_block_on_irregular_file(folder, kind):
    file = folder.path / 'processes' / '0.log'
    make_irregular_file(file, kind)
    thread = threading.Thread(target=log_failure, args=(folder, 0, LOST, 'noise'), daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
    with pytest.raises(DamagedFileError):
        append_text(file, 'noise')


def test_log_failure_does_not_block_on_fifo_created_after_check(folder, monkeypatch):
    file = folder.path / 'processes' / '0.log'
    make_irregular_file(file, 'FIFO')
    # Let the check pass, as if the FIFO appeared after it.
    monkeypatch.setattr(untrusted_files, 'check_regular_file', lambda path: None)
    log_failure(folder, 0, LOST, 'noise')
    with pytest.raises(OSError, match='No such device'):
        append_text(file, 'noise')


@pytest.mark.parametrize(
    'content', [b'[]', b'{"kind": 5}', b'{', b'', b'\xff', b'{"kind": "done", "step": NaN}', b'[' * 100_000]
)
def test_write_outcome_replaces_damaged_outcome(folder, content):
    (folder.path / 'outcome.json').write_bytes(content)
    make_policy(folder).write_outcome(LOST)
    assert folder.read_json('outcome') == dict(
        kind='lost', step=0, checkpoint=None, message='gone', exit_code=42, fruitless=0
    )


@pytest.mark.parametrize('kind', ['FIFO', 'folder', 'socket'])
def test_write_outcome_ignores_unreadable_metrics(folder, kind):
    make_irregular_file(folder.path / 'metrics.jsonl', kind)
    make_policy(folder).write_outcome(LOST)
    assert folder.read_json('outcome')['kind'] == 'lost'


def test_combine_exit_statuses_prefers_cause_over_effect():
    """Process 0 reports the effect, and process 1 reports the cause."""
    pairs = [('refused', 'lost'), ('killed', 'aborted'), ('crashed', 'runtime'), ('hung', 'crashed')]
    for cause, effect in [*pairs, ('stopped', 'runtime'), ('interrupted', 'aborted')]:
        assert combine_exit_statuses({0: ExitStatus(effect), 1: ExitStatus(cause)}, ['a', 'b']).cause == cause
    assert {code for _, code in EXIT_CAUSES.values()} == {0, 1, 3, 42, 70, 130}


def parse_options(*arguments):
    parser = argparse.ArgumentParser()
    process_flags.add_arguments(parser)
    return parser.parse_args(arguments)


def test_parse_timeouts_reads_patience_and_join_timeout():
    timeouts = process_flags.parse_timeouts(parse_options('--patience=5,30', '--join_timeout=7'))
    assert (timeouts.step_multiple, timeouts.min_step, timeouts.join) == (5, 30, 7)
    assert (timeouts.get_step_timeout(1), timeouts.get_step_timeout(100)) == (30, 500)
    assert (
        process_flags.parse_timeouts(parse_options('--patience=5')).min_step
        == process_flags.parse_timeouts(parse_options()).min_step
    )


@pytest.mark.parametrize(
    'option',
    [
        *('--patience=x', '--patience=', '--patience=1,2,3', '--patience=0', '--patience=nan', '--patience=5,'),
        *('--join_timeout=-1', '--grace=0', '--grace=nan', '--restarts=-1'),
    ],
)
def test_parse_timeouts_rejects_invalid_value_and_names_flag(option):
    with pytest.raises(UserError) as error:
        process_flags.parse_timeouts(parse_options(option))
    assert option.partition('=')[0] in str(error.value)
