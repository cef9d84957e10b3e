"""Runs in buckets, compared with runs on disk: content, resumption and storage errors."""

import json
import time

import jax
import numpy as np
import pytest
from conftest import tiny
from emulators import Answer
from runs import Died, Dying, Hearing, spec, timeless, train

from sinklab.checkpoint import checkpointer
from sinklab.cli import tail
from sinklab.cli import train as cli
from sinklab.cli.main import main
from sinklab.errors import UserError
from sinklab.process_group import SingleProcessGroup
from sinklab.report import runs
from sinklab.run_dir import RunDir
from sinklab.storage import lease
from sinklab.storage.directories import list_files
from sinklab.storage.paths import parse_path, short_timeout
from sinklab.train import warm_start

# Test only one kind of bucket by default where a related test covers the other kind.
GS = pytest.mark.parametrize('bucket', ['gs', pytest.param('s3', marks=pytest.mark.exhaustive)], indirect=True)
S3 = pytest.mark.parametrize('bucket', ['s3', pytest.param('gs', marks=pytest.mark.exhaustive)], indirect=True)
OURS = ('config.json', 'row.json', 'run.json', 'tokenizer.json')


@pytest.fixture(scope='module')
def disk(corpus, tmp_path_factory):
    """Return the folder of an uninterrupted run of eight steps."""
    path = tmp_path_factory.mktemp('disk') / 'run'
    train(spec(corpus), path)
    return path


@pytest.fixture
def at(bucket):
    return parse_path(f'{bucket.url}/runs/run')


def arrays(path):
    with path.open('rb') as file, np.load(file) as found:
        return dict(found)


def params(path, step):
    return jax.tree.leaves(checkpointer.restore_parameters(path, step))


def same(ours, theirs):
    return len(ours) == len(theirs) and all(map(np.array_equal, ours, theirs))


