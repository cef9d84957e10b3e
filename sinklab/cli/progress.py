"""Progress display of running runs: live bars on a terminal, otherwise a line for each run every LOG_SECONDS.

A run shows its own records; `sinklab sweep` and `sinklab tail` read those of all runs from their folders. A terminal
or a disk that cannot be written does not end a run: errors of printing are suppressed.
"""

import contextlib
import datetime
import math
import threading
import time
from collections.abc import Callable, Sequence

from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

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


def format_seconds(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds))).removeprefix('0:')


class StatusColumn(ProgressColumn):
    """Column with a text that each refresh of the bars formats anew, because it contains times."""

    def __init__(self, format_status: Callable[[Task], str]):
        super().__init__(Column(no_wrap=True))
        self.format_status = format_status

    def render(self, task: Task) -> Text:
        return Text(self.format_status(task))


class ProgressDisplay:
    """Progress display of runs; as a context manager it shows the bars, and removes them at the end.

    Args:
        console: The console to print to.
        suppressed_errors: Errors of printing that are suppressed.
        auto_refresh: Whether a thread refreshes the bars; with it, lines of several threads may leave a bar behind.
    """

    def __init__(
        self,
        console: terminal.Console,
        suppressed_errors: tuple[type[Exception], ...] = (OSError,),
        auto_refresh: bool = True,
    ):
        self.console = console
        self.suppressed_errors = suppressed_errors
        self.is_live = terminal.is_live(console)
        self.bars = Progress(
            TextColumn('{task.description}', markup=False),
            BarColumn(None),  # it takes what the other columns leave
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            StatusColumn(lambda task: self.format_status(task, console.width >= WIDE_CONSOLE)),
            console=console,
            transient=True,
            disable=not self.is_live,
            auto_refresh=auto_refresh,
            speed_estimate_period=SPEED_SECONDS,
        )
        self.all_runs: Task | None = None
        self.done_steps = 0
        self.end_time = math.inf  # the estimated end of all runs

    def __enter__(self) -> 'ProgressDisplay':
        with contextlib.suppress(*self.suppressed_errors):
            self.bars.start()
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(*self.suppressed_errors):
            self.bars.stop()

    def add(self, name: str, steps: int) -> TaskID:
        """Add a run to the display, and return the key for its updates."""
        fields = dict(metrics={}, print_time=0.0, phase='starting', phase_time=time.monotonic(), first_step=0)
        return self.bars.add_task(name, total=steps, **fields)

    def add_all_runs(self, steps: int, done_steps: int = 0) -> None:
        """Add a bar of all runs, with the sum of their steps, and of the steps of runs that were done before."""
        self.done_steps = done_steps
        self.bars.add_task('all runs', total=steps, completed=done_steps)
        self.all_runs = self.bars.tasks[-1]

    def set_phase(self, key: TaskID, phase: str) -> None:
        """Show what a run does until its first step ends."""
        self.bars.update(key, phase=phase, phase_time=time.monotonic())

    def begin(self, key: TaskID, step: int) -> None:
        """Show that an attempt begins after a step."""
        self.set_phase(key, 'compiling')
        self.bars.update(key, completed=step, first_step=step, metrics={})

    def update(self, key: TaskID, *records: dict) -> None:
        """Show the last of these records of a run, and the newest value of each metric in them."""
        task = self.bars.tasks[key]
        for record in records:
            task.fields['metrics'] |= record
        if LOSS_METRIC not in task.fields['metrics']:
            self.set_phase(key, 'first step')
        self.bars.update(key, completed=records[-1]['step'])
        if self.all_runs:
            self.count_steps(self.all_runs)
        is_due = task.finished or time.monotonic() - task.fields['print_time'] > LOG_SECONDS
        if not self.is_live and is_due:
            self.print_metrics(task)

    def count_steps(self, all_runs: Task) -> None:
        """Sum the steps of all runs, and estimate their end from the time since the start of the display."""
        runs = [task for task in self.bars.tasks if 'metrics' in task.fields]
        self.bars.update(all_runs.id, completed=self.done_steps + sum(run.completed for run in runs))
        new_steps = sum(run.completed - run.fields['first_step'] for run in runs)
        if new_steps > 0:
            self.end_time = time.monotonic() + all_runs.elapsed * all_runs.remaining / new_steps

    def format_status(self, task: Task, shows_speed: bool = True) -> str:
        """Format the newest metrics of a run, or what it does before, and the remaining time."""
        metrics = task.fields.get('metrics')
        seconds = self.end_time - time.monotonic() if metrics is None else task.time_remaining or 0
        remaining = f'{format_seconds(seconds)} left' if 0 < seconds < math.inf else ''
        if metrics is None:
            return remaining
        phase = ''
        if self.is_live and LOSS_METRIC not in metrics:
            phase = f'{task.fields["phase"]} {format_seconds(time.monotonic() - task.fields["phase_time"])}'
        return '  '.join(filter(None, [format_metrics(metrics, shows_speed), phase, remaining]))

    def print_metrics(self, task: Task) -> None:
        """Print the newest metrics of a run in one line."""
        task.fields['print_time'] = time.monotonic()
        self.print_line(f'{self.format_steps(task)}  {self.format_status(task)}'.rstrip())

    def format_steps(self, task: Task) -> str:
        return f'{task.description}  step {task.completed:.0f}/{task.total:.0f}'

    def end(self, key: TaskID, outcome: str) -> None:
        """Remove the bar of a run that has ended, and print its newest metrics and its outcome."""
        task = self.bars.tasks[key]
        if self.is_live and task.fields['metrics']:
            self.print_line(f'{self.format_steps(task)}  {format_metrics(task.fields["metrics"])}'.rstrip())
        self.bars.update(key, visible=False)
        line = f'{task.description}  {outcome}'
        if self.all_runs:
            self.bars.update(self.all_runs.id, total=self.all_runs.total - task.remaining)  # steps that do not come
            self.count_steps(self.all_runs)
            if not self.is_live:
                line += f'  ({self.format_steps(self.all_runs)}  {self.format_status(self.all_runs)}'.rstrip() + ')'
        self.print_line(line)

    def print_line(self, text: str) -> None:
        """Print a line above the bars."""
        with contextlib.suppress(*self.suppressed_errors):
            terminal.print_wrapped(text, self.console)


