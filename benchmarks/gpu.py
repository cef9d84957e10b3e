"""Measure this project on one GPU: a plan of four parts, each of which continues where it stopped.

    make gpu PART=kernels
    python -m benchmarks.gpu natural --source=store:stores/large [--minutes=9] [--out=DIR]
    python -m benchmarks.gpu speed --tiny --out=/tmp/gpu

The parts, in order of value:

- kernels: attention kernels against the definition (gpu_kernels.py).
- natural: models of 10M and 60M parameters without a fixed first token (gpu_training.py, configs/natural.py). On
  one H200 a step of 60M takes 126 to 134 ms (docs/results/gpu.md), thus a run of 4,000 steps at most 9 minutes.
- speed: attention alone, and training steps (gpu_speed.py).
- sizes: softmax at 10M, 25M and 60M, with tokens in proportion and three seeds (gpu_training.py); 45 minutes at most.

A part is a list of cells. The result of a cell is written to DIR as soon as it is measured. After --minutes the part
stops; the same command measures the cells that are neither in DIR nor, if DIR is new, in docs/results. A training run
continues from its checkpoint in DIR/runs, if that is still there. --tiny measures a few tiny cells on any device.
python -m docs.gpu_results DIR copies the results to docs/results and writes docs/results/gpu.md.
"""

import argparse
import concurrent.futures
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.argument_types import parse_positive_number

