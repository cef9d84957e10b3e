"""Progress display of running runs: live bars on a terminal, otherwise a line for each run every LOG_SECONDS.

A sweep trains its runs in processes of their own. It sets SINKLAB_PROGRESS=json for them. They then write their
numbers as JSON text sequences (RFC 7464) to standard error, and the sweep shows them all in one display. A terminal
or a disk that cannot be written does not end a run: errors of printing are suppressed.
"""

import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from sinklab.cli import terminal
from sinklab.config.spec import Spec
from sinklab.exit_status import STOPPING_MESSAGE, ExitStatus
from sinklab.metrics.registry import HEADLINE_METRIC
from sinklab.sweep.plan import SweepRun
from sinklab.sweep.run import PROGRESS_VARIABLE
from sinklab.train.callbacks import Callback

LOG_SECONDS = 10.0  # seconds between two lines of a log
RECORD_SEPARATOR = '\x1e'  # the character before each record of a JSON text sequence
RECORD_SECONDS = 0.2  # seconds between two records
LOSS_METRIC, SPEED_METRIC = 'train/loss', 'speed/tokens_per_second'
MAX_FINISHED_BARS = 8  # in a sweep with more runs than this, the bar of a run is hidden when the run ends


@dataclasses.dataclass
class LatestMetrics:
    """Latest metrics of a run, formatted as text."""

    num_steps: int
    step: int = 0
    loss: str = '  -  '
    speed: str = '-'
    sink: str = '-'
    sink_step: int | None = None  # the step of `sink`

    def update(self, record: dict) -> None:
        self.step = record['step']
        if LOSS_METRIC in record:
            self.loss = f'{record[LOSS_METRIC]:.3f}'
        if SPEED_METRIC in record:
            self.speed = f'{record[SPEED_METRIC]:,.0f}'
        if HEADLINE_METRIC.name in record:
            self.sink, self.sink_step = HEADLINE_METRIC.format_value(record[HEADLINE_METRIC.name]), self.step

    def format_line(self) -> str:
        """Format all metrics for a log; Sink_1 has its step if that is not the newest step."""
        step_suffix = '' if self.sink_step in (None, self.step) else f' at step {self.sink_step}'
        return (
            f'step {self.step}/{self.num_steps}  loss {self.loss}  {self.speed} '
            f'tokens/s  {HEADLINE_METRIC.label} {self.sink}{step_suffix}'
        )

    def format_bar_text(self) -> str:
        """Format the metrics that are shown behind a bar."""
        state = 'compiling ' if self.step == 0 and self.loss.strip() == '-' else f'loss {self.loss}'
        return f'{state}  {HEADLINE_METRIC.label} {self.sink:>7}'


class ProgressDisplay:
    """Progress display of runs; as a context manager it shows the bars, and removes them at the end."""

    def __init__(self, console: terminal.Console):
        self.console, self.is_live, self.is_stopping = console, terminal.is_live(console), False
        self.bars = Progress(
            terminal.make_progress_column('{task.description}'),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            terminal.make_progress_column('{task.fields[text]}'),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=not self.is_live,
        )
        self.metrics, self.print_times = {}, {}

    def __enter__(self) -> 'ProgressDisplay':
        with contextlib.suppress(OSError):
            self.bars.start()
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(OSError):
            self.bars.stop()

    def add(self, name: str, steps: int) -> int:
        """Add a run to the display, and return the key for its updates."""
        key = self.bars.add_task(name, total=steps, text='starting')
        self.metrics[key], self.print_times[key] = LatestMetrics(steps), 0.0
        return key

    def update(self, key: int, record: dict) -> None:
        metrics = self.metrics[key]
        metrics.update(record)
        if self.is_live:
            text = 'stopping, saves a checkpoint' if self.is_stopping else metrics.format_bar_text()
            text += f'  {metrics.speed} tokens/s' if self.console.width >= 100 else ''
            self.bars.update(key, completed=metrics.step, text=text)
        elif metrics.step == metrics.num_steps or time.monotonic() - self.print_times[key] > LOG_SECONDS:
            self.print_times[key] = time.monotonic()
            self.print_line(f'{self.bars.tasks[key].description}  {metrics.format_line()}')

    def print_line(self, text: str) -> None:
        """Print a line above the bars."""
        with contextlib.suppress(OSError):
            self.console.print(text, soft_wrap=True)


