"""Profiler traces of selected steps."""

import jax
import pytest
from tiny_runs import CrashError, CrashingCallback, RecordingCallback, make_spec, train_run

from sinklab.cli.main import main
from sinklab.errors import UserError
from sinklab.run_dir import RunDir
from sinklab.train import loop
from sinklab.train.callbacks import parse_profile_steps


def train_with_profiler(corpus, path, profile_steps, *callbacks, **changes):
    """Train a run of eight steps with a profiler; return the messages of the run."""
    recorder = RecordingCallback()
    steps = parse_profile_steps(profile_steps, RunDir(path), 8)
    spec = make_spec(corpus, log__every_steps=1, **changes)
    train_run(spec, path, recorder, *callbacks, profile_steps=steps)
    return recorder.messages


def find_dispatched_steps(path):
    """Return the steps whose whole dispatch is in the trace."""
    (trace_file,) = path.glob('profile/plugins/profile/*/*.xplane.pb')
    lines = [line for plane in jax.profiler.ProfileData.from_file(str(trace_file)).planes for line in plane.lines]
    events = [event for line in lines for event in line.events if event.name == 'train']
    return sorted(dict(event.stats)['step_num'] for event in events)


@pytest.mark.slow
@pytest.mark.parametrize(('profile_steps', 'steps'), [('1:2', [1, 2]), ('2:1', [2]), ('5:2', [5, 6]), ('8:100', [8])])
def test_profile_traces_requested_steps(corpus, tmp_path, profile_steps, steps):
    (message,) = train_with_profiler(corpus, tmp_path, profile_steps)
    assert str(tmp_path) in message
    assert find_dispatched_steps(tmp_path) == steps


@pytest.mark.slow
def test_profile_ends_when_run_fails(corpus, tmp_path):
    with pytest.raises(CrashError):
        train_with_profiler(corpus, tmp_path, '5:3', CrashingCallback(6))
    assert 5 in find_dispatched_steps(tmp_path)


@pytest.mark.parametrize('profile_steps', ['3', '0:2', '3:0', 'a:b', '3:2:1', '-1:2', '', f'1:{10**20}', '9:2'])
def test_parse_profile_steps_rejects_invalid_range(tmp_path, profile_steps):
    assert parse_profile_steps('8:2', RunDir(tmp_path), 8) == range(8, 9)
    with pytest.raises(UserError):
        parse_profile_steps(profile_steps, RunDir(tmp_path), 8)


def test_invalid_profile_is_rejected_before_run_begins(monkeypatch, capsys, tmp_path):
    def fail_if_called(*_, **__):
        raise AssertionError('it has been begun')

    monkeypatch.setattr(loop, 'train', fail_if_called)
    options = ['--config=configs/quickstart.py:softmax', f'--workdir={tmp_path}/run', '--profile=3']
    assert main(['train', *options]) == 1
    assert '--profile=3' in capsys.readouterr().err
    assert not (tmp_path / 'run').exists()
