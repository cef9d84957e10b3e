"""Checkpoint saves: schedule, grace period, lost lease and exit."""

import time

import jax.numpy as jnp
import pytest
from conftest import make_tiny_spec
from tiny_runs import RecordingCallback, make_spec, train_run

from sinklab.checkpoint import checkpointer, digests
from sinklab.checkpoint.checkpointer import Checkpointer
from sinklab.run_dir import RunDir
from sinklab.storage.lease import LeaseLostError
from sinklab.train import loop
from sinklab.train.run_outcome import DivergedError, ReplicaMismatchError, StoppedBySignal


@pytest.mark.slow
def test_run_saves_at_configured_minutes(corpus, tmp_path):
    """Request a save right after each save; the processes agree on it two steps later."""
    timed = make_spec(corpus, checkpoint__every_steps=0, checkpoint__every_minutes=1e-6, checkpoint__keep=8)
    train_run(timed, tmp_path)
    saved = RunDir(tmp_path).list_checkpoint_steps()
    assert len(saved) >= 3
    assert saved[-1] == 8


@pytest.mark.slow
def test_grace_period_shorter_than_save_is_reported_once(corpus, tmp_path):
    hearing = RecordingCallback()
    train_run(
        make_spec(corpus, checkpoint__every_steps=2, log__every_steps=1),
        tmp_path / 'short',
        hearing,
        grace_seconds=1e-3,
    )
    (note,) = hearing.notes
    assert '--grace' in note
    assert '0.001' in note
    hearing.notes.clear()
    train_run(
        make_spec(corpus, checkpoint__every_steps=2, log__every_steps=1),
        tmp_path / 'long',
        hearing,
        grace_seconds=1e3,
    )
    assert hearing.notes == []


class Beside:
    """Group of this process and one with another loss."""

    index, count = 0, 2

    def gather(self, name, value):
        other = value | {'train/loss': (1.0).hex()} if name.startswith('step ') else value
        return [value, other]

    def report_progress(self, activity, step=0, usual_seconds=None):
        pass


@pytest.mark.slow
def test_processes_with_different_losses_save_no_checkpoint(corpus, tmp_path):
    with pytest.raises(ReplicaMismatchError, match=r'process 1 .*process 0 .*train/loss.*0x1\.0.* step 4'):
        train_run(make_spec(corpus), tmp_path, group=Beside())
    assert RunDir(tmp_path).list_checkpoint_steps() == []
    written = RunDir(tmp_path).read_json('outcome')
    assert (written['kind'], written['step'], written['exit_code']) == ('lost', 4, 42)


class Lost(Exception):
    pass


@pytest.mark.parametrize('held', [0, 1])
def test_lost_lease_prevents_digests_and_checkpoint_deletion(tmp_path, held):
    """Lose the lease after `held` checks, during a save in the background."""
    folder, looks = RunDir(tmp_path), []

    def check():
        looks.append(folder)
        if len(looks) > held:
            raise Lost

    rules, values = make_tiny_spec(checkpoint__keep=2).checkpoint, {'a': jnp.arange(3)}
    before = Checkpointer(folder, rules, {})
    for step in (1, 2):
        before.save(step, values)
    before.close()
    now = Checkpointer(folder, rules, {}, check_owner=check)
    now.save(3, values)
    with pytest.raises(Lost):
        now.wait()
    now.close()
    assert folder.list_checkpoint_steps() == [1, 2, 3]
    assert digests.get_digest_path(folder, 3, 0).exists() == bool(held)


class Told:
    """Checkpointer that records its calls."""

    def __init__(self):
        self.told = []

    def wait_on_all_processes(self):
        self.told.append('wait for all')

    def close(self):
        self.told.append('close')


@pytest.mark.parametrize(
    ('error', 'told'),
    [
        (None, ['wait for all', 'close']),
        (StoppedBySignal(15, 4), ['wait for all', 'close']),
        (DivergedError(4, {}), ['wait for all', 'close']),
        (ReplicaMismatchError(4, 'x'), ['wait for all', 'close']),
        (OSError('of this process alone'), ['close']),
        (LeaseLostError('of another job'), []),
    ],
    ids=str,
)
def test_close_waits_for_all_processes_only_after_common_exit(error, told):
    saved = Told()

    def end():
        with loop.close_checkpointer(saved):
            if error:
                raise error

    if error:
        with pytest.raises(type(error)):
            end()
    else:
        end()
    assert saved.told == told


@pytest.mark.slow
def test_long_wait_for_save_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checkpointer, 'WAIT_REPORT_SECONDS', 0.05)
    saved = Checkpointer(RunDir(tmp_path), make_spec('x').checkpoint, {})
    saved.newest_step, saved.pending_save = 4, saved.pool.submit(lambda: time.sleep(0.3) or 0.3)
    saved.wait()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1
    assert all('step 4' in line and str(tmp_path) in line for line in lines)
    saved.close()
    assert capsys.readouterr().err == ''
