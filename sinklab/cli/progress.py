"""Progress of runs: a live display on a terminal, otherwise a line for each run every LOG_SECONDS.

A terminal that cannot be written does not end a run: errors of printing are suppressed.
"""

import contextlib
import datetime
import re
import threading
import time
from collections.abc import Sequence
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, SpinnerColumn, TaskID, TextColumn
from rich.table import Column

from sinklab.cli import terminal
from sinklab.metrics.registry import HEADLINE_METRIC
from sinklab.sweep.plan import SweepRun
from sinklab.train.callbacks import Callback

LOG_SECONDS = 10.0  # seconds between two lines of a log
WIDE_CONSOLE = 100  # columns in which a bar has room for the speed
SPEED_SECONDS = 600.0  # seconds over which the speed is averaged that gives the remaining time
LOSS_METRIC, SPEED_METRIC = 'train/loss', 'speed/tokens_per_second'


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


def format_remaining(seconds: float | None) -> str:
    return f'{datetime.timedelta(seconds=round(seconds))} left'.removeprefix('0:') if seconds else ''


class Display:
    """Lines above a live display, which is shown between start() and stop() if standard error is a terminal."""

    def __init__(self, *columns: ProgressColumn, auto_refresh: bool = True) -> None:
        self.console = terminal.make_console(stderr=True)
        self.is_live = terminal.is_live(self.console)
        self.bars = Progress(
            *columns,
            console=self.console,
            transient=True,
            disable=not self.is_live,
            auto_refresh=auto_refresh,
            speed_estimate_period=SPEED_SECONDS,
        )

    def start(self) -> None:
        with contextlib.suppress(OSError):
            self.bars.start()

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self.bars.stop()

    def print_line(self, text: str) -> None:
        with contextlib.suppress(OSError):
            terminal.print_wrapped(text, self.console)


class ProgressCallback(Display, Callback):
    """Callback that shows the progress of a run.

    Args:
        name: The name of the run.
        num_steps: The number of steps of the run.
        descriptions: Lines about the run, to print when training begins.
    """

    def __init__(self, name: str, num_steps: int, descriptions: Sequence[str] = ()):
        super().__init__(
            SpinnerColumn(),
            TextColumn('{task.description}', markup=False),
            BarColumn(None),  # it takes what the other columns leave
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn('{task.fields[status]}', markup=False),
        )
        self.name = name
        self.descriptions = descriptions
        self.bars.add_task(name, total=num_steps, status='compiling')
        self.task = self.bars.tasks[0]
        self.metrics: dict = {}
        self.print_time = 0.0

    def on_message(self, line: str) -> None:
        self.print_line(f'{self.name}  {line}')

    def on_train_begin(self, step: int, attention: str, changes: list[str]) -> None:
        self.bars.update(self.task.id, completed=step)
        self.start()
        for line in [*self.descriptions, f'attention: {attention}']:
            self.on_message(line)
        if changes:
            self.on_message(f'since step {step}: {"; ".join(changes)}')
        elif step:
            self.on_message(f'resumes after step {step}')

    def on_record(self, record: dict, written: bool) -> None:
        self.metrics |= record
        self.bars.update(self.task.id, completed=record['step'])
        is_due = self.task.finished or time.monotonic() - self.print_time > LOG_SECONDS
        if not self.is_live and not is_due:
            return
        metrics = format_metrics(self.metrics, not self.is_live or self.console.width >= WIDE_CONSOLE)
        status = '  '.join(filter(None, [metrics, format_remaining(self.task.time_remaining)]))
        self.bars.update(self.task.id, status=status)
        if not self.is_live:
            self.print_time = time.monotonic()
            self.on_message(f'step {self.task.completed:.0f}/{self.task.total:.0f}  {status}'.rstrip())

    def on_train_end(self) -> None:
        self.stop()


class SweepDisplay(Display):
    """Display of the lines that the runs of a sweep print; on a terminal, the newest step of each stays below.

    Runs are followed in threads. All of them change the display with `lock`, so that no bar is left behind.
    """

    def __init__(self, runs: Sequence[SweepRun]) -> None:
        super().__init__(TextColumn('{task.description}', markup=False), auto_refresh=False)
        self.lock = threading.Lock()
        self.task_ids: dict[int, TaskID] = {}
        self.start_time = time.monotonic()
        self.done_steps = 0
        self.remaining_steps = sum(run.spec.optimizer.steps for run in runs if run.outcome == 'to do')

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def print_line(self, text: str) -> None:
        with self.lock:
            super().print_line(text)

    def on_run_begin(self, label: str, run: SweepRun) -> None:
        self.print_line(label)
        with self.lock:
            self.task_ids[id(run)] = self.bars.add_task(str(run), total=None)

    def on_output_line(self, run: SweepRun, line: bytes) -> None:
        """Show a line from the process of a run, except how it has ended: the sweep tells that itself."""
        text = line.decode(errors='backslashreplace').rstrip('\n')
        if not text.strip() or text.startswith('sinklab train: '):
            return
        row = run.row.rpartition(':')[2]
        text = f'{run}  {text.removeprefix(f"{row}  ")}'
        if not self.is_live or not re.search(r'  step \d+/\d+', text):
            self.print_line(text)
            return
        with self.lock, contextlib.suppress(OSError):
            self.bars.update(self.task_ids[id(run)], description=text, refresh=True)

    def on_run_end(self, run: SweepRun) -> None:
        with self.lock:
            self.bars.remove_task(self.task_ids.pop(id(run)))
        is_stopped = run.outcome == 'to do'
        message = run.read_last_outcome().get('message') if is_stopped else run.reason
        line = f'{run}  {"stopped" if is_stopped else run.outcome}' + (f': {message}' if message else '')
        self.remaining_steps -= run.spec.optimizer.steps
        if run.outcome == 'done':
            self.done_steps += run.spec.optimizer.steps
        if self.done_steps and self.remaining_steps and not is_stopped:
            seconds = (time.monotonic() - self.start_time) * self.remaining_steps / self.done_steps
            line += f'  (all runs: {format_remaining(seconds)})'
        self.print_line(line)
