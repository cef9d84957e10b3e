"""Measure this project on one GPU: a plan of four parts, each of which continues where it stopped.

    make gpu PART=kernels
    python -m benchmarks.gpu natural --source=store:stores/large [--minutes=9] [--out=DIR]
    python -m benchmarks.gpu speed --tiny

The parts, in order of value:

- kernels: attention kernels against the definition (gpu_kernels.py); about 6 minutes, if a cell takes 12 s.
- natural: models of 10M and 60M parameters without a fixed first token (gpu_training.py, configs/natural.py). On one
  H200 a step of 60M takes 126 to 134 ms with the paper's larger vocabulary (docs/results/gpu.md), thus a run of 4,000
  steps at most 9 minutes.
- speed: attention alone, and training steps (gpu_speed.py); about 9 minutes. tokamax is measured if it is installed.
- sizes: softmax at 10M, 25M and 60M, with tokens in proportion and three seeds (gpu_training.py); 45 minutes at most.

A part is a list of cells. The result of a cell is written to DIR as soon as it is measured. After --minutes, or a
signal, the part stops; the same command measures the cells that have no complete result in DIR or, if DIR is new, in
docs/results. A training run continues from its checkpoint in DIR/runs, if that is still there. --tiny measures a few
tiny cells on any device. python -m docs.gpu_results DIR copies the results to docs/results and writes
docs/results/gpu.md. The exit code is 1 if a cell failed. On a machine without a network, install wheels of the
packages that setup.py requires, and unpack a store (packed_store.py).
"""

