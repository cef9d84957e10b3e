"""benchmarks/device.py without a device: results of its parts, and no leftover processes."""

import contextlib
import dataclasses
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import make_tiny_spec

BENCHMARKS = Path(__file__).parents[1] / 'benchmarks'
EXITS_ON_SIGTERM = pytest.param('heeds', None, marks=pytest.mark.exhaustive)
IGNORES_SIGTERM = pytest.param('deaf', None, marks=pytest.mark.exhaustive)
BENCHMARK_COMMAND = [sys.executable, BENCHMARKS / 'device.py']
# Starts a child and writes both pids to a file. With the argument `deaf` it ignores SIGTERM.
PARENT_SCRIPT = """
import os, signal, subprocess, sys, time
heeds, file = sys.argv[1:]
if heeds == 'deaf':
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
with open(file + '.part', 'w') as note:
    note.write(f'{os.getpid()} {child.pid}')
os.rename(file + '.part', file)
if heeds != 'leaves':
    time.sleep(600)
"""


def is_alive(pid):
    """Return whether a process exists and is no zombie."""
    with contextlib.suppress(OSError):
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] not in 'ZX'
    return False


def wait_for_pids(pid_file):
    """Wait for a file of pids and return them."""
    deadline = time.monotonic() + 60
    while not pid_file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return [int(pid) for pid in pid_file.read_text().split()]


def assert_processes_exited(pids):
    deadline = time.monotonic() + 5
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if is_alive(pid)]


@pytest.fixture
def device_globals(monkeypatch):
    """Return the globals of device.py."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return runpy.run_path(str(BENCHMARKS / 'device.py'))


@pytest.mark.slow
@pytest.mark.parametrize(('kind', 'exit_code'), [EXITS_ON_SIGTERM, IGNORES_SIGTERM, ('leaves', 0)])
def test_run_with_timeout_leaves_no_processes(device_globals, monkeypatch, tmp_path, kind, exit_code):
    """The command exits on SIGTERM, ignores it or leaves its child running."""
    monkeypatch.setitem(device_globals['run_with_timeout'].__globals__, 'TERMINATION_SECONDS', 0.5)
    pid_file = tmp_path / 'pids'
    assert (
        device_globals['run_with_timeout']([sys.executable, '-c', PARENT_SCRIPT, kind, str(pid_file)], seconds=3.0)
        == exit_code
    )
    assert_processes_exited(wait_for_pids(pid_file))


@pytest.mark.slow
def test_benchmark_ends_child_processes_on_sigterm(tmp_path):
    """The part `tests` starts a pytest that does not end."""
    pid_file, stub_dir = tmp_path / 'pids', tmp_path / 'stub'
    stub_dir.mkdir()
    (stub_dir / 'pytest.py').write_text(f'import sys\nsys.argv = ["", "heeds", {str(pid_file)!r}]\n{PARENT_SCRIPT}')
    options = [f'--out={tmp_path}', '--parts=tests', '--smoke', '--minutes=5']
    process = subprocess.Popen([*BENCHMARK_COMMAND, *options], env=os.environ | dict(PYTHONPATH=str(stub_dir)))
    pids = wait_for_pids(pid_file)
    assert all(map(is_alive, pids))
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
    assert_processes_exited(pids)
    assert json.loads((tmp_path / 'tests.json').read_text())['unfinished'] == ['tests']


@pytest.mark.exhaustive  # takes half a minute; the other tests run single parts
def test_smoke_run_writes_results_of_all_parts(tmp_path):
    (tmp_path / 'memory.json').write_text('{"memory": {"older": {}}}')
    process = subprocess.run([*BENCHMARK_COMMAND, f'--out={tmp_path}', '--smoke'], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    results = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob('*.json')}
    assert results.keys() == {'steps', 'kernels', 'tests', 'memory', 'gaps'}
    assert not any(part['unfinished'] for part in results.values())
    rows = {'softmax_60m', 'sigmoid_60m', 'softmax_1b', 'sigmoid_1b'}
    assert results['steps']['steps'].keys() == results['memory']['memory'].keys() == rows
    softmax = results['steps']['steps']['softmax_60m']
    assert softmax['ours']['tokens_per_second'] > 0
    assert softmax['plain']['tokens_per_second'] > 0
    assert softmax['plain']['remat'] == 'none', 'it fits'
    assert softmax['ours']['mfu'] is None, 'of a CPU no peak is published'
    assert results['gaps']['gaps'].keys() == {'softmax_60m', 'sigmoid_60m'}
    assert results['memory']['memory']['softmax_1b']['planned'] > 0
    assert results['memory']['memory']['softmax_1b']['used_of_planned'] is None, 'a CPU does not say it'
    assert 'GPU' in results['kernels']['output_tail']


@pytest.mark.slow
def test_measure_memory_reports_used_share_of_planned_memory(device_globals, monkeypatch, tmp_path):
    monkeypatch.setitem(
        device_globals['measure_memory'].__globals__, 'get_memory_stats', lambda: dict(peak_bytes_in_use=1000)
    )
    arguments = device_globals['argparse'].Namespace(out=tmp_path, one='memory', row='softmax_60m', smoke=True)
    (results,) = device_globals['measure_memory'](arguments)
    row = results['memory']['softmax_60m']
    assert (row['used'], row['used_of_planned'], row['goal']) == (1000, 1000 / row['planned'], (0.9, 1.1))
    assert row['by_shapes'] > 0


@pytest.mark.slow
def test_make_baseline_run_uses_remat_only_if_memory_is_short(device_globals, monkeypatch):
    spec = make_tiny_spec()
    assert device_globals['make_baseline_run'](spec)[0] == 'none'
    monkeypatch.setattr('sinklab.parallel.device_mesh.get_device_memory_bytes', lambda: 1000)
    remat, run = device_globals['make_baseline_run'](spec)
    assert (remat, run(1) > 0) == ('full', True)


@pytest.mark.slow
def test_baseline_loss_does_not_depend_on_remat(device_globals):
    import jax_baseline

    spec = dataclasses.replace(make_tiny_spec(), seed=1)
    losses = []
    for remat in jax_baseline.REMAT_POLICIES:
        state, step = jax_baseline.make_train_step(spec, remat)
        for _ in range(3):
            state, loss = step(state, device_globals['make_ids'](spec))
        losses.append(float(loss))
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_unknown_part_is_refused_with_one_line(tmp_path):
    process = subprocess.run(
        [*BENCHMARK_COMMAND, f'--out={tmp_path}', '--parts=speed'], capture_output=True, text=True
    )
    assert (process.returncode, len(process.stderr.splitlines())) == (1, 1)
    assert 'speed' in process.stderr
    assert 'steps, kernels, tests, memory, gaps' in process.stderr
