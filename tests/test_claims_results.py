"""Rows of claims.json: equal rows and changed rows."""

import json
import shutil
from pathlib import Path

import pytest
from tiny_specs import make_tiny_spec

from sinklab.cli.claims import EXTRA_METRICS, find_runs
from sinklab.cli.main import main
from sinklab.report.claims import read_claim_metrics
from sinklab.run_dir import RunDir
from sinklab.sweep import results
from sinklab.sweep.plan import SweepRun

RESULTS = Path(__file__).parents[1] / 'docs' / 'results'
EMPTY_RESULTS = dict(configs={}, runs={})


def add_runs(monkeypatch, specs):
    """Return results with one run of each row."""
    monkeypatch.setattr(results, 'read_claim_metrics', lambda run_dir, outcome, names: f'of {run_dir}')
    runs = [SweepRun(row, 0, RunDir(row), None, specs[row], 'done') for row in specs]
    return results.add_runs(EMPTY_RESULTS, specs, runs, set())


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


def test_row_has_runs_of_measured_row_with_equal_config(monkeypatch):
    claim_results = add_runs(monkeypatch, {'A': make_tiny_spec(), 'B': make_tiny_spec(seed=2)})
    assert claim_results['configs']['B'] == {'seed': 2}, 'later configs are differences from the first one'
    specs = {
        'A': make_tiny_spec(data__share=0.5),
        'B': make_tiny_spec(seed=2, log__every_steps=7, checkpoint__every_steps=70),
        'like B': make_tiny_spec(seed=2),
        'other': make_tiny_spec(seed=3),
    }
    assert results.find_measured_rows(claim_results, specs) == {'B': 'B', 'like B': 'B'}


def test_field_that_came_after_a_measurement_counts_as_its_default(monkeypatch):
    claim_results = add_runs(monkeypatch, {'A': make_tiny_spec()})
    del claim_results['configs']['A']['model.scaled_embedding']
    specs = {'default': make_tiny_spec(), 'new': make_tiny_spec(model__scaled_embedding=True)}
    assert results.find_measured_rows(claim_results, specs) == {'default': 'A'}


@pytest.mark.slow
def test_changed_row_is_not_judged_by_its_old_runs(capsys, tmp_path):
    claim_results = json.loads((RESULTS / 'claims.json').read_text(encoding='utf-8'))
    claim_results['configs']['optimization:batch_128']['optimizer.batch_size'] = 16
    (tmp_path / 'claims.json').write_text(json.dumps(claim_results))
    assert main(['claims', 'batch_small', f'--results={tmp_path}/claims.json', '--json']) == 0
    assert json.loads(capsys.readouterr().out)[0]['verdict'] == 'not run'
    assert main(['claims', 'batch_small', f'--workdir={tmp_path}']) == 1
    assert 'optimization:batch_128' in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.slow
def test_claims_command_does_not_train_runs_of_claims_file_again(capsys, tmp_path):
    shutil.copy(RESULTS / 'claims.json', tmp_path)
    assert main(['claims', 'emerges', '--seeds=8', f'--workdir={tmp_path}', '--json']) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry['verdict'], len(entry['differences'])) == ('holds', 8)
    assert entry in json.loads((tmp_path / 'verdicts.json').read_text())
    assert results.list_run_dirs(tmp_path) == []


@pytest.mark.parametrize('name', ['claims.json', 'claims_small.json'])
def test_rows_have_not_changed_since_they_were_measured(name):
    claims_data = results.read_results(RESULTS / name)
    assert find_runs(claims_data['runs'], claims_data) == claims_data['runs']


def test_failure_is_kept_without_a_claim_about_it(tmp_path):
    """Check a loss above and below 0.6 log V, which is 3.74 for a vocabulary of 512."""
    (tmp_path / 'config.json').write_text(json.dumps(dict(optimizer=dict(steps=1), model=dict(vocabulary=512))))
    for loss, fails in ((3.8, 1.0), (3.7, 0.0)):
        (tmp_path / 'metrics.jsonl').write_text(json.dumps({'step': 1, 'valid/loss': loss}) + '\n')
        assert read_claim_metrics(RunDir(tmp_path), 'done', EXTRA_METRICS)['end']['fails'] == fails
