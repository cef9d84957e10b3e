"""Tests of the JobSet manifest against its Kubernetes schema, and of its fields."""

import json
from pathlib import Path

import pytest
from command_recorders import SUBMIT_COMMANDS, get_launcher_output, make_recorders

from launch.job import RETRY_EXIT_CODES
from launch.tpu_slices import TPU_KINDS

jsonschema = pytest.importorskip('jsonschema', reason='jsonschema, of the extra test, is not installed')
CRD = json.loads((Path(__file__).parent / 'jobset_crd.json').read_text())


@pytest.fixture
def recorders(tmp_path, monkeypatch):
    return make_recorders(tmp_path, monkeypatch)


def strict(schema):
    """Return the schema with unknown fields forbidden."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = 'properties' in schema and 'additionalProperties' not in schema
    open_ = schema.get('x-kubernetes-preserve-unknown-fields')
    return {name: strict(part) for name, part in schema.items()} | (
        {'additionalProperties': False} if closed and not open_ else {}
    )


def wrong(manifest):
    """Return the schema errors of a manifest."""
    return [error.message for error in jsonschema.Draft202012Validator(strict(CRD['schema'])).iter_errors(manifest)]


def manifest(capsys, *options, argv=None):
    argv = list(argv or SUBMIT_COMMANDS['jobset'])
    script = get_launcher_output(capsys, 'jobset', [*argv[:2], *options, *argv[2:]])
    return json.loads(script.partition(".json <<'END'\n")[2].partition('\nEND')[0])


OPTIONS = {
    'plain': [],
    'all': [
        *('--spot', '--queue=tpus', '--service_account=trainer', '--namespace=sinks', '--context=gke', '--built'),
        *('--flags=tpu_data', "--env=WORDS=a 'b' $(HOME)", '--restarts=3', '--save=12'),
    ],
}


@pytest.mark.parametrize('options', OPTIONS)
def test_manifest_matches_jobset_schema(options, recorders, capsys):
    assert wrong(manifest(capsys, *OPTIONS[options])) == []


@pytest.mark.parametrize('given', [f'{name}-{max(kind.topologies)}' for name, kind in TPU_KINDS.items()])
def test_manifest_matches_schema_for_every_tpu_kind(given, recorders, capsys):
    chips = given.rpartition('-')[2]
    argv = [one.replace('v5e-256', given) for one in SUBMIT_COMMANDS['jobset']]
    made = manifest(capsys, argv=argv)
    assert wrong(made) == []
    assert made['spec']['replicatedJobs'][0]['template']['spec']['parallelism'] == int(chips) // 4


def test_schema_rejects_misspelled_missing_and_mistyped_fields(recorders, capsys):
    def damaged(change):
        made = manifest(capsys)
        change(made['spec'], made['spec']['replicatedJobs'][0]['template']['spec'])
        return wrong(made)

    def rename(mapping, old, new):
        mapping[new] = mapping.pop(old)

    assert damaged(lambda spec, job: rename(spec['failurePolicy'], 'maxRestarts', 'maxRestart'))
    assert damaged(lambda spec, job: rename(job['template']['spec'], 'containers', 'containerz'))
    assert damaged(lambda spec, job: rename(job['podFailurePolicy'], 'rules', 'rule'))
    assert damaged(lambda spec, job: job['template']['spec'].update(terminationGracePeriodSeconds='30'))
    assert damaged(lambda spec, job: spec['failurePolicy']['rules'][0].update(action='Fail'))
    assert damaged(lambda spec, job: spec['replicatedJobs'][0].pop('name'))


def test_manifest_restarts_only_on_retry_exit_codes(recorders, capsys):
    spec = manifest(capsys)['spec']
    (rule,) = spec['replicatedJobs'][0]['template']['spec']['podFailurePolicy']['rules']
    assert rule['action'] == 'FailJob'
    codes = rule['onExitCodes']
    assert (codes['operator'], codes['values']) == (
        'NotIn',
        sorted(RETRY_EXIT_CODES),
    )  # Kubernetes requires sorted values
    (final,) = spec['failurePolicy']['rules']
    assert (final['action'], final['onJobFailureReasons']) == ('FailJobSet', ['PodFailurePolicy'])
    assert spec['replicatedJobs'][0]['template']['spec']['backoffLimit'] == 0


def test_manifest_passes_termination_grace_period_to_run(recorders, capsys):
    for options, seconds in (([], 120), (['--spot'], 25), (['--save=200'], 210)):
        pod = manifest(capsys, *options)['spec']['replicatedJobs'][0]['template']['spec']['template']['spec']
        assert pod['terminationGracePeriodSeconds'] == seconds
        assert f'--grace={seconds}' in pod['containers'][0]['args']
