"""TensorBoard events beside metrics.jsonl: a mirror of it, never the source."""

from sinklab.files.place import is_remote
from sinklab.folder import RunDir
from sinklab.install import format_extra_command
from sinklab.record import UserError
from sinklab.train.listener import Callback


class TensorBoardCallback(Callback):
    """Repeats every number of a line as a scalar."""

    def __init__(self, run_dir: RunDir):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise UserError(
                f'--tensorboard needs tensorboardX; install it: {format_extra_command("tensorboard")}'
            ) from error
        if is_remote(run_dir.path):
            raise UserError(
                f'--tensorboard writes to disks alone, and {run_dir} is in a bucket; leave it out, or see tail'
            )
        self.run_dir, self.writer_class = run_dir, SummaryWriter

    def on_train_begin(self, step: int, attention: str, changes: list[str]) -> None:
        self.writer = self.writer_class(str(self.run_dir.path / 'tensorboard'))

    def on_record(self, record: dict, written: bool) -> None:
        for name in [name for name in record if written and name not in ('step', 'seconds')]:
            self.writer.add_scalar(name, record[name], record['step'])
        self.writer.flush()
