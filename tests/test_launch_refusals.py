"""Tests of launcher arguments that are rejected, and of messages after scheduler errors."""

import itertools
import re
from pathlib import Path

import pytest
from command_recorders import (
    LAUNCHER_NAMES,
    SITE_FLAGS,
    SUBMIT_COMMANDS,
    TRAIN_COMMAND,
    get_launcher_error,
    get_launcher_output,
    make_recorders,
    run_launcher,
)

from launch import command_line
from sinklab.config.spec import Hardware
from sinklab.errors import UserError
from sinklab.parallel import device_mesh


@pytest.fixture
def recorders(tmp_path, monkeypatch):
    return make_recorders(tmp_path, monkeypatch)


# Invalid command lines of any launcher -> pattern of the error message.
INVALID_ARGUMENTS = {
    'name': (['submit', "o'brien's run"], r"the name \"o'brien's run\" must begin .* e\.g\. o-brien-s-run;"),
    'long': (['submit', 'x' * 41], 'the name .* at most 40 .*, e.g. x{40};'),
    'verb': (['begin', 'pair'], "argument VERB: invalid choice: 'begin'"),
    'unknown': (['submit', 'pair', '--spott'], 'unrecognized arguments: --spott; see --help'),
    'workdir': (['submit', 'pair', *TRAIN_COMMAND], 'submit needs --workdir=DIR'),
    'no command': (['submit', 'pair', '--workdir=gs://b/r'], 'after --, give a sinklab train command, not nothing'),
    'sweep': (['submit', 'pair', '--workdir=gs://b/r', '--', 'sweep'], 'not sweep; e.g. -- train --config'),
    'grace after separator': (
        ['submit', 'pair', '--workdir=gs://b/r', *TRAIN_COMMAND, '--grace=9'],
        '--grace is not allowed after --; give --grace before',
    ),
    'process index': (
        ['submit', 'pair', '--workdir=gs://b/r', *TRAIN_COMMAND, '--process', '0'],
        '--process is not allowed after --; remove it',
    ),
    'local workdir': (
        ['submit', 'pair', '--workdir=runs/pair', *TRAIN_COMMAND],
        '--workdir: runs/pair is not accessible to the hosts of a job; gi',
    ),
    'bucket': (['submit', 'pair', '--workdir=gs://b/', *TRAIN_COMMAND], '--workdir=gs://b/ is a bucket; give'),
    'bucket of sweep': (
        ['submit', 'pair', '--workdir=gs://b', '--rows=a', '--', 'train', '--config=configs/scale.py'],
        '--workdir=gs://b is a bucket; give',
    ),
    'data': (
        ['submit', 'pair', '--workdir=gs://b/r', *TRAIN_COMMAND, '--config.data.source=store:runs/store'],
        r'--config\.data\.source: runs/store is not accessible',
    ),
    'compiled': (
        ['submit', 'pair', '--workdir=gs://b/r', '--compiled=cache', *TRAIN_COMMAND],
        '--compiled: cache is not accessible',
    ),
    'flags': (
        ['submit', 'pair', '--workdir=gs://b/r', '--flags=fast', *TRAIN_COMMAND],
        '--flags=fast is unknown; it is one of none',
    ),
    'env': (['submit', 'pair', '--workdir=gs://b/r', '--env=1=2', *TRAIN_COMMAND], '--env=1=2 is not NAME=VALUE'),
    'flags and env': (
        ['submit', 'pair', '--workdir=gs://b/r', '--flags=gpu', '--env=XLA_FLAGS=--a', *TRAIN_COMMAND],
        '--flags=gpu and --env both set XLA_FLAGS; .*--xla_gpu',
    ),
    **{
        f'save {value}': (
            ['submit', 'pair', '--workdir=gs://b/r', f'--save={value}', *TRAIN_COMMAND],
            f'--save={value} must be a finite number',
        )
        for value in ('nan', 'inf', '-5')
    },
    'restarts': (
        ['submit', 'pair', '--workdir=gs://b/r', '--restarts=-1', *TRAIN_COMMAND],
        '--restarts=-1 must be a whole number',
    ),
    'grace': (
        ['submit', 'pair', '--workdir=gs://b/r', '--save=60', '--grace=60', *TRAIN_COMMAND],
        '60 s are available for a save, but a',
    ),
    'seeds': (['submit', 'pair', '--workdir=gs://b/r', '--seeds=a', *TRAIN_COMMAND], '--seeds=a: '),
    'no seed': (['submit', 'pair', '--workdir=gs://b/r', '--rows=a', '--seeds=0', *TRAIN_COMMAND], '--seeds=0,'),
    'seeds alone': (
        ['submit', 'pair', '--workdir=gs://b/r', '--seeds=1', *TRAIN_COMMAND],
        '--seeds need --rows; give --rows',
    ),
    'origin': (
        ['submit', 'pair', '--workdir=gs://b/r', '--', 'train', '--from=runs/a@5'],
        '--from: runs/a@5 is not accessible',
    ),
    'parameters': (
        ['submit', 'pair', '--workdir=gs://b/r', '--', 'train', '--from=params:runs/a'],
        '--from: runs/a is not accessible',
    ),
    'model in bucket': (
        ['submit', 'pair', '--workdir=gs://b/r', '--', 'train', '--from=hf:gs://b/llama'],
        '--from: hf:gs://b/llama is not accessible',
    ),
    'no grace': (
        ['submit', 'pair', '--workdir=gs://b/r', '--grace=0', *TRAIN_COMMAND],
        '--grace=0 must be a whole number of at least 1',
    ),
    'rows': (
        ['submit', 'pair', '--workdir=gs://b/r', '--rows=a', *TRAIN_COMMAND],
        'names a row; give -- train --config=FILE',
    ),
    'config outside folder': (
        ['submit', 'pair', '--workdir=gs://b/r', '--', 'train', '--config=/a/b.py'],
        'must be inside',
    ),
    'layout': (
        ['submit', 'pair', '--workdir=gs://b/r', *TRAIN_COMMAND, '--data=2', '--fsdp=64'],
        '--data=2 --fsdp=64 do not fit the 256 devices of .*; give sizes whose product is 256, or omit them',
    ),
}


