"""Measure attention kernels and training steps on one GPU, in two parts that continue where they stopped.

    make gpu PART=kernels
    python -m benchmarks.gpu speed [--minutes=9] [--out=DIR]
    python -m benchmarks.gpu speed --tiny

- kernels: attention kernels against the definition (gpu_kernels.py); about 6 minutes, if a cell takes 12 s.
- speed: attention alone, and training steps (gpu_speed.py); about 9 minutes.

A part is a list of cells. The result of a cell is written to DIR as soon as it is measured. After --minutes, or
Ctrl-C, the part stops; the same command measures the cells that have no complete result in DIR or, if DIR is new, in
docs/results. --tiny measures a few tiny cells on any device. python -m docs.gpu_results DIR copies the results to
docs/results and writes docs/results/gpu.md. The exit code is 1 if a cell failed.
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
from pathlib import Path
from typing import Any

from benchmarks.argument_types import parse_positive_number

ROOT = Path(__file__).resolve().parents[1]
RESULTS_DIR = ROOT / 'docs' / 'results'
NO_GPU = 4  # exit code of a worker that finds no GPU


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the plan.

    Attributes:
        module: The module of benchmarks/ with make_cells(is_tiny) and measure_cell(cell, is_tiny).
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
    'speed': Part('gpu_speed'),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('part', choices=PARTS, metavar='PART', help=', '.join(PARTS))
    parser.add_argument('--out', type=Path, metavar='DIR', help='default: build/gpu, with --tiny build/gpu_tiny')
    parser.add_argument('--minutes', type=parse_positive_number, default=9.0, help='of this command (default: 9)')
    parser.add_argument('--tiny', action='store_true', help='a few tiny cells, on any device')
    parser.add_argument('--worker', action='store_true', help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out = (args.out or ROOT / 'build' / ('gpu_tiny' if args.tiny else 'gpu')).absolute()
    if args.worker:
        return run_worker(args)
    try:
        return run_part(args)
    except (OSError, ValueError) as error:  # a folder that cannot be written, a damaged file of results
        print(f'gpu: {args.out}: {error}; give another --out', file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def run_part(args: argparse.Namespace) -> int:
    """Measure the missing cells of a part; return 1 if some have failed."""
    part = PARTS[args.part]
    file = args.out / f'{part.module}.json'
    args.out.mkdir(parents=True, exist_ok=True)
    earlier_file = file if file.exists() or args.tiny else RESULTS_DIR / file.name
    results = json.loads(earlier_file.read_text()) if earlier_file.exists() else dict(sessions=[], cells={})
    names, cells = [*part.import_module().make_cells(args.tiny)], results['cells']
    lock = threading.Lock()

    def record(name: str, result: dict, session: dict) -> None:
        with lock:
            if session not in results['sessions']:
                results['sessions'].append(session)
            cells[name] = result | dict(session=results['sessions'].index(session))
            write_results(file, results)
        print(f'{args.part}: {name}: {result.get("failed", "measured")}, {result["seconds"]:.0f} s', flush=True)

    def has_failed(name: str) -> bool:
        return 'failed' in cells.get(name, {})

    def is_complete(name: str) -> bool:
        return cells.get(name, {}).get('is_complete', False)

    write_results(file, results)  # fails now if it cannot be written
    missing = [name for name in names if not is_complete(name)]
    missing.sort(key=has_failed)  # cells that failed before come last
    workers = Workers(args, record)
    chunks = [missing[start : start + part.num_cells] for start in range(0, len(missing), part.num_cells)]
    with concurrent.futures.ThreadPoolExecutor(part.num_processes) as pool:
        try:
            for _ in pool.map(workers.measure, chunks):
                pass
        except BaseException:
            workers.stop()
            raise
    num_complete = sum(map(is_complete, names))
    again = '' if num_complete == len(names) else '; the same command measures the others'
    print(f'{args.part}: {num_complete} of {len(names)} cells are complete in {file}{again}')
    return 1 if any(map(has_failed, names)) else 0


def write_results(file: Path, results: dict) -> None:
    """Write a file of results as a whole: it is the only record."""
    file.with_suffix('.part').write_text(json.dumps(results, indent=1) + '\n')
    file.with_suffix('.part').replace(file)


class Workers:
    """The worker processes that measure cells, until the time is over or `stop` is called."""

    def __init__(self, args: argparse.Namespace, record):
        self.args = args
        self.record = record
        self.processes: set[subprocess.Popen] = set()
        self.deadline = time.monotonic() + 60 * args.minutes

    def stop(self) -> None:
        self.deadline = 0.0
        for process in list(self.processes):
            process.terminate()

    def measure(self, names: list[str]) -> None:
        """Measure cells in a worker process, and in another one those after a cell that fails."""
        command = [sys.executable, '-m', 'benchmarks.gpu', *sys.argv[1:], '--worker']
        environment = os.environ | PARTS[self.args.part].environment
        while names and (seconds := self.deadline - time.monotonic()) > 0:
            pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as worker:
                self.processes.add(worker)
                timer = threading.Timer(seconds, worker.terminate)
                timer.start()
                worker.stdin.write(json.dumps(names))
                worker.stdin.close()
                num_measured = 0
                for line in worker.stdout:
                    self.record(**json.loads(line))
                    num_measured += 1
                timer.cancel()
            self.processes.discard(worker)
            names = names[num_measured:]
            if worker.returncode == NO_GPU:
                self.stop()
            elif not num_measured and time.monotonic() < self.deadline:
                print(f'{self.args.part}: {names[0]}: exit code {worker.returncode}', file=sys.stderr)
                names = names[1:]


def run_worker(args: argparse.Namespace) -> int:
    """Measure the cells that are named on standard input until one fails, and print a line of JSON for each."""
    results = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)  # what libraries print
    names, module = json.load(sys.stdin), PARTS[args.part].import_module()
    cells, session = module.make_cells(args.tiny), describe_session(args)
    if not args.tiny and session['backend'] != 'gpu':  # jax falls back to the CPU if it cannot open the GPU
        print(f'gpu: jax finds {session["backend"]}, and no GPU; --tiny runs on any device', file=sys.stderr)
        return NO_GPU
    for name in names:
        start = time.monotonic()
        result = measure_or_explain(module, cells[name], args.tiny)
        result |= dict(is_complete='failed' not in result, seconds=time.monotonic() - start)
        print(json.dumps(dict(name=name, result=result, session=session)), file=results, flush=True)
        if 'failed' in result:  # a failed kernel can leave the GPU unusable for its process
            return 1
    return 0


def measure_or_explain(module: Any, cell: dict, is_tiny: bool) -> dict:
    from sinklab.errors import format_error

    try:
        return module.measure_cell(cell, is_tiny)
    except Exception as error:  # a cell that fails is a result
        return dict(failed=format_error(error, with_type=True))


def describe_session(args: argparse.Namespace) -> dict:
    """Describe the machine, the versions and the command."""
    import jax

    from benchmarks.machine import describe_machine
    from sinklab.environment import describe_code

    device = jax.devices()[0]
    return dict(
        date=time.strftime('%Y-%m-%d'),
        backend=jax.default_backend(),
        device=device.device_kind,
        runtime=device.client.platform_version,
        machine=describe_machine(),
        code=describe_code(),
        command=f'python -m benchmarks.gpu {args.part}' + args.tiny * ' --tiny',
    )


if __name__ == '__main__':
    sys.exit(main())
