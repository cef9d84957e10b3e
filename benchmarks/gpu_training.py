"""Training runs of benchmarks/gpu.py: when a sink emerges without a fixed first token (`natural`), by size (`sizes`).

A cell is a run of configs/natural.py. Its result has the metrics of METRICS by step; a run that --minutes stops is
incomplete, and has those that it reached.
"""

import argparse
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
SAVE_SECONDS = 30  # for the step and the checkpoint after SIGTERM
# In order of value: (size, rows).
NATURAL = [
    ('10m', ['softmax', 'sigmoid']),
    ('paper', ['softmax', 'sigmoid', 'sigmoid_apple']),
    ('10m', ['sigmoid_apple', 'bos', 'fixed_1', 'kv']),
    ('paper', ['bos', 'fixed_1', 'kv']),
]
# Sequences of a batch, in proportion to the parameters; the number of steps is the same. 60M has the 32 of its row.
BATCH_SIZES = {'10m': dict(batch_size=6), '25m': dict(batch_size=14), 'paper': {}}


def make_cells(part: str, is_tiny: bool) -> dict[str, dict]:
    """Make the cells of `natural` or `sizes`: {name: arguments of a run}."""
    if part == 'natural':
        runs = [dict(size=size, row=row, seed=0) for size, rows in NATURAL for row in rows]
    else:
        runs = [
            dict(size=size, row='softmax', seed=seed) | batch
            for seed in range(3)
            for size, batch in BATCH_SIZES.items()
        ]
    if is_tiny:
        runs = [run | dict(size='smoke') for run in runs[:2]]
    return {'-'.join(map(str, run.values())): run for run in runs}


def measure_cell(cell: dict, args: argparse.Namespace) -> dict:
    """Train, or continue to train, the run of a cell; return its metrics by step."""
    name = '-'.join(map(str, cell.values()))
    run_dir = args.out / 'runs' / name
    source = args.bos_source if cell['row'] == 'bos' and args.bos_source else args.source
    command = [
        *(sys.executable, '-m', 'sinklab', 'train', f'--config=configs/natural.py:{cell["row"]}'),
        *(f'--size={cell["size"]}', f'--workdir={run_dir}', f'--config.seed={cell["seed"]}', '--remat=auto'),
        f'--config.data.source={source}',
    ]
    if 'batch_size' in cell:
        command.append(f'--config.optimizer.batch_size={cell["batch_size"]}')
    # The worker itself needs hardly any memory of the GPU (benchmarks/gpu.py).
    process = subprocess.Popen(
        command, stdout=sys.stderr, env=os.environ | dict(XLA_PYTHON_CLIENT_PREALLOCATE='true')
    )

    def stop(*_) -> None:
        process.terminate()
        timer = threading.Timer(SAVE_SECONDS, process.kill)
        timer.daemon = True
        timer.start()

    signal.signal(signal.SIGTERM, stop)
    exit_code = process.wait()
    if exit_code not in (0, *STOPPED):
        return dict(failed=f'sinklab train ended with exit code {exit_code}')
    return dict(is_complete=exit_code == 0, metrics=read_metrics(run_dir))


def read_metrics(run_dir: Path) -> dict[str, list[list[float]]]:
    """Return {metric: its (step, value)}."""
    file = run_dir / 'metrics.jsonl'
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    values = {name: [[record['step'], record[name]] for record in records if name in record] for name in METRICS}
    return {name: pairs for name, pairs in values.items() if pairs}
