"""Follow a run in progress from any terminal: its step, loss and Sink_1, and how it ends.

The command only reads the run folder. Ctrl-C ends the command, not the run.

example:
  sinklab tail runs/softmax
  sinklab tail runs/softmax | grep loss
"""

import argparse
import contextlib
import time
from collections.abc import Iterator

from sinklab.metrics.registry import HEADLINE_METRIC
from sinklab.run_dir import RunDir
from sinklab.run_ref import read_spec
from sinklab.storage.folder_lock import is_held
from sinklab.storage.paths import is_remote, make_absolute
from sinklab.train.callbacks import Callback, summarize_newest_attempt

POLL_SECONDS = 1.0  # seconds between two polls
REMOTE_POLL_SECONDS = 20.0  # in a bucket, where metrics.jsonl is read whole and written once a minute


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('run', metavar='RUN', help='run folder, such as runs/softmax')


def run(args: argparse.Namespace, extra_args: list[str]) -> int:
    from sinklab.cli.progress import ProgressCallback

    run_dir = RunDir(args.run)
    spec = read_spec(run_dir)
    name = run_dir.read_json('row')['row'] or make_absolute(run_dir.path).name
    with contextlib.suppress(KeyboardInterrupt), ProgressCallback(name, spec, stderr=False) as progress:
        for _ in follow_run(run_dir, progress):
            time.sleep(REMOTE_POLL_SECONDS if is_remote(run_dir.path) else POLL_SECONDS)
        progress.on_message(describe_outcome(run_dir))
    return 0


def follow_run(run_dir: RunDir, callback: Callback) -> Iterator[None]:
    """Pass the newest attempt and records of a run to a callback, and later ones until the run is over.

    Yields:
        None after each poll; the caller waits before the next one.
    """
    num_attempts, num_lines = 0, None
    while True:
        is_over = (run_dir.path / 'outcome.json').exists() or not is_held(run_dir.path)
        attempts = run_dir.read_environment().get('attempts', [])
        if len(attempts) > num_attempts:
            num_attempts = len(attempts)
            callback.on_train_begin(*summarize_newest_attempt(run_dir, attempts))
        records = run_dir.read_metric_lines()
        if num_lines is None:  # of the past, show the newest Sink_1 and the newest record
            new_records = [record for record in records[:-1] if HEADLINE_METRIC.name in record][-1:] + records[-1:]
        else:
            new_records = records[num_lines:]
        num_lines = len(records)  # fewer than before if the run has resumed from an earlier step
        for record in new_records:
            callback.on_record(record, written=True)
        if is_over:  # determined before the records were read, so that none is missed
            return
        yield


def describe_outcome(run_dir: RunDir) -> str:
    """Describe the outcome of the latest attempt in one line."""
    try:
        outcome = run_dir.read_json('outcome')
    except FileNotFoundError:
        return 'lost: no process works on this run; start the same command again'
    return ': '.join(filter(None, [outcome['kind'], outcome.get('message', '')]))
