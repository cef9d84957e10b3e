"""Tests of checkpoints in a bucket: incomplete uploads, corruption, leases and copies."""

import threading

import jax
import numpy as np
import pytest
from conftest import some, tiny
from orbax.checkpoint import v1 as ocp

from sinklab.checkpoint import checkpointer, digests
from sinklab.checkpoint.checkpointer import Checkpointer
from sinklab.errors import UserError
from sinklab.run_dir import RunDir
from sinklab.storage import lease
from sinklab.storage.directories import COMMIT_MARKER, list_files
from sinklab.storage.paths import parse_path


@pytest.fixture
def at(bucket):
    return parse_path(f'{bucket.url}/runs/run')


def saving(at, **rules):
    state = {'params': {'x': jax.numpy.arange(4.0)}}
    folder = RunDir(at)
    return folder, Checkpointer(folder, tiny(**rules).checkpoint, {}), state


def test_incomplete_upload_is_not_listed_and_is_deleted(at):
    folder, saved, state = saving(at)
    saved.save(1, state)
    saved.wait()
    (folder.checkpoint_dir / '2' / 'state').joinpath('half').write_bytes(b'half')
    assert folder.list_checkpoint_steps() == [1]
    saved.close()
    _, again, _ = saving(at)
    assert again.find_latest_valid_step() == (1, [])
    assert not list_files(folder.checkpoint_dir / '2')
    again.close()


def test_retention_deletes_old_checkpoints_and_digests(at):
    folder, saved, state = saving(at, checkpoint__keep=2)
    for step in (1, 2, 3, 4):
        saved.save(step, state)
    saved.close()
    assert folder.list_checkpoint_steps() == [3, 4]
    assert {name.partition('/')[0] for name in list_files(folder.checkpoint_dir)} == {'3', '4'}
    assert {name.partition('/')[0] for name in list_files(folder.digest_dir)} == {'3', '4'}


HARM = {
    'other bytes': lambda path: path.write_bytes(b'other bytes'),
    'another size': lambda path: path.write_bytes(path.read_bytes() + b'x'),
    'gone': lambda path: path.unlink(),
}


@pytest.mark.parametrize('harm', some(HARM, ['other bytes']))
def test_corrupt_checkpoint_falls_back_to_previous_step_and_is_quarantined(at, harm):
    folder, saved, state = saving(at)
    for step in (1, 2):
        saved.save(step, state)
    saved.close()
    largest = max(list_files(folder.checkpoint_dir / '2'), key=lambda name: ('/d/' in name, name))
    HARM[harm](folder.checkpoint_dir / '2' / largest)
    _, again, _ = saving(at)
    step, passed = again.find_latest_valid_step()
    assert (step, folder.list_checkpoint_steps()) == (1, [1])
    assert str(folder.checkpoint_dir / '2') in passed[0]
    assert list_files(folder.quarantine_dir / '2' / 'checkpoint')
    loaded = again.restore(1, jax.tree.map(lambda leaf: leaf, state))
    assert np.array_equal(loaded['params']['x'], state['params']['x'])
    again.close()


def test_checkpoint_without_digests_is_incomplete(at):
    folder, saved, state = saving(at)
    saved.save(1, state)
    saved.close()
    digests.get_digest_path(folder, 1, 0).unlink()
    assert digests.find_corruption(folder, 1).is_incomplete
    assert (folder.checkpoint_dir / '1' / COMMIT_MARKER).exists()


def test_checkpoint_is_loadable_by_orbax(at):
    folder, saved, state = saving(at)
    saved.save(1, state)
    saved.close()
    found = ocp.load(folder.checkpoint_dir / '1', checkpointable_name='state')
    assert np.array_equal(found['params']['x'], state['params']['x'])


def test_lease_rejects_second_job(at):
    with lease.hold_lease(at) as held:
        with pytest.raises(UserError, match='in use'), lease.hold_lease(at):
            pass
        held.check()
    assert not list_files(at)
    with lease.hold_lease(at):
        pass


def test_lease_admits_one_of_concurrent_jobs(at, monkeypatch):
    monkeypatch.setattr(
        lease, 'get_process_identity', lambda: dict(lease.UNREADABLE_OWNER, host='here', machine='this', pid=1)
    )
    entered, refused, over = [], [], threading.Barrier(6)

    def come():
        try:
            with lease.hold_lease(at):
                entered.append(1)
                over.wait(30)
        except UserError:
            refused.append(1)
            over.wait(30)

    monkeypatch.setattr(lease, 'is_on_this_machine', lambda owner: True)
    monkeypatch.setattr(lease, 'is_dead', lambda owner: False)
    crowd = [threading.Thread(target=come) for _ in range(6)]
    for one in crowd:
        one.start()
    for one in crowd:
        one.join()
    assert (len(entered), len(refused)) == (1, 5)


def test_lease_of_silent_owner_is_taken_over(at, monkeypatch):
    monkeypatch.setattr(lease, 'OWNER_TIMEOUT_SECONDS', 0.3)
    monkeypatch.setattr(lease, 'is_on_this_machine', lambda owner: False)
    with lease.hold_lease(at) as asleep:
        asleep.stop_event.set()  # stop its thread, as in a suspended process
        asleep.thread.join()
        with lease.hold_lease(at) as held:
            asleep.write_record()  # has no effect
            held.poll_owner()
            held.check()
            asleep.last_read_time -= 60
            with pytest.raises(lease.LeaseLostError, match='taken over'):
                asleep.check()
        assert not list_files(at)


def test_checkpoint_copied_from_disk_to_bucket_is_verified_by_content(at, tmp_path):
    folder, saved, state = saving(tmp_path / 'run')
    saved.save(1, state)
    saved.close()
    for name in list_files(folder.path):
        (at / name).write_bytes((folder.path / name).read_bytes())
    copied, again, _ = saving(at)
    assert again.find_latest_valid_step() == (1, [])
    again.close()
    (copied.checkpoint_dir / '1' / COMMIT_MARKER).unlink()  # as after a copy without it
    with pytest.raises(UserError, match=COMMIT_MARKER):
        saving(at)
    assert len(list_files(at)) == len(list_files(folder.path)) - 1


def test_checkpoint_copied_from_bucket_to_disk_is_verified_by_digests(at, tmp_path):
    _, saved, state = saving(at)
    saved.save(1, state)
    saved.close()
    here = RunDir(tmp_path / 'run')
    for name in list_files(at):
        (here.path / name).parent.mkdir(parents=True, exist_ok=True)
        (here.path / name).write_bytes((at / name).read_bytes())
    assert digests.find_corruption(here, 1) is None
    loaded = checkpointer.restore_parameters(here.path, 1)
    assert np.array_equal(loaded['x'], state['params']['x'])
    largest = max(list_files(here.checkpoint_dir / '1'), key=lambda name: ('/d/' in name, name))
    harmed = here.checkpoint_dir / '1' / largest
    harmed.write_bytes(harmed.read_bytes()[:-1] + b'?')
    assert largest in digests.find_corruption(here, 1).reason
