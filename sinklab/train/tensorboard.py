"""TensorBoard events beside metrics.jsonl: a mirror of it, never the source."""

import functools
from typing import Any

from sinklab.folder import Folder
from sinklab.record import Refusal
from sinklab.train.listener import Listener


class Mirror(Listener):
    """Repeats every number of a line as a scalar."""

    def __init__(self, folder: Folder):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise Refusal(
                '--tensorboard needs tensorboardX; install it: pip install "sinklab[tensorboard]"'
            ) from error
        self.open = functools.partial(SummaryWriter, str(folder.path / 'tensorboard'))

    @functools.cached_property
    def writer(self) -> Any:
        return self.open()  # not before the folder is a run's

    def record(self, record: dict, written: bool) -> None:
        for name in [name for name in record if written and name not in ('step', 'seconds')]:
            self.writer.add_scalar(name, record[name], record['step'])
        self.writer.flush()
