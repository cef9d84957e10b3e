"""Launchers: printed commands of each verb, jobs of a sweep, and command lines that are refused."""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_recorders import (
    LAUNCHER_NAMES,
    SITE_FLAGS,
    SUBMIT_COMMANDS,
    TRAIN_COMMAND,
    WORKDIRS,
    get_launcher_error,
    get_launcher_output,
    get_scheduler,
    run_launcher,
)

from launch import job, tpu_slices
from launch.code_bundle import ROOT
from sinklab.cli.main import build_parser

QUEUED_RESOURCES = 'gcloud compute tpus queued-resources'
SSH = 'gcloud compute tpus tpu-vm ssh pair --quiet'
CREATE = (
    f'{QUEUED_RESOURCES} create pair --node-id=pair --accelerator-type=v5litepod-256 '
    '--runtime-version=v2-alpha-tpuv5-lite --metadata-from-file=startup-script=runs/launched/pair/boot.sh'
)
DELETE = f'{QUEUED_RESOURCES} delete pair --force --quiet'
APPLY = 'kubectl apply --filename=runs/launched/pair/jobset.json'
DELETE_JOBSET = 'kubectl delete jobset --ignore-not-found --cascade=foreground --wait=true pair'
FIRST_POD_SELECTOR = (
    '--selector=jobset.sigs.k8s.io/jobset-name=pair,batch.kubernetes.io/job-completion-index=0,'
    'jobset.sigs.k8s.io/job-index=0'
)


def list_code_commands(folder, pins):
    return [
        'sinklab rows --config=configs/scale.py:softmax_1b',
        f'uv build --quiet --no-create-gitignore --out-dir {folder} {ROOT}',
        f'cp {ROOT}/launch/pins/{pins}.txt {folder}/pins.txt',
        f'mkdir -p {folder}/configs',
        f'cp configs/scale.py {folder}/configs/scale.py',
    ]


EXPECTED_COMMANDS = {
    'queued_resources': {
        'submit': [
            *list_code_commands('runs/launched/pair', 'tpu'),
            'gcloud storage rsync --recursive runs/launched/pair gs://b/runs/code/pair/pair',
            CREATE,
        ],
        'keep': ['bash runs/launched/pair/keep.sh'],
        'resume': [f'{DELETE} || true', 'bash runs/launched/pair/create.sh'],
        'status': [f"{QUEUED_RESOURCES} describe pair '--format=value(state.state)'"],
        'logs': [
            f"{SSH} --worker=0 '--command=sudo journalctl --follow --lines=50 --unit=google-startup-scripts "
            "--unit=sinklab'"
        ],
        'preempt': [f"{SSH} --worker=0 '--command=sudo systemctl kill --signal=TERM sinklab'"],
        'stop': [f"{SSH} --worker=all '--command=sudo systemctl stop sinklab' || true", DELETE],
    },
    'jobset': {
        'submit': [
            *list_code_commands('runs/launched/pair/image', 'tpu'),
            'gcloud builds submit --tag=r.pkg.dev/p/i:1 runs/launched/pair/image',
            APPLY,
        ],
        'resume': [DELETE_JOBSET, APPLY],
        'status': ['kubectl get jobset --output=wide pair'],
        'logs': [f'kubectl logs --follow --tail=50 {FIRST_POD_SELECTOR}'],
        'preempt': [f'kubectl delete pod --wait=false {FIRST_POD_SELECTOR}'],
        'stop': [DELETE_JOBSET],
    },
    'slurm': {
        'submit': [
            *list_code_commands('/shared/runs/code/pair', 'gpu'),
            'bash /shared/runs/code/pair/install.sh',
            'sbatch /shared/runs/code/pair/job.sh',
        ],
        'resume': ['sbatch /shared/runs/code/pair/job.sh'],
        'status': ["squeue --me '--format=%i %T %r %M %l %R' --name=pair"],
        'logs': ['tail --follow=name --lines=50 /shared/runs/code/pair/pair-*.log'],
        'preempt': ['scancel --me --signal=TERM --name=pair'],
        'stop': [
            'scancel --me --state=PENDING --name=pair',
            'scancel --me --signal=TERM --batch --name=pair',
            'scancel --me --signal=TERM --name=pair',
        ],
    },
}


def extract_commands(script):
    """Return the commands of a script, without the statements that write files."""
    script = re.sub(
        r"^mkdir [^\n]*\n\(umask 077 && cat > .*?\) <<'END_OF_FILE'\n.*?^END_OF_FILE\n", '', script, flags=re.M | re.S
    )
    return script.splitlines()[2:]


@pytest.mark.parametrize(
    ('name', 'verb'), [(name, verb) for name in LAUNCHER_NAMES for verb in get_scheduler(name).verbs]
)
def test_verb_prints_expected_commands(name, verb, recorders, capsys):
    arguments = TRAIN_COMMAND if verb == 'submit' else []
    argv = [verb, 'pair', WORKDIRS[name], *SITE_FLAGS[name], *arguments]
    assert extract_commands(get_launcher_output(capsys, name, argv)) == EXPECTED_COMMANDS[name][verb]
    assert recorders.pop_calls() == []


