"""Progress display of running runs: live bars on a terminal, otherwise a line for each run every LOG_SECONDS.

A run shows its own records; `sinklab sweep` and `sinklab tail` read those of all runs from their folders. A terminal
or a disk that cannot be written does not end a run: errors of printing are suppressed.
"""

import contextlib
import datetime
import math
import threading
import time

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from sinklab.cli import terminal
from sinklab.errors import print_status
from sinklab.metrics.registry import HEADLINE_METRIC
from sinklab.run_dir import RunDir
from sinklab.storage.files import DamagedFileError
from sinklab.storage.paths import is_remote
from sinklab.sweep.plan import SweepRun
from sinklab.train.callbacks import Callback, summarize_newest_attempt
from sinklab.train.run_outcome import is_storage_error

LOG_SECONDS = 10.0  # seconds between two lines of a log
WIDE_CONSOLE = 100  # columns in which a bar has room for the speed
SPEED_SECONDS = 600.0  # seconds over which the speed is averaged that gives the remaining time
LOSS_METRIC, SPEED_METRIC = 'train/loss', 'speed/tokens_per_second'
REMOTE_POLL_SECONDS = 20.0  # in a bucket, where metrics.jsonl is read whole and written once a minute


def format_metrics(metrics: dict, shows_speed: bool = True) -> str:
    """Format the newest loss, speed and Sink_1 of a run in one line."""
    texts = []
    if LOSS_METRIC in metrics:
        texts.append(f'loss {metrics[LOSS_METRIC]:.3f}')
    if SPEED_METRIC in metrics and shows_speed:
        texts.append(f'{metrics[SPEED_METRIC]:,.0f} tokens/s')
    if HEADLINE_METRIC.name in metrics:
        texts.append(f'{HEADLINE_METRIC.label} {HEADLINE_METRIC.format_value(metrics[HEADLINE_METRIC.name])}')
    return '  '.join(texts)


class ProgressDisplay:
    """Progress display of runs; as a context manager it shows the bars, and removes them at the end.

    Args:
        console: The console to print to.
        suppressed_errors: Errors of printing that are suppressed.
    """

    def __init__(self, console: terminal.Console, suppressed_errors: tuple[type[Exception], ...] = (OSError,)):
        self.console = console
        self.suppressed_errors = suppressed_errors
        self.is_live = terminal.is_live(console)
        self.bars = Progress(
            TextColumn('{task.description}', markup=False),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn('{task.fields[text]}', markup=False),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=not self.is_live,
            speed_estimate_period=SPEED_SECONDS,
        )
        self.metrics: dict[TaskID, dict] = {}  # the newest value of each metric of a run
        self.print_times: dict[TaskID, float] = {}

    def __enter__(self) -> 'ProgressDisplay':
        with contextlib.suppress(*self.suppressed_errors):
            self.bars.start()
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(*self.suppressed_errors):
            self.bars.stop()

    def add(self, name: str, steps: int) -> TaskID:
        """Add a run to the display, and return the key for its updates."""
        key = self.bars.add_task(name, total=steps, text='starting')
        self.metrics[key] = {}
        self.print_times[key] = 0.0
        return key

    def update(self, key: TaskID, *records: dict) -> None:
        """Show the last of these records of a run, and the newest value of each metric in them."""
        metrics = self.metrics[key]
        for record in records:
            metrics |= record
        text = format_metrics(metrics, self.console.width >= WIDE_CONSOLE) if LOSS_METRIC in metrics else 'compiling'
        self.bars.update(key, completed=metrics['step'], text=text)
        is_due = self.bars.tasks[key].finished or time.monotonic() - self.print_times[key] > LOG_SECONDS
        if not self.is_live and is_due:
            self.print_metrics(key)

    def print_metrics(self, key: TaskID) -> None:
        """Print the newest metrics of a run in one line."""
        self.print_times[key] = time.monotonic()
        task = self.bars.tasks[key]
        remaining = datetime.timedelta(seconds=round(task.time_remaining or 0))
        suffix = f'  {remaining} left' if remaining else ''
        steps = f'step {task.completed}/{task.total}'
        self.print_line(f'{task.description}  {steps}  {format_metrics(self.metrics[key])}{suffix}')

    def end(self, key: TaskID, outcome: str) -> None:
        """Remove the bar of a run that has ended, and print its newest metrics and its outcome."""
        if self.is_live:
            self.print_metrics(key)
        self.bars.update(key, visible=False)
        self.print_line(f'{self.bars.tasks[key].description}  {outcome}')

    def print_line(self, text: str) -> None:
        """Print a line above the bars."""
        with contextlib.suppress(*self.suppressed_errors):
            self.console.print(text, soft_wrap=True)


