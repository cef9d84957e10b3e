"""Command `sinklab sweep`: rows, seeds, outcomes, interruption and summary table."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest
from commands import get_error_line, write_table
from tiny_runs import read_timeless_records
from tiny_specs import make_tiny_spec

from sinklab.cli.main import build_parser
from sinklab.cli.sweep import make_train_command
from sinklab.config.spec import Layout
from sinklab.errors import UserError
from sinklab.process_group import ProcessGroup, join_processes
from sinklab.run_dir import RunDir
from sinklab.storage.folder_lock import hold_folder
from sinklab.sweep.plan import SweepRun, plan_runs
from sinklab.sweep.run import run_sweep

TABLE = """
import os, signal, sys, time
from sinklab.configs.table import table

ROWS = {
    'softmax': dict(diff={}, published={'sink/1': 18.18, 'valid/loss': 3.73}, source='here'),
    'wild': dict(diff={'optimizer.peak_learning_rate': 1e30}, published={'fails': True}, source='here'),
    'late': dict(diff={'optimizer.weight_decay': 0.2}, published={'sink/1': 1}, source='here', note='unlikely'),
    'killed': dict(diff={'optimizer.weight_decay': 0.3}, published={'sink/1': 1.0}, source='here'),
    'sigmoid': dict(
        diff={'model.attention.similarity': 'sigmoid', 'model.attention.normalizer': 'none'},
        published={'sink/1': 0.44, 'sink/2': 2.5},
        source='here',
    ),
}
get_config = table(ROWS, {'data.source': SOURCE})

if 'train' in sys.argv and ':killed' in ' '.join(sys.argv):
    os.kill(os.getpid(), signal.SIGKILL)
if 'train' in sys.argv and ':late' in ' '.join(sys.argv):
    raise ValueError('what only its own process can see')

if 'train' in sys.argv and 'INTERRUPT' in os.environ:
    from sinklab.train import loop

    def report(run, record, is_logged, report=loop.MetricsLogger.report_record):
        report(run, record, is_logged)
        if record['step'] == 2:
            eval(os.environ['INTERRUPT'])
            time.sleep(2)

    loop.MetricsLogger.report_record = report
