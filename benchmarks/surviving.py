"""What surviving costs: a supervised loop and the bare jitted step take turns in one process.

    python benchmarks/surviving.py [--rounds=20] [--every=40] [--size=quickstart]

A turn of the loop is a checkpoint with its digests, and the `every` steps after it with their data and metrics; by
`make quickstart` a checkpoint is due every 480. It is compared with the mean of the bare turns before and after it.
By the clock, and by what the process takes of its cores, which other work on the machine does not lengthen. Signs of
life go on beside both; what they take is told as the time of the supervisor, of one core.
"""

import argparse
import dataclasses
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from loop import HARDWARE, bare, spread, undisturbed

from configs.sizes import SIZES
from sinklab.cli import processes
from sinklab.cli.progress import Progress
from sinklab.folder import Folder
from sinklab.group import Group
from sinklab.processes import link
from sinklab.processes.cluster import Seat
from sinklab.processes.ending import End
from sinklab.processes.patience import Patience
from sinklab.train import loop
from sinklab.train.environment import versions
from sinklab.train.listener import Listener


class Turns(Listener):
    """Gives the bare step a turn wherever a checkpoint is due, when no step of the loop is under way."""

    def __init__(self, group: Group, step: Callable[[int], float], every: int):
        self.group, self.step, self.every, self.ended = group, step, every, None
        self.alone, self.looped = [], []  # (seconds by the clock, seconds of cores) a step

    def record(self, record: dict, written: bool) -> None:
        if record['step'] == 0 or record['step'] % self.every:
            return
        if self.ended:
            self.looped.append(since(self.ended, self.every))
        self.group.at('measuring', record['step'])  # for as long as it takes
        begun = since((0.0, 0.0))
        self.step(self.every - 1)  # after one more
        self.alone.append(since(begun, self.every))
        self.ended = since((0.0, 0.0))


def since(begun: tuple[float, float], steps: int = 1) -> tuple[float, float]:
    """(seconds by the clock, seconds of cores) a step, since a moment."""
    clock, cores = begun
    return (time.perf_counter() - clock) / steps, (time.process_time() - cores) / steps


def trained(group: Group, given: argparse.Namespace, folder: Path) -> End:
    """The supervised run; leaves the seconds a step of each turn."""
    spec = undisturbed(given.every * (given.rounds + 1) + 1, given.size)  # the last step is measured, and in no turn
    spec = dataclasses.replace(spec, checkpoint=dataclasses.replace(spec.checkpoint, every_steps=given.every))
    turns = Turns(group, bare(spec), given.every)
    with Progress('softmax', spec) as progress:
        loop.train(spec, HARDWARE, Folder(folder / 'run'), {}, progress, turns, group=group)
    (folder / 'turns.json').write_text(json.dumps([turns.alone, turns.looped]))
    return End('done')


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument('--rounds', type=int, default=20, choices=range(2, 10_000), metavar='N', help='from 2 on')
    arguments.add_argument('--every', type=int, default=40, help='steps between two checkpoints')
    arguments.add_argument('--size', default='quickstart', choices=SIZES)
    arguments.add_argument('--folder', type=Path, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if link.supervised():
        processes.child(lambda group: trained(group, given, given.folder))
    with tempfile.TemporaryDirectory() as folder:
        command, start, before = [sys.executable, *sys.argv, f'--folder={folder}'], time.perf_counter(), used()
        if code := processes.supervise(command, Seat(), Patience(), Folder(f'{folder}/run'), lambda: True, 0):
            sys.exit(code)
        seconds, supervisor = time.perf_counter() - start, used() - before
        alone, looped = json.loads(Path(folder, 'turns.json').read_text())
    print(f'{platform.processor() or platform.machine()}, {os.cpu_count()} cores, python {platform.python_version()}')
    print(json.dumps(versions(('jax', 'jaxlib', 'orbax-checkpoint'))))
    for name, bare_ms, loop_ms in zip(('clock', 'cores'), columns(alone), columns(looped), strict=True):
        beside = [(before + after) / 2 for before, after in pairwise(bare_ms)]
        percent = [100 * (whole / step - 1) for whole, step in zip(loop_ms, beside, strict=True)]
        print(f'{name}: bare step, ms:              {spread(bare_ms)}')
        print(f'{name}: step of a supervised loop:  {spread(loop_ms)}')
        print(f'{name}: loop over step, %:          {spread(percent)}')
        print('{}: the middle half of that, %: {:.2f} to {:.2f}'.format(name, *statistics.quantiles(percent)[::2]))
    print(f'supervisor, % of a core:           {100 * supervisor / seconds:.2f}')


def columns(turns: list[tuple[float, float]]) -> list[list[float]]:
    """Milliseconds by the clock, and of cores."""
    return [[1e3 * value for value in column] for column in zip(*turns, strict=True)]


def used() -> float:
    """Seconds of a core that this process has taken, without its children."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == '__main__':
    main()
