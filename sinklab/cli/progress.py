"""Progress display of running runs: live bars on a terminal, occasional lines in a log.

A sweep trains its runs in processes of their own. It sets SINKLAB_PROGRESS=json for them. They then write their
numbers as JSON text sequences (RFC 7464) to standard error, and the sweep shows them all in one display.
"""

import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from sinklab import standard_streams
from sinklab.cli import terminal
from sinklab.config.spec import Spec
from sinklab.escape import escape_control
from sinklab.exit_status import STOPPING_MESSAGE, ExitStatus
from sinklab.metrics.registry import HEADLINE_METRIC
from sinklab.sweep.plan import SweepRun
from sinklab.sweep.run import PROGRESS_VARIABLE
from sinklab.train.callbacks import Callback

LOG_SECONDS = 10.0  # seconds between two lines of a log
RECORD_SEPARATOR = '\x1e'  # the character before each record of a JSON text sequence
RECORD_SECONDS = 0.2  # seconds between two records
LOSS_METRIC, SPEED_METRIC = 'train/loss', 'speed/tokens_per_second'
SAVING_TEXT = 'stopping, saves a checkpoint'
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
        if self.step == 0 and self.loss.strip() == '-':
            return 'compiling' if self.sink_step is None else f'compiling   {HEADLINE_METRIC.label} {self.sink:>7}'
        return f'loss {self.loss}  {HEADLINE_METRIC.label} {self.sink:>7}'


class ProgressDisplay:
    """Progress display of runs: bars on a terminal, otherwise one line for each run every LOG_SECONDS.

    As a context manager it shows the bars, and removes them at the end.

    Args:
        console: The console to print to.
        is_single_run: Whether there is only one run; its speed is then shown as well.
    """

    def __init__(self, console: Console, is_single_run: bool = False):
        self.console, self.is_single_run, self.is_live = console, is_single_run, terminal.is_live(console)
        self.bars = Bars(
            terminal.make_progress_column('{task.description}'),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            terminal.make_progress_column('{task.fields[text]}'),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=not self.is_live,
        )
        self.runs, self.last_print_times = {}, {}

    def __enter__(self) -> 'ProgressDisplay':
        self.bars.start()
        return self

    def __exit__(self, *_) -> None:
        self.bars.stop()

    def add(self, name: str, steps: int) -> int:
        """Add a run to the display, and return the key for its updates."""
        key = self.bars.add_task(escape_control(name), total=steps, text='starting')
        self.runs[key], self.last_print_times[key] = LatestMetrics(steps), 0.0
        return key

    def update(self, key: int, record: dict) -> None:
        numbers = self.runs[key]
        numbers.update(record)
        if self.is_live:
            speed_text = f'  {numbers.speed} tokens/s' if self.is_single_run and self.console.width >= 100 else ''
            self.bars.update(key, completed=numbers.step, text=numbers.format_bar_text() + speed_text)
        elif numbers.step == numbers.num_steps or time.monotonic() - self.last_print_times[key] > LOG_SECONDS:
            self.last_print_times[key] = time.monotonic()
            self.print_line(f'{self.bars.tasks[key].description}  {numbers.format_line()}')

    def set_bar_text(self, key: int, text: str) -> None:
        """Show a text instead of the metrics of a run."""
        self.bars.update(key, text=text)

    def print_line(self, text: str) -> None:
        """Print a line above the bars."""
        self.console.print(escape_control(text), soft_wrap=True)


class ProgressRecordWriter:
    """Writer of progress records, as a JSON text sequence (RFC 7464), for the display of a sweep."""

    def __init__(self, stream: Any):
        self.stream, self.num_steps, self.last_write_time = standard_streams.get_unescaped_stream(stream), 0, 0.0

    def __enter__(self) -> 'ProgressRecordWriter':
        return self

    def __exit__(self, *_) -> None:
        pass

    def add(self, name: str, steps: int) -> int:
        self.num_steps = steps
        return 0

    def update(self, key: int, record: dict) -> None:
        is_due = record['step'] == self.num_steps or HEADLINE_METRIC.name in record
        if is_due or time.monotonic() - self.last_write_time > RECORD_SECONDS:
            self.last_write_time = time.monotonic()
            names = 'step', LOSS_METRIC, SPEED_METRIC, HEADLINE_METRIC.name
            self.write_record(record={name: record[name] for name in names if name in record})

    def print_line(self, text: str) -> None:
        self.write_record(note=text)

    def write_record(self, **content: Any) -> None:
        self.stream.write(f'{RECORD_SEPARATOR}{json.dumps(content)}\n')
        self.stream.flush()


