"""Tests of the JobSet manifest against its Kubernetes schema, and of its fields."""

import json
import re
from pathlib import Path

import pytest
from command_recorders import HOSTILE_PATH, SUBMIT_COMMANDS, TRAIN_COMMAND, get_launcher_output

from launch.tpu_slices import TPU_KINDS

jsonschema = pytest.importorskip('jsonschema', reason='jsonschema, of the extra test, is not installed')
CRD = json.loads((Path(__file__).parent / 'jobset_crd.json').read_text())


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
    return json.loads(script.partition(".json) <<'END_OF_FILE'\n")[2].partition('\nEND_OF_FILE')[0])


OPTIONS = {
    'plain': [],
    'all': [*('--spot', '--service_account=trainer'), *("--env=WORDS=a 'b' $(HOME)", '--restarts=3', '--grace=22')],
}


@pytest.mark.parametrize('options', OPTIONS)
def test_manifest_matches_jobset_schema(options, recorders, capsys):
    assert list_schema_errors(make_manifest(capsys, *OPTIONS[options])) == []


@pytest.mark.parametrize('accelerator', [f'{name}-{max(kind.topology_by_chips)}' for name, kind in TPU_KINDS.items()])
def test_manifest_matches_schema_for_every_tpu_kind(accelerator, recorders, capsys):
    chips = accelerator.rpartition('-')[2]
    argv = [argument.replace('v5e-256', accelerator) for argument in SUBMIT_COMMANDS['jobset']]
    manifest = make_manifest(capsys, argv=argv)
    assert list_schema_errors(manifest) == []
    assert manifest['spec']['replicatedJobs'][0]['template']['spec']['parallelism'] == int(chips) // 4


def test_manifest_restarts_after_all_but_final_exit_codes(recorders, capsys):
    spec = make_manifest(capsys)['spec']
    (rule,) = spec['replicatedJobs'][0]['template']['spec']['podFailurePolicy']['rules']
    assert rule['action'] == 'FailJob'
    exit_codes = rule['onExitCodes']
    assert (exit_codes['operator'], exit_codes['values']) == ('In', [1, 3, 130])  # Kubernetes requires sorted values
    (final_rule,) = spec['failurePolicy']['rules']
    assert (final_rule['action'], final_rule['onJobFailureReasons']) == ('FailJobSet', ['PodFailurePolicy'])
    assert spec['replicatedJobs'][0]['template']['spec']['backoffLimit'] == 0


def test_manifest_passes_termination_grace_period_to_run(recorders, capsys):
    for options, seconds in (([], 120), (['--spot'], 25), (['--grace=210'], 210)):
        pod = make_manifest(capsys, *options)['spec']['replicatedJobs'][0]['template']['spec']['template']['spec']
        assert pod['terminationGracePeriodSeconds'] == seconds
        assert f'--grace={seconds}' in pod['containers'][0]['args']


def test_container_receives_arguments_and_variables_unchanged(recorders, capsys):
    """Emulate Kubernetes, which expands $(NAME) and replaces $$ by $."""

    def expand(text):
        return re.sub(r'\$\$|\$\((\w+)\)', lambda match: '$' if match[0] == '$$' else 'EXPANDED', text)

    value = '$(HOME) $$(HOME) $ $$ plain'
    argv = [
        f'--workdir={HOSTILE_PATH}' if word.startswith('--workdir') else word for word in SUBMIT_COMMANDS['jobset']
    ]
    spec = make_manifest(capsys, f'--env=WORDS={value}', argv=argv)['spec']['replicatedJobs'][0]['template']['spec']
    (container,) = spec['template']['spec']['containers']
    arguments = [expand(argument) for argument in container['args']]
    assert arguments[: len(TRAIN_COMMAND) - 1] == TRAIN_COMMAND[1:]
    assert f'--workdir={HOSTILE_PATH}' in arguments
    assert [expand(variable['value']) for variable in container['env']] == [value]
