"""A run of Weights & Biases beside metrics.jsonl, offline unless WANDB_MODE says otherwise: never the source."""

import contextlib
import hashlib
import os

from sinklab.files.place import absolute, is_remote
from sinklab.folder import Folder, flat
from sinklab.install import format_extra_command
from sinklab.record import Refusal
from sinklab.train.listener import Listener


class Mirror(Listener, contextlib.AbstractContextManager):
    """Repeats every number of a line; attempts at one folder are one run there."""

    def __init__(self, folder: Folder):
        try:
            import wandb
        except ImportError as error:
            raise Refusal(f'--wandb needs wandb; install it: {format_extra_command("wandb")}') from error
        if is_remote(folder.path):
            raise Refusal(f'--wandb writes to disks alone, and {folder} is in a bucket; leave it out, or see tail')
        self.folder, self.wandb, self.run = folder, wandb, None

    def begin(self, step: int, attention: str, changes: list[str]) -> None:
        path = absolute(self.folder.path)
        self.run = self.wandb.init(
            project=os.environ.get('WANDB_PROJECT', 'sinklab'),
            name=path.name,
            id=hashlib.sha256(str(path).encode()).hexdigest()[:12],
            resume='allow',
            dir=path,
            mode=os.environ.get('WANDB_MODE', 'offline'),
            config=flat(self.folder.read('config')),
            settings=self.wandb.Settings(silent=True),
        )
        self.run.define_metric('*', step_metric='step')  # a resumed run says steps again, which its own would refuse

    def record(self, record: dict, written: bool) -> None:
        if written and self.run:
            self.run.log(record)

    def __exit__(self, *_: object) -> None:
        if self.run:
            with contextlib.suppress(Exception):  # the run has ended, and metrics.jsonl is whole
                self.run.finish()
