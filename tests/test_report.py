"""The page in a real browser, and the pictures."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest

from sinklab.folder import Folder
from sinklab.measure.table import PICTURES
from sinklab.record import Refusal
from sinklab.report import page, pictures, runs

BROWSER = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome', 'chrome'))), None)
HEADLESS = ['--headless', '--no-sandbox', '--disable-gpu', '--disable-background-networking']
HEADLESS += ['--virtual-time-budget=20000']


def made_up(path, row, layers=3, heads=2, steps=(0, 10, 20), seed=0):
    """A run folder with random numbers in it."""
    rng = np.random.default_rng(seed)
    (path / 'probe').mkdir(parents=True)
    (path / 'config.json').write_text('{}')
    (path / 'row.json').write_text(json.dumps(dict(row=row)))
    with (path / 'metrics.jsonl').open('w') as file:
        for step in steps:
            record = {
                'step': step,
                'seconds': step / 2,
                'train/loss': 5 - step / 10,
                'valid/loss': 5 - step / 12,
            }
            record |= {'sink/1': 2.0 * step, 'alpha/1': 0.3, 'alpha/floor': 0.074, 'mass/row': 1.0}
            file.write(json.dumps(record) + '\n')
            sizes = dict(L=layers, P=5, H=heads, J=3, T=8, S=8)
            shapes = {
                picture.array: [sizes[letter] for letter in picture.array.split('_')[1]] for picture in PICTURES
            }
            arrays = {name: rng.random(shape, np.float32) for name, shape in shapes.items()}
            arrays['attention_LHTS'] = np.tril(arrays['attention_LHTS']).astype(np.float16)
            np.savez(Folder(path).probe(step), **arrays)
    return str(path)


@pytest.fixture
def found(tmp_path):
    paths = [made_up(tmp_path / 'a', 'softmax'), made_up(tmp_path / 'b', 'a<b & "c"', steps=(0, 20), seed=1)]
    return runs.read(paths)


def test_a_run_is_read_as_it_was_written(found, tmp_path):
    run = found[0]
    assert run.probe_steps == [0, 10, 20]
    assert run.curve('train/loss') == ([0, 10, 20], [5.0, 4.0, 3.0])
    assert run.curve('nothing') == ([], [])
    with np.load(Folder(tmp_path / 'a').probe(20)) as arrays:
        alpha_LH = arrays['alpha_LPHJ'][..., 0].mean(1)
    np.testing.assert_allclose(run.values['alpha'][2], alpha_LH)
    (layer, head), *_ = run.strongest(4)
    assert alpha_LH[layer, head] == alpha_LH.max()
    np.testing.assert_allclose(run.values['attention'].sum(-1), 1, atol=1e-2)
    row = {'arm': 'softmax', 'step': 20, 'sink/1': 40.0, 'sink/star': None, 'alpha/1': 0.3, 'valid/loss': 5 - 20 / 12}
    assert {name: runs.table(found)[0][name] for name in row} == row
    shown = dict(zip([number.label for number in runs.NUMBERS], runs.cells(runs.table(found)[0])[1:], strict=True))
    assert (shown['Sink_1'], shown['Sink_*'], shown['alpha_1'], shown['valid loss']) == (
        '40.0 %',
        '-',
        '0.300',
        '3.333',
    )


def test_rows_of_one_name_are_told_apart_by_their_folders(tmp_path):
    paths = [made_up(tmp_path / name, 'softmax') for name in 'ab']
    assert [run.name for run in runs.read(paths)] == [f'softmax ({path})' for path in paths]


def test_a_damaged_probe_is_named(tmp_path):
    path = made_up(tmp_path / 'a', 'softmax')
    Folder(path).probe(10).write_bytes(b'PK nothing')
    with pytest.raises(Refusal, match=r'00000010\.npz is damaged'):
        runs.read([path])


def test_a_probe_that_was_written_before_an_array_was_kept_is_refused(tmp_path):
    path = made_up(tmp_path / 'a', 'softmax')
    probe = Folder(path).probe(10)
    arrays = dict(np.load(probe))
    arrays['alpha_LPHK'] = arrays.pop('alpha_LPHJ')
    np.savez(probe, **arrays)
    with pytest.raises(Refusal, match=r'00000010\.npz has no alpha_LPHJ, for an earlier sinklab has written it'):
        runs.read([path])


def test_a_run_that_is_older_than_a_measure_is_shown_without_its_picture(tmp_path):
    paths = [made_up(tmp_path / name, name) for name in ('old', 'new')]
    probe = Folder(paths[0]).probe(10)
    arrays = dict(np.load(probe))
    del arrays['entropy_LH']
    np.savez(probe, **arrays)
    drawn = {picture.name for picture in runs.common_pictures(runs.read(paths))}
    assert drawn == {picture.name for picture in runs.common_pictures(runs.read(paths[1:]))} - {'entropy'}
    page.write(tmp_path / 'report.html', runs.read(paths))
    assert 'How spread attention is' not in (tmp_path / 'report.html').read_text(encoding='utf-8')


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason='needs a browser: install chromium (Debian: apt-get install chromium)')
def test_the_page_draws_itself_in_a_browser_without_a_network(found, tmp_path):
    page.write(tmp_path / 'report.html', found)
    html = (tmp_path / 'report.html').read_text()
    assert not re.search(r'<(script|link|img)[^>]+(src|href)=["\']?(https?:)?//', html), (
        'loads something from a network'
    )
    assert 'a&lt;b &amp; &quot;c&quot;' in html
    command = [
        BROWSER,
        *HEADLESS,
        f'--user-data-dir={tmp_path}/profile',
        '--enable-logging=stderr',
        '--dump-dom',
    ]
    drawn = subprocess.run([*command, f'file://{tmp_path}/report.html'], capture_output=True, text=True, timeout=600)
    dom = drawn.stdout
    assert 'CONSOLE' not in drawn.stderr or 'Uncaught' not in drawn.stderr
    assert dom.count('class="main-svg"') > len(PICTURES), 'a figure was not drawn'
    kinds = [picture.kind for picture in PICTURES]
    assert dom.count('class="slider-container"') == kinds.count('heads')
    assert dom.count('class="scatterlayer') >= 2
    assert dom.count('class="heatmaplayer') >= 2
    for text in (*(picture.title for picture in PICTURES), *(number.label for number in runs.NUMBERS)):
        assert text in dom


@pytest.mark.slow
def test_the_pictures_are_png_files_of_some_size(found, tmp_path):
    written = pictures.write(tmp_path, found)
    assert [path.name for path in written] == [f'{name}.png' for name in ('curves', *(p.name for p in PICTURES))]
    for path in written:
        head = path.read_bytes()[:24]
        assert head.startswith(b'\x89PNG')
        assert int.from_bytes(head[16:20], 'big') > 600
