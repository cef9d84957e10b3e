"""TensorBoard events beside metrics.jsonl: a mirror of it, never the source."""

from sinklab.files.place import is_remote
from sinklab.folder import Folder
from sinklab.install import format_extra_command
from sinklab.record import Refusal
from sinklab.train.listener import Listener


class Mirror(Listener):
    """Repeats every number of a line as a scalar."""

    def __init__(self, folder: Folder):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise Refusal(
                f'--tensorboard needs tensorboardX; install it: {format_extra_command("tensorboard")}'
            ) from error
        if is_remote(folder.path):
            raise Refusal(
                f'--tensorboard writes to disks alone, and {folder} is in a bucket; leave it out, or see tail'
            )
        self.folder, self.kind = folder, SummaryWriter

    def begin(self, step: int, attention: str, changes: list[str]) -> None:
        self.writer = self.kind(str(self.folder.path / 'tensorboard'))

    def record(self, record: dict, written: bool) -> None:
        for name in [name for name in record if written and name not in ('step', 'seconds')]:
            self.writer.add_scalar(name, record[name], record['step'])
        self.writer.flush()
