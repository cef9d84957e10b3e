"""benchmarks/gpu.py on a CPU: its parts at a tiny size, how it continues, and the page of its results."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import gpu, gpu_kernels
from docs import gpu_results, page_parts

ROOT = Path(__file__).parents[1]


def run_plan(part, out, *options):
    command = [sys.executable, '-m', 'benchmarks.gpu', part, f'--out={out}', *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def read_cells(out, part):
    return json.loads((out / f'{gpu.PARTS[part].module}.json').read_text())['cells']


@pytest.mark.exhaustive  # half a minute for the steps
def test_speed_part_measures_attention_and_steps(tmp_path):
    assert run_plan('speed', tmp_path, '--tiny').returncode == 0
    cells = read_cells(tmp_path, 'speed')
    assert all(min(quartiles) > 0 for quartiles in cells['attention T=64 K=16']['forward_and_backward'].values())
    steps = cells['steps smoke']['steps']
    assert steps.keys() == {'softmax', 'sigmoid', 'plain JAX softmax'}
    assert all(min(step['seconds']) > 0 and step['planned_bytes'] > 0 for step in steps.values())


@pytest.mark.exhaustive
def test_kernels_part_measures_missing_cells(tmp_path):
    """The first command has no time, so that it measures nothing; the third one measures a cell that has failed."""
    assert run_plan('kernels', tmp_path, '--tiny', '--minutes=1e-9').returncode == 0
    assert read_cells(tmp_path, 'kernels') == {}
    assert run_plan('kernels', tmp_path, '--tiny').returncode == 0
    cells = read_cells(tmp_path, 'kernels')
    assert cells.keys() == gpu_kernels.make_cells(is_tiny=True).keys()
    assert all(1e-4 < gpu_kernels.get_largest_error(cell) < 2e-2 for cell in cells.values())
    assert [cell['leak'] for cell in cells.values() if 'leak' in cell] == [0.0]
    name = next(iter(cells))
    failed = dict(cells=cells | {name: dict(failed='an earlier failure', session=0)}, sessions=[])
    (tmp_path / 'gpu_kernels.json').write_text(json.dumps(failed))
    process = run_plan('kernels', tmp_path, '--tiny')
    assert [line.split(': ')[1] for line in process.stdout.splitlines()[:-1]] == [name]
    assert read_cells(tmp_path, 'kernels')[name]['is_complete']


def test_error_of_a_cell_is_its_result():
    module = SimpleNamespace(measure_cell=lambda cell, is_tiny: cell['missing'])
    assert 'KeyError' in gpu.measure_or_explain(module, {}, is_tiny=True)['failed']


def test_results_of_tiny_cells_are_not_copied_to_the_page(tmp_path):
    (tmp_path / 'gpu_speed.json').write_text('{"sessions": [{"command": "gpu speed --tiny"}], "cells": {}}')
    for folder in (tmp_path, tmp_path / 'nothing'):
        with pytest.raises(SystemExit):
            gpu_results.copy_results(folder)


def test_without_a_gpu_no_cell_is_measured(tmp_path):
    """A cell that a worker calls unsupported because jax fell back to the CPU would never be measured."""
    process = run_plan('speed', tmp_path)
    assert 'no GPU' in process.stderr
    assert not any(cell['is_complete'] for cell in read_cells(tmp_path, 'speed').values())


def test_page_has_the_generated_tables():
    page = gpu_results.PAGE.read_text(encoding='utf-8')
    for name, content in gpu_results.make_parts().items():
        page = page_parts.replace_part(page, name, content)
    assert page == gpu_results.PAGE.read_text(encoding='utf-8')
