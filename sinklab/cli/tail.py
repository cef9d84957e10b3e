"""Follow a run or a sweep from any terminal: step, loss and Sink_1 of each run, and how it ends.

The command only reads the folder. Ctrl-C ends the command, not the run.

example:
  sinklab tail runs/softmax
  sinklab tail runs/sweep
  sinklab tail runs/softmax | grep loss
"""

import argparse
import contextlib
import time
from pathlib import Path

from sinklab.cli import terminal
from sinklab.cli.progress import REMOTE_POLL_SECONDS, ProgressDisplay, RunFollower
from sinklab.cli.report import list_sweep_runs
from sinklab.run_dir import RunDir, read_spec
from sinklab.storage.folder_lock import is_held
from sinklab.storage.paths import is_remote, make_absolute, parse_path

POLL_SECONDS = 1.0  # seconds between two polls


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('run', metavar='DIR', help='folder of a run or of a sweep, such as runs/softmax')


def run(args: argparse.Namespace, extra_args: list[str]) -> int:
    folder = parse_path(args.run)
    if not is_sweep(folder):
        read_spec(RunDir(folder))  # raises if the folder holds no run
    with contextlib.suppress(KeyboardInterrupt), ProgressDisplay(terminal.make_console(), (), False) as display:
        follow_runs(folder, display)
    return 0


def follow_runs(folder: Path, display: ProgressDisplay) -> None:
    """Show the runs of a folder, and how each has ended, until no process works on the folder or on a run.

    In a bucket nothing tells whether a sweep has been stopped: then the user ends it.
    """
    if is_sweep(folder):
        rows = RunDir(folder).read_json('sweep')
        display.add_all_runs(sum(row.get('steps', 0) * len(row['seeds']) for row in rows))
    followers: dict[Path, RunFollower] = {}
    ended_paths: set[Path] = set()
    while True:
        is_over = not is_running(folder)  # determined before records are read, so that none is missed
        paths = [path for path in list_sweep_runs(folder) if RunDir(path).has_run()] if is_sweep(folder) else [folder]
        for path in paths:
            is_ended = not is_running(path)
            if is_ended and path in ended_paths:
                continue
            ended_paths.discard(path)  # a sweep may have started it again
            if path not in followers:
                run_dir = RunDir(path)
                spec = read_spec(run_dir)
                row = run_dir.read_json('row').get('row') or make_absolute(path).name
                name = row if path == folder else f'{row}, seed {spec.seed}'
                followers[path] = RunFollower(display, name, spec.optimizer.steps, run_dir)
            followers[path].poll()
            if is_ended:
                ended_paths.add(path)
                display.end(followers.pop(path).key, describe_outcome(RunDir(path)))
        if is_over and not followers:
            return
        display.bars.refresh()
        time.sleep(REMOTE_POLL_SECONDS if is_remote(folder) else POLL_SECONDS)


def is_sweep(folder: Path) -> bool:
    return (folder / 'sweep.json').exists()


def is_running(folder: Path) -> bool:
    """Return whether a job may be working on a run or a sweep."""
    if not is_held(folder):
        return False
    if is_sweep(folder):
        rows = RunDir(folder).read_json('sweep')
        return any(outcome == 'to do' for row in rows for outcome in row['seeds'].values())
    return not (folder / 'outcome.json').exists()


def describe_outcome(run_dir: RunDir) -> str:
    """Describe the outcome of the latest attempt in one line."""
    try:
        outcome = run_dir.read_json('outcome')
    except FileNotFoundError:
        return 'lost: no process works on this run; start the same command again'
    return ': '.join(filter(None, [outcome['kind'], outcome.get('message', '')]))
