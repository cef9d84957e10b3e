"""Tests of the table of a sweep: outcomes, differences and published values."""

import numpy as np
import pytest

from sinklab.report import sweep_table
from sinklab.report.statistics import compute_mean_interval
from sinklab.report.sweep_table import RowResult


@pytest.mark.parametrize(
    ('outcomes', 'fails', 'text'),
    [
        ('done done done', False, 'done 3/3'),
        ('done diverged done', False, 'done 2/3, diverged 1/3'),
        ('diverged diverged', True, 'diverged 2/2, as published'),
        ('diverged diverged', False, 'diverged 2/2'),
        ('done done', True, 'trained, published: fails'),
        ('done diverged', True, 'done 1/2, diverged 1/2, published: fails'),
        ('diverged crashed', True, 'diverged 1/2, crashed 1/2, published: fails'),
        ('refused', True, 'refused 1/1'),
        ('done,to do', False, 'done 1/2, to do 1/2'),
    ],
)
def test_format_outcome_compares_with_published_failure(outcomes, fails, text):
    assert sweep_table.format_outcome(outcomes.split(',' if ',' in outcomes else ' '), fails) == text


def make_row_result(row, published, outcomes=('done', 'done'), **metrics):
    """Make the result of a row whose seeds 0, 1, ... have these metrics; _ stands for / in their names."""
    metrics_by_seed = {
        seed: {name.replace('_', '/'): values[seed] for name, values in metrics.items()}
        for seed, outcome in enumerate(outcomes)
        if outcome == 'done'
    }
    return RowResult(
        dict(config='x.py', row=row, published=published), dict(enumerate(outcomes)), {}, metrics_by_seed
    )


def test_sweep_table_difference_uses_common_seeds():
    first = make_row_result('a', {}, ('done', 'crashed', 'done'), sink_1=[10.0, 0.0, 30.0])
    other = make_row_result('b', {}, ('done', 'done', 'done'), sink_1=[11.0, 50.0, 34.0])
    rows = sweep_table.make_sweep_table(
        [first, other, make_row_result('c', {}, ('diverged', 'done', 'refused'), sink_1=[1.0, 2.0, 3.0])]
    )
    assert rows[1]['ours']['sink/1'] == pytest.approx(dict(mean=95 / 3, sd=np.std([11, 50, 34], ddof=1), n=3))
    expected = dict(mean=2.5, sd=1.5 * 2**0.5, n=2, interval=None)
    assert rows[1]['difference'] == {'from': 'a', 'sink/1': pytest.approx(expected)}
    assert rows[2]['difference'] == {'from': 'a'}
    assert rows[2]['ours']['sink/1'] == dict(mean=2.0, sd=None, n=1)


def test_sweep_table_difference_of_three_seeds_has_interval():
    first, other = (
        make_row_result('a', {}, 3 * ('done',), sink_1=[10.0, 20.0, 30.0]),
        make_row_result('b', {}, 3 * ('done',), sink_1=[1.0, 2.0, 9.0]),
    )
    difference = sweep_table.make_sweep_table([first, other])[1]['difference']['sink/1']
    assert difference['interval'] == compute_mean_interval([-9.0, -18.0, -21.0])


@pytest.mark.parametrize(
    ('rates', 'step'),
    [([0, 0, 10, 30, 40], 250.0), ([30, 40, 30, 30, 40], 0.0), ([0, 50, 5, 30, 40], 250.0), ([50, 0, 0, 0, 0], None)],
)
def test_run_metrics_include_step_of_sink_emergence(rates, step):
    records = [{'step': 100 * index, 'sink/1': float(rate)} for index, rate in enumerate(rates)]
    assert sweep_table.compute_run_metrics(records, None).get(sweep_table.EMERGENCE_METRIC) == step


def test_table_cells_combine_measured_and_published_values():
    first = make_row_result('plain', {'sink/1': 18.18, 'valid/loss': 3.7}, sink_1=[10.0, 20.0], valid_loss=[3.0, 3.5])
    published = {'sink/2': 69.03, 'not measured here': 5}
    moved = make_row_result('moved', published, sink_1=[0.0, 1.0], sink_2=[60.0, 60.0], sink_star=[1.0, 3.0])
    fails = make_row_result('fails', {'fails': True}, ('diverged', 'diverged'))
    headings, rows = sweep_table.format_table_cells(sweep_table.make_sweep_table([first, moved, fails]), {})
    assert headings == [
        *('row', 'runs', 'Sink_1 (%)', 'Sink_1 - plain (%)', 'Sink_* (%)', 'Sink_2 (%)', 'valid loss (nats)', 'end')
    ]
    assert rows == [
        ['plain', '2', '15.00 ± 7.07 (18.18)', '', '', '', '3.25 ± 0.35 (3.70)', 'done'],
        ['moved', '2', '0.50 ± 0.71', '-14.50 ± 6.36', '2.00 ± 1.41', '60.00 ± 0.00 (69.03)', '', 'done'],
        ['fails', '0', '', '', '', '', '', 'diverged 2/2, as published'],
    ]
    assert sweep_table.format_published({'fails': True}) == 'fails'
    assert sweep_table.format_published({'kurtosis': 340}) == 'kurtosis 340 (not measured here)'
    assert (
        sweep_table.format_published({'sink/star': 74.12, 'sink/1': 0.0, 'valid/loss': 3.72})
        == 'Sink_* 74.12  Sink_1 0.00  loss 3.72'
    )
