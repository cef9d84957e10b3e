"""Benchmark of the parts of a run's startup: cold, warm, and after a restart.

The restart resumes from the checkpoint of the warm run, and must find all compiled programs in the cache.

    python benchmarks/startup_time.py [--rounds=3] [--config=configs/default.py] [--size=smoke]

Every run is a separate process, timed from its start. Times are wall-clock seconds, as median and range of the
rounds. `first step` and `end` are times since the start; the other parts are durations. The time of a program
includes tracing, lowering, and compiling it or loading it from the cache.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from timing import format_spread

ROOT = Path(__file__).parents[1]


def run_child(start: float, options: list[str]) -> None:
    """Run `sinklab` in this process, and print the seconds of its parts as JSON."""
    from sinklab.cli import progress
    from sinklab.cli.main import main
    from sinklab.train import loop, state

    parts = {'imports': time.time() - start}

    def time_function(name: str, function):
        @functools.wraps(function)
        def run(*args, **kwargs):
            call_start = time.time()
            try:
                return function(*args, **kwargs)
            finally:
                parts[name] = parts.get(name, 0.0) + time.time() - call_start

        return run

    def record_and_time(self, record: dict, written: bool) -> None:
        if 'train/loss' in record:
            parts.setdefault('first step', time.time() - start)
        original_record(self, record, written)

    original_record, progress.ProgressCallback.on_record = progress.ProgressCallback.on_record, record_and_time
    loop.load_run_data = time_function('data', loop.load_run_data)
    state.create_state = time_function('initial state', state.create_state)
    loop.make_validation_fn = wrap_maker(time_function, 'validation', loop.make_validation_fn)
    loop.sink_probe.make_probe = wrap_maker(time_function, 'probe', loop.sink_probe.make_probe)
    loop.compile_step = time_function('step', loop.compile_step)
    for name in ('__init__', 'choose_sound_step', 'restore', 'save', 'wait_on_all_processes', 'close'):
        setattr(loop.Checkpointer, name, time_function('checkpoints', getattr(loop.Checkpointer, name)))
    if main(options):
        raise SystemExit(1)
    print(json.dumps(parts | {'end': time.time() - start}))


def wrap_maker(time_function, name: str, maker):
    """Wrap a factory function so that calls of the function that it returns are timed."""
    return lambda *args: time_function(name, maker(*args))


def run_command(options: list[str], cache_dir: str, run_dir: str) -> tuple[dict[str, float], str]:
    """Run a child process; return the seconds of its parts and its stderr."""
    environment = {name: value for name, value in os.environ.items() if name != 'JAX_COMPILATION_CACHE_DIR'}
    command = [sys.executable, __file__, '--child', str(time.time()), *options, f'--workdir={run_dir}']
    process = subprocess.run(command, env=environment | {'SINKLAB_CACHE': cache_dir}, capture_output=True, text=True)
    if process.returncode:
        sys.exit(f'startup_time: a run ended with exit code {process.returncode}:\n{process.stderr[-2000:]}')
    return json.loads(process.stdout.splitlines()[-1]), process.stderr


def run_round(options: list[str]) -> dict[str, dict[str, float]]:
    """Return the seconds of the parts of a cold, a warm and a restarted run."""
    with tempfile.TemporaryDirectory() as temp_dir:
        cold, _ = run_command(options, f'{temp_dir}/cache', f'{temp_dir}/cold')
        warm, _ = run_command(options, f'{temp_dir}/cache', f'{temp_dir}/warm')
        restart, stderr_text = run_command(
            [*options, '--config.optimizer.steps=8'], f'{temp_dir}/cache', f'{temp_dir}/warm'
        )
    assert 'programs: 0 compiled' in stderr_text, stderr_text
    return dict(cold=cold, warm=warm, restart=restart)


def main() -> None:
    if sys.argv[1:2] == ['--child']:
        run_child(float(sys.argv[2]), sys.argv[3:])
        return
    # Not imported in a child, which measures its imports.
    from argument_types import parse_count

    from sinklab.environment import get_package_versions
    from sinklab.machine import describe_machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rounds', type=parse_count, default=3)
    parser.add_argument('--config', default=f'{ROOT}/configs/default.py')
    parser.add_argument('--size', default='smoke')
    args = parser.parse_args()
    options = ['train', f'--config={args.config}', f'--size={args.size}']
    rounds = [run_round(options) for _ in range(args.rounds)]
    print(describe_machine())
    print(json.dumps(get_package_versions()))
    for part in rounds[0]['cold']:
        spreads = (
            f'{kind} {format_spread([result[kind].get(part, 0.0) for result in rounds], width=6)}'
            for kind in rounds[0]
        )
        print(f'{part:14} ' + '  '.join(spreads))


if __name__ == '__main__':
    main()
