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

from sinklab.run_dir import RunDir
from sinklab.run_ref import read_spec
from sinklab.storage.lease import LEASE_NAME, LeaseWatcher
from sinklab.storage.paths import make_absolute
from sinklab.storage.untrusted_files import DamagedFileError
from sinklab.train.callbacks import Callback, summarize_newest_attempt

POLL_SECONDS = 1.0  # seconds between two polls


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('run', metavar='RUN', help='run folder, such as runs/softmax')


def run(args: argparse.Namespace, extra_args: list[str]) -> int:
    from sinklab.cli.progress import ProgressCallback

    run_dir = RunDir(args.run)
    spec, name = read_spec(run_dir), get_run_name(run_dir)
    with contextlib.suppress(KeyboardInterrupt), ProgressCallback(name, spec, stderr=False) as progress:
        for _ in follow_run(run_dir, progress):
            time.sleep(POLL_SECONDS)
        outcome = read_outcome(run_dir)
        if outcome['kind'] == 'done':
            run_dir.warn_about_lost_lines((run_dir.read_records() or [{}])[-1], spec.optimizer.steps, 'train/loss')
        progress.on_message(': '.join(filter(None, [outcome['kind'], outcome.get('message', '')])))
    return 0


def get_run_name(run_dir: RunDir) -> str:
    """Return the name of the row of a run, or the name of its folder if it has no row."""
    with contextlib.suppress(FileNotFoundError, DamagedFileError):
        if name := run_dir.read_json('row').get('row'):
            return name
    return make_absolute(run_dir.path).name


def follow_run(run_dir: RunDir, callback: Callback) -> Iterator[None]:
    """Pass the newest attempt and records of a run to a callback, and later ones until the run is over.

    Yields:
        None after each poll; the caller waits before the next one.
    """
    from sinklab.metrics.registry import HEADLINE_METRIC

    lease_watch, num_attempts = LeaseWatcher(run_dir.path / LEASE_NAME), 0
    records, offset = run_dir.read_metric_lines_from(0)
    sink_records = [record for record in records[:-1] if HEADLINE_METRIC.name in record]
    records = [*sink_records[-1:], *records[-1:]]
    while True:
        lease_watch.poll()
        is_over = lease_watch.is_gone
        attempt_list = run_dir.read_environment().get('attempts', [])
        if len(attempt_list) > num_attempts:
            num_attempts = len(attempt_list)
            callback.on_train_begin(*summarize_newest_attempt(run_dir, attempt_list))
        new_records, offset = run_dir.read_metric_lines_from(offset)
        for record in [*records, *new_records]:
            callback.on_record(record, written=True)
        records = []
        if is_over:  # determined before the records were read, so that none is missed
            return
        yield


def read_outcome(run_dir: RunDir) -> dict:
    """Read the outcome of the latest attempt; its kind is `lost` if there is no outcome.json."""
    try:
        return run_dir.read_json('outcome')
    except DamagedFileError as error:
        return dict(kind='unknown', message=str(error))
    except FileNotFoundError:
        return dict(kind='lost', message='no process works on this run; start the same command again')
