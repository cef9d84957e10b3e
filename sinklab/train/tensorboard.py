"""TensorBoard events beside metrics.jsonl: a mirror of it, never the source."""

from collections.abc import Callable

from sinklab.folder import Folder
from sinklab.record import Refusal


def mirror(folder: Folder) -> Callable[[dict], None]:
    """A listener that repeats every number of a record as a scalar."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise Refusal('--tensorboard needs tensorboardX; install it: pip install "sinklab[tensorboard]"') from error
    writer = None

    def listener(record: dict) -> None:
        nonlocal writer
        writer = writer or SummaryWriter(str(folder.path / 'tensorboard'))  # not before the folder is a run's
        for name, value in record.items():
            if name not in ('step', 'seconds'):
                writer.add_scalar(name, value, record['step'])
        writer.flush()

    return listener
