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
HOLD = """
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


def account(folder, ours=True, restarts=0):
    return RestartPolicy(folder, lambda: ours, lambda: digests.find_newest_step(folder), restarts)


def test_write_outcome_records_step_and_checkpoint_of_lost_run(folder):
    write_checkpoints(folder, 4)
    (folder.path / 'metrics.jsonl').write_text('{"step": 4}\n{"step": 6}\n')
    one = account(folder)
    one.write_outcome(one.decide_restart(LOST)[0])
    expected = dict(kind='lost', step=6, checkpoint=4, message='gone', exit_code=42, fruitless=1)
    assert folder.read_json('outcome') == expected


@pytest.mark.parametrize(
    ('end', 'ours'), [(LOST, False), (ExitStatus('refused', 'no'), True)], ids=['another run', 'refused']
)
def test_write_outcome_skips_run_of_other_owner_and_rejected_start(folder, end, ours):
    account(folder, ours).write_outcome(end)
    assert not (folder.path / 'outcome.json').exists()


def test_write_outcome_skips_folder_with_live_lease_but_not_with_dead_lease(folder):
    """Lose a second job before it holds the lease, and then a child that was killed with its lease."""
    with hold_lease(folder.path):
        account(folder).write_outcome(LOST)
        assert not (folder.path / 'outcome.json').exists()
    with subprocess.Popen([sys.executable, '-c', HOLD.format(repr(str(folder)))], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        child.kill()
    assert read_owner_token(folder.path)
    account(folder).write_outcome(LOST)
    assert folder.read_json('outcome')['kind'] == 'lost'


def test_write_outcome_keeps_outcome_of_process_0(folder):
    folder.write_json('outcome', dict(kind='stopped', exit_code=42, message='saved at step 5'))
    account(folder).write_outcome(ExitStatus('stopped', 'process 1: saved at step 5'))
    assert folder.read_json('outcome')['message'] == 'saved at step 5'


def test_write_outcome_keeps_no_fruitless_count_for_completed_run(folder):
    one = account(folder, restarts=1)
    assert one.decide_restart(LOST) == (LOST, True)
    folder.write_json('outcome', dict(kind='done', exit_code=0))
    one.write_outcome(ExitStatus('done'))
    assert folder.read_json('outcome') == dict(kind='done', exit_code=0)


@pytest.mark.parametrize('cause', ['done', 'refused', 'crashed', 'diverged', 'stopped'])
def test_decide_restart_is_false_for_final_exits(folder, cause):
    assert account(folder, restarts=1).decide_restart(ExitStatus(cause)) == (ExitStatus(cause), False)


def test_decide_restart_is_false_after_last_restart(folder):
    one = account(folder, restarts=1)
    assert [one.decide_restart(LOST)[1] for _ in range(2)] == [True, False]


def test_decide_restart_resets_fruitless_count_after_checkpoint(folder):
    one = account(folder, restarts=11)
    for step in range(5):
        write_checkpoints(folder, step)
        assert [one.decide_restart(LOST)[1] for _ in range(2)] == [True, True]
    assert one.decide_restart(LOST)[0].exit_code == 70


def test_decide_restart_ignores_incomplete_checkpoint(folder):
    write_checkpoints(folder, 4, 6)
    (folder.digest_dir / '6' / '0.json').unlink()
    one = account(folder, restarts=11)
    assert one.newest_step == 4
    assert one.decide_restart(LOST)[1]
    (folder.checkpoint_dir / '8').mkdir()
    one.write_outcome(one.decide_restart(LOST)[0])
    assert (folder.read_json('outcome')['checkpoint'], folder.read_json('outcome')['fruitless']) == (4, 2)


def test_decide_restart_counts_unreadable_disk_as_no_progress(folder):
    def answer():
        if answers.pop():
            raise OSError('stale')
        return 4

    answers = [True, False]
    one = RestartPolicy(folder, lambda: True, answer, restarts=11)
    assert one.newest_step == 4
    assert one.decide_restart(LOST) == (LOST, True)
    assert (one.newest_step, one.num_fruitless_here) == (4, 1)


def test_poll_newest_step_ignores_damaged_digests(folder):
    write_checkpoints(folder, 4, 6)
    one = account(folder, restarts=11)
    file = folder.digest_dir / '6' / '0.json'
    file.write_text('[' * 100_000 + ']' * 100_000)
    assert one.poll_newest_step() == 4


def test_poll_newest_step_keeps_last_step_after_user_error(folder):
    def answer():
        if answers.pop():
            raise UserError('it is damaged')
        return 4

    answers = [True, False]
    one = RestartPolicy(folder, lambda: True, answer, restarts=11)
    assert one.poll_newest_step() == 4


def test_log_failure_writes_only_to_run_folder_and_never_raises(folder, tmp_path):
    log_failure(folder, 1, LOST, 'thread 7')
    assert (folder.path / 'processes' / '1.log').read_text().endswith(' gone\nthread 7\n')
    log_failure(RunDir(tmp_path / 'none'), 1, LOST, '')
    assert not (tmp_path / 'none').exists()
    (folder.path / 'processes' / '2.log').mkdir()
    log_failure(folder, 2, LOST, '')


def occupy(path, kind):
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
    occupy(file, kind)
    writing = threading.Thread(target=log_failure, args=(folder, 0, LOST, 'noise'), daemon=True)
    writing.start()
    writing.join(5)
    assert not writing.is_alive()
    with pytest.raises(DamagedFileError):
        append_text(file, 'noise')


def test_log_failure_does_not_block_on_fifo_created_after_check(folder, monkeypatch):
    file = folder.path / 'processes' / '0.log'
    occupy(file, 'FIFO')
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
    account(folder).write_outcome(LOST)
    assert folder.read_json('outcome') == dict(
        kind='lost', step=0, checkpoint=None, message='gone', exit_code=42, fruitless=0
    )


@pytest.mark.parametrize('kind', ['FIFO', 'folder', 'socket'])
def test_write_outcome_ignores_unreadable_metrics(folder, kind):
    occupy(folder.path / 'metrics.jsonl', kind)
    account(folder).write_outcome(LOST)
    assert folder.read_json('outcome')['kind'] == 'lost'


def test_combine_exit_statuses_prefers_cause_over_effect():
    """Report the effect before the cause."""
    pairs = [('refused', 'lost'), ('killed', 'aborted'), ('crashed', 'runtime'), ('hung', 'crashed')]
    for cause, effect in [*pairs, ('stopped', 'runtime'), ('interrupted', 'aborted')]:
        assert combine_exit_statuses({0: ExitStatus(effect), 1: ExitStatus(cause)}, ['a', 'b']).cause == cause
    assert {code for _, code in EXIT_CAUSES.values()} == {0, 1, 3, 42, 70, 130}


def options(*given):
    parser = argparse.ArgumentParser()
    process_flags.add_arguments(parser)
    return parser.parse_args(given)


def test_parse_timeouts_reads_patience_and_join_timeout():
    taken = process_flags.parse_timeouts(options('--patience=5,30', '--join_timeout=7'))
    assert (taken.step_multiple, taken.min_step, taken.join) == (5, 30, 7)
    assert (taken.get_step_timeout(1), taken.get_step_timeout(100)) == (30, 500)
    assert (
        process_flags.parse_timeouts(options('--patience=5')).min_step
        == process_flags.parse_timeouts(options()).min_step
    )


@pytest.mark.parametrize(
    'given',
    [
        *('--patience=x', '--patience=', '--patience=1,2,3', '--patience=0', '--patience=nan', '--patience=5,'),
        *('--join_timeout=-1', '--grace=0', '--grace=nan', '--restarts=-1'),
    ],
)
def test_parse_timeouts_rejects_invalid_value_and_names_flag(given):
    with pytest.raises(UserError) as refused:
        process_flags.parse_timeouts(options(given))
    assert given.partition('=')[0] in str(refused.value)
