"""Reports of run folders: names, tables, means over seeds, headline, figures and LaTeX."""

import json
import re

import numpy as np
import pytest
from synthetic_runs import write_run

from sinklab.cli.main import main
from sinklab.cli.report import find_runs
from sinklab.metrics.registry import FIGURES
from sinklab.report import figures, page, run_groups, summary_table
from sinklab.report import runs as runs_module
from sinklab.report.runs import read_runs
from sinklab.run_dir import RunDir
from sinklab.storage.files import DamagedFileError

MATRICES = next(figure_spec for figure_spec in FIGURES if figure_spec.kind == 'matrices')


def read_groups(*paths):
    return run_groups.group_runs(read_runs(list(map(str, paths))))


def test_run_has_written_metrics_and_probes(tmp_path):
    (run,) = read_runs([write_run(tmp_path / 'a', 'softmax')])
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
    row = summary_table.make_run_row(run)
    expected = {'run': 'softmax', 'step': 20, 'sink/1': 40.0, 'sink/star': None, 'alpha/1': 0.3}
    assert {name: row[name] for name in expected} == expected
    cells = dict(zip(summary_table.list_run_headings(), summary_table.format_run_cells(row), strict=True))
    expected = {
        'Sink_1': '40.0 %',
        'Sink_*': '-',
        'valid loss': '3.333 nats',
        'emerges (step)': '10-20',
        'end': 'done',
    }
    assert {name: cells[name] for name in expected} == expected


def test_run_names_contain_row_changed_fields_seed_and_folder(tmp_path):
    fields = dict(a=dict(seed=0), b=dict(seed=1), c=dict(seed=1), d=dict(optimizer__weight_decay=0.5))
    for name, run_fields in fields.items():
        write_run(tmp_path / name, 'softmax', **{'optimizer__weight_decay': 0.1, **run_fields})
    loaded = read_runs([f'{tmp_path}/{name}' for name in fields])
    group = 'softmax, optimizer.weight_decay 0.1'
    names = [
        f'{group}, seed 0',
        f'{group}, seed 1 ({tmp_path}/b)',
        f'{group}, seed 1 ({tmp_path}/c)',
        'softmax, optimizer.weight_decay 0.5',
    ]
    assert [run.name for run in loaded] == names
    assert [run_group.name for run_group in run_groups.group_runs(loaded)] == [group, names[-1]]
    assert read_runs([f'{tmp_path}/a'])[0].name == 'softmax'
    assert read_runs([write_run(tmp_path / 'mine', None)])[0].name == 'mine'


@pytest.mark.parametrize(
    ('file', 'content'),
    [
        ('probe/00000010.npz', b'PK nothing'),
        ('probe/00000010.npz', b''),
        ('outcome.json', b'{"kind": "do'),
        ('row.json', b'{}'),
    ],
)
def test_damaged_run_is_named_and_others_are_reported(tmp_path, capsys, file, content):
    paths = [write_run(tmp_path / name, name) for name in ('damaged', 'sound')]
    (tmp_path / 'damaged' / file).write_bytes(content)
    assert [run.name for run in read_runs(paths)] == ['sound']
    assert f'{paths[0]}/{file}' in capsys.readouterr().err
    with pytest.raises(DamagedFileError, match=f'{paths[0]}/{file}'):
        read_runs(paths[:1])


def test_figure_has_only_runs_with_its_array(tmp_path):
    paths = [write_run(tmp_path / name, name) for name in ('old', 'new')]
    probe = RunDir(paths[0]).get_probe_path(10)
    arrays = dict(np.load(probe))
    del arrays['entropy_LH']
    np.savez(probe, **arrays)
    groups = read_groups(*paths)
    all_figures = {figure['name']: figure for figure in figures.make_figures(groups)}
    assert [len(all_figures[name]['maps']) for name in ('entropy', 'alpha')] == [1, 2]


def test_read_runs_selects_probes_evenly_with_first_and_last(monkeypatch, tmp_path):
    path = write_run(tmp_path / 'a', 'softmax', steps=range(0, 90, 10))
    monkeypatch.setattr(runs_module, 'MAX_FILES', 3)
    assert read_runs([path])[0].probe_steps == [0, 40, 80]
    assert runs_module.select_evenly(3, 1) == [2]
    assert runs_module.select_evenly(0, 5) == []


def test_mean_over_seeds_excludes_diverged_run(tmp_path):
    paths = [write_run(tmp_path / str(seed), 'softmax', seed=seed) for seed in (0, 1)]
    paths.append(write_run(tmp_path / '2', 'softmax', seed=2, steps=(0, 10), outcome='diverged', optimizer__steps=20))
    (group,) = read_groups(*paths)
    mean = figures.make_lines([group], 'sink/1')[-1]
    assert (mean['kind'], mean['n'], mean['x'].tolist()) == ('mean', 2, [0, 10, 20])
    np.testing.assert_allclose(mean['y'], [0, 25, 50])
    np.testing.assert_allclose(mean['sd'], [0, 5 * 2**0.5, 10 * 2**0.5], rtol=1e-6)
    (row,) = run_groups.make_group_table([group])
    assert row['ours']['sink/1'] == pytest.approx(dict(mean=50, sd=10 * 2**0.5, n=2))
    assert row['outcome'] == 'done 2/3, diverged 1/3'