@pytest.mark.parametrize('name', ['queued_resources', 'jobset'])
def test_submit_creates_one_job_for_several_slices(name, recorders, capsys):
    script = get_launcher_output(capsys, name, [*SUBMIT_COMMANDS[name][:2], '--slices=2', *SUBMIT_COMMANDS[name][2:]])
    expected_text = dict(queued_resources='--node-count=2 --node-prefix=pair', jobset='"replicas": 2')
    assert expected_text[name] in script


SECRET = "it's 'secret' $(c) $HOME"


@pytest.mark.parametrize('name', ['queued_resources', 'slurm'])
def test_run_receives_arguments_and_variables_unchanged(name, recorders, tmp_path, monkeypatch):
    """Execute `submit`, then the script of the run with a program that prints its arguments."""
    monkeypatch.setenv('WORDS', SECRET)
    root = f"{tmp_path}/o'brien's" if name == 'slurm' else 'gs://b/o\'brien\'s "runs"'
    workdir = f'--workdir={root}/$HOME `x` \\ *;|&'
    argv = ['submit', 'pair', '--execute', workdir, *SITE_FLAGS[name], '--env=WORDS', *TRAIN_COMMAND]
    assert run_launcher(name, argv) == 0
    [path] = tmp_path.rglob('run*.sh')
    assert path.stat().st_mode & 0o077 == 0, 'it has values of --env'
    assert not any(SECRET in word for call in recorders.pop_calls() for word in call), 'on a command line'
    program = tmp_path / 'env' / 'bin' / 'sinklab'
    program.parent.mkdir(parents=True)
    program.write_text(f'#!{sys.executable}\nimport os, sys; print([os.environ["WORDS"], *sys.argv[1:]])\n')
    program.chmod(0o755)
    script = re.sub('^cd .*', f'cd {tmp_path}', path.read_text(), flags=re.MULTILINE)
    process = subprocess.run(['bash', '-c', script], check=True, capture_output=True, text=True)
    expected = [*TRAIN_COMMAND[1:], workdir, '--grace=120', f'--compiled={root}/compiled']
    assert ast.literal_eval(process.stdout) == [SECRET, *expected]
    build_parser().parse_args(expected)  # sinklab accepts them


def test_executed_script_stops_at_first_failure_but_not_at_optional_one(recorders, capfd):
    recorders.add_answers('systemctl stop', ('', 'ERROR: the node pair is gone\n', 1))
    argv = ['stop', 'pair', '--execute', *SITE_FLAGS['queued_resources']]
    assert run_launcher('queued_resources', argv) == 0
    assert 'the node pair is gone' in capfd.readouterr().err
    assert [shlex.join(call) for call in recorders.pop_calls()][-1] == DELETE
    recorders.add_answers('storage rsync', ('', 'ERROR: no permission\n', 3))
    argv = SUBMIT_COMMANDS['queued_resources']
    assert run_launcher('queued_resources', [*argv[:2], '--execute', *argv[2:]]) == 3
    assert recorders.pop_calls()[-1][:3] == ['gcloud', 'storage', 'rsync']


def test_sweep_creates_one_job_per_row_and_seed_and_checks_each_row_first(recorders, capsys):
    """Test the row, both seeds, the folder ROW-SEED and the name of each job."""
    argv = ['submit', 'pair', '--workdir=gs://b/pair', '--rows=softmax_1b,decay_0.5', '--seeds=0,3']
    argv += [*SITE_FLAGS['queued_resources'], '--', 'train', '--config', 'configs/scale.py', '--size=smoke']
    script = get_launcher_output(capsys, 'queued_resources', argv)
    runs = [tuple(shlex.split(line)[1:]) for line in script.splitlines() if line.startswith('exec ./env')]
    rows = ['softmax_1b', 'decay_0.5'] * 2
    seeds = ['0', '0', '3', '3']
    assert [job.parse_option(run, 'config')[0] for run in runs] == [f'configs/scale.py:{row}' for row in rows]
    for field in ('config.seed', 'config.data.seed'):
        assert [job.parse_option(run, field)[0] for run in runs] == seeds
    assert [job.parse_option(run, 'workdir')[0] for run in runs] == [
        f'gs://b/pair/{row}-{seed}' for row, seed in zip(rows, seeds, strict=True)
    ]
    assert {job.parse_option(run, 'compiled')[0] for run in runs} == {'gs://b/compiled'}
    commands = extract_commands(script)
    names = [command.split()[5] for command in commands if command.startswith(f'{QUEUED_RESOURCES} create')]
    assert names == [f'pair-{row}-{seed}' for seed in (0, 3) for row in ('softmax-1b', 'decay-0-5')]
    checks = [f'sinklab rows --config=configs/scale.py:{row} --size=smoke' for row in rows[:2]]
    assert commands[:2] == checks
    assert not set(checks) & set(commands[2:])