class ProgressCallback(Callback):
    """Callback that shows the progress of one run.

    As a context manager it shows the bar, and removes it at the end.

    Args:
        name: The name of the run.
        spec: The spec of the run.
        compilation_cache: Its text says how many programs were compiled; it is printed after the first step.
        stderr: True: write to standard error; False: to standard output.
        row_description: The fields that the row changes at its size, in one line.
    """

    def __init__(
        self,
        name: str,
        spec: Spec,
        compilation_cache: object = None,
        stderr: bool = True,
        row_description: str | None = None,
    ):
        as_records = os.environ.get(PROGRESS_VARIABLE) == 'json'
        self.display = (
            ProgressRecordWriter(sys.stderr)
            if as_records
            else ProgressDisplay(terminal.make_console(stderr=stderr), is_single_run=True)
        )
        self.key = self.display.add(name, spec.optimizer.steps)
        self.name, self.num_steps, self.epochs = name, spec.optimizer.steps, None
        self.checkpoint, self.compilation_cache, self.row_description = (
            spec.checkpoint,
            compilation_cache,
            row_description,
        )

    def __enter__(self) -> 'ProgressCallback':
        self.display.__enter__()
        return self

    def __exit__(self, *_) -> None:
        self.display.__exit__()

    def on_record(self, record: dict, written: bool) -> None:
        if self.compilation_cache and LOSS_METRIC in record:
            self.print_fact(str(self.compilation_cache))
            self.compilation_cache = None
        if self.epochs is None and 'data/epoch' in record:
            self.epochs = record['data/epoch'] * self.num_steps / record['step']
            share_text = (
                f'{100 * self.epochs:.3g} % of the data' if self.epochs < 1 else f'the data {self.epochs:.3g} times'
            )
            self.print_fact(f'{self.num_steps} steps read {share_text}')
        self.display.update(self.key, record)

    def on_message(self, line: str) -> None:
        """Print a message for the user; a sweep shows it as well."""
        if isinstance(self.display, ProgressRecordWriter):
            self.display.write_record(warning=line)
        else:
            self.print_fact(line)

    def on_train_begin(self, step: int, attention: str, changes: list[str]) -> None:
        if self.row_description and not isinstance(
            self.display, ProgressRecordWriter
        ):  # a sweep has printed the descriptions of all rows
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

    def print_line(self, line: str) -> None:
        """Print a line without the name of the run."""
        self.display.print_line(line)

    def print_fact(self, line: str) -> None:
        """Print a fact about the run that a log should contain, after the name of the run."""
        self.display.print_line(line if isinstance(self.display, ProgressRecordWriter) else f'{self.name}  {line}')

    def finish(self, exit_status: ExitStatus, message: str, print_results: Callable[[], None]) -> None:
        """Remove the bar, and print how the run has ended.

        Args:
            exit_status: The exit status of the run.
            message: The line to print if the exit code is not 0.
            print_results: Prints the results of the run if its exit code is 0. In a sweep it is not called, because
                the sweep prints the results of all runs.
        """
        if isinstance(self.display, ProgressRecordWriter):
            self.display.write_record(end=exit_status.kind, message=exit_status.message)
            return
        self.display.__exit__()
        if exit_status.exit_code == 0:
            print_results()
        else:
            self.display.print_line(message)


class SweepDisplay(ProgressDisplay):
    """Progress display of all runs of a sweep.

    Args:
        runs: All runs; each run that is still to do gets a bar when it begins.
        jobs: How many runs train at once.
    """

    def __init__(self, runs: list[SweepRun], jobs: int):
        super().__init__(terminal.make_console(stderr=True))
        self.pending_runs, self.seeds = [run for run in runs if run.outcome == 'to do'], {run.seed for run in runs}
        self.bar_keys, self.lock, self.total_bar, self.is_stopping = {}, threading.Lock(), None, False
        if self.is_live and len(self.pending_runs) > jobs:
            self.total_bar = self.bars.add_task('all runs', total=len(self.pending_runs), text='')

    def format_run_name(self, run: SweepRun) -> str:
        return run.row if self.is_live and len(self.seeds) == 1 else str(run)

    def on_run_begin(self, label: str, run: SweepRun) -> None:
        if not self.is_live:
            self.print_line(label)
        with self.lock:
            self.bar_keys[id(run)] = self.add(self.format_run_name(run), run.spec.optimizer.steps)

    def on_output_line(self, run: SweepRun, line: bytes) -> bool:
        """Show a line from the process of a run; return whether it is a progress record."""
        text = line.decode(errors='backslashreplace').removesuffix('\n')
        content = parse_record(text)
        if content is None:
            # The stop message of a run has a command that resumes only this run, not the sweep: it is not shown.
            is_end = text == STOPPING_MESSAGE or (self.is_stopping and text.startswith('sinklab train: '))
            if text.strip() and not (self.is_live and is_end):
                self.print_line(f'{self.format_run_name(run)}: {text}')
            return False
        if isinstance(content.get('record'), dict):
            self.update(self.bar_keys[id(run)], content['record'])
            if self.is_stopping:
                self.set_bar_text(self.bar_keys[id(run)], SAVING_TEXT)
        elif 'warning' in content or ('note' in content and not self.is_live):
            self.print_line(f'{self.format_run_name(run)}  {content.get("warning", content.get("note"))}')
        elif 'end' in content and content['end'] != 'done' and not (self.is_live and content['end'] == 'stopped'):
            self.print_line(f'{self.format_run_name(run)}: {content["end"]}: {content.get("message", "")}')
        return True

    def on_run_end(self, run: SweepRun) -> None:
        key = self.bar_keys[id(run)]
        if self.total_bar is not None:
            self.bars.advance(self.total_bar)
        if len(self.pending_runs) > MAX_FINISHED_BARS:
            self.bars.update(key, visible=False)
        elif run.outcome != 'done':
            self.set_bar_text(key, run.outcome if run.outcome != 'to do' else 'stopped')

    def on_stop_signal(self) -> None:
        """Show beside the bars that the runs are stopping and save checkpoints."""
        self.is_stopping = True
        for run in self.pending_runs:
            if run.outcome == 'to do' and id(run) in self.bar_keys:
                self.set_bar_text(self.bar_keys[id(run)], SAVING_TEXT)


def parse_record(text: str) -> dict | None:
    """Parse a record of a JSON text sequence (RFC 7464); return None for any other line."""
    if not text.startswith(RECORD_SEPARATOR):
        return None
    try:
        content = json.loads(text[1:])
    except ValueError:
        return None
    return content if isinstance(content, dict) else None
