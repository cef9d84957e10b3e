"""Reports of run folders: names, tables, means over seeds, headline, figures and LaTeX."""

import json
import re

import numpy as np
import pytest
from synthetic_runs import write_run

from sinklab.cli.main import main
from sinklab.errors import UserError
from sinklab.metrics.registry import FIGURES
from sinklab.report import (
    emergence,
    figure_data,
    latex,
    page,
    pictures,
    run_groups,
    runs,
    summary_table,
)
from sinklab.report import runs as runs_module
from sinklab.report.emergence import RunEmergence
from sinklab.report.figure_data import BinaryPayload
from sinklab.run_dir import RunDir

MATRICES = next(picture for picture in FIGURES if picture.kind == 'matrices')


@pytest.fixture
def loaded_runs(tmp_path):
    paths = [write_run(tmp_path / 'a', 'softmax'), write_run(tmp_path / 'b', 'a<b & "c"', steps=(0, 20), seed=1)]
    return runs.read_runs(paths)


def parse_integers(text):
    return [int(number) for number in re.findall(r'\d+', text)]


def test_read_runs_returns_written_metrics_and_probes(loaded_runs, tmp_path):
    run = loaded_runs[0]
    assert run.probe_steps == [0, 10, 20]
    assert run.get_curve('train/loss') == ([0, 10, 20], [5.0, 4.0, 3.0])
    assert run.get_curve('nothing') == ([], [])
    with np.load(RunDir(tmp_path / 'a').get_probe_path(20)) as arrays:
        alpha_LH = arrays['alpha_LPHJ'][..., 0].mean(1)
    np.testing.assert_allclose(run.probe_values['alpha'][2], alpha_LH)
    (layer, head), *_ = run.find_strongest_heads(4)
    assert alpha_LH[layer, head] == alpha_LH.max()
    np.testing.assert_allclose(run.load_matrices(MATRICES).sum(-1), 1, atol=1e-2)
    assert run.probe_values['value'].shape == (3, 3), 'ratios of every probe'
    row = {'run': 'softmax', 'step': 20, 'sink/1': 40.0, 'sink/star': None, 'alpha/1': 0.3, 'valid/loss': 5 - 20 / 12}
    table = summary_table.make_run_table(loaded_runs)
    assert {name: table[0][name] for name in row} == row
    cells = dict(zip(summary_table.RUN_HEADINGS, summary_table.format_run_cells(table[0]), strict=True))
    expected = ('40.0 %', '-', '0.300', '3.333 nats', '10-20', 'done')
    names = 'Sink_1', 'Sink_*', 'alpha_1', 'valid loss', 'emerges (step)', 'end'
    assert tuple(cells[name] for name in names) == expected


def test_cell_has_step_of_value_that_is_older_than_last_step(tmp_path):
    path = write_run(tmp_path / 'a', 'softmax', optimizer__steps=100, outcome='preempted')
    with (tmp_path / 'a' / 'metrics.jsonl').open('a') as file:
        file.write('{"step": 25, "seconds": 3.0, "train/loss": 2.5}\n')
    (row,) = summary_table.make_run_table(runs.read_runs([path]))
    cells = dict(zip(summary_table.RUN_HEADINGS, summary_table.format_run_cells(row), strict=True))
    assert (cells['step'], cells['valid loss']) == ('25', '3.333 nats (step 20)')
    assert row['earlier_steps']['valid/loss'] == 20
    assert 'seconds' not in row['earlier_steps']


