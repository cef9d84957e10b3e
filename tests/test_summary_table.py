"""Tests of the summary printed after runs: values with units, and expected values."""

import re

import pytest

from sinklab.cli import sweep
from sinklab.metrics.emergence import EmergenceSpan, merge_emergence
from sinklab.metrics.metric import format_fixed
from sinklab.report import summary_table, sweep_table
from sinklab.report.sweep_table import RowResult

QUICKSTART_CONFIG = 'configs/quickstart.py'


def make_records(*rates, **last_values):
    records = [
        {'step': 100 * index, 'sink/1': float(rate), 'seconds': 7.0 * index} for index, rate in enumerate(rates)
    ]
    records[-1] |= {'valid/loss': 2.5, 'alpha/1': 0.25} | last_values
    return records


def make_row_result(row, *records_by_seed, published=None):
    metrics_by_seed = {
        seed: sweep_table.compute_run_metrics(records, 512) for seed, records in enumerate(records_by_seed)
    }
    row_info = dict(config=QUICKSTART_CONFIG, row=row, published=published or {})
    return RowResult(row_info, dict.fromkeys(metrics_by_seed, 'done'), {}, metrics_by_seed)


@pytest.mark.parametrize(
    ('value', 'digits', 'sign', 'text'),
    [
        *[(-0.001, 2, '', '0.00'), (-0.001, 2, '+', '0.00'), (0.0, 1, '+', '0.0'), (-0.006, 2, '+', '-0.01')],
        *[(0.25, 1, '+', '+0.2'), (100.0, 0, '', '100'), (float('nan'), 2, '', 'nan')],
    ],
)
def test_format_fixed_omits_sign_of_rounded_zero(value, digits, sign, text):
    assert format_fixed(value, digits, sign) == text


def make_rows_and_spans(*row_results):
    return sweep_table.make_sweep_table(row_results), sweep_table.compute_spans(row_results)


def test_emergence_span_of_seeds_covers_first_to_last_probe():
    run_records = make_records(0, 10, 40, 40)
    rows, spans = make_rows_and_spans(make_row_result('softmax', run_records))
    assert spans == {'softmax': EmergenceSpan(100, 200, 1, 1)}
    assert summary_table.summarize_sink(run_records) == (40.0, spans['softmax'].format_sentence())
    assert summary_table.summarize_sink_of_rows(rows, spans) == {'softmax': summary_table.summarize_sink(run_records)}
    rows, spans = make_rows_and_spans(
        make_row_result('softmax', run_records, make_records(0, 0, 0, 40), make_records(0, 0, 0, 0.5))
    )
    assert spans == {'softmax': EmergenceSpan(100, 300, 2, 3)}
    rate, _ = summary_table.summarize_sink_of_rows(rows, spans)['softmax']
    assert round(rate, 3) == 26.833
    headings, (cells,) = sweep_table.format_table_cells(rows, spans)
    assert dict(zip(headings, cells, strict=True))['emerges (step)'] == '100-300 (2 of 3)'


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
    assert merge_emergence(spans) == expected
    assert (merge_emergence(spans).format_cell(), merge_emergence(spans).is_learned) == (cell, is_learned)
    assert ('emerging' in merge_emergence(spans).format_sentence('emerging')) == is_learned


def test_sink_present_before_training_has_no_emergence_step():
    assert summary_table.summarize_sink(make_records(10, 10, 10)) == (
        10.0,
        EmergenceSpan(None, 0, 1, 1).format_sentence(),
    )
    assert summary_table.summarize_sink(make_records(0, 0.1)) == (
        0.1,
        EmergenceSpan(None, None, 0, 1).format_sentence(),
    )
    assert summary_table.summarize_sink([{'step': 0}])[0] is None


def test_summary_table_shows_none_for_row_without_final_sink():
    row_results = [
        make_row_result('softmax', make_records(0, 40)),
        make_row_result('sigmoid', make_records(0, 0.1), make_records(0, 0)),
        make_row_result('silent', [{'step': 1}]),
    ]
    headings, lines = sweep.build_summary_table(
        sweep_table.make_sweep_table(row_results), sweep_table.compute_spans(row_results)
    )
    column = headings.index('emerges (step)')
    assert [line[column] for line in lines] == ['0-100', 'none', '']
    assert 'none: ' in sweep.format_legend(headings, sweep_table.make_sweep_table(row_results))


