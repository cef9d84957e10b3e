"""Runs in buckets, compared with runs on disk: content, resumption and storage errors."""

import json
import time

import jax
import numpy as np
import pytest
from conftest import make_tiny_spec
from emulators import Answer
from tiny_runs import CrashError, CrashingCallback, RecordingCallback, drop_clock_metrics, make_spec, train_run

from sinklab.checkpoint import checkpointer
from sinklab.cli import tail
from sinklab.cli.main import main
from sinklab.errors import UserError
from sinklab.report import runs
from sinklab.run_dir import RunDir
from sinklab.storage import lease
from sinklab.storage.directories import list_files
from sinklab.storage.paths import limit_retry_seconds, parse_path
from sinklab.train import warm_start

RUN_FILES = ('config.json', 'row.json', 'run.json', 'tokenizer.json')


@pytest.fixture(scope='module')
def disk_path(corpus, tmp_path_factory):
    """Return the folder of an uninterrupted run of eight steps."""
    path = tmp_path_factory.mktemp('disk') / 'run'
    train_run(make_spec(corpus), path)
    return path


@pytest.fixture
def bucket_path(bucket):
    return parse_path(f'{bucket.url}/runs/run')


def load_arrays(path):
    with path.open('rb') as file, np.load(file) as archive:
        return dict(archive)


def restore_params(path, step):
    return jax.tree.leaves(checkpointer.restore_parameters(path, step))


def are_equal(actual, expected):
    return len(actual) == len(expected) and all(map(np.array_equal, actual, expected))


def assert_same_run(bucket_path, disk_path):
    """Check that a run in a bucket has the content of a run on disk."""
    bucket_run, disk_run = RunDir(bucket_path), RunDir(disk_path)
    assert [bucket_run.read_json(name) for name in ('config', 'row')] == [
        disk_run.read_json(name) for name in ('config', 'row')
    ]
    assert drop_clock_metrics(bucket_run.read_records()) == drop_clock_metrics(disk_run.read_records())
    assert [path.name for path in bucket_run.probe_files] == [path.name for path in disk_run.probe_files]
    for bucket_file, disk_file in zip(bucket_run.probe_files, disk_run.probe_files, strict=True):
        assert bucket_file.read_bytes() == disk_file.read_bytes()
    assert bucket_run.list_checkpoint_steps() == disk_run.list_checkpoint_steps()
    assert are_equal(restore_params(bucket_path, 8), restore_params(disk_path, 8))


@pytest.mark.slow
def test_run_in_bucket_has_same_content_as_on_disk(corpus, bucket_path, disk_path):
    train_run(make_spec(corpus), bucket_path)
    assert_same_run(bucket_path, disk_path)
    assert [line['step'] for line in RunDir(bucket_path).read_metric_lines()] == [
        line['step'] for line in RunDir(disk_path).read_metric_lines()
    ]
    assert {name.partition('/')[0] for name in list_files(bucket_path)} == {
        *RUN_FILES,
        'environment.json',
        'outcome.json',
        'metrics',
        'probe',
        'checkpoints',
        'digests',
    }


@pytest.mark.slow
def test_crashed_run_in_bucket_resumes_to_same_result(corpus, bucket_path, disk_path):
    with pytest.raises(CrashError):
        train_run(make_spec(corpus), bucket_path, CrashingCallback(step=6))
    callback = RecordingCallback()
    train_run(make_spec(corpus), bucket_path, callback)
    assert callback.train_begin_arguments[0] == 4
    assert_same_run(bucket_path, disk_path)