"""


@pytest.fixture(scope='module')
def table(tmp_path_factory, corpus):
    path = tmp_path_factory.mktemp('table') / 'mine.py'
    path.write_text(TABLE.replace('SOURCE', repr(corpus)))
    return path


def run_sweep_command(table, workdir, *arguments, **environment):
    """Run the real program; its processes share a cache of compiled functions and tokens."""
    command = [sys.executable, '-m', 'sinklab', 'sweep', f'--config={table}', '--size=smoke', f'--workdir={workdir}']
    environment = {**os.environ, 'SINKLAB_CACHE': f'{table.parent}/cache', **environment}
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=500, env=environment, start_new_session=True
    )


@pytest.fixture(scope='module')
def finished_sweep(table, tmp_path_factory):
    """Return (folder of runs, completed process of the sweep)."""
    path = tmp_path_factory.mktemp('sweep') / 'runs'
    return path, run_sweep_command(table, path, '--seeds=7,', '--config.log.every_steps=1', '--json')


def get_sweep_error(capsys, table, workdir, *arguments):
    return get_error_line(capsys, 'sweep', f'--config={table}', f'--workdir={workdir}', *arguments)


NEW_FILES = 'sweep.json', 'owner.json', 'run.lock'  # which each sweep writes


def read_mtimes(path):
    return {file: file.stat().st_mtime_ns for file in path.rglob('*') if file.name not in NEW_FILES and file != path}


@pytest.mark.slow
def test_sweep_records_outcome_of_every_row_despite_failures(finished_sweep):
    path, process = finished_sweep
    assert process.returncode == 1, process.stderr
    rows = json.loads(process.stdout)
    assert {row['row']: row['outcome'] for row in rows} == {
        'softmax': 'done 1/1',
        'wild': 'diverged 1/1, published: fails',
        'late': 'refused 1/1',
        'killed': 'crashed 1/1',
        'sigmoid': 'done 1/1',
    }
    assert rows == json.loads((path / 'sweep.json').read_text())
    assert 'late refused' in process.stderr
    assert 'what only its own process can see' in process.stderr
    assert any('killed crashed' in line and 'SIGKILL' in line for line in process.stderr.splitlines())
    assert rows[1]['reasons']['7'].startswith('train/')
    assert any(
        all(part in line for part in ('wild', 'smoke', 'optimizer.peak_learning_rate', '0.0004', '1e+30'))
        for line in process.stderr.splitlines()
    )
    assert [row['diff'] for row in rows[:3]] == [
        {},
        {'optimizer.peak_learning_rate': 1e30},
        {'optimizer.weight_decay': 0.2},
    ]
    assert RunDir(path / 'wild-7').read_json('row')['diff'] == {'optimizer.peak_learning_rate': 1e30}
    kinds = {row: RunDir(path / f'{row}-7').read_json('outcome')['kind'] for row in ('softmax', 'wild')}
    assert kinds == {'softmax': 'done', 'wild': 'diverged'}
    configs = [RunDir(path / f'{row}-7').read_json('config') for row in ('softmax', 'wild', 'sigmoid')]
    assert [(config['seed'], config['data']) for config in configs] == [(7, configs[0]['data'] | {'seed': 7})] * 3
    assert rows[2]['note'] == 'unlikely'
    assert (rows[0]['size'], rows[0]['overrides']) == ('smoke', {'log.every_steps': '1'})


@pytest.mark.slow
def test_sweep_skips_completed_and_diverged_runs(table, finished_sweep, tmp_path):
    path = shutil.copytree(finished_sweep[0], tmp_path / 'runs')
    old_mtimes = read_mtimes(path)
    process = run_sweep_command(table, path, '--rows=softmax,wild,sigmoid', '--seeds=7,')
    assert process.returncode == 0, process.stderr
    assert read_mtimes(path) == old_mtimes
    assert process.stderr.count('done before') == 2
    assert process.stderr.count('diverged before') == 1
    assert 'diverged 1/1, published: fails' in process.stdout
    assert 'Sink_1 is ' in process.stdout


@pytest.mark.parametrize(
    ('rows', 'arguments', 'texts'),
    [
        ('misspelt', [], ['row misspelt ', 'optimizer.stps', 'mean optimizer.steps?']),
        ('powerless,misspelt', [], ['row powerless ', 'misspelt', 'config.model.attention.power']),
        ('narrow', ['--tensor=4'], ['row narrow ', 'config.model.heads', '--tensor=4']),
    ],
)
def test_sweep_rejects_invalid_row_before_training(capsys, tmp_path, rows, arguments, texts):
    diffs = {'plain': {}, 'misspelt': {'optimizer.stps': 5}, 'powerless': {'model.attention.power': 2.0}}
    diffs['narrow'] = {'model.heads': 2, 'model.head_width': 2}
    table = {name: dict(diff=diff, published={}, source='here') for name, diff in diffs.items()}
    write_table(tmp_path / 'mine.py', table)
    line = get_sweep_error(capsys, tmp_path / 'mine.py', tmp_path / 'runs', f'--rows=plain,{rows}', *arguments)
    assert [text for text in (*texts, 'nothing was trained') if text not in line] == []
    assert not (tmp_path / 'runs').exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ('interrupt', 'exit_code'),
    [
        ('os.killpg(0, signal.SIGINT)', 130),  # Ctrl-C, sent to all processes of the terminal
        # Sent to the sweep alone:
        pytest.param('os.kill(os.getppid(), signal.SIGTERM)', 143, marks=pytest.mark.exhaustive),
        pytest.param('os.killpg(0, signal.SIGTERM)', 143, marks=pytest.mark.exhaustive),
    ],
)
def test_sweep_saves_run_on_interrupt_and_resumes(table, finished_sweep, tmp_path, interrupt, exit_code):
    arguments = ['--rows=softmax,sigmoid', '--seeds=7,']
    interrupted = run_sweep_command(table, tmp_path, *arguments, INTERRUPT=interrupt)
    assert interrupted.returncode == exit_code, interrupted.stderr
    assert 'saved' in interrupted.stderr, interrupted.stderr
    assert f'{sys.executable} -m sinklab sweep --config={table}' in interrupted.stderr
    assert [row['outcome'] for row in json.loads((tmp_path / 'sweep.json').read_text())] == ['to do 1/1'] * 2
    assert not (tmp_path / 'sigmoid-7').exists()
    resumed = run_sweep_command(table, tmp_path, '--rows=softmax', '--seeds=7,')
    assert resumed.returncode == 0, resumed.stderr
    assert read_timeless_records(tmp_path / 'softmax-7') == read_timeless_records(finished_sweep[0] / 'softmax-7')


@pytest.mark.parametrize(
    ('argument', 'texts'),
    [
        ('--rows=softmax,sigmod', ["'sigmod'", 'mean sigmoid?']),
        ('--rows=', ["''", 'softmax']),
        ('--rows=softmax,softmax', ["'softmax' twice"]),
        ('--seeds=0,x', ['--seeds=0,x']),
        ('--config.data.seed=5', ['--config.data.seed=5', '--seeds']),
        ('--tensorboard', ['--tensorboard']),
        ('--config.model.attention.power=2', ['config.model.attention.power', '2.0']),
        ('--tensor=64', ['--tensor=64']),
        ('--config=configs/default.py', ['configs/default.py']),
        ('--config=configs/quickstart.py:softmax', ['--config=configs/quickstart.py --rows=softmax']),
    ],
)
def test_sweep_rejects_invalid_argument_before_training(capsys, table, tmp_path, argument, texts):
    line = get_sweep_error(capsys, table, tmp_path / 'runs', argument)
    assert [text for text in texts if text not in line] == []
    assert not (tmp_path / 'runs').exists()


def test_plan_has_all_rows_of_a_seed_before_the_next_seed(tmp_path):
    spec = make_tiny_spec()
    runs = plan_runs(['a', 'b'], [0, 7], f'{tmp_path}/runs', lambda row, seed: (spec, {}), Layout())
    assert list(map(str, runs)) == ['a, seed 0', 'b, seed 0', 'a, seed 7', 'b, seed 7']


def test_sweep_row_runs_as_single_process_in_slurm_job(monkeypatch, tmp_path):
    for name, value in dict(SLURM_JOB_ID='1', SLURM_NTASKS='2').items():
        monkeypatch.setenv(name, value)
    command = make_train_command('mine.py', SweepRun('softmax', 0, RunDir(tmp_path), None, None), [])
    options, _ = build_parser().parse_known_args(command[command.index('train') :])
    assert join_processes(options.coordinator, options.processes, options.process, 5) == ProcessGroup()


def test_sweep_rejects_second_sweep_in_same_folder(capsys, table, tmp_path):
    with hold_folder(tmp_path / 'runs'):
        line = get_sweep_error(capsys, table, tmp_path / 'runs', '--rows=softmax')
    assert line.startswith('sinklab sweep: ')
    assert f'{tmp_path}/runs' in line
    assert f'process {os.getpid()}' in line
    assert not (tmp_path / 'runs').exists()


class SilentDisplay:
    """Display that shows nothing."""

    def __getattr__(self, name):
        return lambda *arguments: False


def test_run_sweep_starts_no_run_after_another_job_took_the_folder(tmp_path):
    def check_owner():
        raise UserError('another job has taken over')

    runs = [SweepRun('softmax', 0, RunDir(tmp_path), None, None)]
    with pytest.raises(UserError):
        run_sweep(runs, lambda run: pytest.fail('a run was started'), SilentDisplay(), check_owner)


def test_run_sweep_stops_running_jobs_after_error(tmp_path):
    def make_command(run):
        if run.seed == 1:
            raise RuntimeError('seed 1')
        return [sys.executable, '-c', 'import time; time.sleep(60)']

    runs = [SweepRun('softmax', seed, RunDir(tmp_path / str(seed)), None, None) for seed in (0, 1)]
    start_time = time.monotonic()
    with pytest.raises(RuntimeError, match='seed 1'):
        run_sweep(runs, make_command, SilentDisplay(), lambda: None, jobs=2)
    assert time.monotonic() - start_time < 30
