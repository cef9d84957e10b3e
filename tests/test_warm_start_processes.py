"""Forks of several processes: one common checkpoint, or an error on all processes."""

import json
import threading

import pytest
from conftest import make_tiny_spec
from thread_group import run_group
from tiny_runs import write_checkpoints

from sinklab.checkpoint.checkpointer import Checkpointer
from sinklab.errors import UserError
from sinklab.run_dir import RunDir
from sinklab.storage import files
from sinklab.train import warm_start


def make_origin(path, content=b'of a run'):
    folder = RunDir(path)
    write_checkpoints(folder, 4, content=content)
    return warm_start.WarmStart(folder, 4, make_tiny_spec())


def verify_on_processes(*origins):
    return run_group(len(origins), lambda group: warm_start.verify_origin(origins[group.process_index], group))


def test_verify_origin_accepts_same_checkpoint_by_other_path(tmp_path):
    origin = make_origin(tmp_path / 'one')
    (tmp_path / 'two').symlink_to(tmp_path / 'one')
    assert verify_on_processes(origin, warm_start.WarmStart(RunDir(tmp_path / 'two'), 4, make_tiny_spec())) == [
        None,
        None,
    ]


def test_verify_origin_refuses_different_or_missing_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(files, 'SHARED_DISK_SECONDS', 0.0)
    first_origin, other_origin = make_origin(tmp_path / 'one'), make_origin(tmp_path / 'two', b'of another')
    for origins in ((first_origin, other_origin), (first_origin, None), (None, first_origin)):
        errors = verify_on_processes(*origins)
        assert [type(error) for error in errors] == [UserError, UserError]
        assert all(word in str(message) for message in errors for word in ('process 1', 'process 0', '--from'))


def test_verify_origin_refuses_damage_found_by_one_process(tmp_path):
    origin = make_origin(tmp_path / 'one')
    (origin.run_dir.checkpoint_dir / '4' / 'state' / 'manifest.ocdbt').write_bytes(b'of a RUN')
    assert [
        'checkpoints/4 ' in str(error) and ' state/manifest.ocdbt ' in str(error)
        for error in verify_on_processes(origin, origin)
    ] == [
        True,
        True,
    ]


@pytest.mark.slow
def test_verify_origin_waits_for_delayed_digests(tmp_path):
    first_origin, other_origin = make_origin(tmp_path / 'one'), make_origin(tmp_path / 'two')
    content = (first_origin.run_dir.checkpoint_dir / '4' / 'digests_0.json').read_bytes()
    file = other_origin.run_dir.checkpoint_dir / '4' / 'digests_0.json'
    file.unlink()
    timer = threading.Timer(0.3, file.write_bytes, [content])
    timer.start()
    assert verify_on_processes(first_origin, other_origin) == [None, None]
    timer.join()


def test_save_first_checkpoint_refuses_missing_origin_on_all_processes(tmp_path):
    """Only process 0 sees row.json."""
    run_dirs = [RunDir(tmp_path / name) for name in ('here', 'there')]
    run_dirs[0].path.mkdir()
    (run_dirs[0].path / 'row.json').write_text(json.dumps({'from': dict(run='../parent', step=4)}))

    def prepare_checkpoint(group):
        return warm_start.save_first_checkpoint(
            None,
            make_tiny_spec(),
            None,
            4,
            Checkpointer(run_dirs[group.process_index], make_tiny_spec().checkpoint, {}, group),
        )

    errors = run_group(2, prepare_checkpoint)
    message_ending = 'here has no checkpoint and starts at step 4 of ../parent; give --from again'
    assert [str(error).endswith(message_ending) for error in errors] == [True, True]