@pytest.mark.parametrize(('options', 'grace'), [([], 120), (['--grace=300'], 300), (['--spot'], 30)])
def test_grace_period_is_given_to_run_and_service(options, grace, recorders, capsys):
    argv = SUBMIT_COMMANDS['queued_resources']
    script = get_launcher_output(capsys, 'queued_resources', [*argv[:2], *options, *argv[2:]])
    assert f'--grace={grace} ' in script
    assert f'TimeoutStopSec={grace}\n' in script


@pytest.mark.parametrize(
    'accelerator',
    [f'{name}-{chips}' for name, kind in tpu_slices.TPU_KINDS.items() for chips in kind.topology_by_chips],
)
def test_parse_slice_topology_matches_chips_and_hosts(accelerator):
    tpu_slice = tpu_slices.parse_slice(accelerator)
    assert tpu_slice.chips == tpu_slice.num_hosts * tpu_slice.chips_per_host
    assert tpu_slice.num_hosts == 1 or tpu_slice.chips_per_host == 4


SUBMIT = ['submit', 'pair', 'WORKDIR']
# Command lines of any launcher that are refused, with a value that the message names.
INVALID_ARGUMENTS = {
    'name': (['submit', "o'brien's run"], 'brien'),
    'verb': (['begin', 'pair'], 'begin'),
    'unknown option': ([*SUBMIT, '--spott'], '--spott'),
    'no workdir': (['submit', 'pair', *TRAIN_COMMAND], '--workdir'),
    'no command': (SUBMIT, 'nothing'),
    'sweep': ([*SUBMIT, '--', 'sweep'], 'sweep'),
    'local workdir': (['submit', 'pair', '--workdir=runs/pair', *TRAIN_COMMAND], 'runs/pair'),
    'bucket': (['submit', 'pair', '--workdir=gs://b/', *TRAIN_COMMAND], 'gs://b/'),
    'env': ([*SUBMIT, '--env=1=2', *TRAIN_COMMAND], '--env=1=2'),
    'unset variable': ([*SUBMIT, '--env=NO_SUCH_VARIABLE', *TRAIN_COMMAND], 'NO_SUCH_VARIABLE'),
    'restarts': ([*SUBMIT, '--restarts=-1', *TRAIN_COMMAND], '-1'),
    'seeds': ([*SUBMIT, '--seeds=a', *TRAIN_COMMAND], '--seeds=a'),
    'seeds alone': ([*SUBMIT, '--seeds=1', *TRAIN_COMMAND], '--rows'),
    'rows of row': ([*SUBMIT, '--rows=a', *TRAIN_COMMAND], 'configs/scale.py:softmax_1b'),
    'config outside folder': ([*SUBMIT, '--', 'train', '--config=/a/b.py'], '/a/b.py'),
}


@pytest.mark.parametrize('name', LAUNCHER_NAMES)
@pytest.mark.parametrize('case', INVALID_ARGUMENTS)
def test_launcher_refuses_invalid_arguments_before_running_commands(name, case, recorders, capsys):
    argv, value = INVALID_ARGUMENTS[case]
    argv = [WORKDIRS[name] if word == 'WORKDIR' else word for word in argv]
    assert value in get_launcher_error(capsys, name, [*argv[:2], '--execute', *SITE_FLAGS[name], *argv[2:]])
    assert recorders.pop_calls() == []
    assert not Path('runs').exists()


# Missing options or wrong values of one launcher, with a value that the message names.
INVALID_OPTIONS = [
    ('queued_resources', [], '--accelerator'),
    ('queued_resources', ['--accelerator=v5e-3'], 'v5e-3'),
    ('queued_resources', ['--accelerator=v5e-256', '--slices=0'], '--slices'),
    ('jobset', ['--accelerator=v5e-256'], '--image'),
    ('slurm', ['--nodes=32'], '--time'),
    ('slurm', [*SITE_FLAGS['slurm'], '--workdir=gs://b/runs/pair'], 'gs://b/runs/pair'),
]


@pytest.mark.parametrize(('name', 'options', 'value'), INVALID_OPTIONS)
def test_launcher_refuses_missing_options_and_wrong_values(name, options, value, recorders, capsys):
    argv = ['submit', 'pair', WORKDIRS[name], '--execute', *options, *TRAIN_COMMAND]
    assert value in get_launcher_error(capsys, name, argv)
    assert recorders.pop_calls() == []


@pytest.mark.parametrize('name', LAUNCHER_NAMES)
def test_help_lists_every_verb_without_importing_heavy_modules(name):
    process = subprocess.run(
        [sys.executable, '-X', 'importtime', '-m', f'launch.{name}', '--help'],
        cwd=ROOT, env={**os.environ, 'PYTHONPATH': str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert set(re.findall(r'^  (\w+) +[A-Z]', process.stdout, re.MULTILINE)) == set(get_scheduler(name).verbs)
    assert not re.search(r'\| +(jax|numpy|yaml)$', process.stderr, re.MULTILINE)
