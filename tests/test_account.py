"""What supervisors leave in a folder: an outcome where process 0 could write none, and logs of what went wrong."""

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import threading

import pytest
from runs import saved

from sinklab.checkpoint import digests
from sinklab.cli import process_flags
from sinklab.run_dir import RunDir
from sinklab.schema import UserError
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


def test_a_lost_run_has_an_outcome_with_its_step_and_checkpoint(folder):
    saved(folder, 4)
    (folder.path / 'metrics.jsonl').write_text('{"step": 4}\n{"step": 6}\n')
    one = account(folder)
    one.write_outcome(one.decide_restart(LOST, True)[0])
    expected = dict(kind='lost', step=6, checkpoint=4, message='gone', exit_code=42, fruitless=1)
    assert folder.read_json('outcome') == expected


@pytest.mark.parametrize(
    ('end', 'ours'), [(LOST, False), (ExitStatus('refused', 'no'), True)], ids=['another run', 'refused']
)
def test_no_outcome_is_written_of_what_did_not_take_place_there(folder, end, ours):
    account(folder, ours).write_outcome(end)
    assert not (folder.path / 'outcome.json').exists()


def test_of_the_run_of_another_job_nothing_is_written_and_of_a_child_that_was_killed_with_its_lease_it_is(folder):
    """A second job by mistake that is stopped, or loses a process, before it has the lease."""
    with hold_lease(folder.path):
        account(folder).write_outcome(LOST)
        assert not (folder.path / 'outcome.json').exists()
    with subprocess.Popen([sys.executable, '-c', HOLD.format(repr(str(folder)))], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        child.kill()
    assert read_owner_token(folder.path)
    account(folder).write_outcome(LOST)
    assert folder.read_json('outcome')['kind'] == 'lost'


def test_what_process_0_has_written_of_the_same_end_stays(folder):
    folder.write_json('outcome', dict(kind='stopped', exit_code=42, message='saved at step 5'))
    account(folder).write_outcome(ExitStatus('stopped', 'process 1: saved at step 5'))
    assert folder.read_json('outcome')['message'] == 'saved at step 5'


def test_a_run_that_is_done_after_restarts_forgets_the_attempts_in_vain(folder):
    one = account(folder, restarts=1)
    assert one.decide_restart(LOST, True) == (LOST, True)
    folder.write_json('outcome', dict(kind='done', exit_code=0))
    one.write_outcome(ExitStatus('done'))
    assert folder.read_json('outcome') == dict(kind='done', exit_code=0)


def test_nothing_begins_again_where_a_supervisor_is_gone_or_all_is_well_or_it_would_end_alike(folder):
    for end, able in [
        (LOST, False),
        (ExitStatus('done'), True),
        (ExitStatus('refused'), True),
        (ExitStatus('crashed'), True),
    ]:
        assert account(folder, restarts=1).decide_restart(end, able) == (end, False)


def test_attempts_are_counted_anew_once_one_of_them_has_saved(folder):
    one = account(folder, restarts=11)
    for step in range(5):
        saved(folder, step)
        assert [one.decide_restart(LOST, True)[1] for _ in range(2)] == [True, True]
    assert one.decide_restart(LOST, True)[0].exit_code == 70


def test_a_checkpoint_whose_save_was_cut_short_is_none(folder):
    saved(folder, 4, 6)
    (folder.digest_dir / '6' / '0.json').unlink()
    one = account(folder, restarts=11)
    assert one.newest_step == 4
    assert one.decide_restart(LOST, True)[1]
    (folder.checkpoint_dir / '8').mkdir()
    one.write_outcome(one.decide_restart(LOST, True)[0])
    assert (folder.read_json('outcome')['checkpoint'], folder.read_json('outcome')['fruitless']) == (4, 2)


def test_a_disk_that_does_not_answer_is_no_new_checkpoint(folder):
    def answer():
        if asked.pop():
            raise OSError('stale')
        return 4

    asked = [True, False]
    one = RestartPolicy(folder, lambda: True, answer, restarts=11)
    assert one.newest_step == 4
    assert one.decide_restart(LOST, True) == (LOST, True)
    assert (one.newest_step, one.num_fruitless_here) == (4, 1)


def test_damaged_digests_do_not_end_the_thread_that_looks_after_a_run(folder):
    saved(folder, 4, 6)
    one = account(folder, restarts=11)
    file = folder.digest_dir / '6' / '0.json'
    file.write_text('[' * 100_000 + ']' * 100_000)
    assert one.poll_newest_step() == 4


def test_a_refusal_of_the_folder_leaves_the_newest_checkpoint_as_it_was_known(folder):
    def answer():
        if asked.pop():
            raise UserError('it is damaged')
        return 4

    asked = [True, False]
    one = RestartPolicy(folder, lambda: True, answer, restarts=11)
    assert one.poll_newest_step() == 4


def test_a_log_is_for_runs_and_one_that_cannot_be_written_does_no_harm(folder, tmp_path):
    log_failure(folder, 1, LOST, 'thread 7')
    assert (folder.path / 'processes' / '1.log').read_text().endswith(' gone\nthread 7\n')
    log_failure(RunDir(tmp_path / 'none'), 1, LOST, '')
    assert not (tmp_path / 'none').exists()
    (folder.path / 'processes' / '2.log').mkdir()
    log_failure(folder, 2, LOST, '')


def occupy(path, kind):
    """Put something in the place of a file that is none."""
    path.parent.mkdir(exist_ok=True)
    match kind:
        case 'FIFO':
            os.mkfifo(path)
        case 'folder':
            path.mkdir()
        case 'socket':
            with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as server:  # its name must be short
                server.bind(path.name)
        case 'link to a FIFO':
            os.mkfifo(path.with_suffix('.fifo'))
            path.symlink_to(path.with_suffix('.fifo'))


@pytest.mark.parametrize('kind', ['FIFO', 'folder', 'socket', 'link to a FIFO'])
def test_what_stands_in_the_place_of_a_log_delays_and_ends_nobody(folder, kind):
    file = folder.path / 'processes' / '0.log'
    occupy(file, kind)
    writing = threading.Thread(target=log_failure, args=(folder, 0, LOST, 'noise'), daemon=True)
    writing.start()
    writing.join(5)
    assert not writing.is_alive()
    with pytest.raises(DamagedFileError):
        append_text(file, 'noise')


def test_no_reader_is_waited_for_where_a_fifo_comes_into_the_place_of_a_log(folder, monkeypatch):
    file = folder.path / 'processes' / '0.log'
    occupy(file, 'FIFO')
    # It was a file when it was checked.
    monkeypatch.setattr(untrusted_files, 'check_regular_file', lambda path: None)
    log_failure(folder, 0, LOST, 'noise')
    with pytest.raises(OSError, match='No such device'):
        append_text(file, 'noise')


@pytest.mark.parametrize(
    'content', [b'[]', b'{"kind": 5}', b'{', b'', b'\xff', b'{"kind": "done", "step": NaN}', b'[' * 100_000]
)
def test_a_damaged_outcome_is_replaced(folder, content):
    (folder.path / 'outcome.json').write_bytes(content)
    account(folder).write_outcome(LOST)
    assert folder.read_json('outcome') == dict(
        kind='lost', step=0, checkpoint=None, message='gone', exit_code=42, fruitless=0
    )


@pytest.mark.parametrize('kind', ['FIFO', 'folder', 'socket'])
def test_metrics_that_cannot_be_read_do_not_keep_an_outcome_from_being_written(folder, kind):
    occupy(folder.path / 'metrics.jsonl', kind)
    account(folder).write_outcome(LOST)
    assert folder.read_json('outcome')['kind'] == 'lost'


def test_a_refusal_or_a_kill_is_a_cause_and_an_abort_is_what_comes_of_it():
    """Whichever the hub hears of first."""
    pairs = [('refused', 'lost'), ('killed', 'aborted'), ('crashed', 'runtime'), ('hung', 'crashed')]
    for cause, effect in [*pairs, ('stopped', 'runtime'), ('interrupted', 'aborted')]:
        assert combine_exit_statuses({0: ExitStatus(effect), 1: ExitStatus(cause)}, ['a', 'b']).cause == cause
    assert {code for _, code in EXIT_CAUSES.values()} == {0, 1, 3, 42, 70, 130}


def options(*given):
    parser = argparse.ArgumentParser()
    process_flags.add_arguments(parser)
    return parser.parse_args(given)


def test_patience_is_as_given():
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
def test_other_patience_is_refused_in_the_words_in_which_it_was_given(given):
    with pytest.raises(UserError) as refused:
        process_flags.parse_timeouts(options(given))
    assert given.partition('=')[0] in str(refused.value)
