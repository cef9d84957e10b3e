"""What `measure` keeps for the next time: used where it is what was kept, and never in the way of a result."""

import json

import pytest
import runs

from sinklab.cli.main import main
from sinklab.storage import run_files

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def trained(tmp_path_factory, corpus):
    path = tmp_path_factory.mktemp('runs') / 'run'
    runs.train(runs.spec(corpus), path)
    return path


def measure(path, capsys, *more):
    run_files.PRINTED_WARNINGS.clear()
    code = main(['measure', str(path), '--json', *more])
    out, err = capsys.readouterr()
    return code, out and json.loads(out), err


def test_a_cache_that_cannot_be_written_takes_no_result_away(trained, tmp_path, monkeypatch, capsys):
    (tmp_path / 'cache').mkdir()
    (tmp_path / 'cache' / 'measured').write_text('a file in the place of the folder')
    monkeypatch.setenv('SINKLAB_CACHE', str(tmp_path / 'cache'))
    code, found, err = measure(trained, capsys)
    assert (code, 'sink/1' in found['inputs']['natural']) == (0, True)
    said = err.splitlines()[-1]  # before it the corpus may be prepared
    assert said.startswith('sinklab: the measurement is not cached (')


def test_a_result_is_printed_before_a_folder_that_cannot_be_written_ends_it(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        'sinklab.analysis.measure.write_results', lambda *_: (_ for _ in ()).throw(OSError(28, 'No space left'))
    )
    code, found, err = measure(trained, capsys, f'--out={tmp_path}/out')
    assert (code, 'sink/1' in found['inputs']['natural']) == (1, True)
    assert 'No space left' in err.splitlines()[-1]
    assert 'Traceback' not in err


def test_a_result_kept_under_another_name_is_measured_again(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv('SINKLAB_CACHE', str(tmp_path / 'cache'))
    _, first, _ = measure(f'{trained}@4', capsys)
    (kept,) = (tmp_path / 'cache' / 'measured').glob('*.npz')
    _, last, _ = measure(f'{trained}@8', capsys)
    (other,) = {*(tmp_path / 'cache' / 'measured').glob('*.npz')} - {kept}
    other.write_bytes(kept.read_bytes())
    code, again, err = measure(f'{trained}@8', capsys)
    assert (code, again) == (0, last)
    assert f'{other} is damaged (it differs from what was cached under this name)' in err
    assert measure(f'{trained}@8', capsys) == (0, last, '')
    assert first['inputs'] != last['inputs']