def test_run_names_contain_row_changed_fields_seed_and_folder(tmp_path):
    run_fields = [
        ('a', dict(seed=0)),
        ('b', dict(seed=1)),
        ('c', dict(seed=1)),
        ('d', dict(optimizer__weight_decay=0.5)),
    ]
    for name, fields in run_fields:
        write_run(tmp_path / name, 'softmax', **{'optimizer__weight_decay': 0.1, **fields})
    loaded_runs = runs.read_runs([f'{tmp_path}/{name}' for name in 'abcd'])
    common_name = 'softmax, weight_decay 0.1'
    names = [
        f'{common_name}, seed 0',
        f'{common_name}, seed 1 (b)',
        f'{common_name}, seed 1 (c)',
        'softmax, weight_decay 0.5',
    ]
    assert [run.name for run in loaded_runs] == names
    assert [group.name for group in run_groups.group_runs(loaded_runs)] == [common_name, 'softmax, weight_decay 0.5']
    assert runs.read_runs([f'{tmp_path}/a'])[0].name == 'softmax'


def test_run_name_falls_back_to_folder_name(tmp_path):
    assert runs.read_runs([write_run(tmp_path / 'mine', None)])[0].name == 'mine'


def test_read_runs_names_damaged_probe_file(tmp_path):
    path = write_run(tmp_path / 'a', 'softmax')
    RunDir(path).get_probe_path(10).write_bytes(b'PK nothing')
    with pytest.raises(UserError, match=r'00000010\.npz'):
        runs.read_runs([path])


def test_read_runs_skips_run_with_damaged_probe(tmp_path, capsys):
    damaged, sound = (write_run(tmp_path / name, name) for name in ('damaged', 'sound'))
    (RunDir(damaged).get_probe_path(10)).write_bytes(b'')
    assert [run.name for run in runs.read_runs([damaged, sound])] == ['sound']
    assert str(RunDir(damaged).get_probe_path(10)) in capsys.readouterr().err
    with pytest.raises(UserError):
        runs.read_runs([damaged, damaged + '/'])


def test_read_runs_rejects_probe_without_required_array(tmp_path):
    path = write_run(tmp_path / 'a', 'softmax')
    probe = RunDir(path).get_probe_path(10)
    arrays = dict(np.load(probe))
    arrays['alpha_LPHK'] = arrays.pop('alpha_LPHJ')
    np.savez(probe, **arrays)
    with pytest.raises(UserError, match=r'00000010\.npz.*alpha_LPHJ'):
        runs.read_runs([path])


def test_report_page_names_runs_without_optional_probe_array(tmp_path):
    paths = [write_run(tmp_path / name, name) for name in ('old', 'new')]
    probe = RunDir(paths[0]).get_probe_path(10)
    arrays = dict(np.load(probe))
    del arrays['entropy_LH']
    np.savez(probe, **arrays)
    assert {p.name for p in FIGURES} - {p.name for p in runs.select_drawn_figures(runs.read_runs(paths[:1]))} == {
        'entropy'
    }
    page.write_report_page(tmp_path / 'report.html', runs.read_runs(paths))
    text = (tmp_path / 'report.html').read_text(encoding='utf-8')
    assert re.search(r'Attention entropy</h2><p>[^<]* Missing in: old\.', text)


def test_read_runs_selects_probes_evenly_with_first_and_last(monkeypatch, tmp_path):
    path = write_run(tmp_path / 'a', 'softmax', steps=range(0, 90, 10))
    monkeypatch.setattr(runs_module, 'MAX_FILES', 3)
    assert runs.read_runs([path])[0].probe_steps == [0, 40, 80]
    assert runs_module.select_evenly(3, 1) == [2]
    assert runs_module.select_evenly(0, 5) == []


