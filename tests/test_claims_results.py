"""Rows of claims.json: identical rows and changed rows."""

import json
import math
import shutil
from pathlib import Path

import pytest
from conftest import make_tiny_spec

from sinklab.cli.claims import EXTRA_METRIC_PATTERNS, find_first_equal_rows, format_changes
from sinklab.cli.main import main
from sinklab.report.claims import Reading, read_claim_metrics
from sinklab.run_dir import RunDir
from sinklab.sweep import results
from sinklab.sweep.plan import SweepRun

RESULTS = Path(__file__).parents[1] / 'docs' / 'results'
EMPTY_RESULTS = dict(same={}, configs={}, runs={})


def add_distinct_runs(monkeypatch, earlier_results, specs):
    """Return the results with one run added for each distinct row."""
    monkeypatch.setattr(results, 'read_claim_metrics', lambda run_dir, outcome, names: f'of {run_dir}')
    first_equal_rows = find_first_equal_rows(specs)
    runs = [
        SweepRun(row, 0, RunDir(row), None, specs[row], 'done') for row in dict.fromkeys(first_equal_rows.values())
    ]
    return results.add_runs(earlier_results, specs, first_equal_rows, runs, set())


def test_identical_rows_are_trained_once_even_if_requested_separately(monkeypatch):
    """Check that B shares the run of A until its config changes."""
    specs = {'A': make_tiny_spec(), 'B': make_tiny_spec(), 'C': make_tiny_spec(seed=2)}
    assert find_first_equal_rows(specs) == {'A': 'A', 'B': 'A', 'C': 'C'}
    first_results = add_distinct_runs(monkeypatch, EMPTY_RESULTS, specs)
    assert first_results['same'] == {'B': 'A'}
    assert results.expand_same_rows(first_results) == {
        row: {'0': f'of {run}'} for row, run in zip('ACB', 'ACA', strict=True)
    }
    second_results = add_distinct_runs(monkeypatch, first_results, specs | {'B': make_tiny_spec(seed=3)})
    assert second_results['same'] == {}
    assert second_results['configs'] == first_results['configs'] | {'B': {'seed': 3}}


def test_metrics_that_match_a_pattern_are_read_before_training_and_at_the_end(tmp_path):
    """Check that metrics of other names are left out, and that a diverged run has no final metrics."""
    (tmp_path / 'config.json').write_text(json.dumps(dict(optimizer=dict(steps=2), model=dict(vocabulary=9))))
    first_metrics, last_metrics = (
        {'norm/ratio/01': 1.0, 'norm/ratio/02': 2.0, 'norm/key/1': 9.0},
        {'norm/ratio/01': 3.0, 'seconds': 7.0},
    )
    (tmp_path / 'metrics.jsonl').write_text(
        ''.join(
            f'{json.dumps(record)}\n'
            for record in ({'step': 0, 'seconds': 1.0} | first_metrics, {'step': 2} | last_metrics)
        )
    )
    patterns = {'norm/ratio/*', 'seconds'}
    start = {'norm/ratio/01': 1.0, 'norm/ratio/02': 2.0, 'seconds': 1.0}
    end = {'norm/ratio/01': 3.0, 'norm/ratio/02': 2.0, 'seconds': 7.0}
    expected_fields = dict(outcome='done', start=start, end=end, device='', jax='')
    assert read_claim_metrics(RunDir(tmp_path), 'done', patterns) == expected_fields
    assert read_claim_metrics(RunDir(tmp_path), 'diverged', patterns | {'fails'})['end'] == {'fails': 1.0}
    environment = dict(attempts=[dict(step=0, attention='dense')], devices=['cpu', 'cpu'], versions={'jax': '0.10.2'})
    (tmp_path / 'environment.json').write_text(json.dumps(environment))
    expected_fields |= dict(device='cpu', jax='0.10.2')
    assert read_claim_metrics(RunDir(tmp_path), 'done', patterns) == expected_fields


def test_row_without_runs_has_runs_of_row_with_equal_config(monkeypatch):
    measured_specs = {'A': make_tiny_spec(), 'B': make_tiny_spec(seed=2)}
    claim_results = add_distinct_runs(monkeypatch, EMPTY_RESULTS, measured_specs)
    specs = {'like B': make_tiny_spec(seed=2), 'other': make_tiny_spec(seed=3)}
    assert results.find_equal_rows(claim_results, specs) == {'like B': 'B'}


def test_field_that_came_after_a_measurement_counts_as_its_default(monkeypatch):
    claim_results = add_distinct_runs(monkeypatch, EMPTY_RESULTS, {'A': make_tiny_spec()})
    del claim_results['configs']['A']['model.scaled_embedding']
    specs = {'default': make_tiny_spec(), 'new': make_tiny_spec(model__scaled_embedding=True)}
    assert results.find_equal_rows(claim_results, specs) == {'default': 'A'}
    assert results.find_changed_rows(claim_results, {'A': specs['default']}) == {}
    assert results.find_changed_rows(claim_results, {'A': specs['new']}) == {
        'A': 'model.scaled_embedding False -> True'
    }