class ProgressCallback(Callback):
    """Callback that shows the progress of one run, or writes records for the display of its sweep.

    As a context manager it shows the bar, and removes it at the end.

    Args:
        name: The name of the run.
        spec: The spec of the run.
        stderr: True: write to standard error; False: to standard output.
        row_description: The fields that the row changes at its size, in one line.
    """

    def __init__(
        self,
        name: str,
        spec: Spec,
        stderr: bool = True,
        row_description: str | None = None,
    ):
        self.name, self.num_steps, self.checkpoint = name, spec.optimizer.steps, spec.checkpoint
        self.row_description, self.has_epochs, self.record_time = row_description, False, 0.0
        self.is_in_sweep = os.environ.get(PROGRESS_VARIABLE) == 'json'
        self.display = ProgressDisplay(terminal.make_console(stderr=stderr))
        self.key = self.display.add(name, self.num_steps)

    def __enter__(self) -> 'ProgressCallback':
        if not self.is_in_sweep:
            self.display.__enter__()
        return self

    def __exit__(self, *_) -> None:
        self.display.__exit__()

    def on_record(self, record: dict, written: bool) -> None:
        if not self.has_epochs and 'data/epoch' in record:
            self.has_epochs = True
            epochs = record['data/epoch'] * self.num_steps / record['step']
            share = f'{100 * epochs:.3g} % of the data' if epochs < 1 else f'the data {epochs:.3g} times'
            self.print_fact(f'{self.num_steps} steps read {share}')
        if not self.is_in_sweep:
            self.display.update(self.key, record)
            return
        is_due = record['step'] == self.num_steps or HEADLINE_METRIC.name in record
        if is_due or time.monotonic() - self.record_time > RECORD_SECONDS:
            self.record_time = time.monotonic()
            names = 'step', LOSS_METRIC, SPEED_METRIC, HEADLINE_METRIC.name
            write_record(record={name: record[name] for name in names if name in record})

    def on_message(self, line: str) -> None:
        """Print a message for the user; a sweep shows it beside its bars as well."""
        write_record(warning=line) if self.is_in_sweep else self.print_fact(line)

    def on_train_begin(self, step: int, attention: str, changes: list[str]) -> None:
        if self.row_description and not self.is_in_sweep:  # a sweep has printed the descriptions of all rows
            self.print_fact(self.row_description)
        self.print_fact(f'attention: {attention}')
        if changes:
            self.on_message(f'since step {step}: {"; ".join(changes)}')
        elif step:
            self.print_fact(f'resumes after step {step}')
        interval = self.checkpoint.every_steps
        if not self.checkpoint.every_minutes and (
            not interval or step + interval - step % interval >= self.num_steps
        ):
            self.print_fact(
                f'saves a checkpoint only at the end, or when Ctrl-C or SIGTERM stops it '
                f'(config.checkpoint.every_steps is {interval})'
            )

    def print_fact(self, line: str) -> None:
        """Print a fact about the run that a log should contain, after the name of the run."""
        write_record(note=line) if self.is_in_sweep else self.display.print_line(f'{self.name}  {line}')

    def finish(self, exit_status: ExitStatus, message: str, print_results: Callable[[], None]) -> None:
        """Remove the bar, and print how the run has ended; a sweep prints that of all runs itself.

        Args:
            exit_status: The exit status of the run.
            message: The line to print if the exit code is not 0.
            print_results: Prints the results of the run if its exit code is 0.
        """
        self.display.__exit__()
        if self.is_in_sweep:
            return
        if exit_status.exit_code:
            self.display.print_line(message)
            return
        try:
            print_results()
            sys.stdout.flush()
        except OSError:
            terminal.discard_stdout()


def write_record(**content: Any) -> None:
    """Write a progress record to standard error, for the sweep that has started this process."""
    with contextlib.suppress(OSError):
        print(f'{RECORD_SEPARATOR}{json.dumps(content)}', file=sys.stderr, flush=True)


def parse_record(text: str) -> dict | None:
    """Parse a record of a JSON text sequence (RFC 7464); return None for any other line."""
    try:
        return json.loads(text[1:]) if text.startswith(f'{RECORD_SEPARATOR}{{') else None
    except ValueError:
        return None


class SweepDisplay(ProgressDisplay):
    """Progress display of all runs of a sweep.

    Args:
        runs: All runs; each run that is still to do gets a bar when it begins.
        jobs: How many runs train at once.
    """

    def __init__(self, runs: list[SweepRun], jobs: int):
        super().__init__(terminal.make_console(stderr=True))
        self.pending_runs, self.seeds = [run for run in runs if run.outcome == 'to do'], {run.seed for run in runs}
        self.keys, self.lock, self.total_bar = {}, threading.Lock(), None
        if self.is_live and len(self.pending_runs) > jobs:
            self.total_bar = self.bars.add_task('all runs', total=len(self.pending_runs), text='')

    def format_run_name(self, run: SweepRun) -> str:
        return run.row if self.is_live and len(self.seeds) == 1 else str(run)

    def on_run_begin(self, label: str, run: SweepRun) -> None:
        if not self.is_live:
            self.print_line(label)
        with self.lock:
            self.keys[id(run)] = self.add(self.format_run_name(run), run.spec.optimizer.steps)

    def on_output_line(self, run: SweepRun, line: bytes) -> bool:
        """Show a line from the process of a run; return whether it is a progress record."""
        text, name = line.decode(errors='backslashreplace').removesuffix('\n'), self.format_run_name(run)
        content = parse_record(text)
        if content is None:
            # The stop message of a run has a command that resumes only this run, not the sweep: it is not shown.
            is_stop_message = text == STOPPING_MESSAGE or (self.is_stopping and text.startswith('sinklab train: '))
            if text.strip() and not is_stop_message:
                self.print_line(f'{name}: {text}')
        elif 'record' in content:
            self.update(self.keys[id(run)], content['record'])
        elif 'warning' in content or not self.is_live:
            self.print_line(f'{name}  {content.get("warning", content.get("note"))}')
        return content is not None

    def on_run_end(self, run: SweepRun) -> None:
        key = self.keys[id(run)]
        is_stopped = run.outcome == 'to do'
        message = run.read_last_outcome().get('message') if is_stopped else run.reason
        if message:
            self.print_line(f'{self.format_run_name(run)}: {"stopped" if is_stopped else run.outcome}: {message}')
        if self.total_bar is not None:
            self.bars.advance(self.total_bar)
        self.bars.update(key, visible=len(self.pending_runs) <= MAX_FINISHED_BARS)

    def on_stop_signal(self) -> None:
        """Show behind the bars that the runs are stopping and save checkpoints."""
        self.is_stopping = True
        for key, metrics in [*self.metrics.items()] if self.is_live else []:
            self.update(key, dict(step=metrics.step))
