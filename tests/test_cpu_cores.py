"""Tests of CPU cores as devices of one run and as resources of parallel runs, and of claims."""

import json
import os
import subprocess
import sys

import pytest
from tiny_runs import read_timeless_records

from sinklab.sweep import run as sweep
from sinklab.sweep.plan import get_run_dir_name

TABLE = """
from sinklab.configs.table import table

ROWS = {
    'softmax': dict(diff={}, published={'sink/1': 18.18}, source='here'),
    'wild': dict(diff={'optimizer.peak_learning_rate': 1e30}, published={}, source='here'),
    'sigmoid': dict(
        diff={'model.attention.similarity': 'sigmoid', 'model.attention.normalizer': 'none'},
        published={'sink/1': 0.44},
        source='here',
    ),
}
get_config = table(ROWS, {'data.source': SOURCE})
"""
NUM_SEEDS = 5
CLAIMS = """
def claim(left, relation, right):
    return dict(statement='A.', source='here', left=left, relation=relation, right=right, min_difference=5.0)


MASS = 'mass/row'
CLAIMS = {
    'more': claim(('TABLE:sigmoid', MASS), '>', ('TABLE:softmax', MASS)),
    'less': claim(('TABLE:sigmoid', MASS), '<', ('TABLE:softmax', MASS)),
    'same': claim(('TABLE:softmax', MASS), '=', ('TABLE:softmax', MASS, 'start')),
    'wild': claim(('TABLE:wild', MASS), '>', ('TABLE:softmax', MASS)),
    'large': dict(statement='A.', source='here', untestable_reason='it is large'),
}
"""


@pytest.fixture(scope='module')
def config_dir(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp('files')
    (folder / 'mine.py').write_text(TABLE.replace('SOURCE', repr(corpus)))
    # The rows have a mass below 1.5 and above 6, so the threshold must be below their difference.
    (folder / 'claims.py').write_text(CLAIMS.replace('TABLE', f'{folder}/mine.py').replace('5.0', '1.0'))
    return folder


def run_sinklab(config_dir, subcommand, *arguments):
    """Run sinklab as a program without device settings in the environment."""
    unset_variables = {'XLA_FLAGS', 'JAX_NUM_CPU_DEVICES'}
    environment = {name: value for name, value in os.environ.items() if name not in unset_variables}
    environment |= {'SINKLAB_CACHE': f'{config_dir}/cache', 'JAX_PLATFORMS': 'cpu'}
    command = [sys.executable, '-m', 'sinklab', subcommand, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)


@pytest.mark.slow
def test_train_splits_cpu_into_requested_devices(config_dir, tmp_path):
    options = [f'--config={config_dir}/mine.py:softmax', '--size=smoke', '--config.log.every_steps=1']
    for num_devices in (1, 2):
        completed = run_sinklab(
            config_dir, 'train', *options, f'--data={num_devices}', f'--workdir={tmp_path}/{num_devices}'
        )
        assert completed.returncode == 0, completed.stderr
    assert '2 devices (data 2' in completed.stderr
    one_device, two_devices = (read_timeless_records(tmp_path / str(num_devices)) for num_devices in (1, 2))
    for record, other_record in zip(one_device, two_devices, strict=True):
        assert record == pytest.approx(other_record, rel=1e-4, abs=1e-5)


@pytest.mark.exhaustive
def test_validation_in_many_parts_does_not_hang_on_two_devices(config_dir, tmp_path):
    options = ['--size=smoke', '--config.optimizer.steps=2', '--config.valid.windows=120', '--micro_batch=2']
    completed = run_sinklab(
        config_dir,
        'train',
        f'--config={config_dir}/mine.py:softmax',
        *options,
        '--data=2',
        f'--workdir={tmp_path}/run',
    )
    assert completed.returncode == 0, completed.stderr[-2000:]
    assert 'valid/loss' in read_timeless_records(tmp_path / 'run')[-1]


@pytest.mark.slow
def test_train_keeps_cpu_device_count_of_environment(config_dir, tmp_path, monkeypatch):
    monkeypatch.setenv('JAX_NUM_CPU_DEVICES', '1')
    options = [f'--config={config_dir}/mine.py:softmax', '--size=smoke', '--data=2', f'--workdir={tmp_path}/run']
    command = [sys.executable, '-m', 'sinklab', 'train', *options]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert completed.returncode == 1
    assert '--data=2' in completed.stderr
    assert '1 devices' in completed.stderr


def test_split_cores_partitions_all_cores_among_jobs(monkeypatch):
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: {0, 2, 3, 5, 7}, raising=False)
    assert sweep.split_cores(1) == [None]
    assert sweep.split_cores(2) == [[0, 3, 7], [2, 5]]
    assert sweep.split_cores(5) == [[0], [2], [3], [5], [7]]
    assert sweep.split_cores(6) == [[0], [2], [3], [5], [7], [0]]


def test_run_dir_name_includes_table_of_row():
    assert get_run_dir_name('softmax', 3) == 'softmax-3'
    assert get_run_dir_name('attention:alpha_0.1', 3) == 'attention.alpha_0.1-3'
    assert get_run_dir_name('/somewhere/mine.py:softmax', 0) == 'mine.softmax-0'


@pytest.fixture(scope='module')
def claims_run(config_dir, tmp_path_factory):
    """Run all claims and return (the folder of the runs, the printed entries)."""
    path = tmp_path_factory.mktemp('claimed') / 'runs'
    completed = run_sinklab(config_dir, 'claims', *make_claims_options(config_dir, path), '--json', '--jobs=2')
    assert completed.returncode == 0, completed.stderr
    return path, json.loads(completed.stdout)


def make_claims_options(config_dir, path):
    return [f'--config={config_dir}/claims.py', '--size=smoke', f'--seeds={NUM_SEEDS}', f'--workdir={path}']


@pytest.mark.exhaustive
def test_claims_trains_required_rows_and_judges_each_claim(claims_run):
    path, entries = claims_run
    assert {entry['claim']: entry['verdict'] for entry in entries} == {
        'more': 'holds',
        'less': 'contradicted',
        'same': 'holds',
        'wild': 'diverged',
        'large': 'not testable here',
    }
    (claim,) = (entry for entry in entries if entry['claim'] == 'more')
    masses = {
        row: [read_timeless_records(path / f'mine.{row}-{seed}')[-1]['mass/row'] for seed in range(NUM_SEEDS)]
        for row in ('sigmoid', 'softmax')
    }
    expected = [sigmoid_mass - softmax_mass for sigmoid_mass, softmax_mass in zip(*masses.values(), strict=True)]
    assert [*claim['differences'].values()] == pytest.approx(expected)
    assert claim['published'] is None
    assert {folder.name for folder in path.iterdir() if folder.is_dir()} == {
        f'mine.{row}-{seed}' for row in ('softmax', 'sigmoid', 'wild') for seed in range(NUM_SEEDS)
    }