@pytest.mark.parametrize('name', LAUNCHER_NAMES)
@pytest.mark.parametrize('case', INVALID_ARGUMENTS)
def test_launcher_rejects_invalid_arguments_before_running_commands(name, case, recorders, capsys):
    argv, pattern = INVALID_ARGUMENTS[case]
    for execute in ([], ['--execute']):
        assert re.search(
            pattern, get_launcher_error(capsys, name, [*argv[:2], *execute, *SITE_FLAGS[name], *argv[2:]])
        )
    assert recorders.pop_calls() == []
    assert not Path('runs').exists()


@pytest.mark.parametrize('name', LAUNCHER_NAMES)
@pytest.mark.parametrize(
    'sizes', [[], ['--fsdp=32'], ['--data=2'], ['--tensor=4'], ['--data=2', '--tensor=4'], ['--data=4', '--fsdp=64']]
)
def test_submit_passes_only_given_mesh_sizes(name, sizes, recorders, capsys):
    script = get_launcher_output(capsys, name, [*SUBMIT_COMMANDS[name], *sizes])
    assert re.findall(r'--(?:data|fsdp|tensor)=\d+', script) == sizes


def raises_user_error(check, *arguments):
    try:
        check(*arguments)
    except UserError:
        return True
    return False


@pytest.mark.parametrize('slices', [1, 2])
def test_check_layout_agrees_with_mesh_shape_of_run(slices):
    sizes = (None, 1, 2, 3, 4, 8, 16, 32)
    for data, fsdp, tensor in itertools.product(sizes, sizes, sizes[1:]):
        given_sizes = {name: size for name, size in dict(data=data, fsdp=fsdp, tensor=tensor).items() if size}
        arguments = tuple(f'--{name}={size}' for name, size in given_sizes.items())
        is_rejected_by_run = raises_user_error(device_mesh.compute_mesh_shape, Hardware(**given_sizes), 16, slices)
        assert raises_user_error(command_line.check_layout, arguments, 16, '16') == is_rejected_by_run, arguments


def test_check_layout_ignores_non_numeric_sizes():
    for size in ('0', '-1', 'all', ''):
        assert not raises_user_error(command_line.check_layout, ('train', f'--fsdp={size}'), 8, '8')


