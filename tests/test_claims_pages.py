"""Generated parts of docs/results/claims.md and of the README, and the experiments on the emergence of the sink."""

import json

import numpy as np
import pytest

from benchmarks import emergence_order, switch_attention
from docs import claims_results, emergence_results, page_parts
from sinklab.cli import config_flags
from sinklab.config.spec import Spec
from sinklab.configs.claims import CLAIMS
from sinklab.configs.hypotheses import NATURAL_ROWS


@pytest.mark.slow
@pytest.mark.parametrize(
    ('path', 'parts'), claims_results.PAGES.items(), ids=lambda value: getattr(value, 'stem', '')
)
def test_page_matches_measurements(path, parts):
    text = path.read_text(encoding='utf-8')
    assert claims_results.update_page(text, parts) == text


@pytest.mark.slow
def test_emergence_page_matches_measurements():
    text = emergence_results.PAGE.read_text(encoding='utf-8')
    assert emergence_results.update_page(text) == text


@pytest.mark.parametrize(
    ('module', 'part', 'name'),
    [(emergence_order, 'order', 'emergence_order.json'), (switch_attention, 'switch', 'switch.json')],
)
def test_mechanism_page_matches_measurements(module, part, name):
    results = json.loads((claims_results.RESULTS_DIR / name).read_text(encoding='utf-8'))
    text = (claims_results.RESULTS_DIR / 'mechanism.md').read_text(encoding='utf-8')
    assert page_parts.replace_part(text, part, module.format_results(results)) == text


def test_table_of_readme_has_means_and_deviations_of_stored_runs():
    readme = (claims_results.ROOT / 'README.md').read_text(encoding='utf-8')
    runs = json.loads((claims_results.RESULTS_DIR / 'claims.json').read_text(encoding='utf-8'))['runs']
    lines = readme.partition('<!-- claims: readme -->')[2].partition('<!-- end -->')[0].strip().splitlines()[2:]
    assert len(lines) == len(claims_results.README_CLAIMS)
    for name, line in zip(claims_results.README_CLAIMS, lines, strict=True):
        for reading in ('right', 'left'):
            row, metric = CLAIMS[name][reading][:2]
            values = [run['end'][metric] for run in runs[row].values()]
            assert f'| {np.mean(values):.1f} ± {np.std(values, ddof=1):.1f} |' in line


def test_page_discusses_every_claim_that_runs_do_not_confirm():
    unconfirmed = {
        name
        for table in claims_results.CLAIM_TABLES
        for entries in claims_results.load_verdicts(table).values()
        for name, entry in entries.items()
        if entry['verdict'] in ('contradicted', 'not seen', 'diverged', 'unsettled')
    }
    assert len(unconfirmed) > 30
    assert unconfirmed <= claims_results.find_discussions().keys() | NATURAL_ROWS.keys()


@pytest.mark.parametrize(
    ('values', 'min_change', 'step'),
    [
        ([0, 0, 0.6, 1, 1, 1, 1, 1], 0.2, 20),
        ([0, 0.9, 0.1, 0.6, 1, 1, 1, 1], 0.2, 30),  # stays beyond half from the fourth probe on
        ([1, 1, 0.6, 0.2, 0, 0, 0, 0], -0.2, 30),  # a quantity that falls
        ([1, 1, 0.6, 0.2, 0, 0, 0, 0], 0.2, None),  # to the other side
        ([0, 0.1, -0.1, 0.1, 0, 0.1, 0, 0.1], 0.2, None),  # noise
        ([0, 0, 0, 1, 1, 1, 1, 0], 0.2, None),  # does not stay
    ],
)
def test_half_step_is_first_probe_that_stays_beyond_half_of_change(values, min_change, step):
    assert emergence_order.find_half_step(np.arange(0, 80, 10), np.array(values, float), min_change) == step


def test_orders_count_layers_by_sign_of_difference():
    layers = [
        {'direction': direction, 'attention': 100, 'hidden state': 100, 'value': value}
        for direction, value in ((20, 200), (40, None), (120, 200))
    ]
    orders = emergence_order.count_orders(layers)
    assert orders['direction'] == dict(before=2, same=0, after=1, no_step=0)
    assert orders['hidden state'] == dict(before=0, same=3, after=0, no_step=0)
    assert orders['value'] == dict(before=0, same=0, after=2, no_step=1)


@pytest.mark.parametrize('forked_row', switch_attention.ROWS)
def test_fork_has_attention_of_other_row(forked_row):
    """Check that the values of a fork are those of the row that it changes to."""
    other_row = switch_attention.get_other_row(forked_row)
    overrides = switch_attention.format_attention_flags(other_row)

    def load(row: str, options: list[str]) -> Spec:
        return config_flags.load_spec(f'configs/attention.py:{row}', options, 'quickstart')[0]

    assert load(forked_row, overrides) == load(other_row, [])
    assert load(forked_row, overrides) != load(forked_row, [])


@pytest.fixture
def probed_run(tmp_path):
    """A run of two layers and two heads with equal probes; head 0 of layer 0 and head 1 of layer 1 are sink heads."""
    (tmp_path / 'probe').mkdir()
    alpha_LPHJ = np.zeros((2, 3, 2, 4))
    alpha_LPHJ[..., 0] = [[[0.4, 0.1]] * 3, [[0.2, 0.6]] * 3]
    for step in range(emergence_order.LAST_PROBES):
        np.savez(
            tmp_path / 'probe' / f'{step}.npz',
            alpha_LPHJ=alpha_LPHJ,
            cos_LH2=np.stack([[[0.5, 0.6], [0.7, 0.8]], np.full((2, 2), 0.2)], -1),
            norm_LT=np.array([[6.0, 1, 3], [9, 9, 9]]),
            value_LT=np.array([[1.0, 2, 2], [3, 1, 1]]),
        )
    return tmp_path


def test_quantities_are_read_from_probes(probed_run):
    """Check ratios of the first and the other tokens, and that a layer reads the hidden state of the block before."""
    steps, quantities = emergence_order.read_quantities(probed_run)
    assert steps.tolist() == [0, 1, 2, 3, 4]
    for name, expected_LH in {
        'direction': [[0.3, 0.4], [0.5, 0.6]],
        'attention': [[0.4, 0.1], [0.2, 0.6]],
        'hidden state': [[np.nan, np.nan], [3, 3]],
        'value': [[0.5, 0.5], [3, 3]],
    }.items():
        np.testing.assert_allclose(quantities[name], np.broadcast_to(expected_LH, (5, 2, 2)), err_msg=name)


@pytest.mark.parametrize(('kind', 'is_finished'), [('done', True), ('stopped', False), (None, False)])
def test_stopped_run_is_not_finished(tmp_path, kind, is_finished):
    if kind:
        (tmp_path / 'outcome.json').write_text(json.dumps(dict(kind=kind)))
    assert switch_attention.is_finished(tmp_path) is is_finished
    if not is_finished:
        with pytest.raises(SystemExit):
            switch_attention.read_curves(tmp_path)