def test_mean_over_seeds_excludes_diverged_run(tmp_path):
    paths = [write_run(tmp_path / str(seed), 'softmax', seed=seed) for seed in (0, 1)]
    paths.append(write_run(tmp_path / '2', 'softmax', seed=2, steps=(0, 10), outcome='diverged', optimizer__steps=20))
    loaded_runs = runs.read_runs(paths)
    (group,) = run_groups.group_runs(loaded_runs)
    steps, mean, spread = run_groups.compute_mean_curve(group.counted_runs, 'sink/1')
    assert steps == [0, 10, 20]
    np.testing.assert_allclose(mean, [0, 25, 50])
    np.testing.assert_allclose(spread, [0, 5 * 2**0.5, 10 * 2**0.5])
    (row,) = run_groups.make_group_table([group])
    assert row['ours']['sink/1'] == pytest.approx(dict(mean=50, sd=10 * 2**0.5, n=2))
    assert row['outcome'] == 'done 2/3, diverged 1/3'
    headline = summary_table.format_headline([group])
    assert headline.startswith('softmax: ')
    assert headline.endswith('.')
    assert summary_table.format_group(group)[0] in headline
    sink_text, failure_text = summary_table.format_group(group)
    # share, lowest and highest share, steps, seeds, and the probes between which the sinks emerge
    assert parse_integers(sink_text) == [50, 40, 60, 20, 2, 10, 20]
    assert ('diverged' in failure_text, parse_integers(failure_text)) == (True, [2, 10])


def test_headline_counts_seeds_with_sink(tmp_path):
    for seed, extra_metrics in enumerate([None, {'sink/1': 0.0}, None]):
        write_run(tmp_path / str(seed), 'softmax', seed=seed, extra_metrics=extra_metrics)
    (group,) = run_groups.group_runs(runs.read_runs([f'{tmp_path}/{seed}' for seed in range(3)]))
    (description,) = summary_table.format_group(group)
    assert parse_integers(description)[-4:] == [10, 20, 2, 3]


def test_group_table_reports_direction_relative_to_published_values(tmp_path):
    """Check that the group without changed fields comes first, in any input order."""
    for name, seed, published in (
        ('b', 1, 30.0),
        ('softmax', 0, 18.18),
        ('c', 1, 3.0),
        ('d', 0, 3.0),
        ('e', 4, None),
    ):
        published_values = {} if published is None else {'sink/1': published}
        write_run(
            tmp_path / name,
            name,
            seed=0,
            published=published_values,
            extra_metrics={'sink/1': 10.0 + seed},
            model__x=name,
        )
    groups = run_groups.group_runs(runs.read_runs([f'{tmp_path}/{name}' for name in ('b', 'softmax', 'c', 'd', 'e')]))
    directions = {row['row']: row['direction'] for row in run_groups.make_group_table(groups)}
    assert [*directions] == ['softmax', 'b', 'c', 'd', 'e']
    assert [*directions.values()] == ['', 'as published, one seed', 'opposite, one seed', 'no difference', '']


def test_headline_names_groups_without_sink_probe_or_final_step(tmp_path):
    write_run(tmp_path / 'a', 'softmax')
    write_run(tmp_path / 'b', 'none', extra_metrics={'sink/1': 0.0})
    write_run(tmp_path / 'c', 'silent', probes=False, outcome='unfinished', steps=(0, 10), optimizer__steps=20)
    write_run(tmp_path / 'd', 'wild', outcome='diverged')
    write_run(tmp_path / 'e', 'halted', outcome='stopped', extra_metrics={'sink/1': 0.0})
    groups = run_groups.group_runs(runs.read_runs([f'{tmp_path}/{name}' for name in 'abcde']))
    descriptions = dict(
        part.split(': ', 1) for part in summary_table.format_headline(groups).removesuffix('.').split('; ')
    )
    assert {name: parse_integers(description) for name, description in descriptions.items()} == {
        'softmax': [40, 20, 0, 10, 20],  # share, steps, seed, emergence
        'none': [20, 0],
        'silent': [],
        'wild': [20],
        'halted': [20, 0],
    }
    assert {name for name, description in descriptions.items() if description.startswith('none')} == {
        'none',
        'halted',
    }
    for name, word in (('silent', 'no probe'), ('wild', 'diverged'), ('halted', 'stopped')):
        assert [row for row, description in descriptions.items() if word in description] == [name]
    first, *others = summary_table.format_many_groups(groups).removesuffix('.').split('; ')
    assert parse_integers(first) == [5, 5, 0, 40], 'runs, rows, the lowest and the highest share'
    assert re.findall(r'\((\w+)\)', first) == ['none', 'softmax']
    assert parse_integers(others[0]) == [2, 3], 'rows without a sink, of those that have a probe'
    for word in ('unfinished', 'diverged', 'stopped', 'probe'):
        assert [parse_integers(part) for part in others[1:] if word in part] == [[1]], word