class ProgressCallback(Callback):
    """Callback that shows the progress of one run in a display.

    Args:
        display: The display, which may show other runs, too.
        name: The name of the run.
        num_steps: The number of steps of the run.
        descriptions: Lines about the run, to print when training begins.
    """

    def __init__(self, display: ProgressDisplay, name: str, num_steps: int, descriptions: Sequence[str] = ()):
        self.display = display
        self.name = name
        self.descriptions = descriptions
        self.key = display.add(name, num_steps)

    def on_record(self, record: dict, written: bool) -> None:
        self.display.update(self.key, record)

    def on_message(self, line: str) -> None:
        self.display.print_line(f'{self.name}  {line}')

    def on_train_begin(self, step: int, attention: str, changes: list[str]) -> None:
        self.display.begin(self.key, step)
        for line in [*self.descriptions, f'attention: {attention}']:
            self.on_message(line)
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

    def skip(self) -> None:
        """Leave out what the folder has already, of earlier attempts."""
        self.num_attempts = len(self.run_dir.read_environment().get('attempts', []))
        self.num_lines = len(self.run_dir.read_metric_lines())

    def poll(self) -> None:
        """Show a new attempt and new records; at first, the newest Sink_1 and the newest record."""
        self.poll_time = time.monotonic()
        attempts = self.run_dir.read_environment().get('attempts', [])
        if len(attempts) > self.num_attempts:
            self.num_attempts = len(attempts)
            self.on_train_begin(*summarize_newest_attempt(self.run_dir, attempts))
        records = self.run_dir.read_metric_lines()
        if self.num_lines is None:
            if records:
                self.display.begin(self.key, records[-1]['step'])  # what came before does not count in estimates
            new_records = [record for record in records[:-1] if HEADLINE_METRIC.name in record][-1:] + records[-1:]
        else:
            new_records = records[self.num_lines :]
        self.num_lines = len(records)  # fewer than before if the run has resumed from an earlier step
        if new_records:
            self.display.update(self.key, *new_records)


class SweepDisplay(ProgressDisplay):
    """Progress display of the runs of a sweep; runs with an outcome, which are not trained again, count as done."""

    def __init__(self, runs: Sequence[SweepRun]) -> None:
        super().__init__(terminal.make_console(stderr=True), auto_refresh=False)
        self.add_all_runs(
            sum(run.spec.optimizer.steps for run in runs),
            sum(run.spec.optimizer.steps for run in runs if run.outcome != 'to do'),
        )
        self.followers: dict[int, RunFollower] = {}
        self.lock = threading.RLock()

    def on_run_begin(self, label: str, run: SweepRun) -> None:
        with self.lock:
            self.print_line(label)
            follower = RunFollower(self, str(run), run.spec.optimizer.steps, run.run_dir)
            self.suppress_read_errors(follower.skip)
            self.followers[id(run)] = follower

    def poll(self) -> None:
        """Show what the running runs have written since the last call."""
        with self.lock:
            for follower in self.followers.values():
                if follower.is_due():
                    self.suppress_read_errors(follower.poll)
            with contextlib.suppress(*self.suppressed_errors):
                self.bars.refresh()

    def print_line(self, text: str) -> None:
        with self.lock:
            super().print_line(text)

    def suppress_read_errors(self, read: Callable[[], None]) -> None:
        """Read the folder of a run; the run itself tells about a folder that cannot be read."""
        try:
            read()
        except Exception as error:
            if not is_storage_error(error) and not isinstance(error, DamagedFileError):
                raise

    def on_output_line(self, run: SweepRun, line: bytes) -> None:
        """Show a line from the process of a run, except how it has ended: the sweep tells that itself."""
        text = line.decode(errors='backslashreplace').removesuffix('\n')
        if text.strip() and not text.startswith('sinklab train: '):
            self.print_line(f'{run}: {text}')

    def on_run_end(self, run: SweepRun) -> None:
        is_stopped = run.outcome == 'to do'
        message = run.read_last_outcome().get('message') if is_stopped else run.reason
        outcome = 'stopped' if is_stopped else run.outcome
        with self.lock:
            follower = self.followers.pop(id(run))
            self.suppress_read_errors(follower.poll)
            self.end(follower.key, f'{outcome}: {message}' if message else outcome)
