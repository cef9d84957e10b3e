"""Tests of the JobSet manifest against its Kubernetes schema, and of its fields."""

import json
from pathlib import Path

import pytest
from command_recorders import SUBMIT_COMMANDS, get_launcher_output, make_recorders

from launch.tpu_slices import TPU_KINDS

jsonschema = pytest.importorskip('jsonschema', reason='jsonschema, of the extra test, is not installed')
CRD = json.loads((Path(__file__).parent / 'jobset_crd.json').read_text())


@pytest.fixture
def recorders(tmp_path, monkeypatch):
    return make_recorders(tmp_path, monkeypatch)


def forbid_unknown_fields(schema):
    """Return the schema with unknown fields forbidden."""
    if isinstance(schema, list):
        return [forbid_unknown_fields(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    lists_properties = 'properties' in schema and 'additionalProperties' not in schema
    preserves_unknown = schema.get('x-kubernetes-preserve-unknown-fields')
    return {name: forbid_unknown_fields(part) for name, part in schema.items()} | (
        {'additionalProperties': False} if lists_properties and not preserves_unknown else {}
    )


def list_schema_errors(instance):
    """Return the schema errors of a manifest."""
    return [
        error.message
        for error in jsonschema.Draft202012Validator(forbid_unknown_fields(CRD['schema'])).iter_errors(instance)
    ]


def make_manifest(capsys, *options, argv=None):
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
    assert list_schema_errors(make_manifest(capsys, *OPTIONS[options])) == []


@pytest.mark.parametrize('accelerator', [f'{name}-{max(kind.topologies)}' for name, kind in TPU_KINDS.items()])
def test_manifest_matches_schema_for_every_tpu_kind(accelerator, recorders, capsys):
    chips = accelerator.rpartition('-')[2]
    argv = [argument.replace('v5e-256', accelerator) for argument in SUBMIT_COMMANDS['jobset']]
    manifest = make_manifest(capsys, argv=argv)
    assert list_schema_errors(manifest) == []
    assert manifest['spec']['replicatedJobs'][0]['template']['spec']['parallelism'] == int(chips) // 4


def test_schema_rejects_misspelled_missing_and_mistyped_fields(recorders, capsys):
    def list_errors_after(change):
        manifest = make_manifest(capsys)
        change(manifest['spec'], manifest['spec']['replicatedJobs'][0]['template']['spec'])
        return list_schema_errors(manifest)

    def rename(mapping, old, new):
        mapping[new] = mapping.pop(old)

    assert list_errors_after(lambda spec, job: rename(spec['failurePolicy'], 'maxRestarts', 'maxRestart'))
    assert list_errors_after(lambda spec, job: rename(job['template']['spec'], 'containers', 'containerz'))
    assert list_errors_after(lambda spec, job: rename(job['podFailurePolicy'], 'rules', 'rule'))
    assert list_errors_after(lambda spec, job: job['template']['spec'].update(terminationGracePeriodSeconds='30'))
    assert list_errors_after(lambda spec, job: spec['failurePolicy']['rules'][0].update(action='Fail'))
    assert list_errors_after(lambda spec, job: spec['replicatedJobs'][0].pop('name'))


def test_manifest_restarts_after_all_but_final_exit_codes(recorders, capsys):
    spec = make_manifest(capsys)['spec']
    (rule,) = spec['replicatedJobs'][0]['template']['spec']['podFailurePolicy']['rules']
    assert rule['action'] == 'FailJob'
    exit_codes = rule['onExitCodes']
    assert (exit_codes['operator'], exit_codes['values']) == (
        'In',
        [1, 3, 130],
    )  # Kubernetes requires sorted values
    (final_rule,) = spec['failurePolicy']['rules']
    assert (final_rule['action'], final_rule['onJobFailureReasons']) == ('FailJobSet', ['PodFailurePolicy'])
    assert spec['replicatedJobs'][0]['template']['spec']['backoffLimit'] == 0


def test_manifest_passes_termination_grace_period_to_run(recorders, capsys):
    for options, seconds in (([], 120), (['--spot'], 25), (['--save=200'], 210)):
        pod = make_manifest(capsys, *options)['spec']['replicatedJobs'][0]['template']['spec']['template']['spec']
        assert pod['terminationGracePeriodSeconds'] == seconds
        assert f'--grace={seconds}' in pod['containers'][0]['args']