@pytest.mark.parametrize(
    ('rates', 'start_step', 'end_step'),
    [((0, 5, 40, 80), 20, 30), ((0, 60, 30, 80), 20, 30), ((50, 60, 70, 80), None, 0)],
)
def test_emergence_is_first_probe_that_stays_above_half_of_final_rate(tmp_path, rates, start_step, end_step):
    path = write_run(tmp_path / 'a', 'softmax', steps=(0, 10, 20, 30))
    lines = [json.dumps(dict(step=10 * index, seconds=1, **{'sink/1': rate})) for index, rate in enumerate(rates)]
    (tmp_path / 'a' / 'metrics.jsonl').write_text('\n'.join(lines) + '\n')
    run = runs.read_runs([path])[0]
    actual = emergence.find_run_emergence(run)
    step, head = find_first_lasting_head(run.probe_steps, run.probe_values['alpha'])
    assert actual == RunEmergence(start_step, end_step, rates[end_step // 10], head, step)


@pytest.mark.parametrize('runs_per_row', [1, 2])
def test_emergence_is_absent_when_final_rate_exists_at_step_0(tmp_path, runs_per_row):
    """Check a constant rate: it has no step of emergence, no mark and no axis."""
    paths = []
    for decay in (0.1, 0.5):
        for seed in range(runs_per_row):
            paths.append(tmp_path / f'{decay}-{seed}')
            extra_metrics = {'sink/1': 10.0}
            write_run(
                paths[-1], f'decay_{decay}', seed=seed, extra_metrics=extra_metrics, optimizer__weight_decay=decay
            )
    groups = run_groups.group_runs(runs.read_runs(list(map(str, paths))))
    assert [emergence.find_learned_emergences(group.counted_runs) for group in groups] == [[], []]
    assert 'emerging' not in summary_table.format_headline(groups)
    assert 'before training' in summary_table.format_headline(groups)
    figures = figure_data.LineFigures(groups, BinaryPayload())
    assert figures.make_sink_and_loss_figure(False)['panels'][0]['emergences'] == []
    (axis,) = run_groups.find_axes(groups, run_groups.make_group_table(groups))
    assert 'step of emergence' not in [panel['label'] for panel in figures.make_axis_figure(axis)['panels']]


def test_emergence_is_interval_in_both_tables_and_figure(tmp_path):
    for seed, steps in ((0, (0, 10, 20)), (1, (0, 15, 20))):
        write_run(tmp_path / str(seed), 'softmax', steps, seed, optimizer__weight_decay=0.1)
    write_run(tmp_path / '2', 'decay', optimizer__weight_decay=0.5)
    page.write_report_page(tmp_path / 'report.html', runs.read_runs([f'{tmp_path}/{seed}' for seed in range(3)]))
    html = (tmp_path / 'report.html').read_text()
    row_table, run_table = (
        re.search(f'id="table-{name}".*?</table>', html, re.DOTALL)[0] for name in ('rows', 'runs')
    )
    groups = run_groups.group_runs(runs.read_runs([f'{tmp_path}/{seed}' for seed in range(3)]))
    spans_by_group = [[emergence.compute_span([run]) for run in group.counted_runs] for group in groups]
    assert [[(item.start_step, item.end_step) for item in spans] for spans in spans_by_group] == [
        [(10, 20), (0, 15)],
        [(10, 20)],
    ]
    assert re.findall(r'<td>(\d+-\d+)</td>', row_table) == ['0-20', '10-20']
    assert re.findall(r'<td>(\d+-\d+)</td>', run_table) == ['10-20', '0-15', '10-20']
    (axis,) = run_groups.find_axes(groups, run_groups.make_group_table(groups))
    (panel,) = [
        item
        for item in figure_data.LineFigures(groups, BinaryPayload()).make_axis_figure(axis)['panels']
        if 'emergence' in item['label']
    ]
    assert [line['texts'] for line in panel['lines']] == [['0-20', '10-20']]


def test_loss_figure_draws_training_as_line_and_validation_as_dots(tmp_path):
    path = write_run(tmp_path / 'a', 'softmax')
    _, loss = figure_data.LineFigures(
        run_groups.group_runs(runs.read_runs([path])), BinaryPayload()
    ).make_sink_and_loss_figure(False)['panels']
    assert [(line['split'], line.get('dots', False)) for line in loss['lines']] == [
        ('training', False),
        ('validation', True),
    ]


def find_first_lasting_head(steps, alpha_NLH):
    """Return (step, (layer, head) from 1) of the strongest of the first heads that stay above 0.3."""
    for index, step in enumerate(steps):
        lasting_heads = [
            (alpha_NLH[index][head], tuple(number + 1 for number in head))
            for head in np.ndindex(alpha_NLH[0].shape)
            if all(alpha_LH[head] > 0.3 for alpha_LH in alpha_NLH[index:])
        ]
        if lasting_heads:
            return step, max(lasting_heads)[1]
    return None, None


def test_first_head_excludes_head_that_falls_again(tmp_path):
    run = runs.read_runs([write_run(tmp_path / 'a', 'softmax', steps=(0, 10, 20, 30))])[0]
    alpha_NLH = np.zeros_like(run.probe_values['alpha'])
    alpha_NLH[[0, 1], 0, 0] = 0.9
    alpha_NLH[2:, 1, 1] = 0.4
    run.probe_values['alpha'] = alpha_NLH
    assert emergence.find_first_head(run) == ((2, 2), 20)


def test_axes_list_each_numeric_field_that_alone_differs(tmp_path):
    settings = [(0.1, 1e-3, None), (0.5, 1e-3, None), (0.1, 1e-2, None), (0.5, 1e-1, 4)]
    for index, (decay, rate, window) in enumerate(settings):
        config = dict(optimizer__weight_decay=decay, optimizer__peak_learning_rate=rate, model__mask__window=window)
        write_run(tmp_path / str(index), f'row{index}', data__length=64, published={'sink/1': 18.18}, **config)
    groups = run_groups.group_runs(runs.read_runs([f'{tmp_path}/{index}' for index in range(4)]))
    decay_axis, rate_axis = run_groups.find_axes(groups, run_groups.make_group_table(groups))
    assert (decay_axis.name, decay_axis.labels) == ('weight decay', ['0.1', '0.5'])
    assert (rate_axis.name, rate_axis.labels) == ('peak learning rate', ['0.001', '0.01'])
    assert [[point.group_name for point in line] for line in decay_axis.lines] == [['row0', 'row1']]
    assert decay_axis.lines[0][0].published == {'sink/1': 18.18}


def test_emergence_figure_draws_interval_between_probes(tmp_path):
    """Check that segments span two probes, and that tick labels count runs in which a sink emerges."""
    run_settings = [(1e-3, 0, (0, 10, 20), {}), (1e-3, 1, (0, 10, 20), {'sink/1': 0.0}), (1e-2, 0, (0, 40, 60), {})]
    for rate, seed, steps, extra_metrics in run_settings:
        config = dict(optimizer__peak_learning_rate=rate, optimizer__steps=60)
        write_run(tmp_path / f'{rate}-{seed}', f'rate_{rate}', steps, seed, extra_metrics=extra_metrics, **config)
    groups = run_groups.group_runs(runs.read_runs(sorted(map(str, tmp_path.iterdir()))))
    ((_, draw, sweep_axes),) = [entry for entry in pictures.list_figures(groups) if entry[0] == 'emergence']
    (axis,) = draw(groups, sweep_axes).axes
    assert [[(x, y) for x, y in segment] for bars in axis.collections for segment in bars.get_segments()] == [
        [(0, 10), (0, 20)],
        [(1, 0), (1, 40)],
    ]
    assert [label.get_text() for label in axis.get_xticklabels()] == ['0.001\n1/2', '0.01\n1/1']
    assert [[*line.get_ydata()] for line in axis.lines] == [[20], [40], [15, 20]]


def test_axis_labels_window_none_with_sequence_length(tmp_path):
    for window in (None, 8):
        write_run(tmp_path / str(window), f'window_{window}', model__mask__window=window, data__length=64)
    groups = run_groups.group_runs(runs.read_runs([f'{tmp_path}/None', f'{tmp_path}/8']))
    (axis,) = run_groups.find_axes(groups, run_groups.make_group_table(groups))
    assert axis.labels == ['8', '64']


def test_latex_table_escapes_special_characters(tmp_path):
    write_run(tmp_path / 'a', 'softmax', published={'sink/1': 18.18})
    write_run(tmp_path / 'b', 'k_first & 50%', published={'sink/1': 1.0})
    latex.write_latex_table(tmp_path / 'table.tex', runs.read_runs([f'{tmp_path}/a', f'{tmp_path}/b']))
    lines = (tmp_path / 'table.tex').read_text().splitlines()
    assert r'\toprule' in lines
    assert next(line for line in lines if line.startswith('softmax')).startswith('softmax & 1 & 40.00 (18.18)')
    assert any(line.startswith(r'k\_first \& 50\% & 1 & 40.00 (1.00)') for line in lines)


@pytest.mark.slow
def test_report_command_writes_requested_files_and_rejects_unusable_out_path(capsys, tmp_path):
    write_run(tmp_path / 'a', 'softmax')
    write_run(tmp_path / 'b', 'silent', probes=False, outcome='unfinished')
    assert main(['report', f'{tmp_path}/a', f'{tmp_path}/b', '--paper', '--svg', '--pdf', '--latex', '--json']) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row['run'], row['probes'], row['outcome']) for row in rows] == [
        ('softmax', 3, 'done'),
        ('silent', 0, 'done'),
    ]
    assert (tmp_path / 'curves.svg').read_text().startswith('<?xml')
    assert (tmp_path / 'attention.pdf').read_bytes().startswith(b'%PDF')
    assert (tmp_path / 'table.tex').exists()
    text = (tmp_path / 'report.html').read_text()
    assert 'Figure 2A. Emergence: Sink and loss</h2>' in text
    assert main(['report', f'{tmp_path}/a', '--out', f'{tmp_path}/a/config.json/x']) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.slow
def test_report_command_orders_sweep_runs_by_row(capsys, tmp_path):
    for row in ('b', 'a'):
        write_run(tmp_path / f'{row}-0', row)
    rows = [dict(row=row, seeds={'0': 'done', '1': 'to do'}) for row in ('b', 'a')]
    (tmp_path / 'sweep.json').write_text(json.dumps(rows))
    assert main(['report', str(tmp_path), '--json']) == 0
    assert [row['run'] for row in json.loads(capsys.readouterr().out)] == ['b', 'a']
    assert (tmp_path / 'report.html').exists()


@pytest.mark.slow
def test_pictures_are_png_files_wider_than_600_pixels(loaded_runs, tmp_path):
    paths = pictures.write_pictures(tmp_path, loaded_runs)
    assert [path.name for path in paths] == [f'{name}.png' for name in ('curves', *(p.name for p in FIGURES))]
    for path in paths:
        header = path.read_bytes()[:24]
        assert header.startswith(b'\x89PNG')
        assert int.from_bytes(header[16:20], 'big') > 600
