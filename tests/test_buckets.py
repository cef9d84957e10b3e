"""Runs in a bucket, compared with the same runs on a disk."""

import jax
import numpy as np
import pytest
from checkpoint_damages import flip_bit
from emulators import Answer
from tiny_runs import CrashError, CrashingCallback, RecordingCallback, drop_clock_metrics, make_spec, train_run

from sinklab.checkpoint import checkpointer
from sinklab.cli.main import main
from sinklab.exit_status import EXIT_CODES
from sinklab.report import runs
from sinklab.run_dir import RunDir
from sinklab.storage.files import list_file_infos
from sinklab.storage.folder_lock import FolderTakenError, hold_folder
from sinklab.storage.paths import parse_path
from sinklab.train import warm_start
from sinklab.train.run_outcome import classify_error

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def disk_path(corpus, tmp_path_factory):
    """Return the folder of an uninterrupted run of eight steps."""
    path = tmp_path_factory.mktemp('disk') / 'run'
    train_run(make_spec(corpus), path)
    return path


@pytest.fixture
def bucket_path(bucket):
    return parse_path(f'{bucket.url}/runs/run')


def assert_same_run(bucket_path, disk_path):
    bucket_run, disk_run = RunDir(bucket_path), RunDir(disk_path)
    for name in ('config', 'row'):
        assert bucket_run.read_json(name) == disk_run.read_json(name)
    assert drop_clock_metrics(bucket_run.read_records()) == drop_clock_metrics(disk_run.read_records())
    for bucket_file, disk_file in zip(bucket_run.probe_files, disk_run.probe_files, strict=True):
        assert bucket_file.read_bytes() == disk_file.read_bytes()
    assert bucket_run.list_checkpoint_steps() == disk_run.list_checkpoint_steps()
    params = [jax.tree.leaves(checkpointer.restore_parameters(path, 8)) for path in (bucket_path, disk_path)]
    assert all(map(np.array_equal, *params))


def test_run_in_bucket_equals_run_on_disk(corpus, bucket_path, disk_path, capsys):
    train_run(make_spec(corpus), bucket_path)
    assert_same_run(bucket_path, disk_path)
    assert {name.partition('/')[0] for name in list_file_infos(bucket_path)} == {
        name.partition('/')[0] for name in list_file_infos(disk_path)
    } - {'run.lock'}
    bucket_run, disk_run = (runs.read_runs([str(path)])[0] for path in (bucket_path, disk_path))
    for name in disk_run.probe_values:
        np.testing.assert_array_equal(bucket_run.probe_values[name], disk_run.probe_values[name])
    assert main(['report', str(bucket_path), '--png']) == 0
    assert (bucket_path / 'curves.png').read_bytes().startswith(b'\x89PNG')
    assert main(['checkpoint', 'verify', str(bucket_path)]) == 0


def test_crashed_run_in_bucket_resumes_to_same_result(corpus, bucket_path, disk_path):
    with pytest.raises(CrashError):
        train_run(make_spec(corpus), bucket_path, CrashingCallback(step=6))
    callback = RecordingCallback()
    train_run(make_spec(corpus), bucket_path, callback)
    assert callback.train_begin_arguments[0] == 4
    assert_same_run(bucket_path, disk_path)


@pytest.mark.parametrize('takes', ['', pytest.param('params', marks=pytest.mark.exhaustive)])
def test_fork_in_bucket_equals_fork_on_disk(corpus, bucket_path, disk_path, tmp_path, takes):
    train_run(make_spec(corpus), bucket_path)

    def fork_run(parent, path):
        parent_checkpoint = warm_start.WarmStart(RunDir(parent), 8, make_spec(corpus), takes)
        return drop_clock_metrics(train_run(make_spec(corpus, optimizer__steps=12), path, parent=parent_checkpoint))

    fork_path = bucket_path.parent / 'fork'
    assert fork_run(bucket_path, fork_path) == fork_run(disk_path, tmp_path / 'fork')
    assert RunDir(fork_path).read_parent()['run'] == '../run'


def test_damaged_checkpoint_in_bucket_is_passed_over(corpus, bucket_path, disk_path):
    train_run(make_spec(corpus), bucket_path)
    name = flip_bit(RunDir(bucket_path), 8, np.random.default_rng(0))
    callback = RecordingCallback()
    train_run(make_spec(corpus), bucket_path, callback)
    assert name in callback.messages[0]
    assert list_file_infos(bucket_path / 'damaged' / '8')
    assert_same_run(bucket_path, disk_path)


def test_job_stops_without_another_write_when_a_newer_one_takes_over(corpus, bucket_path):
    folder = RunDir(bucket_path)

    class TakeoverCallback(RecordingCallback):
        def on_record(self, record, written):
            if record['step'] == 6:
                with hold_folder(bucket_path):
                    self.files = {name: (bucket_path / name).read_bytes() for name in list_file_infos(bucket_path)}

    callback = TakeoverCallback()
    with pytest.raises(FolderTakenError):
        train_run(make_spec(corpus), bucket_path, callback)
    assert folder.list_checkpoint_steps() == [4]
    kept = {name: (bucket_path / name).read_bytes() for name in callback.files}
    assert kept == callback.files


@pytest.mark.parametrize('command', ['report', 'train'])
def test_denied_access_is_reported_in_one_line(bucket, bucket_path, capsys, command):
    options = ['--config=configs/quickstart.py:softmax', '--size=smoke'] if command == 'train' else []
    target = f'--workdir={bucket_path}' if command == 'train' else str(bucket_path)
    with bucket.proxy.apply_rule(lambda method, path: Answer(status=403)):
        assert main([*command.split(), target, *options]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ('status', 'kind'), [pytest.param(403, 'refused', marks=pytest.mark.exhaustive), (503, 'lost')]
)
def test_failed_save_keeps_last_checkpoint_and_run_resumes(corpus, bucket, bucket_path, disk_path, status, kind):
    def refuse_checkpoint(method, path):
        return Answer(status=status) if method in ('POST', 'PUT') and '/checkpoints/8/' in path else None

    with bucket.proxy.apply_rule(refuse_checkpoint), pytest.raises(Exception) as error:
        train_run(make_spec(corpus), bucket_path)
    assert classify_error(error.value).exit_code == EXIT_CODES[kind]
    assert RunDir(bucket_path).read_json('outcome')['checkpoint'] == 4
    train_run(make_spec(corpus), bucket_path)
    assert_same_run(bucket_path, disk_path)
