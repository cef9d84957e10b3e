"""Training runs: written files, failures and resume."""

import contextlib
import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from commands import write_config
from orbax.checkpoint import v1 as ocp
from tiny_runs import (
    CrashError,
    CrashingCallback,
    RecordingCallback,
    drop_clock_metrics,
    load_parameters,
    make_spec,
    read_contents,
    read_outcome,
    train_run,
)
from tiny_specs import replace_operation

from sinklab.attn.backends import BackendChoice
from sinklab.cli.main import main
from sinklab.data.run_data import load_run_data
from sinklab.errors import UserError
from sinklab.run_dir import RunDir
from sinklab.train import loop, step


@pytest.mark.slow
def test_completed_run_writes_config_metrics_probes_and_checkpoints(finished_run, corpus):
    path, records = finished_run
    assert json.loads((path / 'config.json').read_text())['data']['source'] == corpus
    assert json.loads((path / 'row.json').read_text()) == {'row': 'tiny'}
    assert read_outcome(path) == dict(kind='done', step=8, checkpoint=8, message='', exit_code=0)
    assert [record['step'] for record in records] == list(range(9))
    assert sorted(int(file.stem) for file in (path / 'probe').glob('*.npz')) == [0, 3, 6, 8]
    assert sorted(int(folder.name) for folder in (path / 'checkpoints').iterdir()) == [4, 8]
    assert {'train/loss', 'train/grad_norm', 'train/learning_rate', 'speed/tokens_per_second'} < set(records[5])
    assert {
        'valid/loss',
        'sink/1',
        'sink/3',
        'sink/1@0.2',
        'alpha/1',
        'alpha/floor',
        'mass/row',
        'norm/ratio/02',
    } < set(records[-1])
    assert 'sink/1' in records[3]
    assert 'valid/loss' not in records[3]
    assert records[-1]['valid/loss'] < records[0]['valid/loss']
    arrays = dict(np.load(path / 'probe' / '00000008.npz'))
    shapes = {name: array.shape for name, array in arrays.items()}
    expected = {
        'alpha_LPHJ': (2, 5, 4, 3),
        'attention_LHTS': (2, 4, 12, 12),
        **{f'{name}_LH': (2, 4) for name in ('raw', 'mass', 'entropy', 'contribution')},
        **{f'{name}_LT': (2, 12) for name in ('norm', 'key', 'value')},
    }
    assert expected.items() <= shapes.items()


@pytest.mark.slow
@pytest.mark.parametrize('crash_step', [2, 6])  # before the first checkpoint, and between two
def test_resume_after_crash_matches_uninterrupted_run_bitwise(finished_run, corpus, tmp_path, crash_step):
    with pytest.raises(CrashError):
        train_run(make_spec(corpus), tmp_path / 'run', CrashingCallback(crash_step))
    with (tmp_path / 'run' / 'metrics.jsonl').open('a') as file:
        file.write('{"step": 7, "sec')  # a line truncated by a crash
    records = train_run(make_spec(corpus), tmp_path / 'run')
    assert drop_clock_metrics(records) == drop_clock_metrics(finished_run[1])
    for actual, reference in zip(
        load_parameters(tmp_path / 'run', 8), load_parameters(finished_run[0], 8), strict=True
    ):
        np.testing.assert_array_equal(actual, reference)
    seconds = [record['seconds'] for record in records]
    assert seconds == sorted(seconds), 'the clock of a run goes on over its attempts'


@pytest.mark.slow
def test_train_leaves_finished_run_unchanged(finished_run, corpus):
    old_contents = read_contents(finished_run[0])
    assert train_run(make_spec(corpus), finished_run[0]) == finished_run[1]
    assert read_contents(finished_run[0]) == old_contents


@pytest.mark.slow
def test_train_rejects_different_config_in_existing_run(finished_run, corpus):
    old_contents = read_contents(finished_run[0])
    with pytest.raises(UserError) as error:
        train_run(replace_operation(make_spec(corpus, optimizer__steps=20), 'sigmoid', 'none'), finished_run[0])
    for text in ('optimizer.steps 8 -> 20', 'similarity exp -> sigmoid', f'--workdir={finished_run[0]}-2'):
        assert text in str(error.value)
    assert read_contents(finished_run[0]) == old_contents


