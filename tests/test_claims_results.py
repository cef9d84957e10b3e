"""Rows of claims.json: identical rows and changed rows."""

import json
from pathlib import Path

import pytest
from conftest import make_tiny_spec

from sinklab.cli.claims import find_first_equal_rows, format_changes
from sinklab.cli.main import main
from sinklab.run_dir import RunDir
from sinklab.sweep import results
from sinklab.sweep.plan import SweepRun

RESULTS = Path(__file__).parents[1] / 'docs' / 'results'
NOTHING = dict(same={}, configs={}, runs={})


def added(monkeypatch, before, specs):
    """Return the results with one run added for each distinct row."""
    monkeypatch.setattr(results, 'read_claim_metrics', lambda run_dir, outcome, names: f'of {run_dir}')
    same = find_first_equal_rows(specs)
    runs = [SweepRun(row, 0, RunDir(row), None, specs[row], 'done') for row in dict.fromkeys(same.values())]
    return results.add_runs(before, specs, same, runs, set())


def test_identical_rows_are_trained_once_even_if_requested_separately(monkeypatch):
    """Check that B shares the run of A until its config changes."""
    specs = {'A': make_tiny_spec(), 'B': make_tiny_spec(), 'C': make_tiny_spec(seed=2)}
    assert find_first_equal_rows(specs) == {'A': 'A', 'B': 'A', 'C': 'C'}
    after = added(monkeypatch, NOTHING, specs)
    assert after['same'] == {'B': 'A'}
    assert results.expand_same_rows(after) == {row: {'0': f'of {run}'} for row, run in zip('ACB', 'ACA', strict=True)}
    again = added(monkeypatch, after, specs | {'B': make_tiny_spec(seed=3)})
    assert again['same'] == {}
    assert again['configs'] == after['configs'] | {'B': {'seed': 3}}


def test_find_changed_rows_names_changed_fields(monkeypatch):
    specs = {'A': make_tiny_spec(), 'B': make_tiny_spec(seed=2), 'alias': make_tiny_spec()}
    found = added(monkeypatch, NOTHING, specs)
    assert {row: config for row, config in found['configs'].items() if row != 'A'} == {'B': {'seed': 2}, 'alias': {}}

    def changed(**changes):
        return results.find_changed_rows(found, {**specs, **changes})

    assert changed() == {}
    assert changed(A=make_tiny_spec(seed=2)) == {'A': 'seed 0 -> 2'}
    assert changed(B=make_tiny_spec(seed=2, data__share=0.5)) == {'B': 'data.share 1.0 -> 0.5'}
    assert changed(alias=make_tiny_spec(seed=7)) == {'alias': 'seed 0 -> 7'}
    assert changed(B=None) == {'B': 'gone'}
    assert changed(B=make_tiny_spec(seed=2, log__every_steps=7, checkpoint__every_steps=70)) == {}
    half = {row: make_tiny_spec(seed=spec.seed, data__share=0.5) for row, spec in specs.items()}
    assert changed(**half) == dict.fromkeys(specs, 'data.share 1.0 -> 0.5')
    assert format_changes(changed(**half)) == 'A, B, alias (data.share 1.0 -> 0.5)'
    del found['configs']['A']['data.share']
    assert changed() == {}, 'a field that came later'


@pytest.fixture
def of_another_row(tmp_path):
    """Return a folder with the committed results, in which one row had another weight decay."""
    found = json.loads((RESULTS / 'claims.json').read_text(encoding='utf-8'))
    found['configs']['optimization:decay_0.5']['optimizer.weight_decay'] = 0.125
    (tmp_path / 'claims.json').write_text(json.dumps(found))
    return tmp_path


WORDS = 'optimization:decay_0.5 (optimizer.weight_decay 0.125 -> 2.5)'


@pytest.mark.slow
def test_claims_command_judges_changed_row_with_warning(capsys, of_another_row):
    file = of_another_row / 'claims.json'
    assert main(['claims', 'decay_more', f'--results={file}']) == 0
    said = capsys.readouterr()
    assert str(file) in said.err
    assert WORDS in said.err
    assert len(said.err.splitlines()) == 1
    assert 'contradicted' in said.out


@pytest.mark.slow
def test_claims_command_does_not_resume_changed_row(capsys, of_another_row):
    assert main(['claims', 'decay_more', f'--workdir={of_another_row}']) == 1
    line = f'sinklab claims: {of_another_row} contains runs of other rows: {WORDS}; give another --workdir\n'
    assert capsys.readouterr().err == line
    assert [path.name for path in of_another_row.iterdir() if path.is_dir()] == []


def test_results_page_matches_claims_output(capsys):
    assert main(['claims', f'--results={RESULTS}/claims.json', '--markdown']) == 0
    said = capsys.readouterr()
    assert said.out in (RESULTS / 'claims.md').read_text(encoding='utf-8')
    assert said.err == '', 'rows have changed since they were measured'
