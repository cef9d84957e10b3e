"""Tests of the summary printed after runs: values with units, and expected values."""

import re

import pytest

from sinklab.cli import config_flags, sweep
from sinklab.metrics.emergence import EmergenceSpan, merge_emergence
from sinklab.metrics.metric import format_fixed
from sinklab.report import summary_table, sweep_table
from sinklab.report.sweep_table import RowResult

QUICK = 'configs/quickstart.py'


def records(*rates, **last):
    found = [{'step': 100 * at, 'sink/1': float(rate), 'seconds': 7.0 * at} for at, rate in enumerate(rates)]
    found[-1] |= {'valid/loss': 2.5, 'alpha/1': 0.25} | last
    return found


def make_row_result(row, *seeds, published=None):
    numbers = {seed: sweep_table.compute_run_metrics(given, 512) for seed, given in enumerate(seeds)}
    about = dict(config=QUICK, row=row, published=published or {})
    return RowResult(about, dict.fromkeys(numbers, 'done'), {}, numbers)


@pytest.mark.parametrize(
    ('value', 'digits', 'sign', 'text'),
    [
        *[(-0.001, 2, '', '0.00'), (-0.001, 2, '+', '0.00'), (0.0, 1, '+', '0.0'), (-0.006, 2, '+', '-0.01')],
        *[(0.25, 1, '+', '+0.2'), (100.0, 0, '', '100'), (float('nan'), 2, '', 'nan')],
    ],
)
def test_format_fixed_omits_sign_of_rounded_zero(value, digits, sign, text):
    assert format_fixed(value, digits, sign) == text


def test_emergence_steps_agree_between_run_and_row():
    run = records(0, 10, 40, 40)
    rows, spans = (
        function([make_row_result('softmax', run)])
        for function in (sweep_table.make_sweep_table, sweep_table.compute_spans)
    )
    headings, ((*cells,),) = sweep_table.format_table_cells(rows, spans)
    assert dict(zip(headings, cells, strict=True))['emerges (step)'] == '100-200'
    assert spans == {'softmax': EmergenceSpan(100, 200, 1, 1)}
    assert summary_table.summarize_sink(run) == (40.0, spans['softmax'].format_sentence())
    assert summary_table.summarize_sink_of_rows(rows, spans) == {'softmax': summary_table.summarize_sink(run)}


def test_emergence_span_of_seeds_covers_first_to_last_probe():
    groups = [make_row_result('softmax', records(0, 10, 40, 40), records(0, 0, 0, 40), records(0, 0, 0, 0.5))]
    assert sweep_table.compute_spans(groups) == {'softmax': EmergenceSpan(100, 300, 2, 3)}
    rate, words = summary_table.summarize_sink_of_rows(
        sweep_table.make_sweep_table(groups), sweep_table.compute_spans(groups)
    )['softmax']
    assert round(rate, 3) == 26.833
    assert [int(number) for number in re.findall(r'\d+', words)] == [100, 300, 2, 3]
    headings, ((*cells,),) = sweep.build_summary_table(
        sweep_table.make_sweep_table(groups), sweep_table.compute_spans(groups)
    )
    assert dict(zip(headings, cells, strict=True))['emerges (step)'] == '100-300 (2 of 3)'


