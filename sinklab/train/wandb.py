"""A run of Weights & Biases beside metrics.jsonl, offline unless WANDB_MODE says otherwise: never the source."""

import contextlib
import hashlib
import os

from sinklab.files.place import make_absolute, is_remote
from sinklab.folder import RunDir, flatten_dict
from sinklab.install import format_extra_command
from sinklab.record import UserError
from sinklab.train.listener import Callback


class WandbCallback(Callback, contextlib.AbstractContextManager):
    """Repeats every number of a line; attempts at one folder are one run there."""

    def __init__(self, run_dir: RunDir):
        try:
            import wandb
        except ImportError as error:
            raise UserError(f'--wandb needs wandb; install it: {format_extra_command("wandb")}') from error
        if is_remote(run_dir.path):
            raise UserError(f'--wandb writes to disks alone, and {run_dir} is in a bucket; leave it out, or see tail')
        self.run_dir, self.wandb, self.wandb_run = run_dir, wandb, None

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
        self.wandb_run.define_metric('*', step_metric='step')  # a resumed run says steps again, which its own would refuse

    def on_record(self, record: dict, written: bool) -> None:
        if written and self.wandb_run:
            self.wandb_run.log(record)

    def __exit__(self, *_: object) -> None:
        if self.wandb_run:
            with contextlib.suppress(Exception):  # the run has ended, and metrics.jsonl is whole
                self.wandb_run.finish()
