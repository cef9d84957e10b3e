"""What a person sees of a training run: one live line on a terminal, a line now and then in a log."""

import time

from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from sinklab.cli import terminal
from sinklab.escape import escape_control
from sinklab.measure.table import HEADLINE
from sinklab.spec import Spec
from sinklab.train.listener import Listener

QUIET = 10.0  # seconds between two lines of a log


class Progress(Listener):
    """Shows how a run goes on. As a context it shows the line and takes it away.

    `programs` says what was compiled, once it is asked after the first step. `row` says what the row comes to.
    """

    def __init__(self, name: str, spec: Spec, programs: object = None, row: str | None = None):
        self.console = terminal.console(stderr=True)
        self.bar = Bar(
            terminal.column('{task.description}'),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            terminal.column('loss {task.fields[loss]}  {task.fields[pace]} tokens/s  {task.fields[sink]}'),
            TimeRemainingColumn(compact=True),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        shown = dict(loss='  -  ', pace='-', sink=f'{HEADLINE.label} -')
        self.task = self.bar.add_task(escape_control(name), total=spec.optimizer.steps, **shown)
        self.name, self.steps, self.spoke, self.epochs = name, spec.optimizer.steps, 0.0, None
        self.checkpoint, self.measured, self.programs, self.row = spec.checkpoint, None, programs, row

    def __enter__(self) -> 'Progress':
        self.bar.start()
        return self

    def __exit__(self, *_) -> None:
        self.bar.stop()

    def record(self, record: dict, written: bool) -> None:
        fields = dict(sink=self.sink(record))
        if 'train/loss' in record:
            fields['loss'] = f'{record["train/loss"]:.3f}'
        if 'speed/tokens_per_second' in record:
            fields['pace'] = f'{record["speed/tokens_per_second"]:,.0f}'
        self.bar.update(self.task, completed=record['step'], **fields)
        if self.programs and 'train/loss' in record:
            self.say(f'{self.name}  {self.programs}')
            self.programs = None
        if self.epochs is None and 'data/epoch' in record:
            self.epochs = record['data/epoch'] * self.steps / record['step']
            self.say(f'{self.name}  {self.steps} steps read the data {self.epochs:.3g} times')
        if not self.console.is_terminal:
            self.log(record['step'])

    def note(self, line: str) -> None:
        self.say(f'{self.name}  {line}')

    def begin(self, step: int, attention: str, changes: list[str]) -> None:
        if self.row:
            self.note(self.row)
        self.say(f'{self.name}  attention: {attention}')
        if changes:
            self.say(f'{self.name}  since step {step}: {"; ".join(changes)}')
        every = self.checkpoint.every_steps
        if not self.checkpoint.every_minutes and (not every or step + every - step % every >= self.steps):
            self.say(
                f'{self.name}  saves no checkpoint before its end, but for Ctrl-C and SIGTERM '
                f'(config.checkpoint.every_steps is {every})'
            )

    def sink(self, record: dict) -> str:
        """The newest number that stands for all that is measured, with its step where that is not this record's."""
        step = record['step']
        if HEADLINE.name in record:
            self.measured = step, HEADLINE.text(record[HEADLINE.name])
        at, shown = self.measured or (step, '-')
        return f'{HEADLINE.label} {shown}' + ('' if at == step else f' at step {at}')

    def log(self, step: int) -> None:
        if step == self.steps or time.monotonic() - self.spoke > QUIET:
            self.spoke = time.monotonic()
            shown = self.bar.tasks[0].fields
            self.say(
                f'{self.name}  step {step}/{self.steps}  loss {shown["loss"]}  {shown["pace"]} tokens/s  '
                f'{shown["sink"]}'
            )

    def say(self, text: str) -> None:
        self.console.print(escape_control(text), soft_wrap=True)