@pytest.mark.parametrize('path', ['', 'letter', 'letter/run'])
def test_train_rejects_folder_without_run_and_file_path(corpus, tmp_path, path):
    (tmp_path / 'letter').write_text('dear')
    with pytest.raises(UserError):
        train_run(make_spec(corpus), tmp_path / path)
    assert [path.name for path in tmp_path.iterdir()] == ['letter']


@pytest.mark.slow
def test_resume_rejects_changed_data_under_same_source(tmp_path):
    for number in range(30):
        (tmp_path / f'{number}.txt').write_text(f'{number} words ' * 40)
    source = f'text:{tmp_path}/*.txt'
    with pytest.raises(CrashError):
        train_run(make_spec(source), tmp_path / 'run', CrashingCallback(6))
    (tmp_path / '3.txt').write_text('something else ' * 40)
    old_contents = read_contents(tmp_path / 'run')
    assert read_outcome(tmp_path / 'run') == dict(
        kind='crashed', step=6, checkpoint=4, message='CrashError', exit_code=1
    )
    with pytest.raises(UserError):
        train_run(make_spec(source), tmp_path / 'run')
    assert read_contents(tmp_path / 'run') == old_contents
    assert read_outcome(tmp_path / 'run')['kind'] == 'refused'
    assert 'data' in read_outcome(tmp_path / 'run')['message']


@pytest.mark.slow
def test_checkpoint_two_steps_before_divergence_gives_finite_loss_and_gradient(corpus, tmp_path):
    diverging_spec = make_spec(
        corpus, optimizer__peak_learning_rate=1e30, optimizer__warmup_steps=5, checkpoint__every_steps=1
    )
    with pytest.raises(loop.DivergedError, match=r'train/\w+ .*step \d') as error:
        train_run(diverging_spec, tmp_path / 'run')
    checkpoint = RunDir(tmp_path / 'run').checkpoint_dir / str(error.value.step - 2)
    saved_state = ocp.load(checkpoint, checkpointable_name='state')
    batch = load_run_data(diverging_spec).batches.read_rows(int(saved_state['step']), range(4))
    value, gradient = jax.value_and_grad(step.make_loss(diverging_spec))(saved_state['params'], batch)
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.slow
def test_divergence_by_nonfinite_probe_metric_is_not_saved(corpus, tmp_path, monkeypatch):
    values = iter([0.0, float('nan')])
    monkeypatch.setattr(loop.sink_probe, 'compute_probe_metrics', lambda *_: {'sink/1': next(values)})
    with pytest.raises(loop.DivergedError, match=r'sink/1 .*nan.*step 3'):
        train_run(make_spec(corpus, checkpoint__every_steps=3), tmp_path / 'run')
    expected = dict(kind='diverged', step=3, checkpoint=None, message='sink/1 is nan at step 3', exit_code=3)
    assert read_outcome(tmp_path / 'run') == expected
    assert RunDir(tmp_path / 'run').list_checkpoint_steps() == []


