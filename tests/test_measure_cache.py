"""Tests of the result cache of `measure`."""

import json

import pytest
import tiny_runs as runs

from sinklab.cli.main import main
from sinklab.storage import files

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def run_path(tmp_path_factory, corpus):
    path = tmp_path_factory.mktemp('runs') / 'run'
    runs.train_run(runs.make_spec(corpus), path)
    return path


def run_measure(path, capsys, *options):
    files.PRINTED_WARNINGS.clear()
    exit_code = main(['measure', str(path), '--json', *options])
    out, err = capsys.readouterr()
    return exit_code, out and json.loads(out), err


def test_measure_prints_result_when_cache_is_not_writable(run_path, tmp_path, monkeypatch, capsys):
    (tmp_path / 'cache').mkdir()
    (tmp_path / 'cache' / 'measured').write_text('a file in the place of the folder')
    monkeypatch.setenv('SINKLAB_CACHE', str(tmp_path / 'cache'))
    exit_code, result, err = run_measure(run_path, capsys)
    assert (exit_code, 'sink/1' in result['inputs']['natural']) == (0, True)
    message = err.splitlines()[-1]  # earlier lines may report the preparation of the corpus
    assert message.startswith('sinklab: ')
    assert 'not cached' in message


def test_measure_prints_result_before_failing_to_write_out(run_path, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        'sinklab.analysis.measure.write_results', lambda *_: (_ for _ in ()).throw(OSError(28, 'No space left'))
    )
    exit_code, result, err = run_measure(run_path, capsys, f'--out={tmp_path}/out')
    assert (exit_code, 'sink/1' in result['inputs']['natural']) == (1, True)
    assert 'No space left' in err.splitlines()[-1]
    assert 'Traceback' not in err


def test_measure_ignores_cache_entry_of_other_checkpoint(run_path, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv('SINKLAB_CACHE', str(tmp_path / 'cache'))
    _, first_result, _ = run_measure(f'{run_path}@4', capsys)
    (first_entry,) = (tmp_path / 'cache' / 'measured').glob('*.npz')
    _, last_result, _ = run_measure(f'{run_path}@8', capsys)
    (last_entry,) = {*(tmp_path / 'cache' / 'measured').glob('*.npz')} - {first_entry}
    last_entry.write_bytes(first_entry.read_bytes())
    exit_code, repeated_result, err = run_measure(f'{run_path}@8', capsys)
    assert (exit_code, repeated_result) == (0, last_result)
    assert f'{last_entry} is damaged' in err
    assert run_measure(f'{run_path}@8', capsys) == (0, last_result, '')
    assert first_result['inputs'] != last_result['inputs']