@pytest.mark.parametrize(
    ('found', 'expected', 'cell', 'learned'),
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
def test_merge_emergence_spans_and_counts_runs_with_sink(found, expected, cell, learned):
    assert merge_emergence(found) == expected
    assert (merge_emergence(found).format_cell(), merge_emergence(found).is_learned) == (cell, learned)
    assert ('emerging' in merge_emergence(found).format_sentence('emerging')) == learned


def test_sink_present_before_training_has_no_emergence_step():
    assert summary_table.summarize_sink(records(10, 10, 10)) == (10.0, EmergenceSpan(None, 0, 1, 1).format_sentence())
    assert summary_table.summarize_sink(records(0, 0.1)) == (0.1, EmergenceSpan(None, None, 0, 1).format_sentence())
    assert summary_table.summarize_sink([{'step': 0}])[0] is None


def test_summary_table_shows_none_for_row_without_final_sink():
    groups = [
        make_row_result('softmax', records(0, 40)),
        make_row_result('sigmoid', records(0, 0.1), records(0, 0)),
        make_row_result('silent', [{'step': 1}]),
    ]
    headings, lines = sweep.build_summary_table(
        sweep_table.make_sweep_table(groups), sweep_table.compute_spans(groups)
    )
    at = headings.index('emerges (step)')
    assert [line[at] for line in lines] == ['0-100', 'none', '']
    assert 'none: ' in sweep.format_legend(headings, sweep_table.make_sweep_table(groups))


def test_metric_table_has_unit_published_value_and_meaning():
    headings, rows = summary_table.make_metric_table(
        records(0, 40), {'sink/1': 18.18, 'fails': True, 'valid/loss': 'words'}
    )
    assert headings == ['number', 'value', 'published', 'what it is']
    assert {row[0]: row[1:3] for row in rows} == {
        'Sink_1': ['40.0 %', '18.18 %'],
        'alpha_1': ['0.250', ''],
        'valid loss': ['2.500 nats', ''],
    }
    assert all(row[3].endswith('.') for row in rows)
    assert summary_table.make_metric_table(records(0, 40), {})[0] == ['number', 'value', 'what it is']


@pytest.mark.parametrize('published', [{'sink/star': 74.12}, {'fails': True}, {'valid/loss': 'words'}])
def test_metric_table_omits_empty_published_column(published):
    headings, rows = summary_table.make_metric_table(records(0, 40), published)
    assert headings == ['number', 'value', 'what it is']
    assert {len(row) for row in rows} == {3}


def test_describe_published_names_source_of_shown_values_and_failures():
    def described(**published):
        headings, _ = summary_table.make_metric_table(records(0, 40), published)
        return summary_table.describe_published(dict(published=published, source='Table 4'), headings)

    assert 'Table 4' in described(**{'sink/1': 18.18})
    assert 'fails' not in described(**{'sink/1': 18.18})
    assert described(**{'sink/star': 74.12}) == ''
    for numbers in ({}, {'sink/1': 18.18}):
        assert re.search('fails.*Table 4', described(fails=True, **numbers))
    assert summary_table.describe_published(dict(published=None, source='Table 4'), []) == ''


@pytest.mark.parametrize(('published', 'shown'), [({'sink/1': 18.18}, True), ({'sink/2': 1.0}, False)])
def test_legend_explains_parentheses_only_if_used(published, shown):
    groups = [make_row_result('softmax', records(0, 40), published=published | {'fails': True})]
    rows = sweep_table.make_sweep_table(groups)
    headings, lines = sweep.build_summary_table(rows, sweep_table.compute_spans(groups))
    assert any('(' in cell for cell in lines[0]) == shown
    assert ('in parentheses' in sweep.format_legend(headings, rows)) == shown


def test_format_comparison_has_measured_and_expected_values_and_page():
    seen = {'a': (48.5, 'emerges by step 5'), 'b': (None, 'diverged 1/1')}
    said = summary_table.format_comparison(seen, {'a': '18.2 %', 'c': '5 %'}, 'published', 'runs/report.html')
    assert re.findall(r'[\d.]+ %|report.html', said) == ['48.5 %', '18.2 %', 'report.html']
    assert re.search(r'unknown\b.*\bb\b.*diverged 1/1', said)
    assert summary_table.format_comparison({str(at): (1.0, '') for at in range(7)}, {}, '', 'page') == 'page: page'


def test_expected_sinks_exist_only_for_unmodified_quickstart():
    rows, source = config_flags.load_expected_sinks(QUICK, 'quickstart', [])
    assert {'softmax', 'sigmoid_apple'} <= rows.keys()
    assert 'docs/results/quickstart.md' in source
    assert config_flags.load_expected_sinks(QUICK, 'smoke', []) is None
    assert config_flags.load_expected_sinks(QUICK, 'quickstart', ['--config.seed=1']) is None
    assert config_flags.load_expected_sinks('configs/attention.py', None, []) is None
    assert config_flags.load_expected_sinks('gone.py', None, []) is None


def test_sweep_legend_covers_each_column():
    groups = [
        make_row_result('softmax', records(0, 40, **{'mass/row': 1.0}), published={'sink/1': 18.18}),
        make_row_result('other', records(0, 0)),
    ]
    rows = sweep_table.make_sweep_table(groups)
    headings, _ = sweep.build_summary_table(rows, sweep_table.compute_spans(groups))
    note = sweep.format_legend(headings, rows)
    plain = [heading.partition(' (')[0] for heading in headings]
    assert [name for name in plain if f'{name}: ' not in note] == ['row', 'Sink_1 - softmax', 'end'], (
        'one seed has no count of runs'
    )
    assert 'in parentheses' in note
    assert '±' not in note


def test_report_legend_covers_each_column():
    meanings = summary_table.format_legend(summary_table.RUN_HEADINGS)
    plain = [heading.partition(' (')[0] for heading in summary_table.RUN_HEADINGS]
    assert [name for name in plain if f'{name}: ' not in meanings] == ['run', 'end']


def test_quickstart_table_fits_80_columns(monkeypatch, capsys):
    monkeypatch.setenv('COLUMNS', '80')
    mass = {'mass/row': 0.3}
    softmax = make_row_result(
        'softmax', records(0, 10, 48.5, **mass), published={'sink/1': 18.18, 'valid/loss': 3.73}
    )
    groups = [softmax, make_row_result('sigmoid_apple', records(0, 0, 0, **mass))]
    rows = sweep_table.make_sweep_table(groups)
    sweep.print_table_with_note(*sweep.build_summary_table(rows, sweep_table.compute_spans(groups)))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[-2:]] == ['softmax', 'sigmoid_apple'], 'each row in one line'