# Missing or conflicting options of one launcher -> pattern of the error message.
INVALID_OPTIONS = {
    ('queued_resources', 'project'): (
        ['--zone=z', '--accelerator=v5e-256'],
        '--project is missing; .*--project=my-pro',
    ),
    ('queued_resources', 'zone'): (
        ['--project=p', '--accelerator=v5e-256'],
        '--zone is missing; give it, e.g. --zone',
    ),
    ('queued_resources', 'chips'): ([*SITE_FLAGS['queued_resources'][1:]], '--accelerator is missing; .*v5e-256'),
    ('queued_resources', 'kind'): (
        [*SITE_FLAGS['queued_resources'], '--accelerator=v5e-3'],
        'is not KIND-CHIPS; use v4-4',
    ),
    ('queued_resources', 'both'): (
        [*SITE_FLAGS['queued_resources'], '--spot', '--reserved'],
        '--spot and --reserved',
    ),
    ('queued_resources', 'spot'): (
        [*SITE_FLAGS['queued_resources'], '--spot', '--grace=60'],
        '--grace=60: .* kills a job 30 s after',
    ),
    ('jobset', 'spot'): (
        [*SITE_FLAGS['jobset'], '--spot', '--save=40'],
        '25 s are available for a save, but a save of 40 s needs 50',
    ),
    ('jobset', 'image'): (SITE_FLAGS['jobset'][:2], '--image is missing'),
    ('jobset', 'project'): ([SITE_FLAGS['jobset'][0], SITE_FLAGS['jobset'][2]], '--project is missing'),
    ('queued_resources', 'slices'): (
        [*SITE_FLAGS['queued_resources'], '--slices=0'],
        '--slices=0 must be a whole numb',
    ),
    ('jobset', 'slices'): ([*SITE_FLAGS['jobset'], '--slices=0'], '--slices=0 must be a whole number of at least 1'),
    ('jobset', 'chips'): (SITE_FLAGS['jobset'][1:], '--accelerator is missing; .*v5e-256'),
    ('slurm', 'time'): (['--nodes=32'], '--time is missing'),
    ('slurm', 'nodes'): ([*SITE_FLAGS['slurm'], '--nodes=0'], '--nodes=0 must be a whole number of at least 1'),
    ('slurm', 'at_once'): ([*SITE_FLAGS['slurm'], '--at_once=2'], '--at_once=2 needs several jobs; give --rows'),
    ('slurm', 'code'): (
        ['--nodes=32', '--time=1-0'],
        '--code: gs://b/runs/code/pair is not accessible .* begins with /$',
    ),
}


@pytest.mark.parametrize(('name', 'case'), INVALID_OPTIONS)
def test_launcher_rejects_missing_or_conflicting_options(name, case, recorders, capsys, monkeypatch):
    for variable in ('CLOUDSDK_CORE_PROJECT', 'CLOUDSDK_COMPUTE_ZONE'):
        monkeypatch.delenv(variable, raising=False)
    options, pattern = INVALID_OPTIONS[name, case]
    argv = ['submit', 'pair', '--workdir=gs://b/runs/pair', '--execute', *options, *TRAIN_COMMAND]
    assert re.search(pattern, get_launcher_error(capsys, name, argv))
    assert recorders.pop_calls() == []


@pytest.mark.parametrize(
    ('name', 'program'), [('queued_resources', 'gcloud'), ('jobset', 'kubectl'), ('slurm', 'sbatch'), ('slurm', 'uv')]
)
def test_launcher_without_required_program_runs_nothing(name, program, recorders, capsys, tmp_path):
    (recorders.folder / program).unlink()
    argv = [argument.replace('/shared', f'{tmp_path}/shared') for argument in SUBMIT_COMMANDS[name]]
    assert get_launcher_error(capsys, name, [*argv[:2], '--execute', *argv[2:]]).startswith(f'{program} ')
    assert recorders.pop_calls() == []
    assert not Path('runs').exists()
    assert not Path('shared').exists()


# Error output of a scheduler -> parts of the message of the launcher.
SCHEDULER_ERRORS = {
    (
        'queued_resources',
        'queued-resources create',
        "ERROR: Quota 'TPUV5sPreemptibleLitepodPerProjectPerZone' exceeded",
    ): (
        'gcloud compute tpus queued-resources ... exits with 1 (ERROR: Quota ',
        '): ask for more at https://console.cloud.google.com/iam-admin/quotas, or use another --zone',
    ),
    ('queued_resources', 'queued-resources create', 'ERROR: ALREADY_EXISTS: Resource pair'): (
        'with the verb status',
    ),
    ('queued_resources', 'storage rsync', 'ERROR: HTTPError 403: x does not have permission'): (
        'gcloud auth list prints the account in use; 1 more commands were not run',
    ),
    ('jobset', 'kubectl', 'The connection to the server localhost:8080 was refused'): ('get-credentials',),
    ('slurm', 'sbatch', 'sbatch: error: AssocMaxSubmitJobLimit'): ('a limit of your account',),
    ('slurm', 'uv build', 'no such backend'): ('(no such backend): see above; 5 more commands were not run',),
}


@pytest.mark.parametrize('case', SCHEDULER_ERRORS)
def test_launcher_explains_scheduler_error(case, recorders, capsys, tmp_path):
    name, command_part, error = case
    recorders.add_answers(command_part, ('', f'{error}\n', 1))
    argv = [argument.replace('/shared', f'{tmp_path}/shared') for argument in SUBMIT_COMMANDS[name]]
    assert run_launcher(name, [*argv[:2], '--execute', *argv[2:]]) == 1
    *_, scheduler_line, launcher_line = capsys.readouterr().err.splitlines()
    assert scheduler_line == error
    assert all(message_part in launcher_line for message_part in SCHEDULER_ERRORS[case]), launcher_line
    assert command_part in ' '.join(recorders.pop_calls()[-1])
