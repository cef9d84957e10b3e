"""Tests of checkpoints in a bucket: incomplete uploads, corruption, leases and copies."""

import threading

import jax
import numpy as np
import pytest
from conftest import make_case_params, make_tiny_spec
from orbax.checkpoint import v1 as ocp

from sinklab.checkpoint import checkpointer, digests
from sinklab.checkpoint.checkpointer import Checkpointer
from sinklab.errors import UserError
from sinklab.run_dir import RunDir
from sinklab.storage import lease
from sinklab.storage.directories import COMMIT_MARKER, list_files
from sinklab.storage.paths import parse_path


@pytest.fixture
def run_path(bucket):
    return parse_path(f'{bucket.url}/runs/run')


def open_checkpointer(run_path, **changes):
    state = {'params': {'x': jax.numpy.arange(4.0)}}
    folder = RunDir(run_path)
    return folder, Checkpointer(folder, make_tiny_spec(**changes).checkpoint, {}), state


def test_incomplete_upload_is_not_listed_and_is_deleted(run_path):
    folder, checkpoints, state = open_checkpointer(run_path)
    checkpoints.save(1, state)
    checkpoints.wait_until_finished()
    (folder.checkpoint_dir / '2' / 'state').joinpath('half').write_bytes(b'half')
    assert folder.list_checkpoint_steps() == [1]
    checkpoints.close()
    _, new_checkpoints, _ = open_checkpointer(run_path)
    assert new_checkpoints.find_latest_valid_step() == (1, [])
    assert not list_files(folder.checkpoint_dir / '2')
    new_checkpoints.close()


def test_retention_deletes_old_checkpoints_and_digests(run_path):
    folder, checkpoints, state = open_checkpointer(run_path, checkpoint__keep=2)
    for step in (1, 2, 3, 4):
        checkpoints.save(step, state)
    checkpoints.close()
    assert folder.list_checkpoint_steps() == [3, 4]
    assert {name.partition('/')[0] for name in list_files(folder.checkpoint_dir)} == {'3', '4'}
    assert {name.partition('/')[0] for name in list_files(folder.digest_dir)} == {'3', '4'}


DAMAGE_FUNCTIONS = {
    'other bytes': lambda path: path.write_bytes(b'other bytes'),
    'another size': lambda path: path.write_bytes(path.read_bytes() + b'x'),
    'gone': lambda path: path.unlink(),
}


@pytest.mark.parametrize('damage', make_case_params(DAMAGE_FUNCTIONS, ['other bytes']))
def test_corrupt_checkpoint_falls_back_to_previous_step_and_is_quarantined(run_path, damage):
    folder, checkpoints, state = open_checkpointer(run_path)
    for step in (1, 2):
        checkpoints.save(step, state)
    checkpoints.close()
    data_file_name = max(list_files(folder.checkpoint_dir / '2'), key=lambda name: ('/d/' in name, name))
    DAMAGE_FUNCTIONS[damage](folder.checkpoint_dir / '2' / data_file_name)
    _, new_checkpoints, _ = open_checkpointer(run_path)
    step, messages = new_checkpoints.find_latest_valid_step()
    assert (step, folder.list_checkpoint_steps()) == (1, [1])
    assert str(folder.checkpoint_dir / '2') in messages[0]
    assert list_files(folder.quarantine_dir / '2' / 'checkpoint')
    restored_state = new_checkpoints.restore(1, jax.tree.map(lambda leaf: leaf, state))
    assert np.array_equal(restored_state['params']['x'], state['params']['x'])
    new_checkpoints.close()


def test_checkpoint_without_digests_is_incomplete(run_path):
    folder, checkpoints, state = open_checkpointer(run_path)
    checkpoints.save(1, state)
    checkpoints.close()
    digests.get_digest_path(folder, 1, 0).unlink()
    assert digests.find_corruption(folder, 1).is_incomplete
    assert (folder.checkpoint_dir / '1' / COMMIT_MARKER).exists()