def test_train_rejects_probe_that_exceeds_device_memory(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(loop.device_mesh, 'get_device_memory_bytes', lambda: 50_000)
    with pytest.raises(UserError, match='probe'):
        train_run(make_spec(corpus), tmp_path / 'run')


@pytest.mark.slow
@pytest.mark.parametrize('crash_step', [None, 2], ids=['done', 'died'])
def test_train_reports_failed_kernel_at_end_of_run(corpus, tmp_path, monkeypatch, crash_step):
    choice = BackendChoice('chunked', {'tpu': 'it fails on these devices (ValueError: no)'}, ('tpu',))
    monkeypatch.setattr(step, 'choose_backend', lambda *_: choice)
    recorder = RecordingCallback()
    with contextlib.suppress(CrashError):
        train_run(make_spec(corpus), tmp_path / 'run', recorder, CrashingCallback(crash_step))
    assert recorder.messages == [choice.describe_fallback()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ('signal_name', 'signal_step', 'saved_step', 'exit_code'),
    [
        pytest.param('INT', 1, 3, 130, marks=pytest.mark.exhaustive),  # test_sweep.py interrupts a sweep
        pytest.param('TERM', 3, 4, 143, marks=pytest.mark.exhaustive),
        ('TERM', 6, 8, 143),
        pytest.param('HUP', 3, 4, 143, marks=pytest.mark.exhaustive),
        ('KILL', 6, None, -9),
    ],
)
def test_resume_after_signal_completes_run(
    finished_run, corpus, tmp_path, signal_name, signal_step, saved_step, exit_code
):
    """Check that SIGINT, SIGTERM and SIGHUP save a checkpoint and print the command to resume.

    SIGKILL leaves only earlier checkpoints. The same command then finishes the run. It also takes the measurements
    that are due at the step of the stop: 3 (probe), 8 (all).
    """
    changes = dict(data__source=corpus, checkpoint__every_steps=4, probe__every_steps=3)
    script = write_config(tmp_path / 'row.py', **changes)
    command = [sys.executable, '-m', 'sinklab', 'train', f'--config={script}', f'--workdir={tmp_path}/run']
    program = f"""
import os, signal, sys, sinklab.train.loop as loop
from sinklab.cli.main import main

def report_record(logger, record, is_logged, original=loop.MetricsLogger.report_record):
    original(logger, record, is_logged)
    if record['step'] == {signal_step}:
        os.kill(os.getpid(), signal.SIG{signal_name})

loop.MetricsLogger.report_record = report_record
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # libtpu in another test ignores it
sys.exit(main(sys.argv[1:]))
"""
    first_run = subprocess.run(
        [sys.executable, '-c', program, *command[3:]], capture_output=True, text=True, timeout=600
    )
    assert first_run.returncode == exit_code, first_run.stderr
    if signal_name == 'KILL':
        assert not (tmp_path / 'run' / 'outcome.json').exists()
    else:
        expected = dict(
            kind='stopped',
            step=saved_step,
            checkpoint=saved_step,
            message=f'saved at step {saved_step}',
            exit_code=exit_code,
        )
        assert read_outcome(tmp_path / 'run') == expected
        assert 'saved at step' in first_run.stderr
        assert f'-m sinklab train --config={script} --workdir={tmp_path}/run' in first_run.stderr
    if signal_name == 'TERM':
        second_run = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert second_run.returncode == 0, second_run.stderr
    else:
        assert main(command[3:]) == 0
    assert drop_clock_metrics(RunDir(tmp_path / 'run').read_records()) == drop_clock_metrics(finished_run[1])
    for actual, reference in zip(
        load_parameters(tmp_path / 'run', 8), load_parameters(finished_run[0], 8), strict=True
    ):
        np.testing.assert_array_equal(actual, reference)


@pytest.mark.slow
def test_train_measures_finished_run_again_after_last_record_is_truncated(finished_run, corpus, tmp_path):
    shutil.copytree(finished_run[0], tmp_path / 'run')
    metrics = tmp_path / 'run' / 'metrics.jsonl'
    metrics.write_bytes(metrics.read_bytes()[:-20])
    records = train_run(make_spec(corpus), tmp_path / 'run')
    names = {name for name in finished_run[1][-1] if not name.startswith(('train', 'data', 'speed', 'seconds'))}
    assert {name: records[-1][name] for name in names} == {name: finished_run[1][-1][name] for name in names}
    assert drop_clock_metrics(records[:-1]) == drop_clock_metrics(finished_run[1][:-1])


@pytest.mark.slow
def test_run_with_damaged_checkpoint_resumes_from_sound_checkpoint_to_same_result(finished_run, corpus, tmp_path):
    shutil.copytree(finished_run[0], tmp_path / 'run')
    shutil.rmtree(tmp_path / 'run' / 'checkpoints' / '8' / 'state')
    callback = RecordingCallback()
    records = train_run(make_spec(corpus), tmp_path / 'run', callback)
    assert drop_clock_metrics(records) == drop_clock_metrics(finished_run[1])
    assert callback.messages[0].startswith(f'{tmp_path}/run/checkpoints/8 ')
    assert RunDir(tmp_path / 'run').list_checkpoint_steps() == [4, 8]
