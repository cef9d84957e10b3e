"""Forks of several processes: one common checkpoint, or an error on all processes."""

import json
import threading

import pytest
from conftest import make_tiny_spec
from runs import write_checkpoints
from thread_group import run_group

from sinklab.checkpoint.checkpointer import Checkpointer
from sinklab.errors import UserError
from sinklab.run_dir import RunDir
from sinklab.storage import atomic_write as files
from sinklab.train import warm_start


def made(path, content=b'of a run'):
    folder = RunDir(path)
    write_checkpoints(folder, 4, content=content)
    return warm_start.WarmStart(folder, 4, make_tiny_spec())


def verified(*origins):
    return run_group(len(origins), lambda group: warm_start.verify_origin(origins[group.index], group))


def test_verify_origin_accepts_same_checkpoint_by_other_path(tmp_path):
    origin = made(tmp_path / 'one')
    (tmp_path / 'two').symlink_to(tmp_path / 'one')
    assert verified(origin, warm_start.WarmStart(RunDir(tmp_path / 'two'), 4, make_tiny_spec())) == [None, None]


def test_verify_origin_refuses_different_or_missing_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(files, 'SHARED_DISK_SECONDS', 0.0)
    one, other = made(tmp_path / 'one'), made(tmp_path / 'two', b'of another')
    for origins in ((one, other), (one, None), (None, one)):
        said = verified(*origins)
        assert [type(refusal) for refusal in said] == [UserError, UserError]
        assert all(word in str(line) for line in said for word in ('process 1', 'process 0', '--from'))


def test_verify_origin_refuses_damage_found_by_one_process(tmp_path):
    origin = made(tmp_path / 'one')
    (origin.run_dir.checkpoint_dir / '4' / 'file').write_bytes(b'of a RUN')
    assert ['checkpoints/4 ' in str(line) and ' file ' in str(line) for line in verified(origin, origin)] == [
        True,
        True,
    ]


@pytest.mark.slow
def test_verify_origin_waits_for_delayed_digests(tmp_path):
    one, other = made(tmp_path / 'one'), made(tmp_path / 'two')
    content = (one.run_dir.digest_dir / '4' / '0.json').read_bytes()
    file = other.run_dir.digest_dir / '4' / '0.json'
    file.write_text('{}')
    later = threading.Timer(0.3, file.write_bytes, [content])
    later.start()
    assert verified(one, other) == [None, None]
    later.join()


def test_prepare_first_checkpoint_refuses_missing_origin_on_all_processes(tmp_path):
    """Only process 0 sees row.json."""
    folders = [RunDir(tmp_path / name) for name in ('here', 'there')]
    folders[0].path.mkdir()
    (folders[0].path / 'row.json').write_text(json.dumps({'from': dict(run='../parent', step=4)}))

    def begin(group):
        return warm_start.prepare_first_checkpoint(
            None,
            make_tiny_spec(),
            None,
            4,
            Checkpointer(folders[group.index], make_tiny_spec().checkpoint, {}, group),
        )

    said = run_group(2, begin)
    words = 'here has no checkpoint and starts at step 4 of ../parent; give --from again'
    assert [str(refusal).endswith(words) for refusal in said] == [True, True]