def test_checkpoint_is_loadable_by_orbax(run_path):
    folder, checkpoints, state = open_checkpointer(run_path)
    checkpoints.save(1, state)
    checkpoints.close()
    loaded_state = ocp.load(folder.checkpoint_dir / '1', checkpointable_name='state')
    assert np.array_equal(loaded_state['params']['x'], state['params']['x'])


def test_lease_rejects_second_job(run_path):
    with lease.hold_lease(run_path) as held_lease:
        with pytest.raises(UserError, match='in use'), lease.hold_lease(run_path):
            pass
        held_lease.check()
    assert not list_files(run_path)
    with lease.hold_lease(run_path):
        pass


def test_lease_admits_one_of_concurrent_jobs(run_path, monkeypatch):
    monkeypatch.setattr(
        lease, 'get_process_identity', lambda: dict(lease.UNREADABLE_OWNER, host='here', machine='this', pid=1)
    )
    admissions, refusals, barrier = [], [], threading.Barrier(6)

    def take_lease():
        try:
            with lease.hold_lease(run_path):
                admissions.append(1)
                barrier.wait(30)
        except UserError:
            refusals.append(1)
            barrier.wait(30)

    monkeypatch.setattr(lease, 'is_on_this_machine', lambda owner: True)
    monkeypatch.setattr(lease, 'is_dead', lambda owner: False)
    threads = [threading.Thread(target=take_lease) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(admissions), len(refusals)) == (1, 5)


def test_lease_of_silent_owner_is_taken_over(run_path, monkeypatch):
    monkeypatch.setattr(lease, 'OWNER_TIMEOUT_SECONDS', 0.3)
    monkeypatch.setattr(lease, 'is_on_this_machine', lambda owner: False)
    with lease.hold_lease(run_path) as sleeping_lease:
        sleeping_lease.stop_event.set()  # stop its thread, as in a suspended process
        sleeping_lease.thread.join()
        with lease.hold_lease(run_path) as new_lease:
            sleeping_lease.write_record()  # has no effect
            new_lease.poll_owner()
            new_lease.check()
            sleeping_lease.last_read_time -= 60
            with pytest.raises(lease.LeaseLostError, match='taken over'):
                sleeping_lease.check()
        assert not list_files(run_path)


def test_checkpoint_copied_from_disk_to_bucket_is_verified_by_content(run_path, tmp_path):
    folder, checkpoints, state = open_checkpointer(tmp_path / 'run')
    checkpoints.save(1, state)
    checkpoints.close()
    for name in list_files(folder.path):
        (run_path / name).write_bytes((folder.path / name).read_bytes())
    bucket_folder, new_checkpoints, _ = open_checkpointer(run_path)
    assert new_checkpoints.find_latest_valid_step() == (1, [])
    new_checkpoints.close()
    (bucket_folder.checkpoint_dir / '1' / COMMIT_MARKER).unlink()  # as after a copy without it
    with pytest.raises(UserError, match=COMMIT_MARKER):
        open_checkpointer(run_path)
    assert len(list_files(run_path)) == len(list_files(folder.path)) - 1


def test_checkpoint_copied_from_bucket_to_disk_is_verified_by_digests(run_path, tmp_path):
    _, checkpoints, state = open_checkpointer(run_path)
    checkpoints.save(1, state)
    checkpoints.close()
    disk_folder = RunDir(tmp_path / 'run')
    for name in list_files(run_path):
        (disk_folder.path / name).parent.mkdir(parents=True, exist_ok=True)
        (disk_folder.path / name).write_bytes((run_path / name).read_bytes())
    assert digests.find_corruption(disk_folder, 1) is None
    params_of_disk = checkpointer.restore_parameters(disk_folder.path, 1)
    assert np.array_equal(params_of_disk['x'], state['params']['x'])
    data_file_name = max(list_files(disk_folder.checkpoint_dir / '1'), key=lambda name: ('/d/' in name, name))
    damaged_file = disk_folder.checkpoint_dir / '1' / data_file_name
    damaged_file.write_bytes(damaged_file.read_bytes()[:-1] + b'?')
    assert data_file_name in digests.find_corruption(disk_folder, 1).reason