def test_metric_table_has_unit_published_value_and_meaning():
    headings, rows = summary_table.make_metric_table(
        make_records(0, 40), {'sink/1': 18.18, 'fails': True, 'valid/loss': 'words'}
    )
    assert headings == ['number', 'value', 'published', 'what it is']
    assert {row[0]: row[1:3] for row in rows} == {
        'Sink_1': ['40.0 %', '18.18 %'],
        'alpha_1': ['0.250', ''],
        'valid loss': ['2.500 nats', ''],
    }
    assert all(row[3].endswith('.') for row in rows)
    assert summary_table.make_metric_table(make_records(0, 40), {})[0] == ['number', 'value', 'what it is']


@pytest.mark.parametrize('published', [{'sink/star': 74.12}, {'fails': True}, {'valid/loss': 'words'}])
def test_metric_table_omits_empty_published_column(published):
    headings, rows = summary_table.make_metric_table(make_records(0, 40), published)
    assert headings == ['number', 'value', 'what it is']
    assert {len(row) for row in rows} == {3}


def test_describe_published_names_source_of_shown_values_and_failures():
    def describe(**published):
        headings, _ = summary_table.make_metric_table(make_records(0, 40), published)
        return summary_table.describe_published(dict(published=published, source='Table 4'), headings)

    assert 'Table 4' in describe(**{'sink/1': 18.18})
    assert 'fails' not in describe(**{'sink/1': 18.18})
    assert describe(**{'sink/star': 74.12}) == ''
    for published_metrics in ({}, {'sink/1': 18.18}):
        assert re.search('fails.*Table 4', describe(fails=True, **published_metrics))
    assert summary_table.describe_published(dict(published=None, source='Table 4'), []) == ''


@pytest.mark.parametrize(('published', 'is_shown'), [({'sink/1': 18.18}, True), ({'sink/2': 1.0}, False)])
def test_legend_explains_parentheses_only_if_used(published, is_shown):
    row_results = [make_row_result('softmax', make_records(0, 40), published=published | {'fails': True})]
    rows = sweep_table.make_sweep_table(row_results)
    headings, lines = sweep.build_summary_table(rows, sweep_table.compute_spans(row_results))
    assert any('(' in cell for cell in lines[0]) == is_shown
    assert ('in parentheses' in sweep.format_legend(headings, rows)) == is_shown


def test_format_observations_has_measured_values_and_page():
    results = {'a': (48.5, 'emerges by step 5'), 'b': (None, 'diverged 1/1')}
    text = summary_table.format_observations(results, 'runs/report.html')
    assert re.findall(r'[\d.]+ %|report.html', text) == ['48.5 %', 'report.html']
    assert re.search(r'unknown\b.*\bb\b.*diverged 1/1', text)
    assert summary_table.format_observations({str(row): (1.0, '') for row in range(7)}, 'page') == 'page: page'


def test_sweep_legend_covers_each_column():
    row_results = [
        make_row_result('softmax', make_records(0, 40, **{'mass/row': 1.0}), published={'sink/1': 18.18}),
        make_row_result('other', make_records(0, 0)),
    ]
    rows = sweep_table.make_sweep_table(row_results)
    headings, _ = sweep.build_summary_table(rows, sweep_table.compute_spans(row_results))
    legend = sweep.format_legend(headings, rows)
    heading_names = [heading.partition(' (')[0] for heading in headings]
    assert [name for name in heading_names if f'{name}: ' not in legend] == ['row', 'Sink_1 - softmax', 'end'], (
        'one seed has no count of runs'
    )
    assert 'in parentheses' in legend
    assert '±' not in legend


def test_report_legend_covers_each_column():
    legend = summary_table.format_legend(summary_table.RUN_HEADINGS)
    heading_names = [heading.partition(' (')[0] for heading in summary_table.RUN_HEADINGS]
    assert [name for name in heading_names if f'{name}: ' not in legend] == ['run', 'end']


def test_quickstart_table_fits_80_columns(monkeypatch, capsys):
    monkeypatch.setenv('COLUMNS', '80')
    mass = {'mass/row': 0.3}
    softmax = make_row_result(
        'softmax', make_records(0, 10, 48.5, **mass), published={'sink/1': 18.18, 'valid/loss': 3.73}
    )
    row_results = [softmax, make_row_result('sigmoid_apple', make_records(0, 0, 0, **mass))]
    rows = sweep_table.make_sweep_table(row_results)
    sweep.print_table_with_note(*sweep.build_summary_table(rows, sweep_table.compute_spans(row_results)))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[-2:]] == ['softmax', 'sigmoid_apple'], 'each row in one line'
