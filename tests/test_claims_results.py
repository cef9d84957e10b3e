"""What a claims.json keeps of rows: which are one run, and which have changed since."""

import json
from pathlib import Path

import pytest
from conftest import tiny

from sinklab.cli.claims import find_first_equal_rows, format_changes
from sinklab.cli.main import main
from sinklab.run_dir import RunDir
from sinklab.sweep import results
from sinklab.sweep.plan import SweepRun

RESULTS = Path(__file__).parents[1] / 'docs' / 'results'
NOTHING = dict(same={}, configs={}, runs={})


def added(monkeypatch, before, specs):
    """With a run of every row that is the first of its kind."""
    monkeypatch.setattr(results, 'read_claim_metrics', lambda run_dir, outcome, names: f'of {run_dir}')
    same = find_first_equal_rows(specs)
    runs = [SweepRun(row, 0, RunDir(row), None, specs[row], 'done') for row in dict.fromkeys(same.values())]
    return results.add_runs(before, specs, same, runs, set())


def test_rows_that_are_one_run_are_trained_once_also_when_they_are_asked_for_one_by_one(monkeypatch):
    """B is A's run: asked for alone afterwards, it is A that goes on."""
    specs = {'A': tiny(), 'B': tiny(), 'C': tiny(seed=2)}
    assert find_first_equal_rows(specs) == {'A': 'A', 'B': 'A', 'C': 'C'}
    after = added(monkeypatch, NOTHING, specs)
    assert after['same'] == {'B': 'A'}
    assert results.expand_same_rows(after) == {row: {'0': f'of {run}'} for row, run in zip('ACB', 'ACA', strict=True)}
    again = added(monkeypatch, after, specs | {'B': tiny(seed=3)})
    assert again['same'] == {}
    assert again['configs'] == after['configs'] | {'B': {'seed': 3}}


def test_rows_that_are_others_than_when_they_were_measured_are_named(monkeypatch):
    specs = {'A': tiny(), 'B': tiny(seed=2), 'alias': tiny()}
    found = added(monkeypatch, NOTHING, specs)
    assert {row: config for row, config in found['configs'].items() if row != 'A'} == {'B': {'seed': 2}, 'alias': {}}

    def changed(**changes):
        return results.find_changed_rows(found, {**specs, **changes})

    assert changed() == {}
    assert changed(A=tiny(seed=2)) == {'A': 'seed 0 -> 2'}
    assert changed(B=tiny(seed=2, data__share=0.5)) == {'B': 'data.share 1.0 -> 0.5'}
    assert changed(alias=tiny(seed=7)) == {'alias': 'seed 0 -> 7'}
    assert changed(B=None) == {'B': 'gone'}
    assert changed(B=tiny(seed=2, log__every_steps=7, checkpoint__every_steps=70)) == {}
    half = {row: tiny(seed=spec.seed, data__share=0.5) for row, spec in specs.items()}
    assert changed(**half) == dict.fromkeys(specs, 'data.share 1.0 -> 0.5')
    assert format_changes(changed(**half)) == 'A, B, alias (data.share 1.0 -> 0.5)'
    del found['configs']['A']['data.share']
    assert changed() == {}, 'a field that came later'


@pytest.fixture
def of_another_row(tmp_path):
    """The committed results, one row of which had another decay."""
    found = json.loads((RESULTS / 'claims.json').read_text(encoding='utf-8'))
    found['configs']['optimization:decay_0.5']['optimizer.weight_decay'] = 0.125
    (tmp_path / 'claims.json').write_text(json.dumps(found))
    return tmp_path


WORDS = 'optimization:decay_0.5 (optimizer.weight_decay 0.125 -> 2.5)'


@pytest.mark.slow
def test_results_of_a_row_that_has_changed_are_judged_and_say_so(capsys, of_another_row):
    file = of_another_row / 'claims.json'
    assert main(['claims', 'decay_more', f'--results={file}']) == 0
    said = capsys.readouterr()
    assert said.err == f'rows that have changed since {file}: {WORDS}\n'
    assert 'contradicted' in said.out


@pytest.mark.slow
def test_a_row_that_has_changed_does_not_go_on(capsys, of_another_row):
    assert main(['claims', 'decay_more', f'--workdir={of_another_row}']) == 1
    line = f'sinklab claims: {of_another_row} contains runs of other rows: {WORDS}; give another --workdir\n'
    assert capsys.readouterr().err == line
    assert [path.name for path in of_another_row.iterdir() if path.is_dir()] == []


def test_the_page_of_results_is_what_the_numbers_say(capsys):
    assert main(['claims', f'--results={RESULTS}/claims.json', '--markdown']) == 0
    said = capsys.readouterr()
    assert said.out in (RESULTS / 'claims.md').read_text(encoding='utf-8')
    assert said.err == '', 'rows have changed since they were measured'
