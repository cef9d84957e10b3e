"""HTML report: its content, and in a real browser its figures, slider, filters and two hundred runs."""

import base64
import gzip
import json
import re

import numpy as np
import pytest
from browser import NEEDS_BROWSER, open_browser
from hypothesis import given
from hypothesis import strategies as st
from synthetic_runs import write_run

from sinklab.metrics.metric import FigureSpec
from sinklab.metrics.registry import FIGURES
from sinklab.report import figures, page, summary_table
from sinklab.report.runs import read_runs

pytestmark = pytest.mark.slow
BACKGROUND_COLOR = 'getComputedStyle(document.body).backgroundColor'
ARIA_LABEL = 'document.querySelector("#figure-{} {}").getAttribute("aria-label")'
DISPATCH = (
    '(() => {{ const element = getElement("{}"); element.value = {}; element.dispatchEvent(new Event("{}")) }})()'
)


@pytest.fixture(scope='module')
def tab(tmp_path_factory):
    with open_browser(tmp_path_factory.mktemp('profile')) as browser_tab:
        yield browser_tab


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Return a folder with two seeds of a row, a row name to escape, a run without probes and a diverged run."""
    path = tmp_path_factory.mktemp('runs')
    published = {'sink/1': 18.18, 'valid/loss': 3.73}
    extra = {'sink/1/context': 3.0}
    for seed in (0, 1):
        fields = dict(published=published, extra_metrics=extra, optimizer__weight_decay=0.1)
        write_run(path / f'softmax-{seed}', 'softmax', seed=seed, **fields)
    write_run(path / 'odd', 'a<b & "c"', steps=(0, 20), published={'sink/1': 41.08}, optimizer__weight_decay=0.5)
    write_run(path / 'silent', 'silent', probes=False, outcome='unfinished')
    write_run(path / 'wild', 'wild', steps=(0, 10), outcome='diverged')
    names = ('softmax-0', 'softmax-1', 'odd', 'silent', 'wild')
    page.write_report_page(path / 'report.html', read_runs([f'{path}/{name}' for name in names]))
    return path


def open_page(tab, path, width=1280, dark=False):
    tab.console.clear()
    return tab.open(path, width, dark=dark)


@pytest.fixture
def report_tab(tab, folder):
    return open_page(tab, folder / 'report.html')


def set_control(tab, name, value, event='change'):
    tab.evaluate(DISPATCH.format(name, json.dumps(value), event))
    tab.wait_for_frames()


def test_page_loads_no_resources_and_is_small(folder):
    html = (folder / 'report.html').read_text()
    assert not re.search(r'<(script|link|img)[^>]+(src|href)=', html), 'loads something'
    assert 'a&lt;b &amp; &quot;c&quot;' in html
    assert 'a<b' not in html
    assert html.index('</h1>') < html.index('Sink_1 is ') < html.index('<main>')
    assert len(html) < 150_000
    headings = {heading for heading in summary_table.list_run_headings() if heading != 'Sink_*'}
    assert {text for text in (*headings, *(figure.title for figure in FIGURES)) if text not in html} == set()


@pytest.mark.parametrize('name', ['alpha', 'cos'])
def test_page_packs_values_of_every_probe_within_one_quantization_level(folder, name):
    packed = re.search(r'id="payload">([^<]+)<', (folder / 'report.html').read_text())[1]
    content = json.loads(gzip.decompress(base64.b64decode(packed)))
    (figure,) = (entry for entry in content['figures'] if entry['name'] == name)
    (run,) = read_runs([f'{folder}/softmax-0'])
    first_map = figure['maps'][0]
    dtype, encoded = first_map['values']
    levels = np.frombuffer(base64.b64decode(encoded), f'<{dtype}')
    span = figure['scale_max'] - figure['scale_min']
    assert figure['scale_min'] == (-figure['scale_max'] if name == 'cos' else 0)
    assert first_map['steps'] == run.probe_steps
    values = figure['scale_min'] + levels / 65535 * span
    np.testing.assert_allclose(values, run.probe_values[name].ravel(), atol=span / 65535)


def test_cosine_is_that_of_first_key_minus_that_of_others(folder):
    (run,) = read_runs([f'{folder}/softmax-0'])
    with np.load(run.run_dir.probe_files[0]) as saved:
        np.testing.assert_array_equal(run.probe_values['cos'][0], saved['cos_LH2'][..., 0] - saved['cos_LH2'][..., 1])


def test_scale_is_centered_at_zero_for_negative_values():
    cosine = FigureSpec('heads', 'cosine_LH', 'Queries and keys', 'cosine')
    assert figures.compute_scale(cosine, [np.array([-0.5, 0.25])]) == (-0.5, 0.5)
    assert figures.compute_scale(cosine, [np.array([0.125, 0.25])]) == (0.0, 0.25)


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=300), st.integers(6, 40))
def test_select_extremes_keeps_ends_minimum_and_maximum(values, count):
    extremes = figures.select_extremes(values, count)
    assert len(extremes) <= count
    assert {0, len(values) - 1} <= {*extremes}
    assert {min(values), max(values)} <= {values[index] for index in extremes}


@NEEDS_BROWSER
def test_page_draws_every_figure_without_console_output(report_tab):
    assert report_tab.console == []
    names = [figure.name for figure in FIGURES] + ['curves']
    for name in names:
        count = f'document.querySelectorAll("[id=\\"figure-{name}\\"] .plot :is(.curve, canvas)").length'
        assert report_tab.evaluate(count) > 0, f'{name} is not drawn'
    counts = {'section.figure': len(names), '#figure-alpha canvas': 4, '#figure-attention canvas': 12}
    counts['.reference'] = [figure.kind for figure in FIGURES].count('ratios')
    for selector, count in counts.items():
        assert report_tab.evaluate(f'document.querySelectorAll("{selector}").length') == count, selector
    assert report_tab.evaluate('[...document.querySelectorAll("canvas, svg[role=img]")].every(one => one.ariaLabel)')
    pixels = 'document.querySelector("#figure-alpha canvas").getContext("2d").getImageData(0, 0, 2, 3).data'
    assert report_tab.evaluate(f'new Set({pixels}).size') > 6, 'colours'


@NEEDS_BROWSER
def test_slider_and_keys_move_all_figures(report_tab):
    labels = [ARIA_LABEL.format('curves', 'svg[role=img]')]
    labels += [ARIA_LABEL.format(name, 'canvas') for name in ('alpha', 'attention', 'cos')]
    value_label = ARIA_LABEL.format('value', 'svg[role=img]')
    value_before = report_tab.evaluate(value_label)
    assert 'at step 20: softmax, mean of 2 50.0' in report_tab.evaluate(labels[0])
    assert all('step 20' in report_tab.evaluate(label) for label in labels)
    set_control(report_tab, 'step', 1, 'input')
    assert 'at step 10: softmax, mean of 2 25.0' in report_tab.evaluate(labels[0])
    assert all('step 10' in report_tab.evaluate(label) for label in labels)
    assert report_tab.evaluate(value_label) != value_before
    report_tab.evaluate('document.body.dispatchEvent(new KeyboardEvent("keydown", {key: "[", bubbles: true}))')
    report_tab.wait_for_frames()
    assert all('step 0' in report_tab.evaluate(label) for label in labels)
    assert report_tab.console == []


@NEEDS_BROWSER
def test_controls_filter_rows_layers_and_heads(report_tab):
    canvases = 'document.querySelectorAll("#figure-{} canvas").length'
    count_curves = 'document.querySelectorAll("#figure-curves .panel:first-child .curve").length'
    num_curves = report_tab.evaluate(count_curves)
    set_control(report_tab, 'group-search', 'soft', 'input')
    assert report_tab.evaluate(canvases.format('alpha')) == 2
    shown_rows = '[...document.querySelectorAll("tr[data-group]")].filter(row => !row.hidden).length'
    assert report_tab.evaluate(shown_rows) == 3
    assert 'a<b' not in report_tab.evaluate(ARIA_LABEL.format('curves', 'svg[role=img]'))
    assert 0 < report_tab.evaluate(count_curves) < num_curves
    set_control(report_tab, 'layer', 0)
    set_control(report_tab, 'head', 1)
    captions = '[...document.querySelectorAll("#figure-attention figcaption")].map(one => one.textContent)'
    assert ['layer 0 head 1' in caption for caption in report_tab.evaluate(captions)] == [True, True]
    set_control(report_tab, 'group-search', 'no such row', 'input')
    assert report_tab.evaluate(canvases.format('alpha')) == 0
    assert report_tab.evaluate(ARIA_LABEL.format('curves', 'svg[role=img]')) == 'no row is shown'
    report_tab.evaluate(
        'document.querySelector("#figure-curves svg[role=img]").dispatchEvent(new MouseEvent("click"))'
    )
    set_control(report_tab, 'group-search', '', 'input')
    assert report_tab.evaluate(canvases.format('alpha')) == 4
    assert report_tab.console == []


@NEEDS_BROWSER
@pytest.mark.parametrize('width', [400, 1280])
def test_page_fits_window_width_and_has_dark_theme(tab, folder, width):
    colours = []
    elements = 'document.querySelectorAll("h1, h2, h3, figcaption, svg, canvas, .legend")'
    boxes = f'[...{elements}].map(one => one.getBoundingClientRect()).filter(one => one.width)'
    for dark in (False, True):
        open_page(tab, folder / 'report.html', width, dark)
        assert tab.evaluate('document.documentElement.scrollWidth') <= width
        assert tab.evaluate(f'{boxes}.every(one => one.right <= innerWidth + 1 && one.left >= -1)')
        colours.append(tab.evaluate(BACKGROUND_COLOR))
    assert colours == ['rgb(255, 255, 255)', 'rgb(20, 23, 26)']


@NEEDS_BROWSER
@pytest.mark.parametrize('run_options', [{}, dict(probes=False), dict(outcome='diverged')], ids=str)
def test_page_shows_single_run(tab, tmp_path, run_options):
    path = write_run(tmp_path / 'run', 'softmax', **run_options)
    page.write_report_page(tmp_path / 'report.html', read_runs([path]))
    open_page(tab, tmp_path / 'report.html', 400)
    assert tab.console == []
    assert tab.evaluate('document.querySelectorAll(".curve").length') > 0
    display = tab.evaluate('getComputedStyle(getElement("layer").closest("label")).display')
    assert display == ('none' if run_options == dict(probes=False) else 'flex')
