"""What a start waits for: a smoke run by its parts, cold (nothing kept) and warm (data and programs found again).

The third kind, a restart, goes on from the checkpoint of the warm one, and has to find all its programs.

    python benchmarks/start.py [--rounds=3] [--config=configs/default.py] [--size=smoke]

Every run is a process of its own, timed from its start: seconds by the clock, the median and the range of the rounds.
`first step` and `end` are counted from the start, the other parts are what they took; a program is traced, lowered,
and compiled or found.
"""

import argparse
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time


def child(start: float, options: list[str]) -> None:
    """One run; prints its parts as JSON."""
    from sinklab.cli import progress
    from sinklab.cli.main import main
    from sinklab.train import loop, state
    from sinklab.train import start as beginning

    parts = {'imports': time.time() - start}

    def timed(name: str, function):
        @functools.wraps(function)
        def run(*given, **more):
            begun = time.time()
            try:
                return function(*given, **more)
            finally:
                parts[name] = parts.get(name, 0.0) + time.time() - begun

        return run

    def listened(self, record: dict, written: bool) -> None:
        if 'train/loss' in record:
            parts.setdefault('first step', time.time() - start)
        heard(self, record, written)

    heard, progress.Progress.record = progress.Progress.record, listened
    beginning.sequences = timed('data', beginning.sequences)
    state.create = timed('initial state', state.create)
    loop.evaluation = wrapped(timed, 'validation', loop.evaluation)
    loop.probe.observer = wrapped(timed, 'probe', loop.probe.observer)
    loop.Run.executable = timed('step', loop.Run.executable)
    for name in ('__init__', 'sound', 'restore', 'save', 'close'):
        setattr(loop.Checkpoints, name, timed('checkpoints', getattr(loop.Checkpoints, name)))
    if main(options):
        raise SystemExit(1)
    print(json.dumps(parts | {'end': time.time() - start}))


def wrapped(timed, name: str, maker):
    """What a maker makes, timed."""
    return lambda *given: timed(name, maker(*given))


def run(options: list[str], cache: str, folder: str) -> tuple[dict[str, float], str]:
    """(seconds by part, what it has said)"""
    environment = {name: value for name, value in os.environ.items() if name != 'JAX_COMPILATION_CACHE_DIR'}
    command = [sys.executable, __file__, '--child', str(time.time()), *options, f'--workdir={folder}']
    process = subprocess.run(
        command, env=environment | {'SINKLAB_CACHE': cache}, capture_output=True, text=True, check=True
    )
    return json.loads(process.stdout.splitlines()[-1]), process.stderr


def round_of(options: list[str]) -> dict[str, dict[str, float]]:
    """The parts of the three kinds of start."""
    with tempfile.TemporaryDirectory() as folder:
        cold, _ = run(options, f'{folder}/cache', f'{folder}/cold')
        warm, _ = run(options, f'{folder}/cache', f'{folder}/warm')
        restart, said = run([*options, '--config.optimizer.steps=8'], f'{folder}/cache', f'{folder}/warm')
    assert 'programs: 0 compiled' in said, said
    return dict(cold=cold, warm=warm, restart=restart)


def main() -> None:
    if sys.argv[1:2] == ['--child']:
        child(float(sys.argv[2]), sys.argv[3:])
        return
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument('--rounds', type=int, default=3)
    arguments.add_argument('--config', default='configs/default.py')
    arguments.add_argument('--size', default='smoke')
    given = arguments.parse_args()
    options = ['train', f'--config={given.config}', f'--size={given.size}']
    rounds = [round_of(options) for _ in range(given.rounds)]
    print(f'{platform.processor() or platform.machine()}, {os.cpu_count()} cores, python {platform.python_version()}')
    for part in rounds[0]['cold']:
        spreads = (f'{kind} {spread([one[kind].get(part, 0.0) for one in rounds])}' for kind in rounds[0])
        print(f'{part:14} ' + '  '.join(spreads))


def spread(values: list[float]) -> str:
    return f'{statistics.median(values):6.2f} ({min(values):.2f} to {max(values):.2f})'


if __name__ == '__main__':
    main()
