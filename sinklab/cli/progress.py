"""What a person sees of runs under way: live bars on a terminal, a line now and then in a log.

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

from sinklab import streams
from sinklab.cli import terminal
from sinklab.escape import escape_control
from sinklab.measure.table import HEADLINE
from sinklab.processes.ending import STOPPING, End
from sinklab.spec import Spec
from sinklab.sweep.plan import Run
from sinklab.sweep.run import Watch
from sinklab.train.listener import Listener

QUIET = 10.0  # seconds between two lines of a log
VARIABLE = 'SINKLAB_PROGRESS'  # environment variable: json has Progress write records for a sweep
MARK = '\x1e'  # the character before each record of a JSON text sequence
EVERY = 0.2  # seconds between two records
LOSS, PACE = 'train/loss', 'speed/tokens_per_second'
SAVING = 'stopping, saves a checkpoint'
MOST = 8  # bars of runs that have ended which stay until the end of a sweep


@dataclasses.dataclass
class Numbers:
    """The newest numbers of a run, as text."""

    steps: int
    step: int = 0
    loss: str = '  -  '
    pace: str = '-'
    sink: str = '-'
    measured: int | None = None  # the step of `sink`

    def update(self, record: dict) -> None:
        self.step = record['step']
        if LOSS in record:
            self.loss = f'{record[LOSS]:.3f}'
        if PACE in record:
            self.pace = f'{record[PACE]:,.0f}'
        if HEADLINE.name in record:
            self.sink, self.measured = HEADLINE.text(record[HEADLINE.name]), self.step

    def line(self) -> str:
        """Format all numbers for a log, Sink_1 with its step if that is not the newest one."""
        at = '' if self.measured in (None, self.step) else f' at step {self.measured}'
        return (
            f'step {self.step}/{self.steps}  loss {self.loss}  {self.pace} tokens/s  {HEADLINE.label} {self.sink}{at}'
        )

    def live(self) -> str:
        """Format the numbers behind a bar."""
        if self.step == 0 and self.loss.strip() == '-':
            return 'compiling' if self.measured is None else f'compiling   {HEADLINE.label} {self.sink:>7}'
        return f'loss {self.loss}  {HEADLINE.label} {self.sink:>7}'


class Display:
    """Shows how runs go on: a bar for each on a terminal, else a line of each every QUIET seconds.

    As a context it shows the bars and takes them away.

    Args:
        console: what is written to.
        only: whether there is one run, of which the pace is shown as well.
    """

    def __init__(self, console: Console, only: bool = False):
        self.console, self.only, self.live = console, only, terminal.is_live(console)
        self.bars = Bars(
            terminal.column('{task.description}'),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            terminal.column('{task.fields[text]}'),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=not self.live,
        )
        self.runs, self.spoke = {}, {}

    def __enter__(self) -> 'Display':
        self.bars.start()
        return self

    def __exit__(self, *_) -> None:
        self.bars.stop()

    def add(self, name: str, steps: int) -> int:
        """Begin to show a run, and return the key by which it is updated."""
        key = self.bars.add_task(escape_control(name), total=steps, text='starting')
        self.runs[key], self.spoke[key] = Numbers(steps), 0.0
        return key

    def update(self, key: int, record: dict) -> None:
        numbers = self.runs[key]
        numbers.update(record)
        if self.live:
            pace = f'  {numbers.pace} tokens/s' if self.only and self.console.width >= 100 else ''
            self.bars.update(key, completed=numbers.step, text=numbers.live() + pace)
        elif numbers.step == numbers.steps or time.monotonic() - self.spoke[key] > QUIET:
            self.spoke[key] = time.monotonic()
            self.say(f'{self.bars.tasks[key].description}  {numbers.line()}')

    def mark(self, key: int, text: str) -> None:
        """Show words in place of the numbers of a run."""
        self.bars.update(key, text=text)

    def say(self, text: str) -> None:
        """Print a line, above the bars if there are any."""
        self.console.print(escape_control(text), soft_wrap=True)


class Sequence:
    """Writes what a Display shows as a JSON text sequence for the display of a sweep; numbers every EVERY seconds."""

    def __init__(self, stream: Any):
        self.stream, self.steps, self.written = streams.unescaped(stream), 0, 0.0

    def __enter__(self) -> 'Sequence':
        return self

    def __exit__(self, *_) -> None:
        pass

    def add(self, name: str, steps: int) -> int:
        self.steps = steps
        return 0

    def update(self, key: int, record: dict) -> None:
        last = record['step'] == self.steps or HEADLINE.name in record
        if last or time.monotonic() - self.written > EVERY:
            self.written = time.monotonic()
            names = 'step', LOSS, PACE, HEADLINE.name
            self.write(record={name: record[name] for name in names if name in record})

    def say(self, text: str) -> None:
        self.write(note=text)

    def write(self, **content: Any) -> None:
        self.stream.write(f'{MARK}{json.dumps(content)}\n')
        self.stream.flush()


class Progress(Listener):
    """Shows how one run goes on. As a context it shows the bar and takes it away.

    Args:
        name: of the run.
        spec: its config.
        programs: says what was compiled, once it is asked after the first step.
        stderr: whether to write to standard error; else to standard output.
        row: the fields that the row changes at its size, in one line.
    """

    def __init__(self, name: str, spec: Spec, programs: object = None, stderr: bool = True, row: str | None = None):
        as_records = os.environ.get(VARIABLE) == 'json'
        self.display = Sequence(sys.stderr) if as_records else Display(terminal.console(stderr=stderr), only=True)
        self.key = self.display.add(name, spec.optimizer.steps)
        self.name, self.steps, self.epochs = name, spec.optimizer.steps, None
        self.checkpoint, self.programs, self.row = spec.checkpoint, programs, row

    def __enter__(self) -> 'Progress':
        self.display.__enter__()
        return self

    def __exit__(self, *_) -> None:
        self.display.__exit__()

    def record(self, record: dict, written: bool) -> None:
        if self.programs and LOSS in record:
            self.fact(str(self.programs))
            self.programs = None
        if self.epochs is None and 'data/epoch' in record:
            self.epochs = record['data/epoch'] * self.steps / record['step']
            part = f'{100 * self.epochs:.3g} %' if self.epochs < 1 else f'{self.epochs:.3g} times all'
            self.fact(f'{self.steps} steps read {part} of the data')
        self.display.update(self.key, record)

    def note(self, line: str) -> None:
        """Say what the reader should know; a sweep shows it, too."""
        if isinstance(self.display, Sequence):
            self.display.write(warning=line)
        else:
            self.fact(line)

    def begin(self, step: int, attention: str, changes: list[str]) -> None:
        if self.row and not isinstance(self.display, Sequence):  # a sweep has said it of all rows
            self.fact(self.row)
        self.fact(f'attention: {attention}')
        if changes:
            self.note(f'since step {step}: {"; ".join(changes)}')
        every = self.checkpoint.every_steps
        if not self.checkpoint.every_minutes and (not every or step + every - step % every >= self.steps):
            self.fact(
                f'saves no checkpoint before its end, but for Ctrl-C and SIGTERM '
                f'(config.checkpoint.every_steps is {every})'
            )

    def say(self, line: str) -> None:
        """Print a line as it is."""
        self.display.say(line)

    def fact(self, line: str) -> None:
        """Say something of the run that a log should have."""
        self.display.say(line if isinstance(self.display, Sequence) else f'{self.name}  {line}')

    def end(self, end: End, words: str, closing: Callable[[], None]) -> None:
        """Take the bar away, and say how the run has ended.

        Args:
            end: how it has ended.
            words: the line that says so, where the run is not done.
            closing: prints the results of the run; a sweep does that for all of its runs.
        """
        if isinstance(self.display, Sequence):
            self.display.write(end=end.kind, words=end.words)
            return
        self.display.__exit__()
        if end.code == 0:
            closing()
        else:
            self.display.say(words)


class Runs(Display, Watch):
    """One display of all runs of a sweep.

    Args:
        runs: all of them; those that are to do get a bar each.
        jobs: how many there are at once.
    """

    def __init__(self, runs: list[Run], jobs: int):
        super().__init__(terminal.console(stderr=True))
        self.waiting, self.seeds = [run for run in runs if run.outcome == 'to do'], {run.seed for run in runs}
        self.keys, self.lock, self.all, self.is_stopping = {}, threading.Lock(), None, False
        if self.live and len(self.waiting) > jobs:
            self.all = self.bars.add_task('all runs', total=len(self.waiting), text='')

    def name(self, run: Run) -> str:
        return run.row if self.live and len(self.seeds) == 1 else str(run)

    def begin(self, at: str, run: Run) -> None:
        if not self.live:
            self.say(at)
        with self.lock:
            self.keys[id(run)] = self.add(self.name(run), run.spec.optimizer.steps)

    def hear(self, run: Run, line: bytes) -> bool:
        """Show a line of a run's process; return whether it is a record."""
        text = line.decode(errors='backslashreplace').removesuffix('\n')
        content = parse(text)
        if content is None:
            # What a run says as it stops names a command that goes on with this run alone.
            is_end = text == STOPPING or (self.is_stopping and text.startswith('sinklab train: '))
            if text.strip() and not (self.live and is_end):
                self.say(f'{self.name(run)}: {text}')
            return False
        if isinstance(content.get('record'), dict):
            self.update(self.keys[id(run)], content['record'])
            if self.is_stopping:
                self.mark(self.keys[id(run)], SAVING)
        elif 'warning' in content or ('note' in content and not self.live):
            self.say(f'{self.name(run)}  {content.get("warning", content.get("note"))}')
        elif 'end' in content and content['end'] != 'done' and not (self.live and content['end'] == 'stopped'):
            self.say(f'{self.name(run)}: {content["end"]}: {content.get("words", "")}')
        return True

    def end(self, run: Run) -> None:
        key = self.keys[id(run)]
        if self.all is not None:
            self.bars.advance(self.all)
        if len(self.waiting) > MOST:
            self.bars.update(key, visible=False)
        elif run.outcome != 'done':
            self.mark(key, run.outcome if run.outcome != 'to do' else 'stopped')

    def stopping(self) -> None:
        """Say beside the bars that a signal has come, and what the runs do now."""
        self.is_stopping = True
        for run in self.waiting:
            if run.outcome == 'to do' and id(run) in self.keys:
                self.mark(self.keys[id(run)], SAVING)


def parse(text: str) -> dict | None:
    """Return a record of a JSON text sequence; None of any other line."""
    if not text.startswith(MARK):
        return None
    try:
        content = json.loads(text[1:])
    except ValueError:
        return None
    return content if isinstance(content, dict) else None
