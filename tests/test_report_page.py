"""HTML report in a real browser: figures, slider, filters, keys and two hundred runs."""

import base64
import gzip
import json
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
from browser import NEEDS_BROWSER, open_browser
from hypothesis import given
from hypothesis import strategies as st
from synthetic_runs import SIZES, make_record, write_probe, write_run

from sinklab.metrics.metric import FigureSpec
from sinklab.metrics.registry import FIGURES
from sinklab.report import (
    figure_data,
    page,
    runs,
    summary_table,
)
from sinklab.run_dir import RunDir

pytestmark = pytest.mark.slow
BACKGROUND_COLOR = 'getComputedStyle(document.body).backgroundColor'
ARIA_LABEL = 'document.querySelector("#figure-{} {}").getAttribute("aria-label")'


@pytest.fixture(scope='module')
def tab(tmp_path_factory):
    with open_browser(tmp_path_factory.mktemp('profile')) as browser_tab:
        yield browser_tab


def test_limits_note_of_one_run_has_singular():
    note = page.render_limits_note([SimpleNamespace(probe_steps=[1])])
    assert '>1 run:' in note


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Return a folder with two seeds of a row, a row name to escape, a run without probes and a diverged run."""
    path = tmp_path_factory.mktemp('runs')
    published = {'sink/1': 18.18, 'valid/loss': 3.73}
    for seed in (0, 1):
        extra_metrics = {'sink/1/context': 3.0, 'alpha/1/context': 0.2}
        write_run(
            path / f'softmax-{seed}',
            'softmax',
            seed=seed,
            published=published,
            extra_metrics=extra_metrics,
            optimizer__weight_decay=0.1,
        )
    write_run(path / 'odd', 'a<b & "c"', steps=(0, 20), published={'sink/1': 41.08}, optimizer__weight_decay=0.5)
    write_run(path / 'silent', 'silent', probes=False, outcome='unfinished')
    write_run(path / 'wild', 'wild', steps=(0, 10), outcome='diverged')
    names = ('softmax-0', 'softmax-1', 'odd', 'silent', 'wild')
    page.write_report_page(path / 'report.html', runs.read_runs([f'{path}/{name}' for name in names]))
    return path


@pytest.fixture
def report_tab(tab, folder):
    tab.console.clear()
    return tab.open(folder / 'report.html')


def test_page_loads_no_resources_and_is_small(folder):
    html = (folder / 'report.html').read_text()
    assert not re.search(r'<(script|link|img)[^>]+(src|href)=', html), 'loads something'
    assert 'a&lt;b &amp; &quot;c&quot;' in html
    assert 'a<b' not in html
    assert len(html) < 150_000
    for text in (
        *(picture.title for picture in FIGURES),
        *(heading for heading in summary_table.RUN_HEADINGS if heading != 'Sink_*'),
    ):
        assert text in html


def test_page_packs_probe_values_within_one_quantization_level(folder):
    page_data, arrays = unpack_page(folder / 'report.html')
    (alpha,) = (figure for figure in page_data['figures'] if figure['name'] == 'alpha')
    (run,) = runs.read_runs([f'{folder}/softmax-0'])
    values = read_levels(arrays, alpha['maps'][0]['values'])
    np.testing.assert_allclose(values, run.probe_values['alpha'].ravel(), atol=1 / 65535)


def unpack_page(path):
    """Return (descriptions of figures, bytes of arrays) of a page."""
    packed = re.search(r'id="payload">([^<]+)<', path.read_text())[1]
    content = gzip.decompress(base64.b64decode(packed))
    header_end = 4 + int.from_bytes(content[:4], 'little')
    return json.loads(content[4:header_end]), content[header_end:]


def read_levels(arrays, array_location):
    """Return the values of a map, scaled to the range from 0 to 1."""
    type_code, offset, size = array_location
    return np.frombuffer(arrays, f'<{type_code}', size, offset) / 65535


def test_page_packs_cosines_of_every_probe_with_scale_centered_at_zero(folder):
    page_data, arrays = unpack_page(folder / 'report.html')
    (cosine,) = (figure for figure in page_data['figures'] if figure['name'] == 'cos')
    (run,) = runs.read_runs([f'{folder}/softmax-0'])
    with np.load(RunDir(f'{folder}/softmax-0').probe_files[0]) as saved:
        np.testing.assert_array_equal(run.probe_values['cos'][0], saved['cos_LH2'][..., 0] - saved['cos_LH2'][..., 1])
    assert 'Cosine of queries and keys' in (folder / 'report.html').read_text()
    assert cosine['scale_min'] == -cosine['scale_max'] < 0
    assert cosine['maps'][0]['steps'] == run.probe_steps
    values = cosine['scale_min'] + read_levels(arrays, cosine['maps'][0]['values']) * (
        cosine['scale_max'] - cosine['scale_min']
    )
    np.testing.assert_allclose(values, run.probe_values['cos'].ravel(), atol=2 * cosine['scale_max'] / 65535)


def test_page_has_all_figures_of_paper():
    names = {name for name in figure_data.PAPER_FIGURES if not name.startswith('along-')}
    assert names <= {'curves', *(picture.name for picture in FIGURES)}


def test_compute_scale_is_centered_at_zero_for_negative_values():
    cosine = FigureSpec('heads', 'cosine_LH', 'Queries and keys', 'cosine')
    assert figure_data.compute_scale(cosine, [np.array([-0.5, 0.25])]) == (-0.5, 0.5)
    assert figure_data.compute_scale(cosine, [np.array([0.125, 0.25])]) == (0.0, 0.25)


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=300), st.integers(6, 40))
def test_select_extremes_keeps_ends_minimum_and_maximum(values, count):
    extremes = figure_data.select_extremes(values, count)
    assert len(extremes) <= count
    assert {0, len(values) - 1} <= {*extremes}
    assert {min(values), max(values)} <= {values[index] for index in extremes}


@NEEDS_BROWSER
def test_page_draws_every_figure_without_console_output(report_tab):
    assert report_tab.console == []
    kinds = [picture.kind for picture in FIGURES]
    names = [picture.name for picture in FIGURES] + ['curves', 'context', 'metrics', 'along-optimizer.weight_decay']
    for name in names:
        count = f'document.querySelectorAll("[id=\\"figure-{name}\\"] .plot :is(.curve, canvas)").length'
        assert report_tab.evaluate(count) > 0, f'{name} is not drawn'
    assert report_tab.evaluate('document.querySelectorAll("section.figure").length') == len(names)
    assert report_tab.evaluate('document.querySelectorAll("#figure-alpha canvas").length') == 4
    assert report_tab.evaluate('document.querySelectorAll("#figure-attention canvas").length') == 12, (
        'the first of them'
    )
    assert kinds.count('ratios') == report_tab.evaluate('document.querySelectorAll(".reference").length')
    assert report_tab.evaluate('document.querySelectorAll(".mark").length') == 4
    assert report_tab.evaluate(
        '[...document.querySelectorAll("canvas, svg[role=img]")].every(one => one.ariaLabel && one.tabIndex === 0)'
    )
    colours = (
        'new Set(document.querySelector("#figure-alpha canvas").getContext("2d").getImageData(0, 0, 2, 3).data).size'
    )
    assert report_tab.evaluate(colours) > 6


@NEEDS_BROWSER
def test_page_slider_and_keys_move_all_figures(report_tab):
    curve, alpha, value = (
        ARIA_LABEL.format('curves', 'svg[role=img]'),
        ARIA_LABEL.format('alpha', 'canvas'),
        ARIA_LABEL.format('value', 'svg[role=img]'),
    )
    attention, cosine = (ARIA_LABEL.format(name, 'canvas') for name in ('attention', 'cos'))
    before = [report_tab.evaluate(label) for label in (curve, alpha, value, attention, cosine)]
    assert 'at step 20: softmax, mean of 2 50.0' in before[0]
    assert 'step 20' in before[1]
    report_tab.evaluate('getElement("step").focus()')
    report_tab.press('ArrowLeft')
    after = [report_tab.evaluate(label) for label in (curve, alpha, value, attention, cosine)]
    assert 'at step 10: softmax, mean of 2 25.0' in after[0]
    assert 'step 10' in after[1]
    assert after[2] != before[2]
    assert 'step 10' in after[3]
    assert ', step 20: cos' in before[4]
    assert ', step 10: cos' in after[4]
    report_tab.evaluate('document.activeElement.blur()')
    report_tab.press('[', '[')
    assert 'step 0' in report_tab.evaluate(alpha)
    report_tab.evaluate('document.querySelector("#figure-curves svg[role=img]").focus()')
    report_tab.press('ArrowRight')
    assert report_tab.evaluate('getElement("step-value").textContent') == '10'
    assert report_tab.console == []


@NEEDS_BROWSER
def test_page_filters_rows_layers_and_heads(report_tab):
    canvases = 'document.querySelectorAll("#figure-{} canvas").length'
    report_tab.evaluate(
        'getElement("group-search").value = "soft"; getElement("group-search").dispatchEvent(new Event("input"))'
    )
    report_tab.wait_for_frames()
    assert report_tab.evaluate(canvases.format('alpha')) == 2
    assert (
        report_tab.evaluate('[...document.querySelectorAll("tr[data-group]")].filter(row => !row.hidden).length') == 3
    )
    assert 'a<b' not in report_tab.evaluate(ARIA_LABEL.format('curves', 'svg[role=img]'))
    report_tab.evaluate('getElement("layer").value = 2; getElement("layer").dispatchEvent(new Event("change"))')
    report_tab.evaluate('getElement("head").value = 1; getElement("head").dispatchEvent(new Event("change"))')
    report_tab.wait_for_frames()
    titles = report_tab.evaluate(
        '[...document.querySelectorAll("#figure-attention figcaption")].map(one => one.textContent)'
    )
    assert len(titles) == 2
    assert all('layer 2 head 1' in title for title in titles)
    report_tab.click('#no-groups')
    assert report_tab.evaluate(canvases.format('alpha')) == 0
    assert report_tab.evaluate('document.querySelector("#figure-alpha .message").textContent') == 'no row is shown'
    report_tab.click('#all-groups')
    assert report_tab.evaluate(canvases.format('alpha')) == 4
    assert report_tab.console == []


@NEEDS_BROWSER
def test_page_map_is_navigated_by_keys_and_enter_selects_head(report_tab):
    report_tab.evaluate('document.querySelector("#figure-alpha canvas").focus()')
    report_tab.press('ArrowRight')
    assert re.fullmatch(r'layer 3, head 2: 0\.\d{3}', report_tab.evaluate('getElement("announcement").textContent'))
    report_tab.press('Enter')
    assert report_tab.evaluate('[state.layer, state.head]') == [3, 2]
    report_tab.evaluate('document.querySelector("#figure-alpha .values").open = true')
    report_tab.wait_until('document.querySelectorAll("#figure-alpha .values td").length')
    assert report_tab.evaluate('document.querySelectorAll("#figure-alpha .values table").length') == 4


@NEEDS_BROWSER
def test_page_announces_step_that_key_moves_to(report_tab):
    report_tab.evaluate('document.querySelector("#figure-curves svg[role=img]").focus()')
    report_tab.press('ArrowLeft')
    assert 'at step 10: ' in report_tab.evaluate('getElement("announcement").textContent')


@NEEDS_BROWSER
def test_page_click_selects_head_under_pointer(report_tab):
    report_tab.evaluate(
        '(() => { const canvas = document.querySelector("#figure-alpha canvas");'
        ' const { right, bottom } = canvas.getBoundingClientRect();'
        ' canvas.dispatchEvent(new MouseEvent("click", {clientX: right - 1, clientY: bottom - 1})) })()'
    )
    heads = report_tab.evaluate('document.querySelector("#figure-alpha canvas").width')
    assert report_tab.evaluate('[state.layer, state.head]') == [1, heads]


@NEEDS_BROWSER
def test_page_hides_points_and_values_of_hidden_rows(report_tab):
    sweep = '#figure-along-optimizer\\\\.weight_decay'
    count = f'document.querySelectorAll("{sweep} .panel:first-child circle").length'
    before = report_tab.evaluate(count)
    report_tab.evaluate(
        'getElement("group-search").value = "soft"; getElement("group-search").dispatchEvent(new Event("input"))'
    )
    report_tab.wait_for_frames()
    assert 0 < report_tab.evaluate(count) < before
    assert 'a<b' not in report_tab.evaluate(f'document.querySelector("{sweep} svg").getAttribute("aria-label")')
    report_tab.click('#no-groups')
    label = f'document.querySelector("{sweep} svg[role=img]").getAttribute("aria-label")'
    assert report_tab.evaluate(label) == 'no row is shown'
    report_tab.evaluate(f'document.querySelector("{sweep} svg[role=img]").dispatchEvent(new MouseEvent("click"))')
    assert report_tab.console == []


@NEEDS_BROWSER
def test_page_values_follow_chosen_metric(report_tab):
    report_tab.evaluate('document.querySelector("#figure-metrics .values").open = true')
    report_tab.evaluate(
        '(() => { const menu = document.querySelector("#figure-metrics select"); menu.value = 1;'
        ' menu.dispatchEvent(new Event("change")) })()'
    )
    report_tab.wait_for_frames()
    heading = report_tab.evaluate('document.querySelector("#figure-metrics .values th:nth-child(2)").textContent')
    label = report_tab.evaluate('document.querySelector("#figure-metrics option:nth-child(2)").textContent')
    assert heading.startswith(f'{label}: ')


@NEEDS_BROWSER
def test_page_draws_sweep_of_field_whose_name_is_a_kind_of_panel(tab, tmp_path):
    paths = [
        write_run(tmp_path / str(block), f'block_{block}', model__mask__block=block, data__length=512)
        for block in (128, 256)
    ]
    page.write_report_page(tmp_path / 'report.html', runs.read_runs(paths))
    tab.console.clear()
    tab.open(tmp_path / 'report.html')
    assert tab.console == []
    points = 'document.querySelectorAll("#figure-along-model\\\\.mask\\\\.block .panel:first-child circle").length'
    assert tab.evaluate(points) == 2


@NEEDS_BROWSER
def test_page_mean_by_block_omits_diverged_run(tab, tmp_path):
    paths = [write_run(tmp_path / str(seed), 'softmax', seed=seed) for seed in (0, 1)]
    paths.append(write_run(tmp_path / '2', 'softmax', seed=2, outcome='diverged'))
    page.write_report_page(tmp_path / 'report.html', runs.read_runs(paths))
    tab.open(tmp_path / 'report.html')
    assert 'mean of 2 ' in tab.evaluate(ARIA_LABEL.format('value', 'svg[role=img]'))


@NEEDS_BROWSER
@pytest.mark.parametrize('width', [400, 1280])
def test_page_fits_window_width_and_has_dark_theme(tab, folder, width):
    colours = []
    for dark in (False, True):
        tab.open(folder / 'report.html', width, dark=dark)
        assert tab.evaluate('document.documentElement.scrollWidth') <= width
        colours.append(tab.evaluate(BACKGROUND_COLOR))
        boxes_script = 'const boxes = [...document.querySelectorAll("h1, h2, h3, figcaption, svg, canvas, .legend")]'
        assert tab.evaluate(
            f'(() => {{ {boxes_script}.map(one => one.getBoundingClientRect()).filter(one => one.width); return '
            'boxes.every(one => one.right <= innerWidth + 1 && one.left >= -1) })()'
        )
    tab.click('#theme')
    assert colours == ['rgb(255, 255, 255)', 'rgb(20, 23, 26)']
    assert tab.evaluate(BACKGROUND_COLOR) == colours[0]


CLIPPED = 'document.querySelector("#table-{} .scroll").classList.contains("clipped")'
HINTED = '!document.querySelector("#table-{} .hint").hidden'


@NEEDS_BROWSER
@pytest.mark.parametrize('table', ['rows', 'runs'])
def test_page_shows_scroll_hint_for_table_wider_than_window(tab, folder, table):
    clipped, hinted = CLIPPED.format(table), HINTED.format(table)
    tab.open(folder / 'report.html', 2000)
    tab.evaluate('document.body.style.maxWidth = "none"')
    tab.wait_until(f'!{clipped}')
    assert not tab.evaluate(hinted)
    tab.resize(400)
    tab.wait_until(clipped)
    assert tab.evaluate(hinted)
    tab.evaluate(f'document.querySelector("#table-{table} .scroll").scrollLeft = 9999')
    tab.wait_until(f'!{clipped}')


@NEEDS_BROWSER
def test_page_has_no_negative_axis_for_metric_that_is_zero(tab, tmp_path):
    run = write_run(tmp_path / 'a', 'softmax', extra_metrics={'train/grad_norm': 0.0})
    page.write_report_page(tmp_path / 'report.html', runs.read_runs([run]))
    tab.open(tmp_path / 'report.html')
    ticks = tab.evaluate('[...document.querySelectorAll("#figure-metrics svg text")].map(one => +one.textContent)')
    assert all(value is None or value >= 0 for value in ticks), ticks


@NEEDS_BROWSER
@pytest.mark.parametrize('kind', ['one', 'silent', 'wild'])
def test_page_shows_single_run(tab, tmp_path, kind):
    run_options = dict(one={}, silent=dict(probes=False), wild=dict(outcome='diverged'))[kind]
    page.write_report_page(
        tmp_path / 'report.html', runs.read_runs([write_run(tmp_path / 'run', 'softmax', **run_options)])
    )
    tab.console.clear()
    tab.open(tmp_path / 'report.html', 400)
    assert tab.console == []
    expected_text = dict(one='40 % of (text, layer, head)', silent='no probe yet', wild='diverged at step 20')[kind]
    assert expected_text in tab.evaluate('document.querySelector(".headline").textContent')
    assert tab.evaluate('document.querySelectorAll(".curve").length') > 0
    assert tab.evaluate('getComputedStyle(getElement("layer").closest("label")).display') == (
        'none' if kind == 'silent' else 'flex'
    )


@NEEDS_BROWSER
def test_page_connects_fork_to_curve_of_parent(tab, tmp_path):
    paths = [write_run(tmp_path / 'softmax', 'softmax'), write_run(tmp_path / 'fork', 'sigmoid', steps=(20, 30))]
    row_info = json.loads((tmp_path / 'fork' / 'row.json').read_text())
    changes = dict(config=['model.attention.similarity exp -> sigmoid'], new=[], dropped=[], data=[])
    row_info['from'] = dict(run='../softmax', row='softmax', step=15, **changes)
    (tmp_path / 'fork' / 'row.json').write_text(json.dumps(row_info))
    page.write_report_page(tmp_path / 'report.html', runs.read_runs(paths))
    tab.console.clear()
    tab.open(tmp_path / 'report.html')
    assert tab.console == []
    assert tab.evaluate('document.querySelectorAll("#figure-curves [stroke-dasharray=\'1 4\']").length') == 2
    assert 'sigmoid from softmax@15: ' in tab.evaluate('document.querySelector(".headline").textContent')
    assert 'similarity exp -> sigmoid' in tab.evaluate('document.querySelector(".note").textContent')


def draw_metrics(step, rng):
    return {'step': step, 'valid/loss': 3 + 3 / (1 + step / 900) + rng.random() / 9, 'alpha/1': rng.random()}


def write_runs(path, count, steps):
    """Write runs with the layers and heads of the paper and three seeds per row, and return their paths."""
    sizes = SIZES | dict(L=10, H=8, T=32, S=32, P=2)
    for index in range(count):
        run_path = write_run(
            path / f'{index:03}',
            f'rate_{index // 3}',
            seed=index % 3,
            steps=(0,),
            probes=False,
            optimizer__rate=index // 3,
        )
        rng = np.random.default_rng(index)
        records = [make_record(step / 500, index % 3, probes=True) | draw_metrics(step, rng) for step in steps]
        RunDir(run_path).path.joinpath('metrics.jsonl').write_text('\n'.join(map(json.dumps, records)))
        for step in steps[::40]:
            write_probe(RunDir(run_path).get_probe_path(step), np.random.default_rng(index + step), sizes)
    return [f'{path}/{index:03}' for index in range(count)]


@NEEDS_BROWSER
@pytest.mark.exhaustive
def test_page_of_two_hundred_runs_meets_size_and_time_limits(tab, tmp_path):
    paths = write_runs(tmp_path, 200, range(0, 20_000, 50))
    start_time = time.monotonic()
    page.write_report_page(tmp_path / 'report.html', runs.read_runs(paths))
    seconds, size = time.monotonic() - start_time, (tmp_path / 'report.html').stat().st_size
    tab.console.clear()
    tab.open(tmp_path / 'report.html')
    draw_ms = int(tab.evaluate('document.documentElement.dataset.drawMilliseconds'))
    print(f'200 runs: written in {seconds:.1f} s, {size / 1e6:.2f} MB, drawn {draw_ms} ms after it was asked for')
    assert size < 10e6
    assert draw_ms < 2000 * 4, 'four times what an idle machine may take'
    assert tab.console == []
    assert tab.evaluate('document.querySelectorAll("#figure-alpha canvas").length') == 12
    assert figure_data.MIN_POINTS <= figure_data.MAX_TOTAL_POINTS // 200
    assert figure_data.MAX_MATRIX_RUNS < 200