@pytest.mark.slow
def test_fork_between_buckets_matches_fork_on_disk(corpus, bucket_path, disk_path, tmp_path):
    longer_spec = make_spec(corpus, optimizer__steps=12)
    train_run(make_spec(corpus), bucket_path)

    def fork_run(parent, path):
        origin = warm_start.WarmStart(RunDir(parent), 8, make_spec(corpus))
        return drop_clock_metrics(train_run(longer_spec, path, origin=origin))

    bucket_records, disk_records = (
        fork_run(bucket_path, bucket_path.parent / 'fork'),
        fork_run(disk_path, tmp_path / 'fork'),
    )
    assert bucket_records == disk_records
    assert RunDir(bucket_path.parent / 'fork').read_lineage()['run'] == '../run'
    assert (
        drop_clock_metrics(
            train_run(
                longer_spec, tmp_path / 'here', origin=warm_start.WarmStart(RunDir(bucket_path), 8, make_spec(corpus))
            )
        )
        == bucket_records
    )
    assert RunDir(tmp_path / 'here').read_lineage()['run'] == str(bucket_path)


@pytest.mark.exhaustive
def test_warm_start_from_parameters_in_bucket_matches_disk(corpus, bucket_path, disk_path, tmp_path):
    train_run(make_spec(corpus), bucket_path)

    def tune_run(parent, path):
        origin = warm_start.WarmStart(RunDir(parent), 8, make_spec(corpus), 'params')
        return drop_clock_metrics(train_run(make_spec(corpus), path, origin=origin))

    assert tune_run(bucket_path, bucket_path.parent / 'tuned') == tune_run(disk_path, tmp_path / 'tuned')
    assert RunDir(bucket_path.parent / 'tuned').list_checkpoint_steps() == [0, 4, 8]
    assert RunDir(bucket_path.parent / 'tuned').read_lineage()['takes'] == 'params'


@pytest.mark.slow
def test_report_of_run_in_bucket_matches_disk(corpus, bucket_path, disk_path, capsys):
    train_run(make_spec(corpus), bucket_path)
    bucket_run, disk_run = (runs.read_runs([str(path)])[0] for path in (bucket_path, disk_path))
    assert drop_clock_metrics(bucket_run.records) == drop_clock_metrics(disk_run.records)
    assert all(
        np.array_equal(bucket_run.probe_values[name], disk_run.probe_values[name]) for name in disk_run.probe_values
    )
    assert main(['report', str(bucket_path), '--png']) == 0
    assert f'{bucket_path}/report.html' in capsys.readouterr().out
    assert (bucket_path / 'curves.png').read_bytes().startswith(b'\x89PNG')
    assert main(['checkpoint', 'verify', str(bucket_path)]) == 0
    assert main(['checkpoint', 'ls', str(bucket_path), '--json']) == 0
    rows = json.loads(capsys.readouterr().out.split('sound\n')[-1])
    assert [row['digests'] for row in rows] == ['complete'] * len(rows)
    assert main(['report', f'{bucket_path.parent}/*/', '--out', str(bucket_path.parent / 'page')]) == 0
    assert '<html' in (bucket_path.parent / 'page' / 'report.html').read_text()


@pytest.mark.slow
def test_train_step_sends_no_storage_requests(corpus, bucket):
    """Ignore requests for metrics and lease, which are sent at time intervals."""
    request_counts = []

    class CountingCallback(RecordingCallback):
        def on_record(self, record, written):
            if record['step'] in (1, 39):
                request_counts.append(len(bucket.proxy.requests))

    changes = dict(optimizer__steps=40, checkpoint__every_steps=0, probe__every_steps=0, log__every_steps=1)
    train_run(make_spec(corpus, **changes), f'{bucket.url}/run', CountingCallback())
    step_requests = bucket.proxy.requests[slice(*request_counts)]
    assert [
        request
        for request in step_requests
        if '/metrics/' not in request.path_and_names and 'lease.json' not in request.path_and_names
    ] == []


def test_denied_write_is_reported_before_training(corpus, bucket, bucket_path):
    with (
        bucket.proxy.apply_rule(lambda method, path: Answer(status=403) if method in ('POST', 'PUT') else None),
        pytest.raises(UserError, match=bucket.url),
    ):
        train_run(make_spec(corpus), bucket_path)


def test_unavailable_storage_raises_os_error_after_timeout(bucket, bucket_path):
    with (
        limit_retry_seconds(0.5),
        bucket.proxy.apply_rule(lambda method, path: Answer(status=503)),
        pytest.raises(OSError, match=bucket.url),
    ):
        RunDir(bucket_path).read_json('config')


