"""Runs: what they leave behind, how they die, and how they go on."""

import contextlib
import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import operation
from orbax.checkpoint import v1 as ocp
from runs import Died, Dying, contents, outcome, parameters, spec, timeless, train

from sinklab.attn.backends import BackendChoice
from sinklab.cli.main import main
from sinklab.config.spec import Hardware
from sinklab.data.batches import load_run_data
from sinklab.run_dir import RunDir, flatten_dict
from sinklab.schema import UserError
from sinklab.train import loop, setup, step
from sinklab.train.callbacks import Callback


@pytest.mark.slow
def test_a_run_leaves_what_the_contract_says(whole, corpus):
    path, records = whole
    assert json.loads((path / 'config.json').read_text())['data']['source'] == corpus
    assert json.loads((path / 'row.json').read_text()) == {'row': 'tiny'}
    assert outcome(path) == dict(kind='done', step=8, checkpoint=8, message='', exit_code=0)
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
@pytest.mark.parametrize('at', [2, 6])  # before the first checkpoint, and between two
def test_a_run_that_died_goes_on_bit_for_bit(whole, corpus, tmp_path, at):
    with pytest.raises(Died):
        train(spec(corpus), tmp_path / 'run', Dying(at))
    with (tmp_path / 'run' / 'metrics.jsonl').open('a') as file:
        file.write('{"step": 7, "sec')  # what a crash may leave of a line
    records = train(spec(corpus), tmp_path / 'run')
    assert timeless(records) == timeless(whole[1])
    for ours, theirs in zip(parameters(tmp_path / 'run', 8), parameters(whole[0], 8), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    seconds = [record['seconds'] for record in records]
    assert seconds == sorted(seconds), 'the clock of a run goes on over its attempts'


@pytest.mark.slow
def test_a_finished_run_is_left_as_it_is(whole, corpus):
    before = contents(whole[0])
    assert train(spec(corpus), whole[0]) == whole[1]
    assert contents(whole[0]) == before


@pytest.mark.slow
def test_another_run_is_refused_with_the_difference(whole, corpus):
    before = contents(whole[0])
    other = operation(spec(corpus, optimizer__steps=20), 'sigmoid', 'none')
    with pytest.raises(UserError) as refusal:
        train(other, whole[0])
    for words in ('optimizer.steps 8 -> 20', 'similarity exp -> sigmoid', f'--workdir={whole[0]}-2'):
        assert words in str(refusal.value)
    assert contents(whole[0]) == before


def test_a_folder_of_something_else_and_a_file_are_refused(corpus, tmp_path):
    (tmp_path / 'letter').write_text('dear')
    with pytest.raises(UserError, match='contains files but no run'):
        train(spec(corpus), tmp_path)
    with pytest.raises(UserError, match='is a file'):
        train(spec(corpus), tmp_path / 'letter')
    with pytest.raises(UserError, match='neither local nor in a bucket that is supported'):
        RunDir('http://bucket/run')


@pytest.mark.slow
def test_other_data_under_the_same_name_is_refused(tmp_path):
    for number in range(30):
        (tmp_path / f'{number}.txt').write_text(f'{number} words ' * 40)
    source = f'text:{tmp_path}/*.txt'
    with pytest.raises(Died):
        train(spec(source), tmp_path / 'run', Dying(6))
    (tmp_path / '3.txt').write_text('something else ' * 40)
    before = contents(tmp_path / 'run')
    assert outcome(tmp_path / 'run') == dict(kind='crashed', step=6, checkpoint=4, message='runs.Died', exit_code=70)
    with pytest.raises(UserError, match='was trained on other data'):
        train(spec(source), tmp_path / 'run')
    assert contents(tmp_path / 'run') == before
    assert outcome(tmp_path / 'run')['kind'] == 'refused'
    assert 'was trained on other data' in outcome(tmp_path / 'run')['message']


@pytest.mark.slow
def test_divergence_stops_the_run_and_names_a_checkpoint_that_training_can_go_on_from(corpus, tmp_path):
    wild = spec(corpus, optimizer__peak_learning_rate=1e30, optimizer__warmup_steps=5, checkpoint__every_steps=1)
    with pytest.raises(loop.DivergedError, match=r'train/\w+ is \w+ at step \d'):
        train(wild, tmp_path / 'run')
    folder = RunDir(tmp_path / 'run')
    kept = ocp.load(folder.checkpoint_dir / str(folder.list_checkpoint_steps()[-1]), checkpointable_name='state')
    batch = load_run_data(wild).batches.read_rows(int(kept['step']), range(4))
    value, gradient = jax.value_and_grad(step.make_loss(wild))(kept['params'], batch)
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.slow
def test_a_measurement_that_is_not_finite_is_divergence_and_is_not_saved(corpus, tmp_path, monkeypatch):
    values = iter([0.0, float('nan')])
    monkeypatch.setattr(loop.sink_probe, 'compute_probe_metrics', lambda *_: {'sink/1': next(values)})
    with pytest.raises(loop.DivergedError, match='sink/1 is nan at step 3'):
        train(spec(corpus, checkpoint__every_steps=3), tmp_path / 'run')
    expected = dict(kind='diverged', step=3, checkpoint=None, message='sink/1 is nan at step 3', exit_code=3)
    assert outcome(tmp_path / 'run') == expected
    assert RunDir(tmp_path / 'run').list_checkpoint_steps() == []


def test_a_folder_that_cannot_be_made_is_refused(corpus, tmp_path):
    (tmp_path / 'file').write_text('in the way')
    with pytest.raises(UserError, match=r'cannot be made \(Not a directory\)'):
        train(spec(corpus), tmp_path / 'file' / 'run')


def test_too_little_room_is_refused_before_anything_is_written(corpus, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage._replace(free=100_000))
    with pytest.raises(UserError, match=r'lower config\.checkpoint\.keep'):
        train(spec(corpus), tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


def test_a_probe_that_does_not_fit_is_refused_with_its_size(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(
        setup.device_mesh, 'get_device_memory_bytes', lambda processes: 50_000 // jax.local_device_count()
    )
    with pytest.raises(UserError, match=r'a probe would capture 0\.0 GiB'):
        train(spec(corpus), tmp_path / 'run')


def fill(path):
    with contextlib.suppress(OSError), path.open('wb', buffering=0) as file:
        while file.write(b'x' * 4096):
            pass


@pytest.mark.slow
def test_a_disk_that_fills_up_is_said_in_words_and_the_run_goes_on_when_there_is_room(whole, corpus, small_disk):
    class Filler(Callback):
        def on_record(self, record, written):
            if record['step'] == 6:
                fill(small_disk / 'ballast')

    with pytest.raises(UserError, match='make room and run the same command again'):
        train(spec(corpus), small_disk / 'run', Filler())
    (small_disk / 'ballast').unlink()
    assert timeless(train(spec(corpus), small_disk / 'run')) == timeless(whole[1])


@pytest.mark.slow
@pytest.mark.parametrize('at', [None, 2], ids=['done', 'died'])
def test_a_kernel_that_failed_is_named_at_the_end_of_a_run(corpus, tmp_path, monkeypatch, at):
    choice = BackendChoice('chunked', {'tpu': 'it fails on these devices (ValueError: no)'}, ('tpu',))
    monkeypatch.setattr(setup.step, 'choose_step_backend', lambda spec, hardware: choice)
    heard = Recorded()
    with contextlib.suppress(Died):
        train(spec(corpus), tmp_path / 'run', heard, *([Dying(at)] if at else []))
    assert heard.last[0] == 'note'
    assert 'chunked' in heard.last[1]
    assert choice.rejection_reasons['tpu'] in heard.last[1]


def test_processes_of_one_host_share_its_memory(corpus, tmp_path, monkeypatch):
    """A group in which this process and another are on this host, and a third is elsewhere."""

    class Three:
        index, count = 0, 3

        def gather(self, name, value):
            return [value, value, 'elsewhere'] if name == 'host' else [value] * 3

    asked = []

    def memory(processes):
        asked.append(processes)
        raise UserError('enough is known')

    monkeypatch.setattr(setup.device_mesh, 'get_device_memory_bytes', memory)
    with pytest.raises(UserError, match='enough is known'):
        setup.set_up_run(spec(corpus), Hardware(), RunDir(tmp_path / 'run'), Three())
    assert asked == [2]


class Recorded(Callback):
    """Keeps what it was told last."""

    def on_message(self, line):
        self.last = 'note', line

    def on_record(self, record, written):
        self.last = 'record', record


def test_flat_names_every_leaf():
    assert flatten_dict({'a': {'b': 1, 'c': {'d': None}}, 'e': 2}) == {'a.b': 1, 'a.c.d': None, 'e': 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'at', 'saved', 'code'),
    [
        pytest.param('INT', 1, 3, 130, marks=pytest.mark.exhaustive),  # a sweep is interrupted in test_sweep.py
        pytest.param('TERM', 3, 4, 42, marks=pytest.mark.exhaustive),
        ('TERM', 6, 8, 42),
        pytest.param('HUP', 3, 4, 42, marks=pytest.mark.exhaustive),
        ('KILL', 6, None, -9),
    ],
)
def test_a_signal_to_the_real_program(whole, corpus, tmp_path, name, at, saved, code):
    """Ctrl-C, SIGTERM and SIGHUP save and say how to go on; after SIGKILL only what was saved before is there. Then
    the same command finishes the run, and measures what was due where it was stopped: 3 (probe), 8 (all)."""
    script = tmp_path / 'row.py'
    changes = dict(data__source=corpus, checkpoint__every_steps=4, probe__every_steps=3)
    script.write_text(
        f'import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n'
        'from conftest import tiny_config\n'
        f'def get_config(row=None):\n    return tiny_config(**{changes!r})\n'
    )
    command = [sys.executable, '-m', 'sinklab', 'train', f'--config={script}', f'--workdir={tmp_path}/run']
    slowed = 'import os, signal, sys, sinklab.train.loop as loop\n'
    slowed += 'signal.signal(signal.SIGHUP, signal.SIG_DFL)\n'  # libtpu, in another test, has it ignored
    slowed += 'def note(run, record, written, old=loop.TrainLoop.write_record):\n'
    slowed += (
        f'    old(run, record, written)\n    if record["step"] == {at}: os.kill(os.getpid(), signal.SIG{name})\n'
    )
    slowed += 'loop.TrainLoop.write_record = note\nfrom sinklab.cli.main import main\nsys.exit(main(sys.argv[1:]))\n'
    first = subprocess.run([sys.executable, '-c', slowed, *command[3:]], capture_output=True, text=True, timeout=600)
    assert first.returncode == code, first.stderr
    if name == 'KILL':
        assert not (tmp_path / 'run' / 'outcome.json').exists()
    else:
        expected = dict(
            kind='stopped', step=saved, checkpoint=saved, message=f'saved at step {saved}', exit_code=code
        )
        assert outcome(tmp_path / 'run') == expected
        assert 'saved at step' in first.stderr
        assert f'-m sinklab train --config={script} --workdir={tmp_path}/run' in first.stderr
    if name == 'TERM':
        second = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert second.returncode == 0, second.stderr
    else:
        assert main(command[3:]) == 0
    assert timeless(RunDir(tmp_path / 'run').read_records()) == timeless(whole[1])
    for ours, theirs in zip(parameters(tmp_path / 'run', 8), parameters(whole[0], 8), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_a_finished_run_that_has_lost_the_numbers_of_its_end_measures_them_again(whole, corpus, tmp_path):
    shutil.copytree(whole[0], tmp_path / 'run')
    metrics = tmp_path / 'run' / 'metrics.jsonl'
    metrics.write_bytes(metrics.read_bytes()[:-20])
    again = train(spec(corpus), tmp_path / 'run')
    measured = {name for name in whole[1][-1] if not name.startswith(('train', 'data', 'speed', 'seconds'))}
    assert {name: again[-1][name] for name in measured} == {name: whole[1][-1][name] for name in measured}
    assert timeless(again[:-1]) == timeless(whole[1][:-1])
