"""Training runs of benchmarks/gpu.py: when a sink emerges without a fixed first token (`natural`), by size (`sizes`).

A cell is a run of configs/natural.py. Its result has the metrics of METRICS by step; a run that --minutes stops is
incomplete, and has those that it reached.
"""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

METRICS = (
    'train/loss',
    'valid/loss',
    'sink/1',
    'sink/star',
    'alpha/1',
    'mass/row',
    'norm/value/ratio',
    'speed/tokens_per_second',
)
# Exit codes of a run that was stopped; the first one after a checkpoint.
STOPPED = 143, -signal.SIGTERM, -signal.SIGKILL
DIVERGED = 3  # exit code of a run whose loss is no longer finite
SAVE_SECONDS = 30  # for the step and the checkpoint after SIGTERM
# In order of value: (size, rows).
NATURAL = [
    ('10m', ['softmax', 'sigmoid']),
    ('paper', ['softmax', 'sigmoid', 'sigmoid_apple']),
    ('10m', ['sigmoid_apple', 'bos', 'fixed_1', 'kv']),
    ('paper', ['bos', 'fixed_1', 'kv']),
]
BATCH_SIZE = 32
BATCH_SIZES = {'10m': 6, '25m': 14, 'paper': 32}  # in proportion to the parameters, with the same number of steps


def make_cells(part: str, is_tiny: bool) -> dict[str, dict]:
    """Make the cells of `natural` or `sizes`: {name: arguments of a run}."""
    if part == 'natural':
        runs = [dict(size=size, row=row, batch_size=BATCH_SIZE, seed=0) for size, rows in NATURAL for row in rows]
    else:
        batches = itertools.product(range(3), BATCH_SIZES.items())
        runs = [dict(size=size, row='softmax', batch_size=batch, seed=seed) for seed, (size, batch) in batches]
    if is_tiny:
        runs = [run | dict(size='smoke') for run in runs[:2]]
    return {describe_run(run): run for run in runs}


def describe_run(run: dict) -> str:
    return f'{run["size"]} {run["row"]} batch {run["batch_size"]} seed {run["seed"]}'


def measure_cell(cell: dict, args: argparse.Namespace) -> dict:
    """Train, or continue to train, the run of a cell; return its metrics by step."""
    run_dir = args.out / 'runs' / describe_run(cell).replace(' ', '-')
    source = args.bos_source if cell['row'] == 'bos' and args.bos_source else args.source
    command = [
        *(sys.executable, '-m', 'sinklab', 'train', f'--config=configs/natural.py:{cell["row"]}'),
        *(f'--size={cell["size"]}', f'--workdir={run_dir}', f'--config.seed={cell["seed"]}', '--remat=auto'),
        f'--config.data.source={source}',
        *(f'--config.optimizer.{name}={cell[name]}' for name in ('batch_size', 'steps') if name in cell),
    ]
    processes: list[subprocess.Popen] = []

    def stop(*_) -> None:
        for process in processes:
            process.terminate()
            timer = threading.Timer(SAVE_SECONDS, process.kill)
            timer.daemon = True
            timer.start()

    signal.signal(signal.SIGTERM, stop)
    # The worker itself needs hardly any memory of the GPU (benchmarks/gpu.py).
    environment = os.environ | dict(XLA_PYTHON_CLIENT_PREALLOCATE='true')
    processes.append(subprocess.Popen(command, stdout=sys.stderr, env=environment))
    exit_code = processes[0].wait()
    metrics = read_metrics(run_dir)
    if exit_code not in (0, DIVERGED, *STOPPED):
        return dict(failed=f'sinklab train ended with exit code {exit_code}', metrics=metrics)
    return dict(is_complete=exit_code in (0, DIVERGED), has_diverged=exit_code == DIVERGED, metrics=metrics)


def read_metrics(run_dir: Path) -> dict[str, list[list[float]]]:
    """Return {metric: its (step, value)}."""
    file = run_dir / 'metrics.jsonl'
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    values = {name: [[record['step'], record[name]] for record in records if name in record] for name in METRICS}
    return {name: pairs for name, pairs in values.items() if pairs}