@pytest.mark.slow
@pytest.mark.exhaustive
def test_repeated_sweep_in_bucket_trains_no_runs(corpus, bucket, capsys):
    arguments = [
        '--config=configs/quickstart.py',
        '--size=smoke',
        '--rows=softmax,sigmoid',
        f'--workdir={bucket.url}/sweep',
    ]
    arguments += [f'--config.data.source={corpus}', '--config.optimizer.steps=2', '--json']
    assert main(['sweep', *arguments]) == 0
    table = capsys.readouterr().out
    assert [row['outcome'] for row in json.loads(table)] == ['done 1/1'] * 2
    written_names = [
        request.path_and_names
        for request in bucket.proxy.requests
        if request.is_write and 'metrics' in request.path_and_names
    ]
    assert main(['sweep', *arguments]) == 0
    assert capsys.readouterr().out == table
    assert (
        written_names
        == [
            request.path_and_names
            for request in bucket.proxy.requests
            if request.is_write and 'metrics' in request.path_and_names
        ]
        != []
    )
    assert json.loads((parse_path(bucket.url) / 'sweep' / 'sweep.json').read_text()) == json.loads(table)


def test_follow_run_reads_run_in_bucket(bucket_path):
    class FollowingCallback(RecordingCallback):
        steps = ()

        def on_train_begin(self, step, attention, changes):
            self.messages.append(attention)

        def on_record(self, record, written):
            self.steps = (*self.steps, record['step'])

    folder, callback = RunDir(bucket_path), FollowingCallback()
    folder.initialize(make_tiny_spec(), dict(row='tiny'))
    with lease.hold_lease(bucket_path) as held_lease:
        metrics, updates = folder.open_metrics_writer(held_lease.check), tail.follow_run(folder, callback)
        next(updates)
        folder.write_json('environment', dict(attempts=[dict(step=0, attention='dense')]))
        for step in (1, 2):
            metrics.append(dict(step=step))
            metrics.sync()
            next(updates)
        assert (callback.messages, callback.steps) == (['dense'], (1, 2))
        metrics.append(dict(step=3))
        metrics.close()
        folder.write_json('outcome', dict(kind='done', message=''))
    assert list(updates) == []
    assert callback.steps == (1, 2, 3)


@pytest.mark.parametrize('command', ['report', 'tail', 'checkpoint ls'])
def test_denied_read_is_reported_in_one_line(bucket, bucket_path, capsys, command):
    with bucket.proxy.apply_rule(lambda method, path: Answer(status=403)):
        assert main([*command.split(), str(bucket_path)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert bucket.url in lines[0]


@pytest.mark.exhaustive
def test_busy_storage_does_not_change_run(corpus, bucket, bucket_path, disk_path):
    """Delay metrics, a probe and two checkpoints after step 3."""
    deadlines = []

    class DelayingCallback(RecordingCallback):
        def on_record(self, record, written):
            if record['step'] == 3 and not deadlines:
                deadlines.append(time.monotonic() + 60)

    def answer_busy(method, path):
        return Answer(status=503) if deadlines and time.monotonic() < deadlines[0] else None

    with bucket.proxy.apply_rule(answer_busy):
        train_run(make_spec(corpus), bucket_path, DelayingCallback())
    assert time.monotonic() > deadlines[0]
    assert_same_run(bucket_path, disk_path)


def test_lost_write_permission_keeps_last_checkpoint_and_run_resumes(corpus, bucket, bucket_path, disk_path):
    def deny_checkpoint(method, path):
        return Answer(status=403) if method in ('POST', 'PUT') and '/checkpoints/8/' in path else None

    with bucket.proxy.apply_rule(deny_checkpoint), pytest.raises(UserError, match='checkpoint'):
        train_run(make_spec(corpus), bucket_path)
    assert RunDir(bucket_path).list_checkpoint_steps() == [4]
    assert RunDir(bucket_path).read_json('outcome')['checkpoint'] == 4
    train_run(make_spec(corpus), bucket_path)
    assert_same_run(bucket_path, disk_path)
