"""Checkpoint saves: schedule, lost folder and exit."""

import jax.numpy as jnp
import pytest
from tiny_runs import make_spec, train_run
from tiny_specs import make_tiny_spec

from sinklab.checkpoint import digests
from sinklab.checkpoint.checkpointer import Checkpointer
from sinklab.run_dir import RunDir
from sinklab.storage.folder_lock import FolderTakenError
from sinklab.train import loop
from sinklab.train.run_outcome import DivergedError, StoppedBySignal


@pytest.mark.slow
def test_run_saves_at_configured_minutes(corpus, tmp_path):
    """Request a save right after each save; the processes agree on it two steps later."""
    spec = make_spec(corpus, checkpoint__every_steps=0, checkpoint__every_minutes=1e-6, checkpoint__keep=8)
    train_run(spec, tmp_path)
    steps = RunDir(tmp_path).list_checkpoint_steps()
    assert len(steps) >= 3
    assert steps[-1] == 8


def test_log_schedule_saves_and_keeps_powers_of_two(corpus, tmp_path):
    fields = dict(schedule='log', every_steps=3, keep=2, keep_every_steps=0)
    train_run(make_spec(corpus, **{f'checkpoint__{name}': value for name, value in fields.items()}), tmp_path)
    assert RunDir(tmp_path).list_checkpoint_steps() == [1, 2, 4, 6, 8]  # 3 is saved and deleted


class OwnerCheckError(Exception):
    pass


def test_lost_folder_prevents_digests_and_checkpoint_deletion(tmp_path):
    """Lose the folder during a save in the background."""
    folder, checked_folders = RunDir(tmp_path), []

    def check_owner():
        checked_folders.append(folder)
        if len(checked_folders) > 1:
            raise OwnerCheckError

    config, state = make_tiny_spec(checkpoint__keep=2).checkpoint, {'a': jnp.arange(3)}
    first_checkpointer = Checkpointer(folder, config, {})
    for step in (1, 2):
        first_checkpointer.save(step, state)
    first_checkpointer.close()
    second_checkpointer = Checkpointer(folder, config, {}, check_owner=check_owner)
    second_checkpointer.save(3, state)
    with pytest.raises(OwnerCheckError):
        second_checkpointer.wait_until_finished()
    second_checkpointer.close()
    assert folder.list_checkpoint_steps() == [1, 2, 3]
    assert digests.read_digests(folder.checkpoint_dir / '3') is None


class RecordingCheckpointer:
    """Checkpointer that records its calls."""

    def __init__(self):
        self.calls = []

    def wait_on_all_processes(self):
        self.calls.append('wait for all')

    def close(self):
        self.calls.append('close')


@pytest.mark.parametrize(
    ('error', 'expected_calls'),
    [
        (None, ['wait for all', 'close']),
        (StoppedBySignal(15, 4), ['wait for all', 'close']),
        (DivergedError(4, {}), ['wait for all', 'close']),
        (OSError('of this process alone'), ['close']),
        (FolderTakenError('of another job'), []),
    ],
    ids=str,
)
def test_close_waits_for_all_processes_only_after_common_exit(error, expected_calls):
    recorder = RecordingCheckpointer()

    def exit_context():
        with loop.close_checkpointer(recorder):
            if error:
                raise error

    if error:
        with pytest.raises(type(error)):
            exit_context()
    else:
        exit_context()
    assert recorder.calls == expected_calls
