"""Tables of a sweep and of a run: outcomes, differences, emergence, published values, and their legends."""

import re

import numpy as np
import pytest

from sinklab.cli import sweep
from sinklab.metrics.emergence import EmergenceSpan, merge_emergence
from sinklab.report import summary_table, sweep_table
from sinklab.report.statistics import compute_mean_interval
from sinklab.report.sweep_table import RowResult


def make_row_result(row, published=None, outcomes=('done', 'done'), **metrics):
    """Make the result of a row whose seeds 0, 1, ... have these metrics; _ stands for / in their names."""
    metrics_by_seed = {
        seed: {name.replace('_', '/'): values[seed] for name, values in metrics.items()}
        for seed, outcome in enumerate(outcomes)
        if outcome == 'done'
    }
    row_info = dict(config='x.py', row=row, published=published or {})
    return RowResult(row_info, dict(enumerate(outcomes)), {}, metrics_by_seed)


def make_records(*rates, **last_values):
    records = [
        {'step': 100 * index, 'sink/1': float(rate), 'seconds': 7.0 * index} for index, rate in enumerate(rates)
    ]
    records[-1] |= {'valid/loss': 2.5, 'alpha/1': 0.25} | last_values
    return records


def make_recorded_row(row, *records_by_seed, published=None):
    metrics = {seed: sweep_table.compute_run_metrics(records, 512) for seed, records in enumerate(records_by_seed)}
    row_info = dict(config='x.py', row=row, published=published or {})
    return RowResult(row_info, dict.fromkeys(metrics, 'done'), {}, metrics)


def test_difference_uses_common_seeds_and_has_interval_of_five():
    first = make_row_result('a', {}, ('done', 'crashed', 'done'), sink_1=[10.0, 0.0, 30.0])
    other = make_row_result('b', {}, 3 * ('done',), sink_1=[11.0, 50.0, 34.0])
    third = make_row_result('c', {}, ('diverged', 'done', 'refused'), sink_1=[1.0, 2.0, 3.0])
    rows = sweep_table.make_sweep_table([first, other, third])
    assert rows[1]['ours']['sink/1'] == pytest.approx(dict(mean=95 / 3, sd=np.std([11, 50, 34], ddof=1), n=3))
    expected = dict(mean=2.5, sd=1.5 * 2**0.5, n=2, interval=None)
    assert rows[1]['difference'] == {'from': 'a', 'sink/1': pytest.approx(expected)}
    assert rows[2]['difference'] == {'from': 'a'}
    assert rows[2]['ours']['sink/1'] == dict(mean=2.0, sd=None, n=1)
    values = [[10.0, 20.0, 30.0, 5.0, 1.0], [1.0, 2.0, 9.0, 5.0, 4.0]]
    results = [make_row_result(row, {}, 5 * ('done',), sink_1=sinks) for row, sinks in zip('ab', values, strict=True)]
    difference = sweep_table.make_sweep_table(results)[1]['difference']['sink/1']
    assert difference['interval'] == compute_mean_interval(list(np.subtract(values[1], values[0])))


def test_headline_has_the_mean_of_each_row_or_the_lowest_and_the_highest():
    def make_rows(count):
        results = [make_row_result(f'row_{index}', sink_1=(10.0 * index, 10.0 * index + 2)) for index in range(count)]
        return sweep_table.make_sweep_table(results)

    assert sweep_table.format_headline(make_rows(2)) == (
        'Sink_1 is 1.0 % for row_0 (n = 2), 11.0 % for row_1 (n = 2). Fewer than 5 seeds (n) say little.'
    )
    assert sweep_table.format_headline(make_rows(7)) == (
        'Sink_1 is from 1.0 % for row_0 (n = 2) to 61.0 % for row_6 (n = 2). Fewer than 5 seeds (n) say little.'
    )
    assert '%' not in sweep_table.format_headline([])


def test_cells_combine_measured_and_published_values():
    first = make_row_result('plain', {'sink/1': 18.18, 'valid/loss': 3.7}, sink_1=[10.0, 20.0], valid_loss=[3.0, 3.5])
    published = {'sink/2': 69.03, 'not measured here': 5}
    moved = make_row_result('moved', published, sink_1=[0.0, 1.0], sink_2=[60.0, 60.0], sink_star=[1.0, 3.0])
    fails = make_row_result('fails', {'fails': True}, ('diverged', 'diverged'))
    headings, rows = sweep_table.format_table_cells(sweep_table.make_sweep_table([first, moved, fails]))
    expected_headings = ('row', 'runs', 'Sink_1 (%)', 'Sink_1 - plain (%)', 'Sink_* (%)', 'Sink_2 (%)')
    assert headings == [*expected_headings, 'emerges (step)', 'valid loss (nats)', 'end']
    assert rows == [
        ['plain', '2', '15.00 ± 7.07 (18.18)', '', '', '', 'none', '3.25 ± 0.35 (3.70)', 'done'],
        ['moved', '2', '0.50 ± 0.71', '-14.50 ± 6.36', '2.00 ± 1.41', '60.00 ± 0.00 (69.03)', 'none', '', 'done'],
        ['fails', '0', '', '', '', '', '', '', 'diverged 2/2, published: fails'],
    ]
    published = {'fails': True, 'kurtosis': 340, 'sink/1': 0.0, 'valid/loss': 3.72}
    text = 'fails  kurtosis 340 (not measured here)  Sink_1 0.00  loss 3.72'
    assert sweep_table.format_published(published) == text


