"""Tests of launchers: printed scripts, jobs, arguments and exit codes."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_recorders import (
    HOSTILE_PATH,
    LAUNCHER_NAMES,
    SITE_FLAGS,
    SUBMIT_COMMANDS,
    TRAIN_COMMAND,
    get_launcher_output,
    get_scheduler,
    make_recorders,
    run_launcher,
)

from launch import command_line, job, tpu_slices
from sinklab.cli.main import build_parser
from sinklab.config.seed_list import parse_seeds

ROOT = Path(__file__).parents[1]


@pytest.fixture
def recorders(tmp_path, monkeypatch):
    return make_recorders(tmp_path, monkeypatch)


def read_files(folder):
    files = (path for path in folder.rglob('*') if path.is_file() and not path.is_relative_to(folder / 'bin'))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.slow
@pytest.mark.parametrize('name', LAUNCHER_NAMES)
def test_printed_script_equals_executed_commands(name, recorders, tmp_path, capsys):
    """Run the printed script in bash with special characters in paths; compare commands and files."""
    code_folder = tmp_path / "o'brien's code $HOME"
    arguments = [argument for argument in SUBMIT_COMMANDS[name] if not argument.startswith(('--code', '--workdir'))]
    arguments += ['--config.data.source=stdlib', "--config.optimizer.schedule=it's $HOME"]
    arguments[2:2] = [
        f'--workdir={HOSTILE_PATH}',
        "--env=WORDS=a 'b' $c",
        *([f'--code={code_folder}'] if name == 'slurm' else []),
    ]
    script = get_launcher_output(capsys, name, arguments)
    assert not recorders.calls_path.exists()
    assert run_launcher(name, [*arguments[:2], '--execute', *arguments[2:]]) == 0
    executed_calls, executed_files = recorders.pop_calls(), read_files(tmp_path)
    for path in ('runs', code_folder):
        shutil.rmtree(path, ignore_errors=True)
    subprocess.run(['bash', '-c', script], check=True, env=recorders.environment)
    assert recorders.pop_calls() == executed_calls
    assert read_files(tmp_path) == executed_files
    assert executed_calls


SECRET = 'hf_not_for_others'


@pytest.mark.slow
@pytest.mark.parametrize('mode', ['executed', 'printed'])
@pytest.mark.parametrize('name', LAUNCHER_NAMES)
def test_files_with_environment_variables_are_readable_only_by_owner(name, mode, recorders, tmp_path, capsys):
    arguments = [argument for argument in SUBMIT_COMMANDS[name] if not argument.startswith('--code')]
    arguments[2:2] = [f'--env=TOKEN={SECRET}', *([f'--code={tmp_path}/code'] if name == 'slurm' else [])]
    old_umask = os.umask(0o022)
    try:
        for _ in range(2):  # the second time with existing files that others may read
            if mode == 'executed':
                assert run_launcher(name, [*arguments[:2], '--execute', *arguments[2:]]) == 0
            else:
                subprocess.run(
                    ['bash', '-c', get_launcher_output(capsys, name, arguments)],
                    check=True,
                    env=recorders.environment,
                )
            secret_paths = [path for path, text in read_files(tmp_path).items() if SECRET.encode() in text]
            secret_paths = [tmp_path / path for path in secret_paths if not path.endswith('calls.jsonl')]
            assert secret_paths
            assert {oct(path.stat().st_mode & 0o777) for path in secret_paths} == {'0o600'}
            for path in secret_paths:
                path.chmod(0o644)
    finally:
        os.umask(old_umask)
    assert not any(SECRET in value for call in recorders.pop_calls() for value in call), 'on a command line'


def test_parse_variables_takes_missing_value_from_environment(monkeypatch):
    monkeypatch.setenv('TOKEN', f'{SECRET}=1')
    assert command_line.parse_variables(['TOKEN', 'EMPTY=', 'A=b=c']) == {
        'TOKEN': f'{SECRET}=1',
        'EMPTY': '',
        'A': 'b=c',
    }
    monkeypatch.delenv('TOKEN')
    with pytest.raises(job.UserError, match='TOKEN'):
        command_line.parse_variables(['TOKEN'])


@pytest.mark.parametrize('name', LAUNCHER_NAMES)
def test_run_receives_arguments_unchanged(name, recorders, capsys, tmp_path):
    """Run the generated bash script with an executable that prints its arguments."""
    command = [argument for argument in SUBMIT_COMMANDS[name] if not argument.startswith('--workdir')]
    command[2:2] = [f'--workdir={HOSTILE_PATH}', "--env=WORDS=a 'b' $(c) $HOME", '--compiled=gs://b/c d']
    code_option = '--code=/opt/sinklab' if name == 'slurm' else ''
    scheduler = get_scheduler(name)
    launcher_arguments, arguments = command_line.split_at_separator(
        [argument for argument in [*command[:2], code_option, *command[2:]] if argument]
    )
    options = command_line.make_parser(scheduler).parse_args(launcher_arguments)
    launch_job = command_line.make_job(scheduler, scheduler.verbs['submit'], options, tuple(arguments))
    program = tmp_path / 'env' / 'bin' / 'sinklab'
    program.parent.mkdir(parents=True)
    program.write_text(f'#!{sys.executable}\nimport os, sys; print([os.environ["WORDS"], *sys.argv[1:]])\n')
    program.chmod(0o755)
    process = subprocess.run(
        ['bash', '-c', launch_job.make_script(str(tmp_path))],
        check=True,
        capture_output=True,
        text=True,
        env=recorders.environment,
    )
    added_arguments = [f'--workdir={HOSTILE_PATH}', '--grace=120', '--compiled=gs://b/c d']
    assert ast.literal_eval(process.stdout) == ["a 'b' $(c) $HOME", *TRAIN_COMMAND[1:], *added_arguments]
    build_parser().parse_args(launch_job.argv[1:])  # sinklab accepts them


def test_escape_dollars_prevents_kubernetes_expansion():
    """Emulate Kubernetes, which expands $(NAME) and replaces $$ by $."""
    from launch.jobset import escape_dollars

    def expand(text):
        return re.sub(r'\$\$|\$\((\w+)\)', lambda match: '$' if match[0] == '$$' else 'EXPANDED', text)

    for text in (HOSTILE_PATH, '$(HOME)', '$$(HOME)', '$', '$$', 'plain'):
        assert expand(escape_dollars(text)) == text


@pytest.mark.parametrize(
    ('options', 'grace'),
    [
        ([], 120),
        (['--save=200'], 210),
        (['--save=200.5', '--grace=300'], 300),
        (['--grace=20'], 20),
        (['--spot'], 30),
    ],
)
def test_grace_period_exceeds_save_time(options, grace, recorders, capsys):
    argv = SUBMIT_COMMANDS['queued_resources']
    script = get_launcher_output(capsys, 'queued_resources', [*argv[:2], *options, *argv[2:]])
    assert f'--grace={grace} ' in script
    assert f'TimeoutStopSec={grace}\n' in script


def test_sweep_creates_one_job_per_row_and_seed(recorders, capsys):
    """Test the row, both seeds, the folder ROW-SEED and the name of each job."""
    argv = ['submit', 'pair', '--workdir=gs://b/pair', '--rows=softmax_1b,sigmoid_1b', '--seeds=0,3']
    argv += [*SITE_FLAGS['queued_resources'], '--', 'train', '--config', 'configs/scale.py', '--remat=auto']
    script = get_launcher_output(capsys, 'queued_resources', argv)
    runs = [shlex.split(line)[1:] for line in script.splitlines() if line.startswith('exec ./env')]
    folders = [f'gs://b/pair/{row}-{seed}' for seed in (0, 3) for row in ('softmax_1b', 'sigmoid_1b')]
    assert [job.find_option(tuple(run), 'workdir') for run in runs] == folders
    assert [job.find_option(tuple(run), 'config') for run in runs] == [
        f'configs/scale.py:{row}' for row in ('softmax_1b', 'sigmoid_1b') * 2
    ]
    for field in ('config.seed', 'config.data.seed'):
        assert [job.find_option(tuple(run), field) for run in runs] == ['0', '0', '3', '3']
    assert re.findall(r'^gcloud .* create (\S+)', script, re.MULTILINE) == [
        'pair-softmax-1b-0', 'pair-sigmoid-1b-0', 'pair-softmax-1b-3', 'pair-sigmoid-1b-3'
    ]  # fmt: skip
    assert {job.find_option(tuple(run), 'compiled') for run in runs} == {'gs://b/compiled'}


def test_job_name_replaces_characters_of_row_that_schedulers_refuse():
    sweep = job.Job('pair', ('train', '--config=f.py'), 'gs://b/pair', {}, 0, 0, 'none')
    row_jobs = job.expand_sweep(sweep, ['decay_0.5', 'amount_2.5b', '1.3m'], [0])
    assert [row_job.name for row_job in row_jobs] == ['pair-decay-0-5-0', 'pair-amount-2-5b-0', 'pair-1-3m-0']


def test_submit_checks_each_row_once_at_its_size_before_other_commands(recorders, capsys):
    argv = ['submit', 'pair', '--workdir=gs://b/pair', '--rows=a,b', '--seeds=0,1', *SITE_FLAGS['queued_resources']]
    argv += ['--', 'train', '--config=configs/scale.py', '--size=smoke']
    script = get_launcher_output(capsys, 'queued_resources', argv)
    commands = script.rpartition('\nEND\n')[2].splitlines()
    checks = [f'sinklab rows --config=configs/scale.py:{row} --size=smoke' for row in 'ab']
    assert commands[:2] == checks
    assert not set(checks) & set(commands[2:])


@pytest.mark.parametrize('from_flag', ['/shared/a', 'params:/shared/a@5', 'hf:/shared/llama', 'gguf:/shared/a.gguf'])
def test_slurm_accepts_paths_of_shared_folder_as_from(from_flag, recorders, capsys):
    get_launcher_output(capsys, 'slurm', [*SUBMIT_COMMANDS['slurm'], f'--from={from_flag}'])


@pytest.mark.parametrize(
    'accelerator', [f'{name}-{chips}' for name, kind in tpu_slices.TPU_KINDS.items() for chips in kind.topologies]
)
def test_parse_slice_topology_matches_chips_and_hosts(accelerator):
    tpu_slice = tpu_slices.parse_slice(accelerator)
    product = 1
    for side in tpu_slice.topology.split('x'):
        product *= int(side)
    assert product == tpu_slice.chips == tpu_slice.num_hosts * tpu_slice.chips_per_host
    assert tpu_slice.num_hosts == 1 or tpu_slice.chips_per_host == 4


@pytest.mark.parametrize(
    'seeds',
    [
        *('1', '3', '2,', '0,1,2', '5,3,', '1000', '0', '1001', 'a', '-1', '2.0', ',', '1,,2', '0,0'),
        *('5000000000', '5000000000,'),
    ],
)
def test_parse_seeds_flag_matches_parse_seeds_of_sweep(seeds):
    try:
        expected = parse_seeds(seeds)
    except ValueError:
        with pytest.raises(command_line.UserError, match=f'--seeds={seeds}'):
            command_line.parse_seeds_flag(seeds)
    else:
        assert command_line.parse_seeds_flag(seeds) == expected


# Modules of sinklab that import only the standard library or each other.
LIGHT_MODULES = 'sinklab', 'sinklab.errors', 'sinklab.exit_status', 'sinklab.config.seed_list'


def test_launchers_import_only_light_modules_and_are_not_imported():
    for path in (ROOT / 'launch').glob('*.py'):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom | ast.Import):
                name = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                is_launch_or_stdlib = name.partition('.')[0] in ('launch', *sys.stdlib_module_names)
                assert is_launch_or_stdlib or name in LIGHT_MODULES, f'{path} imports {name}'
    for path in (*(ROOT / 'sinklab').rglob('*.py'), *(ROOT / 'configs').glob('*.py')):
        assert not re.search(r'^\s*(import|from) launch', path.read_text(), re.MULTILINE), path


@pytest.mark.parametrize('name', LAUNCHER_NAMES)
def test_help_lists_every_verb_without_importing_heavy_modules(name):
    process = subprocess.run(
        [sys.executable, '-X', 'importtime', '-m', f'launch.{name}', '--help'],
        cwd=ROOT, env={**os.environ, 'PYTHONPATH': str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    verbs = command_line.COMMON_VERBS | get_scheduler(name).verbs
    assert all(
        re.search(rf'^  {verb} +{re.escape(definition.summary)}$', process.stdout, re.M)
        for verb, definition in verbs.items()
    )
    assert not re.search(r'\b(jax|numpy|yaml)\b', process.stderr)
