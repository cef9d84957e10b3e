"""Generated parts of docs/results/claims.md and of the README, and the experiments on the emergence of the sink."""

import numpy as np
import pytest

from benchmarks import emergence_order, switch_attention
from docs import claims_results
from sinklab.cli import config_flags
from sinklab.config.spec import Spec


@pytest.mark.slow
@pytest.mark.parametrize(
    ('path', 'parts'), claims_results.PAGES.items(), ids=lambda value: getattr(value, 'stem', '')
)
def test_page_matches_measurements(path, parts):
    text = path.read_text(encoding='utf-8')
    assert claims_results.update_page(text, parts) == text


def make_entry(*differences, verdict='holds', interval=None, contrast='Sink_1 of a more than Sink_1 of b'):
    return dict(
        verdict=verdict,
        unit='%',
        contrast=contrast,
        differences=dict(enumerate(differences)),
        mean=float(np.mean(differences)) if differences else None,
        interval=interval,
        diverged=0,
        seeds_needed=None,
    )


def test_cell_with_few_seeds_has_range_and_no_verdict():
    cell = claims_results.format_cell(make_entry(1.0, 4.0, verdict='unsettled'))
    assert cell == 'no verdict<br>+2.50 (+1.00 to +4.00, n = 2)'


def test_cell_with_five_seeds_has_verdict_and_interval():
    cell = claims_results.format_cell(make_entry(1.0, 2.0, 3.0, 4.0, 5.0, interval=(0.5, 5.5)))
    assert cell == '**holds**<br>+3.00 [+0.50, +5.50] (n = 5)'
    loss_cell = claims_results.format_cell(make_entry(0.5, contrast='loss of a less than loss of b'))
    assert loss_cell == 'no verdict<br>+0.50 nats (n = 1)'


def test_contradicted_claims_come_first():
    entries = {
        name: make_entry(*range(5), verdict=verdict, interval=(0.0, 1.0))
        | dict(words=name, source='s', why='', published=None)
        for name, verdict in (('first', 'holds'), ('second', 'contradicted'))
    }
    table = claims_results.format_claim_table({'quickstart': entries}, with_open_models=False)
    assert table.index('`second`') < table.index('`first`')


def test_slope_of_size_is_that_of_line():
    """Check a slope of 10 points for a factor of 10, which all runs lie on."""
    runs = {}
    for name, shape in claims_results.model_size.SHAPES.items():
        sink = 50.0 + 10.0 * np.log10(claims_results.model_size.count_millions(shape))
        runs[f'model_size:{name}'] = {seed: dict(end={'sink/1': sink}) for seed in '01'}
    slope, error, num_runs = claims_results.fit_size_slope(dict(runs=runs, same={}), '')
    assert (slope, error, num_runs) == (pytest.approx(10.0), pytest.approx(0.0, abs=1e-6), 10)


@pytest.mark.parametrize(
    ('values', 'step'),
    [
        ([0.0, 0.0, 0.6, 1.0, 1.0], 20),
        ([0.0, 0.9, 0.1, 0.6, 1.0], 30),  # stays beyond half from the fourth probe on
        ([1.0, 1.0, 0.6, 0.2, 0.0], 30),  # a quantity that falls
        ([2.0, 2.0, 2.0, 2.0, 2.0], None),  # no change
    ],
)
def test_half_step_is_first_probe_that_stays_beyond_half(values, step):
    assert emergence_order.find_half_step(np.arange(0, 50, 10), np.array(values)) == step


def test_orders_count_heads_by_sign_of_difference():
    heads = [
        {'direction': direction, 'attention': 100, 'hidden state': 100, 'value': 200}
        for direction in (20, 40, 60, 80)
    ]
    orders = emergence_order.compare_orders({'run': dict(heads=heads)})
    assert orders['direction'] == dict(before=4, same=0, after=0, p=1 / 16)
    assert orders['hidden state'] == dict(before=0, same=4, after=0, p=1.0)
    assert orders['value'] == dict(before=0, same=0, after=4, p=1.0)


@pytest.mark.parametrize('arm', switch_attention.ATTENTION)
def test_fork_has_attention_of_other_row(arm):
    """Check that the values of a fork are those of the row that it changes to."""
    overrides = [
        f'--config.model.attention.{name}={value}'
        for name, value in switch_attention.ATTENTION[switch_attention.OTHER[arm]].items()
    ]

    def load(row: str, options: list[str]) -> Spec:
        return config_flags.load_spec(f'configs/attention.py:{row}', options, 'quickstart')[0]

    assert load(arm, overrides) == load(switch_attention.OTHER[arm], [])
    assert load(arm, overrides) != load(arm, [])