@pytest.mark.parametrize(
    ('rates', 'step'),
    [
        ([0, 0, 10, 30, 40], 250.0),
        ([30, 40, 30, 30, 40], 0.0),
        ([0, 50, 5, 30, 40], 250.0),
        ([50, 0, 0, 0, 40], None),
    ],
)
def test_run_metrics_include_step_of_sink_emergence(rates, step):
    records = make_records(*rates)
    assert sweep_table.compute_run_metrics(records, None).get(sweep_table.EMERGENCE_METRIC) == step


@pytest.mark.parametrize(
    ('spans', 'expected', 'cell', 'is_learned'),
    [
        ([(100, 200)], EmergenceSpan(100, 200, 1, 1), '100-200', True),
        ([(100, 200), (0, 100), (400, 500)], EmergenceSpan(0, 500, 3, 3), '0-500', True),
        ([(100, 200), (None, 100)], EmergenceSpan(None, 200, 2, 2), 'by 200', True),
        ([(None, 0), None], EmergenceSpan(None, 0, 1, 2), 'at start (1 of 2)', False),
        ([(4, 8), None, None], EmergenceSpan(4, 8, 1, 3), '4-8 (1 of 3)', True),
        ([None, None], EmergenceSpan(None, None, 0, 2), 'none', False),
        ([], EmergenceSpan(None, None, 0, 0), 'none', False),
    ],
)
def test_merge_emergence_spans_and_counts_runs_with_sink(spans, expected, cell, is_learned):
    merged = merge_emergence(spans)
    assert (merged, merged.format_cell(), merged.is_learned) == (expected, cell, is_learned)
    assert ('emerges' in merged.format_sentence()) == is_learned


def test_emergence_of_row_spans_its_seeds_and_agrees_with_that_of_run():
    run_records = make_records(0, 10, 40, 40)
    (row,) = sweep_table.make_sweep_table([make_recorded_row('softmax', run_records)])
    assert row['span'] == EmergenceSpan(100, 200, 1, 1)
    assert summary_table.describe_emergence(run_records) == row['span'].format_sentence()
    softmax = make_recorded_row('softmax', run_records, make_records(0, 0, 0, 40), make_records(0, 0, 0, 0.5))
    results = softmax, make_recorded_row('sigmoid', make_records(0, 0)), make_recorded_row('silent', [{'step': 1}])
    rows = sweep_table.make_sweep_table(results)
    assert rows[0]['span'] == EmergenceSpan(100, 300, 2, 3)
    headings, lines = sweep.build_summary_table(rows)
    column = headings.index('emerges (step)')
    assert [line[column] for line in lines] == ['100-300 (2 of 3)', 'none', '']
    assert 'none: ' in sweep.format_legend(headings, rows)


def test_metric_table_of_run_has_unit_published_value_and_meaning():
    published = {'sink/1': 18.18, 'fails': True, 'valid/loss': 'words'}
    headings, rows = summary_table.make_metric_table(make_records(0, 40), published)
    assert headings == ['number', 'value', 'published', 'what it is']
    assert {row[0]: row[1:3] for row in rows} == {
        'Sink_1': ['40.0 %', '18.18 %'],
        'alpha_1': ['0.250', ''],
        'valid loss': ['2.500 nats', ''],
    }
    assert all(row[3].endswith('.') for row in rows)
    for published in ({'sink/star': 74.12}, {'fails': True}, {'valid/loss': 'words'}):
        headings, rows = summary_table.make_metric_table(make_records(0, 40), published)
        assert (headings, {len(row) for row in rows}) == (['number', 'value', 'what it is'], {3})


@pytest.mark.parametrize(
    ('published', 'pattern'),
    [({'sink/1': 18.18}, 'Table 4'), ({'sink/star': 74.12}, '^$'), ({'fails': True}, 'fails.*Table 4'), (None, '^$')],
)
def test_source_of_shown_values_and_failures_is_named(published, pattern):
    headings, _ = summary_table.make_metric_table(make_records(0, 40), published or {})
    assert re.search(pattern, summary_table.describe_published(dict(published=published, source='Table 4'), headings))
