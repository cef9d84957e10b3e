"""Tests of profiler traces of selected steps."""

import collections

import jax
import pytest
from tiny_runs import CrashError, CrashingCallback, make_spec, train_run

from sinklab.cli.main import main
from sinklab.errors import UserError
from sinklab.run_dir import RunDir
from sinklab.train import loop
from sinklab.train.callbacks import ProfilerCallback, parse_profile_steps


@pytest.fixture
def train_with_profiler(corpus, tmp_path):
    """Return a function that trains a run of eight steps with a profiler and returns the profiler's messages."""

    def train(profile_steps, *callbacks, **changes):
        messages, folder = [], RunDir(tmp_path)
        with ProfilerCallback(folder, parse_profile_steps(profile_steps, folder, 8), messages.append) as profiler:
            train_run(make_spec(corpus, log__every_steps=1, **changes), tmp_path, *callbacks, profiler)
        assert not profiler.is_tracing
        return messages

    return train


def read_trace_lines(folder):
    (trace_file,) = folder.glob('profile/plugins/profile/*/*.xplane.pb')
    return [line for plane in jax.profiler.ProfileData.from_file(str(trace_file)).planes for line in plane.lines]


def find_dispatched_steps(folder):
    """Return the steps whose whole dispatch is in the trace."""
    events = [event for line in read_trace_lines(folder) for event in line.events if event.name == 'train']
    return sorted(dict(event.stats)['step_num'] for event in events)


def count_executed_steps(folder):
    """Return how many complete steps are in the trace, as the count of the rarest operation."""
    counts = collections.Counter()
    for line in read_trace_lines(folder):
        for event in line.events:
            stats = dict(event.stats)
            counts.update([event.name] if 'step' in str(stats.get('hlo_module')) else [])
    return min(counts.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ('profile_steps', 'steps', 'neighbor_steps'),
    [
        ('1:2', {1, 2}, {3}),
        ('2:1', {2}, {1, 3}),
        ('3:2', {3, 4}, {2, 5}),
        ('5:2', {5, 6}, {4, 7}),
        ('6:1', {6}, {5, 7}),
        ('8:100', {8}, {7}),
    ],
)
def test_profile_traces_requested_steps_from_dispatch_to_completion(
    train_with_profiler, tmp_path, profile_steps, steps, neighbor_steps
):
    """Probes run after steps 3 and 6, checkpoints after steps 4 and 8."""
    (message,) = train_with_profiler(profile_steps)
    assert message.startswith(f'steps {min(steps)} to {max(steps)} ')
    assert f'{tmp_path}' in message
    assert steps <= set(find_dispatched_steps(tmp_path)) <= steps | neighbor_steps
    assert count_executed_steps(tmp_path) >= len(find_dispatched_steps(tmp_path))


@pytest.mark.slow
def test_profile_traces_one_extra_dispatch_without_callbacks_between_steps(train_with_profiler, tmp_path):
    long_intervals = dict(checkpoint__every_steps=100, probe__every_steps=100, valid__every_steps=100)
    assert len(train_with_profiler('4:2', **long_intervals)) == 1
    assert find_dispatched_steps(tmp_path) == [4, 5, 6]


@pytest.mark.slow
def test_profile_stops_when_run_fails(train_with_profiler, tmp_path):
    with pytest.raises(CrashError):
        train_with_profiler('5:3', CrashingCallback(6))
    assert 5 in find_dispatched_steps(tmp_path)


@pytest.mark.slow
def test_profile_reports_steps_outside_resumed_attempt(train_with_profiler, corpus, tmp_path):
    messages = ['no step was traced: this attempt runs none of the steps 2 to 4 of --profile']
    with pytest.raises(CrashError):
        train_run(make_spec(corpus), tmp_path, CrashingCallback(5))
    assert train_with_profiler('2:3') == messages, 'the run resumes from step 4'
    assert train_with_profiler('2:3') == messages, 'the run is complete'
    assert not (tmp_path / 'profile').exists()


def test_profile_traces_remaining_steps_of_resumed_attempt(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(jax.profiler, 'start_trace', lambda folder, **_: calls.append(folder))
    monkeypatch.setattr(jax.profiler, 'stop_trace', lambda: calls.append('stop'))
    with ProfilerCallback(RunDir(tmp_path), range(2, 7), calls.append) as profiler:
        profiler.on_train_begin(4, 'dense', [])
        for step in (5, 6, 7):
            profiler.on_record(dict(step=step), written=False)
    assert calls[:2] == [str(tmp_path / 'profile'), 'stop']
    assert calls[2].startswith('steps 2 to 6 ')


@pytest.mark.parametrize('profile_steps', ['3', '0:2', '3:0', 'a:b', '3:2:1', '-1:2', '', f'1:{10**20}'])
def test_parse_profile_steps_rejects_invalid_range(tmp_path, profile_steps):
    with pytest.raises(UserError, match='STEP:COUNT'):
        parse_profile_steps(profile_steps, RunDir(tmp_path), 8)


def test_parse_profile_steps_rejects_start_after_last_step(tmp_path):
    assert parse_profile_steps('8:2', RunDir(tmp_path), 8) == range(8, 9)
    with pytest.raises(UserError, match=r'--profile=9:2.*8.*STEP'):
        parse_profile_steps('9:2', RunDir(tmp_path), 8)


def test_parse_profile_steps_rejects_bucket():
    folder = RunDir('runs/x')
    folder.path = 'gs://bucket/run'
    with pytest.raises(UserError, match=r'--profile.*--workdir'):
        parse_profile_steps('3:2', folder, 8)


@pytest.mark.parametrize('profile_steps', ['3', '201:1'])
def test_invalid_profile_is_rejected_before_distributed_initialization(monkeypatch, capsys, tmp_path, profile_steps):
    def fail_if_called(*_, **__):
        raise AssertionError('it has been begun')

    monkeypatch.setattr(loop, 'train', fail_if_called)
    options = ['--config=configs/quickstart.py:softmax', '--config.optimizer.steps=200', f'--workdir={tmp_path}/run']
    assert main(['train', *options, f'--profile={profile_steps}']) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f'sinklab train: --profile={profile_steps}')
    assert not (tmp_path / 'run').exists()
