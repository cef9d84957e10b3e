"""Tests of the result cache of `measure`."""

import json

import pytest
import tiny_runs as runs

from sinklab.cli.main import main
from sinklab.storage import run_file_schemas

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def trained(tmp_path_factory, corpus):
    path = tmp_path_factory.mktemp('runs') / 'run'
    runs.train_run(runs.make_spec(corpus), path)
    return path


def measure(path, capsys, *more):
    run_file_schemas.PRINTED_WARNINGS.clear()
    code = main(['measure', str(path), '--json', *more])
    out, err = capsys.readouterr()
    return code, out and json.loads(out), err


def test_measure_prints_result_when_cache_is_not_writable(trained, tmp_path, monkeypatch, capsys):
    (tmp_path / 'cache').mkdir()
    (tmp_path / 'cache' / 'measured').write_text('a file in the place of the folder')
    monkeypatch.setenv('SINKLAB_CACHE', str(tmp_path / 'cache'))
    code, found, err = measure(trained, capsys)
    assert (code, 'sink/1' in found['inputs']['natural']) == (0, True)
    said = err.splitlines()[-1]  # earlier lines may report the preparation of the corpus
    assert said.startswith('sinklab: ')
    assert 'not cached' in said


def test_measure_prints_result_before_failing_to_write_out(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        'sinklab.analysis.measure.write_results', lambda *_: (_ for _ in ()).throw(OSError(28, 'No space left'))
    )
    code, found, err = measure(trained, capsys, f'--out={tmp_path}/out')
    assert (code, 'sink/1' in found['inputs']['natural']) == (1, True)
    assert 'No space left' in err.splitlines()[-1]
    assert 'Traceback' not in err


def test_measure_ignores_cache_entry_of_other_checkpoint(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv('SINKLAB_CACHE', str(tmp_path / 'cache'))
    _, first, _ = measure(f'{trained}@4', capsys)
    (kept,) = (tmp_path / 'cache' / 'measured').glob('*.npz')
    _, last, _ = measure(f'{trained}@8', capsys)
    (other,) = {*(tmp_path / 'cache' / 'measured').glob('*.npz')} - {kept}
    other.write_bytes(kept.read_bytes())
    code, again, err = measure(f'{trained}@8', capsys)
    assert (code, again) == (0, last)
    assert f'{other} is damaged' in err
    assert measure(f'{trained}@8', capsys) == (0, last, '')
    assert first['inputs'] != last['inputs']
