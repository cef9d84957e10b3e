"""Benchmark of supervision and checkpoints: a supervised loop against the bare jitted step.

    python benchmarks/fault_tolerance.py [--rounds=20] [--checkpoint_steps=40] [--size=quickstart]

A turn of the loop is a checkpoint with its digests and the --checkpoint_steps steps after it, with their data and
metrics. In `make quickstart` a checkpoint is due every 480 steps. A turn is compared with the mean of the bare turns
before and after it. Times are wall-clock time and CPU time of the process; other work on the machine does not
lengthen CPU time. Heartbeats continue during both kinds of turn; their cost is reported as CPU time of the
supervisor, in percent of one core.
"""

import argparse
import dataclasses
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from argument_types import parse_count_from_2
from timing import format_spread
from train_loop import HARDWARE, make_step_timer, make_uninterrupted_spec

from sinklab.cli import process_flags
from sinklab.cli.progress import ProgressCallback
from sinklab.configs.sizes import SIZES
from sinklab.environment import get_package_versions
from sinklab.machine import describe_machine
from sinklab.process_group import ProcessGroup
from sinklab.run_dir import RunDir
from sinklab.supervisor import worker
from sinklab.supervisor.cluster import ProcessInfo
from sinklab.supervisor.exit_status import ExitStatus
from sinklab.supervisor.worker import Timeouts
from sinklab.train import loop
from sinklab.train.callbacks import Callback


class TurnCallback(Callback):
    """Callback that times bare steps wherever a checkpoint is due, when no step of the loop is running."""

    def __init__(self, group: ProcessGroup, time_step: Callable[[int], float], interval: int):
        self.group, self.time_step, self.interval, self.turn_end = group, time_step, interval, None
        self.bare_times, self.loop_times = [], []  # (wall-clock seconds, CPU seconds) per step

    def on_record(self, record: dict, written: bool) -> None:
        if record['step'] == 0 or record['step'] % self.interval:
            return
        if self.turn_end:
            self.loop_times.append(measure_since(self.turn_end, self.interval))
        self.group.report_progress('measuring', record['step'])  # an activity with a long timeout
        start = measure_since((0.0, 0.0))
        self.time_step(self.interval - 1)  # time_step runs one more step first
        self.bare_times.append(measure_since(start, self.interval))
        self.turn_end = measure_since((0.0, 0.0))


def measure_since(start: tuple[float, float], num_steps: int = 1) -> tuple[float, float]:
    """Return (wall-clock seconds, CPU seconds) per step since a start."""
    wall_start, cpu_start = start
    return (time.perf_counter() - wall_start) / num_steps, (time.process_time() - cpu_start) / num_steps


def run_supervised(group: ProcessGroup, args: argparse.Namespace, out_dir: Path) -> ExitStatus:
    """Train under the supervisor, and write the seconds per step of each turn to turns.json."""
    spec = make_uninterrupted_spec(
        args.checkpoint_steps * (args.rounds + 1) + 1, args.size
    )  # the last step is evaluated and belongs to no turn
    spec = dataclasses.replace(
        spec, checkpoint=dataclasses.replace(spec.checkpoint, every_steps=args.checkpoint_steps)
    )
    turns = TurnCallback(group, make_step_timer(spec), args.checkpoint_steps)
    with ProgressCallback('softmax', spec) as progress:
        loop.train(spec, HARDWARE, RunDir(out_dir / 'run'), {}, progress, turns, group=group)
    (out_dir / 'turns.json').write_text(json.dumps([turns.bare_times, turns.loop_times]))
    return ExitStatus('done')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rounds', type=parse_count_from_2, default=20, metavar='N', help='from 2 on')
    parser.add_argument(
        '--checkpoint_steps',
        type=parse_count_from_2,
        default=40,
        metavar='N',
        help='steps between two checkpoints, from 2 on',
    )
    parser.add_argument('--size', default='quickstart', choices=SIZES)
    parser.add_argument('--folder', type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if worker.is_supervised():
        process_flags.run_worker(lambda group: run_supervised(group, args, args.folder))
    with tempfile.TemporaryDirectory() as folder:
        command, start, before = (
            [sys.executable, *sys.argv, f'--folder={folder}'],
            time.perf_counter(),
            get_cpu_seconds(),
        )
        if code := process_flags.supervise_run(
            command, ProcessInfo(), Timeouts(), RunDir(f'{folder}/run'), lambda: True, 0
        ):
            sys.exit(code)
        seconds, supervisor_seconds = time.perf_counter() - start, get_cpu_seconds() - before
        bare_turns, loop_turns = json.loads(Path(folder, 'turns.json').read_text())
    print(describe_machine())
    print(json.dumps(get_package_versions(('jax', 'jaxlib', 'orbax-checkpoint'))))
    for name, bare_ms, loop_ms in zip(
        ('wall-clock time', 'CPU time'),
        convert_to_milliseconds(bare_turns),
        convert_to_milliseconds(loop_turns),
        strict=True,
    ):
        neighbor_means = [(before + after) / 2 for before, after in pairwise(bare_ms)]
        percent = [
            100 * (loop_value / bare_value - 1)
            for loop_value, bare_value in zip(loop_ms, neighbor_means, strict=True)
        ]
        print(f'{name}: bare step, ms: {format_spread(bare_ms)}')
        print(f'{name}: step of a supervised loop, ms: {format_spread(loop_ms)}')
        print(f'{name}: loop over step, %: {format_spread(percent)}')
        print('{}: loop over step, quartiles, %: {:.2f} to {:.2f}'.format(name, *statistics.quantiles(percent)[::2]))
    print(f'supervisor, CPU time, % of a core: {100 * supervisor_seconds / seconds:.2f}')


def convert_to_milliseconds(turns: list[tuple[float, float]]) -> list[list[float]]:
    """Convert turns to a list of wall-clock milliseconds and a list of CPU milliseconds."""
    return [[1e3 * value for value in column] for column in zip(*turns, strict=True)]


def get_cpu_seconds() -> float:
    """Return the CPU seconds of this process without its children."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == '__main__':
    main()