def test_group_without_changed_fields_is_first(tmp_path):
    for name in ('b', 'softmax', 'c'):
        write_run(tmp_path / name, name, model__x=name)
    rows = run_groups.make_group_table(read_groups(*(tmp_path / name for name in ('b', 'softmax', 'c'))))
    assert [row['row'] for row in rows] == ['softmax', 'b', 'c']


def test_emergence_is_interval_in_both_tables(tmp_path):
    for seed, steps in ((0, (0, 10, 20)), (1, (0, 15, 20))):
        write_run(tmp_path / str(seed), 'softmax', steps, seed, optimizer__weight_decay=0.1)
    write_run(tmp_path / '2', 'decay', optimizer__weight_decay=0.5)
    page.write_report_page(tmp_path / 'report.html', read_runs([f'{tmp_path}/{seed}' for seed in range(3)]))
    html = (tmp_path / 'report.html').read_text()
    tables = [re.search(f'id="table-{name}".*?</table>', html, re.DOTALL)[0] for name in ('rows', 'runs')]
    intervals = [re.findall(r'<td>(\d+-\d+)</td>', table) for table in tables]
    assert intervals == [['0-20', '10-20'], ['10-20', '0-15', '10-20']]


def test_loss_figure_draws_training_as_line_and_validation_as_dots(tmp_path):
    _, loss = figures.make_sink_and_loss_figure(read_groups(write_run(tmp_path / 'a', 'softmax')))['panels']
    kinds = [(line['split'], line.get('dots', False)) for line in loss['lines']]
    assert kinds == [('training', False), ('validation', True)]


def test_picture_joins_no_validation_losses_and_has_no_rate_below_zero(tmp_path):
    from sinklab.report.pictures import draw_lines

    rates = enumerate((0.0, 90.0))  # mean 45, standard deviation 64
    paths = [write_run(tmp_path / str(n), 'softmax', seed=n, extra_metrics={'sink/1': rate}) for n, rate in rates]
    groups = read_groups(*paths)
    sink_axes, loss_axes = draw_lines(figures.make_sink_and_loss_figure(groups), groups).axes
    (band,) = sink_axes.collections
    assert band.get_paths()[0].vertices[:, 1].min() == 0
    validation = [line for line in loss_axes.lines if line.get_marker() == 'o']
    assert [(line.get_linestyle(), len(line.get_xdata())) for line in validation] == [('None', 3)]


def test_mean_by_block_omits_diverged_run(tmp_path):
    paths = [write_run(tmp_path / str(seed), 'softmax', seed=seed) for seed in (0, 1)]
    paths.append(write_run(tmp_path / '2', 'softmax', seed=2, outcome='diverged'))
    (group,) = read_groups(*paths)
    value_spec = next(figure_spec for figure_spec in FIGURES if figure_spec.name == 'value')
    *members, mean = figures.make_ratios_figure([group], value_spec)['panels'][0]['lines']
    assert [(line['kind'], line['run']) for line in members] == [('member', 0), ('member', 1), ('member', 2)]
    assert (mean['n'], mean['steps']) == (2, [0, 10, 20])
    np.testing.assert_allclose(mean['y'], (members[0]['y'] + members[1]['y']) / 2, rtol=1e-6)


@pytest.mark.slow
def test_report_command_writes_requested_files_and_rejects_unusable_out_path(capsys, tmp_path):
    write_run(tmp_path / 'a', 'softmax', published={'sink/1': 18.18})
    write_run(tmp_path / 'b', 'k_first & 50%', published={'sink/1': 1.0}, probes=False, outcome='unfinished')
    assert main(['report', f'{tmp_path}/a', f'{tmp_path}/b', '--png', '--svg', '--pdf', '--json']) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row['probes'], row['outcome']) for row in rows] == [(3, 'done'), (0, 'unfinished')]
    for name in ('curves', *(figure_spec.name for figure_spec in FIGURES if figure_spec.kind == 'ratios')):
        header = (tmp_path / f'{name}.png').read_bytes()[:24]
        assert header.startswith(b'\x89PNG')
        assert int.from_bytes(header[16:20], 'big') > 600, 'the width in pixels'
    assert (tmp_path / 'curves.svg').read_text().startswith('<?xml')
    assert (tmp_path / 'curves.pdf').read_bytes().startswith(b'%PDF')
    assert main(['report', f'{tmp_path}/a', '--out', f'{tmp_path}/a/config.json/x']) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.slow
def test_report_command_orders_sweep_runs_by_row(capsys, tmp_path):
    sweep_dir = tmp_path / 'sweep'
    for row in ('b', 'a'):
        write_run(sweep_dir / f'{row}-0', row)
    rows = [dict(row=row, seeds={'0': 'done', '1': 'to do'}) for row in ('b', 'a')]
    (sweep_dir / 'sweep.json').write_text(json.dumps(rows))
    for arguments, names in (([str(sweep_dir)], ['b', 'a']), (map(str, sorted(sweep_dir.iterdir())), ['a', 'b'])):
        assert main(['report', *arguments, '--json']) == 0
        assert [row['run'] for row in json.loads(capsys.readouterr().out)] == names
    assert (sweep_dir / 'report.html').exists()
    write_run(tmp_path / 'run', 'c')
    contained_runs = [tmp_path / 'run', sweep_dir / 'a-0', sweep_dir / 'b-0']
    assert find_runs(str(tmp_path)) == contained_runs, 'of a folder of a run and a sweep'