def test_find_changed_rows_names_changed_fields(monkeypatch):
    specs = {'A': make_tiny_spec(), 'B': make_tiny_spec(seed=2), 'alias': make_tiny_spec()}
    claim_results = add_distinct_runs(monkeypatch, EMPTY_RESULTS, specs)
    assert {row: config for row, config in claim_results['configs'].items() if row != 'A'} == {
        'B': {'seed': 2},
        'alias': {},
    }

    def find_changes(**changes):
        return results.find_changed_rows(claim_results, {**specs, **changes})

    assert find_changes() == {}
    assert find_changes(A=make_tiny_spec(seed=2)) == {'A': 'seed 0 -> 2'}
    assert find_changes(B=make_tiny_spec(seed=2, data__share=0.5)) == {'B': 'data.share 1.0 -> 0.5'}
    assert find_changes(alias=make_tiny_spec(seed=7)) == {'alias': 'seed 0 -> 7'}
    assert find_changes(B=None) == {'B': 'gone'}
    assert find_changes(B=make_tiny_spec(seed=2, log__every_steps=7, checkpoint__every_steps=70)) == {}
    half_share_specs = {row: make_tiny_spec(seed=spec.seed, data__share=0.5) for row, spec in specs.items()}
    assert find_changes(**half_share_specs) == dict.fromkeys(specs, 'data.share 1.0 -> 0.5')
    assert format_changes(find_changes(**half_share_specs)) == 'A, B, alias (data.share 1.0 -> 0.5)'


@pytest.mark.slow
def test_changed_row_is_judged_with_warning_and_not_resumed(capsys, tmp_path):
    claim_results = json.loads((RESULTS / 'claims.json').read_text(encoding='utf-8'))
    claim_results['configs']['optimization:batch_128']['optimizer.batch_size'] = 16
    (tmp_path / 'claims.json').write_text(json.dumps(claim_results))
    change = 'optimization:batch_128 (optimizer.batch_size 16 -> 8)'
    assert main(['claims', 'batch_small', f'--results={tmp_path}/claims.json', '--json']) == 0
    output = capsys.readouterr()
    assert change in output.err
    assert json.loads(output.out)[0]['verdict'] == 'contradicted'
    assert main(['claims', 'batch_small', f'--workdir={tmp_path}']) == 1
    assert change in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.slow
def test_claims_command_does_not_train_runs_of_claims_file_again(capsys, tmp_path):
    shutil.copy(RESULTS / 'claims.json', tmp_path)
    assert main(['claims', 'emerges', '--seeds=8', f'--workdir={tmp_path}', '--json']) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry['verdict'], len(entry['differences'])) == ('holds', 8)
    assert entry in results.read_verdicts(tmp_path)
    assert results.list_run_dirs(tmp_path) == []


def test_run_without_metric_of_claim_counts_as_missing():
    run = SweepRun('A', 0, RunDir('A-0'), None, make_tiny_spec())
    readings = {Reading('A', 'sink/1'), Reading('A', 'sink/1', 'start')}

    def has_metrics(**run_record):
        return results.has_metrics(EMPTY_RESULTS | dict(runs={'A': {'0': run_record}}), run, readings)

    metrics = {'sink/1': 1.0}
    assert has_metrics(outcome='done', start=metrics, end=metrics)
    assert not has_metrics(outcome='done', start={}, end=metrics)
    assert not has_metrics(outcome='done', start=metrics, end={'sink/2': 1.0})
    assert has_metrics(outcome='diverged', start=metrics, end={'fails': 1.0})
    assert not results.has_metrics(EMPTY_RESULTS, run, readings)


@pytest.mark.parametrize('name', ['claims.json', 'claims_small.json'])
def test_rows_have_not_changed_since_they_were_measured(capsys, name):
    assert main(['claims', f'--results={RESULTS}/{name}']) == 0
    assert capsys.readouterr().err == ''


@pytest.mark.parametrize(('file_name', 'vocabulary'), [('claims.json', 512), ('claims_small.json', 2048)])
def test_committed_runs_fail_if_their_loss_is_above_limit(file_name, vocabulary):
    """Check `fails` of every run against the definition in docs/paper/decisions.md."""
    runs = [run for seeds in results.read_results(RESULTS / file_name)['runs'].values() for run in seeds.values()]
    for run in runs:
        is_failure = run['outcome'] == 'diverged' or run['end']['valid/loss'] > 0.6 * math.log(vocabulary)
        assert run['end']['fails'] == is_failure


def test_failure_is_kept_without_a_claim_about_it(tmp_path):
    """Check a loss above and below 0.6 log V, which is 3.74 for a vocabulary of 512."""
    (tmp_path / 'config.json').write_text(json.dumps(dict(optimizer=dict(steps=1), model=dict(vocabulary=512))))
    for loss, fails in ((3.8, 1.0), (3.7, 0.0)):
        (tmp_path / 'metrics.jsonl').write_text(json.dumps({'step': 1, 'valid/loss': loss}) + '\n')
        assert read_claim_metrics(RunDir(tmp_path), 'done', EXTRA_METRIC_PATTERNS)['end']['fails'] == fails