class ProgressCallback(Callback):
    """Callback that shows the progress of one run in a display.

    Args:
        display: The display, which may show other runs, too.
        name: The name of the run.
        num_steps: The number of steps of the run.
        row_description: The fields that the row changes at its size, in one line.
    """

    def __init__(self, display: ProgressDisplay, name: str, num_steps: int, row_description: str | None = None):
        self.display = display
        self.name = name
        self.row_description = row_description
        self.key = display.add(name, num_steps)

    def on_record(self, record: dict, written: bool) -> None:
        self.display.update(self.key, record)

    def on_message(self, line: str) -> None:
        self.display.print_line(f'{self.name}  {line}')

    def on_train_begin(self, step: int, attention: str, changes: list[str]) -> None:
        if self.row_description:
            self.on_message(self.row_description)
        self.on_message(f'attention: {attention}')
        if changes:
            self.on_message(f'since step {step}: {"; ".join(changes)}')
        elif step:
            self.on_message(f'resumes after step {step}')


class MessageCallback(Callback):
    """Callback that only prints messages for the user, to standard error."""

    def on_message(self, line: str) -> None:
        print_status(line)


class RunFollower(ProgressCallback):
    """Progress of a run in another process, which is read from the folder of the run.

    Args:
        display: The display, which may show other runs, too.
        name: The name of the run.
        num_steps: The number of steps of the run.
        run_dir: The folder of the run, which need not exist yet.
    """

    def __init__(self, display: ProgressDisplay, name: str, num_steps: int, run_dir: RunDir):
        super().__init__(display, name, num_steps)
        self.run_dir = run_dir
        self.num_lines: int | None = None
        self.num_attempts = 0
        self.poll_time = -math.inf

    def is_due(self) -> bool:
        """Return whether it is time for the next poll; a bucket is read seldom, where files are read whole."""
        return time.monotonic() > self.poll_time + (REMOTE_POLL_SECONDS if is_remote(self.run_dir.path) else 0)

    def poll(self) -> None:
        """Show a new attempt and new records; at first, the newest Sink_1 and the newest record."""
        self.poll_time = time.monotonic()
        attempts = self.run_dir.read_environment().get('attempts', [])
        if len(attempts) > self.num_attempts:
            self.num_attempts = len(attempts)
            self.on_train_begin(*summarize_newest_attempt(self.run_dir, attempts))
        records = self.run_dir.read_metric_lines()
        if self.num_lines is None:
            new_records = [record for record in records[:-1] if HEADLINE_METRIC.name in record][-1:] + records[-1:]
        else:
            new_records = records[self.num_lines :]
        self.num_lines = len(records)  # fewer than before if the run has resumed from an earlier step
        if new_records:
            self.display.update(self.key, *new_records)


class SweepDisplay(ProgressDisplay):
    """Progress display of the running runs of a sweep."""

    def __init__(self) -> None:
        super().__init__(terminal.make_console(stderr=True))
        self.followers: dict[int, RunFollower] = {}
        self.lock = threading.Lock()

    def on_run_begin(self, label: str, run: SweepRun) -> None:
        self.print_line(label)
        follower = RunFollower(self, str(run), run.spec.optimizer.steps, run.run_dir)
        with self.lock:
            self.followers[id(run)] = follower

    def poll(self) -> None:
        """Show what the running runs have written since the last call."""
        with self.lock:
            for follower in self.followers.values():
                if follower.is_due():
                    self.show(follower)

    def show(self, follower: RunFollower) -> None:
        """Show what a run has written; the run itself tells about a folder that cannot be read."""
        try:
            follower.poll()
        except Exception as error:
            if not is_storage_error(error) and not isinstance(error, DamagedFileError):
                raise

    def on_output_line(self, run: SweepRun, line: bytes) -> None:
        """Show a line from the process of a run, except how it has ended: the sweep tells that itself."""
        text = line.decode(errors='backslashreplace').removesuffix('\n')
        if text.strip() and not text.startswith('sinklab train: '):
            self.print_line(f'{run}: {text}')

    def on_run_end(self, run: SweepRun) -> None:
        with self.lock:
            follower = self.followers.pop(id(run))
            self.show(follower)
        is_stopped = run.outcome == 'to do'
        message = run.read_last_outcome().get('message') if is_stopped else run.reason
        outcome = 'stopped' if is_stopped else run.outcome
        self.end(follower.key, f'{outcome}: {message}' if message else outcome)