def alike(at, disk):
    """Check that a run in a bucket has the content of a run on disk."""
    ours, theirs = RunDir(at), RunDir(disk)
    assert [ours.read_json(name) for name in ('config', 'row')] == [
        theirs.read_json(name) for name in ('config', 'row')
    ]
    assert timeless(ours.read_records()) == timeless(theirs.read_records())
    assert [path.name for path in ours.probe_files] == [path.name for path in theirs.probe_files]
    for one, other in zip(ours.probe_files, theirs.probe_files, strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert ours.list_checkpoint_steps() == theirs.list_checkpoint_steps()
    assert same(params(at, 8), params(disk, 8))


@pytest.mark.slow
def test_run_in_bucket_has_same_content_as_on_disk(corpus, at, disk):
    train(spec(corpus), at)
    alike(at, disk)
    assert [line['step'] for line in RunDir(at).read_metric_lines()] == [
        line['step'] for line in RunDir(disk).read_metric_lines()
    ]
    assert {name.partition('/')[0] for name in list_files(at)} == {
        *OURS,
        'environment.json',
        'outcome.json',
        'metrics',
        'probe',
        'checkpoints',
        'digests',
    }


@pytest.mark.slow
@S3
def test_crashed_run_in_bucket_resumes_to_same_result(corpus, at, disk):
    with pytest.raises(Died):
        train(spec(corpus), at, Dying(at=6))
    heard = Hearing()
    train(spec(corpus), at, heard)
    assert heard.begun[0] == 4
    alike(at, disk)


@pytest.mark.slow
@S3
def test_fork_between_buckets_matches_fork_on_disk(corpus, at, disk, tmp_path):
    longer = spec(corpus, optimizer__steps=12)
    train(spec(corpus), at)

    def forked(parent, path):
        origin = warm_start.WarmStart(RunDir(parent), 8, spec(corpus))
        return timeless(train(longer, path, origin=origin))

    ours, theirs = forked(at, at.parent / 'fork'), forked(disk, tmp_path / 'fork')
    assert ours == theirs
    assert RunDir(at.parent / 'fork').read_lineage()['run'] == '../run'
    assert (
        timeless(train(longer, tmp_path / 'here', origin=warm_start.WarmStart(RunDir(at), 8, spec(corpus)))) == ours
    )
    assert RunDir(tmp_path / 'here').read_lineage()['run'] == str(at)


@pytest.mark.exhaustive
def test_warm_start_from_parameters_in_bucket_matches_disk(corpus, at, disk, tmp_path):
    train(spec(corpus), at)

    def tuned(parent, path):
        given = cli.resolve_parent(f'params:{parent}@8', RunDir(path), SingleProcessGroup())
        return timeless(train(spec(corpus), path, origin=cli.load_warm_start(given)))

    assert tuned(at, at.parent / 'tuned') == tuned(disk, tmp_path / 'tuned')
    assert RunDir(at.parent / 'tuned').list_checkpoint_steps() == [0, 4, 8]
    assert RunDir(at.parent / 'tuned').read_lineage()['takes'] == 'params'


@pytest.mark.slow
@GS
def test_report_of_run_in_bucket_matches_disk(corpus, at, disk, capsys):
    train(spec(corpus), at)
    ours, theirs = (runs.read_runs([str(path)])[0] for path in (at, disk))
    assert timeless(ours.records) == timeless(theirs.records)
    assert all(np.array_equal(ours.probe_values[name], theirs.probe_values[name]) for name in theirs.probe_values)
    assert main(['report', str(at), '--png']) == 0
    assert f'{at}/report.html' in capsys.readouterr().out
    assert (at / 'curves.png').read_bytes().startswith(b'\x89PNG')
    assert main(['checkpoint', 'verify', str(at)]) == 0
    assert main(['checkpoint', 'ls', str(at), '--json']) == 0
    listed = json.loads(capsys.readouterr().out.split('sound\n')[-1])
    assert [row['digests'] for row in listed] == ['complete'] * len(listed)
    assert main(['report', f'{at.parent}/*/', '--out', str(at.parent / 'page')]) == 0
    assert '<html' in (at.parent / 'page' / 'report.html').read_text()


@pytest.mark.slow
def test_train_step_sends_no_storage_requests(corpus, bucket):
    """Ignore requests for metrics and lease, which are sent at time intervals."""
    between = []

    class Counting(Hearing):
        def on_record(self, record, written):
            if record['step'] in (1, 39):
                between.append(len(bucket.proxy.requests))

    few = dict(optimizer__steps=40, checkpoint__every_steps=0, probe__every_steps=0, log__every_steps=1)
    train(spec(corpus, **few), f'{bucket.url}/run', Counting())
    asked = bucket.proxy.requests[slice(*between)]
    assert [one for one in asked if '/metrics/' not in one.named and 'lease.json' not in one.named] == []


def test_denied_write_is_reported_before_training(corpus, bucket, at):
    with (
        bucket.proxy.treating(lambda method, path: Answer(status=403) if method in ('POST', 'PUT') else None),
        pytest.raises(UserError, match=bucket.url),
    ):
        train(spec(corpus), at)


def test_unavailable_storage_raises_os_error_after_timeout(bucket, at):
    with (
        short_timeout(0.5),
        bucket.proxy.treating(lambda method, path: Answer(status=503)),
        pytest.raises(OSError, match=bucket.url),
    ):
        RunDir(at).read_json('config')


@pytest.mark.slow
@GS
@pytest.mark.exhaustive
def test_repeated_sweep_in_bucket_trains_no_runs(corpus, bucket, capsys):
    given = [
        '--config=configs/quickstart.py',
        '--size=smoke',
        '--rows=softmax,sigmoid',
        f'--workdir={bucket.url}/sweep',
    ]
    given += [f'--config.data.source={corpus}', '--config.optimizer.steps=2', '--json']
    assert main(['sweep', *given]) == 0
    table = capsys.readouterr().out
    assert [row['outcome'] for row in json.loads(table)] == ['done 1/1'] * 2
    written = [one.named for one in bucket.proxy.requests if one.writes and 'metrics' in one.named]
    assert main(['sweep', *given]) == 0
    assert capsys.readouterr().out == table
    assert written == [one.named for one in bucket.proxy.requests if one.writes and 'metrics' in one.named] != []
    assert json.loads((parse_path(bucket.url) / 'sweep' / 'sweep.json').read_text()) == json.loads(table)


def test_follow_run_reads_run_in_bucket(at):
    class Told(Hearing):
        steps = ()

        def on_train_begin(self, step, attention, changes):
            self.notes.append(attention)

        def on_record(self, record, written):
            self.steps = (*self.steps, record['step'])

    folder, told = RunDir(at), Told()
    folder.initialize(tiny(), dict(row='tiny'))
    with lease.hold_lease(at) as held:
        metrics, looks = folder.open_metrics_writer(held.check), tail.follow_run(folder, told)
        next(looks)
        folder.write_json('environment', dict(attempts=[dict(step=0, attention='dense')]))
        for step in (1, 2):
            metrics.append(dict(step=step))
            metrics.sync()
            next(looks)
        assert (told.notes, told.steps) == (['dense'], (1, 2))
        metrics.append(dict(step=3))
        metrics.close()
        folder.write_json('outcome', dict(kind='done', message=''))
    assert list(looks) == []
    assert told.steps == (1, 2, 3)


@pytest.mark.parametrize('missing', ['report', 'tail', 'checkpoint ls'])
def test_denied_read_is_reported_in_one_line(bucket, at, capsys, missing):
    with bucket.proxy.treating(lambda method, path: Answer(status=403)):
        assert main([*missing.split(), str(at)]) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert bucket.url in said[0]


@pytest.mark.exhaustive
def test_busy_storage_does_not_change_run(corpus, bucket, at, disk):
    """Delay metrics, a probe and two checkpoints after step 3."""
    until = []

    class Busy(Hearing):
        def on_record(self, record, written):
            if record['step'] == 3 and not until:
                until.append(time.monotonic() + 60)

    def busy(method, path):
        return Answer(status=503) if until and time.monotonic() < until[0] else None

    with bucket.proxy.treating(busy):
        train(spec(corpus), at, Busy())
    assert time.monotonic() > until[0]
    alike(at, disk)


@GS
def test_lost_write_permission_keeps_last_checkpoint_and_run_resumes(corpus, bucket, at, disk):
    def closed(method, path):
        return Answer(status=403) if method in ('POST', 'PUT') and '/checkpoints/8/' in path else None

    with bucket.proxy.treating(closed), pytest.raises(UserError, match='checkpoint'):
        train(spec(corpus), at)
    assert RunDir(at).list_checkpoint_steps() == [4]
    assert RunDir(at).read_json('outcome')['checkpoint'] == 4
    train(spec(corpus), at)
    alike(at, disk)
