"""benchmarks/gpu.py on a CPU: its parts at a tiny size, how it continues, and the page of its results."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu, gpu_kernels, gpu_training
from docs import gpu_results, page_parts

ROOT = Path(__file__).parents[1]


def run_plan(part, out, *options):
    command = [sys.executable, '-m', 'benchmarks.gpu', part, '--tiny', f'--out={out}', *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def read_cells(out, part):
    return json.loads((out / f'{gpu.PARTS[part].module}.json').read_text())['cells']


@pytest.mark.exhaustive  # half a minute for the steps; the other parts have tests of their own
def test_speed_part_measures_attention_and_steps(tmp_path):
    assert run_plan('speed', tmp_path).returncode == 0
    cells = read_cells(tmp_path, 'speed')
    assert all(min(quartiles) > 0 for quartiles in cells['attention T=64 K=16']['forward_and_backward'].values())
    steps = cells['steps smoke']['steps']
    assert steps.keys() == {'softmax', 'sigmoid', 'plain JAX softmax'}
    assert all(min(step['seconds']) > 0 and step['planned_bytes'] > 0 for step in steps.values())


@pytest.mark.slow
def test_kernels_part_compares_special_cells_with_definition(tmp_path):
    assert run_plan('kernels', tmp_path).returncode == 0
    cells = read_cells(tmp_path, 'kernels')
    assert cells.keys() == gpu_kernels.make_cells('kernels', is_tiny=True).keys()
    assert all(1e-4 < gpu_kernels.get_largest_error(cell) < 2e-2 for cell in cells.values())
    assert [cell['leak'] for cell in cells.values() if 'leak' in cell] == [0.0]


@pytest.mark.slow
def test_natural_part_stops_and_continues(tmp_path):
    """The first command has no time, so that it measures nothing; the second one measures one missing cell."""
    assert run_plan('natural', tmp_path, '--minutes=1e-9').returncode == 0
    assert read_cells(tmp_path, 'natural') == {}
    assert run_plan('natural', tmp_path).returncode == 0
    cells = read_cells(tmp_path, 'natural')
    assert [step for step, _ in cells['smoke softmax batch 32 seed 0']['metrics']['sink/1']] == [0, 4]
    file = tmp_path / 'gpu_training.json'
    results = json.loads(file.read_text())
    results['cells']['smoke sigmoid batch 32 seed 0'] = dict(failed='an earlier failure', session=0)
    file.write_text(json.dumps(results))
    process = run_plan('natural', tmp_path)
    assert [line.split(': ')[1] for line in process.stdout.splitlines()[:1]] == ['smoke sigmoid batch 32 seed 0']
    assert read_cells(tmp_path, 'natural')['smoke sigmoid batch 32 seed 0']['is_complete']


@pytest.mark.slow
def test_cell_that_fails_is_recorded_and_others_are_measured(tmp_path):
    process = run_plan('natural', tmp_path, '--source=text:nothing.txt')
    cells = read_cells(tmp_path, 'natural')
    assert (process.returncode, [*cells]) == (1, ['smoke softmax batch 32 seed 0', 'smoke sigmoid batch 32 seed 0'])
    assert all('exit code 1' in cell['failed'] for cell in cells.values())


@pytest.mark.slow
def test_sigterm_stops_workers_and_keeps_what_is_measured(tmp_path):
    command = [sys.executable, '-m', 'benchmarks.gpu', 'kernels', '--tiny', f'--out={tmp_path}']
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        first_line = process.stdout.readline()
        process.terminate()
        assert process.wait(60) == 0
    assert 'measured' in first_line
    assert 0 < len(read_cells(tmp_path, 'kernels')) < 6


@pytest.mark.parametrize(
    'arguments', [['speeds'], ['natural'], ['kernels', '--minutes=0'], ['kernels', '--out=/dev/null/x']]
)
def test_wrong_arguments_are_refused_before_any_worker(arguments):
    process = subprocess.run(
        [sys.executable, '-m', 'benchmarks.gpu', *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert process.returncode in (1, 2)
    assert 'Traceback' not in process.stderr


def test_results_of_tiny_cells_are_not_copied_to_the_page(tmp_path):
    (tmp_path / 'gpu_speed.json').write_text('{"sessions": [{"command": "gpu speed --tiny"}], "cells": {}}')
    for folder in (tmp_path, tmp_path / 'nothing'):
        with pytest.raises(SystemExit):
            gpu_results.copy_results(folder)


def test_sizes_and_natural_share_the_run_of_60m():
    natural, sizes = (gpu_training.make_cells(part, is_tiny=False) for part in ('natural', 'sizes'))
    assert natural.keys() & sizes.keys() == {'paper softmax batch 32 seed 0'}


def test_without_a_gpu_no_cell_is_measured(tmp_path):
    """A cell that a worker calls unsupported because jax fell back to the CPU would never be measured."""
    process = subprocess.run(
        [sys.executable, '-m', 'benchmarks.gpu', 'speed', f'--out={tmp_path}'],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert 'no GPU' in process.stderr
    assert not any(cell['is_complete'] for cell in read_cells(tmp_path, 'speed').values())


MEASURE_SCRIPT = """
import argparse, json, pathlib, sys
from benchmarks import gpu_training
run = dict(size='smoke', row='softmax', batch_size=4, seed=0, steps=int(sys.argv[2]))
args = argparse.Namespace(out=pathlib.Path(sys.argv[1]), source='stdlib', bos_source=None)
print(json.dumps(gpu_training.measure_cell(run, args)))
"""


@pytest.mark.slow
def test_training_run_saves_after_sigterm_and_continues(tmp_path):
    def start(steps):
        command = [sys.executable, '-c', MEASURE_SCRIPT, str(tmp_path), str(steps)]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    metrics_file = tmp_path / 'runs' / 'smoke-softmax-batch-4-seed-0' / 'metrics.jsonl'
    with start(1_000_000) as process:
        deadline = time.monotonic() + 120
        while not (metrics_file.exists() and metrics_file.read_text().count('\n') > 20):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.terminate()
        stopped = json.loads(process.communicate()[0])
    assert not stopped['is_complete']
    last_step = gpu.count_steps(stopped)
    assert last_step > 0
    with start(last_step + 5) as process:
        continued = json.loads(process.communicate()[0])
    assert continued['is_complete']
    losses, earlier_losses = (result['metrics']['train/loss'] for result in (continued, stopped))
    assert losses[: len(earlier_losses)] == earlier_losses
    assert gpu.count_steps(continued) == last_step + 5


def test_page_has_the_generated_tables():
    page = gpu_results.PAGE.read_text(encoding='utf-8')
    for name, content in gpu_results.make_parts().items():
        page = page_parts.replace_part(page, name, content)
    assert page == gpu_results.PAGE.read_text(encoding='utf-8')