import argparse
import concurrent.futures
import dataclasses
import importlib
import json
import os
import signal
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
NO_GPU = 4  # exit code of a worker that finds no GPU
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
NO_AUTOTUNING = f'{os.environ.get("XLA_FLAGS", "")} --xla_gpu_autotune_level=0'.strip()
SHARED_GPU = dict(XLA_PYTHON_CLIENT_PREALLOCATE='false', XLA_FLAGS=NO_AUTOTUNING)
PARTS = {
    'kernels': Part('gpu_kernels', num_processes=8, num_cells=12, environment=SHARED_GPU),
    'natural': Part('gpu_training', environment=dict(XLA_PYTHON_CLIENT_PREALLOCATE='false')),
    'speed': Part('gpu_speed'),
    'sizes': Part('gpu_training', environment=dict(XLA_PYTHON_CLIENT_PREALLOCATE='false')),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('part', choices=PARTS, metavar='PART', help=', '.join(PARTS))
    parser.add_argument('--out', type=Path, metavar='DIR', help='default: build/gpu, with --tiny build/gpu_tiny')
    parser.add_argument('--minutes', type=parse_positive_number, default=9.0, help='of this command (default: 9)')
    parser.add_argument('--source', help='config.data.source of training runs, such as store:stores/large')
    parser.add_argument('--bos_source', help='that of the row bos, prepared with --bos=documents')
    parser.add_argument('--tiny', action='store_true', help='a few tiny cells, on any device')
    parser.add_argument('--worker', action='store_true', help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out = (args.out or ROOT / 'build' / ('gpu_tiny' if args.tiny else 'gpu')).absolute()
    if args.tiny:
        args.source = args.source or 'stdlib'
    elif not args.source and PARTS[args.part].module == 'gpu_training':
        parser.error(f'{args.part} needs --source, such as --source=store:stores/large (docs/guides/data.md)')
    if args.worker:
        return run_worker(args)
    try:
        return run_part(args)
    except (OSError, ValueError) as error:  # a folder that cannot be written, a damaged file of results
        print(f'gpu: {args.out}: {error}; give another --out', file=sys.stderr)
        return 1


def run_part(args: argparse.Namespace) -> int:
    """Measure the missing cells of a part; return 1 if some have failed."""
    part = PARTS[args.part]
    file = args.out / f'{part.module}.json'
    args.out.mkdir(parents=True, exist_ok=True)
    earlier_file = file if file.exists() or args.tiny else RESULTS_DIR / file.name
    results = json.loads(earlier_file.read_text()) if earlier_file.exists() else dict(sessions=[], cells={})
    names, cells, lock = [*part.import_module().make_cells(args.part, args.tiny)], results['cells'], threading.Lock()

    def record(name: str, result: dict, session: dict) -> None:
        with lock:
            if session not in results['sessions']:
                results['sessions'].append(session)
            if count_steps(result) >= count_steps(cells.get(name, {})):  # a run on a fresh machine starts again
                cells[name] = result | dict(session=results['sessions'].index(session))
            write_results(file, results)
        print(f'{args.part}: {name}: {result.get("failed", "measured")}, {result["seconds"]:.0f} s', flush=True)

    def has_failed(name: str) -> bool:
        return 'failed' in cells.get(name, {})

    write_results(file, results)  # fails now if it cannot be written
    missing = [name for name in names if not cells.get(name, {}).get('is_complete')]
    missing.sort(key=has_failed)  # cells that failed before come last
    workers = Workers(args, record)
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, lambda *_: workers.stop())
    with concurrent.futures.ThreadPoolExecutor(part.num_processes) as pool:
        chunks = [missing[start : start + part.num_cells] for start in range(0, len(missing), part.num_cells)]
        for future in [pool.submit(workers.measure, chunk) for chunk in chunks]:
            try:
                future.result()
            except BaseException:
                workers.stop()
                raise
    num_complete = sum(cells.get(name, {}).get('is_complete', False) for name in names)
    again = '' if num_complete == len(names) else '; the same command measures the others'
    print(f'{args.part}: {num_complete} of {len(names)} cells are complete in {file}{again}')
    return 1 if any(map(has_failed, names)) else 0


def write_results(file: Path, results: dict) -> None:
    """Write a file of results as a whole: it is the only record."""
    file.with_suffix('.part').write_text(json.dumps(results, indent=1) + '\n')
    file.with_suffix('.part').replace(file)


def count_steps(result: dict) -> int:
    """Return the last step of a training run; 0 for other cells."""
    return max((step for step, _ in result.get('metrics', {}).get('train/loss', [])), default=0)


class Workers:
    """The worker processes that measure cells, until the time is over or `stop` is called."""

    def __init__(self, args: argparse.Namespace, record: Callable):
        self.args, self.record, self.processes = args, record, set()
        self.deadline = time.monotonic() + 60 * min(args.minutes, 1440)

    def stop(self) -> None:
        self.deadline = 0.0
        for process in list(self.processes):
            process.terminate()

    def measure(self, names: Sequence[str]) -> None:
        """Measure cells in a worker process, and in another one those after a cell that fails."""
        left = list(names)
        command = [sys.executable, '-m', 'benchmarks.gpu', *sys.argv[1:], f'--out={self.args.out}', '--worker']
        environment = os.environ | PARTS[self.args.part].environment
        while left and time.monotonic() < self.deadline:
            pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            # Ctrl-C reaches the workers, which have a process group of their own, only through `stop`.
            worker = subprocess.Popen(command, cwd=ROOT, env=environment, process_group=0, **pipes)
            self.processes.add(worker)
            seconds = max(0.0, self.deadline - time.monotonic())
            timers = [
                threading.Timer(seconds, worker.terminate),
                threading.Timer(seconds + GRACE_SECONDS, worker.kill),
            ]
            for timer in timers:
                timer.start()
            try:
                worker.stdin.write(json.dumps(left))
                worker.stdin.close()
                num_measured = 0
                for line in worker.stdout:
                    self.record(**json.loads(line))
                    num_measured += 1
                worker.wait()
            except BaseException:
                worker.terminate()
                raise
            finally:
                for timer in timers:
                    timer.cancel()
                self.processes.discard(worker)
            left = left[num_measured:]
            if not num_measured and time.monotonic() < self.deadline:
                print(f'{self.args.part}: {left.pop(0)}: exit code {worker.returncode}', file=sys.stderr)
            if worker.returncode == NO_GPU:
                self.stop()


def run_worker(args: argparse.Namespace) -> int:
    """Measure the cells that are named on standard input until one fails, and print a line of JSON for each."""
    results = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)  # what libraries print
    names, module = json.load(sys.stdin), PARTS[args.part].import_module()
    cells, session = module.make_cells(args.part, args.tiny), describe_session(args)
    if not args.tiny and session['backend'] != 'gpu':  # jax falls back to the CPU if it cannot open the GPU
        print(f'gpu: jax finds {session["backend"]}, and no GPU; --tiny runs on any device', file=sys.stderr)
        return NO_GPU
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

    device, source = jax.devices()[0], f' --source={args.source}' if args.source else ''
    return dict(
        date=time.strftime('%Y-%m-%d'),
        backend=jax.default_backend(),
        device=device.device_kind,
        runtime=device.client.platform_version,
        machine=describe_machine(),
        code=describe_code(),
        command=f'python -m benchmarks.gpu {args.part}{source}' + args.tiny * ' --tiny',
    )


if __name__ == '__main__':
    sys.exit(main())
