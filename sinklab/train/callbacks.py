"""Callbacks of the training loop: the base class, TensorBoard, and Weights & Biases."""

import hashlib
import importlib
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from sinklab.config.differences import flatten_dict
from sinklab.errors import UserError, format_extra_command
from sinklab.run_dir import RunDir
from sinklab.storage.paths import is_remote, make_absolute


class Callback:
    """A callback of the training loop: the methods below are called on process 0 while a run trains.

    The methods of this base class do nothing; derive from it and override those that you need. Pass callbacks to
    `sinklab.train.loop.train`. The terminal, TensorBoard and Weights & Biases are callbacks. An exception in a
    callback ends the run.
    """

    def on_message(self, line: str) -> None:
        """Receive a line to print on the terminal; the first lines may come before `on_train_begin`."""

    def on_train_begin(self, step: int, attention: str, changes: list[str]) -> None:
        """Receive the start of an attempt, the first one or one that resumes.

        It is not called if the run is complete already.

        Args:
            step: The step after which training resumes; 0 for a new run.
            attention: The attention backend, and why preferred backends were rejected.
            changes: Fields of the config that differ from the previous attempt, one line each; at the start of a warm
                start, also its parent.
        """

    def on_record(self, record: dict[str, Any], written: bool) -> None:
        """Receive the metrics of a step.

        The first record of an attempt may have metrics of evaluations alone: those of step 0 or of the step at which
        the previous attempt was stopped.

        Args:
            record: Metrics by name, as in metrics.jsonl, with `step`.
            written: Whether the record is written to metrics.jsonl; steps between two logged steps are not written.
        """

    def on_train_end(self) -> None:
        """Receive the end of the attempt, also after an error, and if `on_train_begin` was not called."""


# A function (step, metrics, state) -> new metrics, or None, which all processes of a run call after the same step, so
# that it can compute with sharded arrays. `metrics` is the record of the step so far; `state` is a dict of `step`,
# `params` and `opt_state`, whose arrays the next step donates.
StateFunction = Callable[[int, dict[str, Any], dict[str, Any]], Mapping[str, float] | None]


def import_extra(module: str, extra: str, run_dir: RunDir) -> Any:
    """Import a module of an optional dependency, for the flag --EXTRA, which writes only to local disks."""
    check_is_local(f'--{extra}', run_dir)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f'--{extra} needs {module}; install it: {format_extra_command(extra)}') from error


def check_is_local(flag: str, run_dir: RunDir) -> None:
    if is_remote(run_dir.path):
        raise UserError(f'{flag} writes only to local disks, and {run_dir} is in a bucket; give another --workdir')


class TensorBoardCallback(Callback):
    """Callback that writes every value of a record as a TensorBoard scalar."""

    def __init__(self, run_dir: RunDir):
        self.tensorboard = import_extra('tensorboardX', 'tensorboard', run_dir)
        self.run_dir = run_dir
        self.writer: Any = None

    def on_train_begin(self, step: int, attention: str, changes: list[str]) -> None:
        self.writer = self.tensorboard.SummaryWriter(str(self.run_dir.path / 'tensorboard'))

    def on_record(self, record: dict[str, Any], written: bool) -> None:
        if written:
            for name in record.keys() - {'step', 'seconds'}:
                self.writer.add_scalar(name, record[name], record['step'])
            self.writer.flush()

    def on_train_end(self) -> None:
        if self.writer:
            self.writer.close()


class WandbCallback(Callback):
    """Callback that logs every value of a record to one W&B run for each run directory."""

    def __init__(self, run_dir: RunDir):
        self.wandb = import_extra('wandb', 'wandb', run_dir)
        self.run_dir = run_dir
        self.wandb_run: Any = None

    def on_train_begin(self, step: int, attention: str, changes: list[str]) -> None:
        path = make_absolute(self.run_dir.path)
        self.wandb_run = self.wandb.init(
            project=os.environ.get('WANDB_PROJECT', 'sinklab'),
            name=path.name,
            id=hashlib.sha256(str(path).encode()).hexdigest()[:12],
            resume='allow',
            dir=path,
            mode=os.environ.get('WANDB_MODE', 'offline'),
            config=flatten_dict(self.run_dir.read_json('config')),
            settings=self.wandb.Settings(silent=True),
        )
        # A resumed run logs steps again, which the step counter of W&B would reject.
        self.wandb_run.define_metric('*', step_metric='step')

    def on_record(self, record: dict[str, Any], written: bool) -> None:
        if written:
            self.wandb_run.log(record)

    def on_train_end(self) -> None:
        if self.wandb_run:
            self.wandb_run.finish()


def parse_profile_steps(option: str | None, run_dir: RunDir, last_step: int) -> range:
    """Parse STEP:COUNT into the range of steps to trace, which ends at the last step of the run; None: no steps.

    Raises:
        UserError: The option is invalid, begins after the last step, or the run directory is in a bucket.
    """
    if option is None:
        return range(0)
    match = re.fullmatch(r'(\d{1,12}):(\d{1,12})', option)
    first_step, count = map(int, match.groups()) if match else (0, 0)
    if not first_step or not count:
        raise UserError(f'--profile={option}: give STEP:COUNT, two whole numbers of at least 1, such as 100:5')
    if first_step > last_step:
        raise UserError(f'--profile={option} begins after the last step, which is {last_step}; give an earlier STEP')
    check_is_local('--profile', run_dir)
    return range(first_step, min(first_step + count - 1, last_step) + 1)