ROOT = Path(__file__).resolve().parents[1]
RESULTS_DIR = ROOT / 'docs' / 'results'
GRACE_SECONDS = 45  # from SIGTERM to SIGKILL; a training run saves a checkpoint in them


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the plan.

    Attributes:
        module: The module of benchmarks/ with make_cells(part, is_tiny) and measure_cell(cell, args).
        num_processes: Number of worker processes at once.
        num_cells: Number of cells that a worker process measures.
        environment: Environment variables of the workers.
    """

    module: str
    num_processes: int = 1
    num_cells: int = 1
    environment: dict[str, str] = dataclasses.field(default_factory=dict)

    def import_module(self) -> Any:
        return importlib.import_module(f'benchmarks.{self.module}')


# Workers for kernels share the GPU and compile most of the time; their programs run only once.
SHARED_GPU = dict(XLA_PYTHON_CLIENT_PREALLOCATE='false', XLA_FLAGS='--xla_gpu_autotune_level=0')
PARTS = {
    'kernels': Part('gpu_kernels', num_processes=8, num_cells=12, environment=SHARED_GPU),
    'natural': Part('gpu_training', environment=dict(XLA_PYTHON_CLIENT_PREALLOCATE='false')),
    'speed': Part('gpu_speed'),
    'sizes': Part('gpu_training', environment=dict(XLA_PYTHON_CLIENT_PREALLOCATE='false')),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('part', choices=PARTS, metavar='PART', help=', '.join(PARTS))
    parser.add_argument('--out', type=Path, default=ROOT / 'build' / 'gpu', metavar='DIR', help='default: build/gpu')
    parser.add_argument('--minutes', type=parse_positive_number, default=9.0, help='of this command (default: 9)')
    parser.add_argument('--source', default='stdlib', help='config.data.source of training runs, such as store:DIR')
    parser.add_argument('--tiny', action='store_true', help='a few tiny cells, on any device')
    parser.add_argument('--worker', action='store_true', help=argparse.SUPPRESS)
    args = parser.parse_args()
    return run_worker(args) if args.worker else run_part(args)


def run_part(args: argparse.Namespace) -> int:
    """Measure the missing cells of a part; return 1 if some are missing afterwards."""
    part = PARTS[args.part]
    file = args.out / f'{part.module}.json'
    deadline = time.monotonic() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    earlier_file = file if file.exists() or args.tiny else RESULTS_DIR / file.name
    results = json.loads(earlier_file.read_text()) if earlier_file.exists() else dict(sessions=[], cells={})
    names, cells, lock = [*part.import_module().make_cells(args.part, args.tiny)], results['cells'], threading.Lock()

    def record(name: str, result: dict, session: dict) -> None:
        with lock:
            if session not in results['sessions']:
                results['sessions'].append(session)
            cells[name] = result | dict(session=results['sessions'].index(session))
            file.write_text(json.dumps(results, indent=1) + '\n')
        print(f'{args.part}: {name}: {result.get("failed", "measured")}, {result["seconds"]:.0f} s', flush=True)

    def find_missing() -> list[str]:
        """Return the cells without a complete result, those that failed last."""
        missing = [name for name in names if not cells.get(name, {}).get('is_complete')]
        return sorted(missing, key=lambda name: 'failed' in cells.get(name, {}))

    missing = find_missing()
    with concurrent.futures.ThreadPoolExecutor(part.num_processes) as pool:
        for start in range(0, len(missing), part.num_cells):
            pool.submit(measure_in_workers, missing[start : start + part.num_cells], args, deadline, record)
    missing = find_missing()
    print(f'{args.part}: {len(names) - len(missing)} of {len(names)} cells are in {file}')
    if missing:
        print(f'{args.part}: {len(missing)} cells are missing; the same command measures them', file=sys.stderr)
    return 1 if missing else 0


def measure_in_workers(names: Sequence[str], args: argparse.Namespace, deadline: float, record: Callable) -> None:
    """Measure cells in a worker process, and in another one those after a cell that fails."""
    left = list(names)
    while left and time.monotonic() < deadline:
        command = [sys.executable, '-m', 'benchmarks.gpu', *sys.argv[1:], '--worker']
        environment = os.environ | PARTS[args.part].environment
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as worker:
            timers = [
                threading.Timer(max(0.0, deadline - time.monotonic()) + delay, stop)
                for delay, stop in ((0, worker.terminate), (GRACE_SECONDS, worker.kill))
            ]
            for timer in timers:
                timer.start()
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.write(json.dumps(left))
            worker.stdin.close()
            num_measured = 0
            for line in worker.stdout:
                record(**json.loads(line))
                num_measured += 1
        for timer in timers:
            timer.cancel()
        left = left[num_measured:]
        if not num_measured and time.monotonic() < deadline:
            print(
                f'{args.part}: {left.pop(0)}: the process ended with exit code {worker.returncode}', file=sys.stderr
            )


def run_worker(args: argparse.Namespace) -> int:
    """Measure the cells that are named on standard input until one fails, and print a line of JSON for each."""
    results = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)  # what libraries print
    names, module = json.load(sys.stdin), PARTS[args.part].import_module()
    cells, session = module.make_cells(args.part, args.tiny), describe_session(args)
    for name in names:
        start = time.monotonic()
        result = measure_or_explain(module.measure_cell, cells[name], args)
        result = dict(is_complete='failed' not in result) | result | dict(seconds=time.monotonic() - start)
        print(json.dumps(dict(name=name, result=result, session=session)), file=results, flush=True)
        if 'failed' in result:  # a failed kernel can leave the GPU unusable for its process
            return 1
    return 0


def measure_or_explain(measure_cell: Callable, cell: dict, args: argparse.Namespace) -> dict:
    from sinklab.errors import format_error

    try:
        return measure_cell(cell, args)
    except Exception as error:  # a cell that fails is a result
        return dict(failed=format_error(error, with_type=True))


def describe_session(args: argparse.Namespace) -> dict:
    """Describe the machine, the versions and the command."""
    import jax

    from sinklab.environment import describe_code
    from sinklab.machine import describe_machine

    device = jax.devices()[0]
    return dict(
        date=time.strftime('%Y-%m-%d'),
        device=device.device_kind,
        runtime=device.client.platform_version,
        machine=describe_machine(),
        code=describe_code(),
        command=f'python -m benchmarks.gpu {args.part}' + args.tiny * ' --tiny',
    )


if __name__ == '__main__':
    sys.exit(main())
