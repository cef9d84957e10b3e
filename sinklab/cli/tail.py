"""Follow a run that is under way, from any terminal: its step, loss and Sink_1, and how it ends.

It only reads the run folder. Ctrl-C ends it, and not the run.

example:
  sinklab tail runs/softmax
  sinklab tail runs/softmax | grep loss
"""

import argparse
import contextlib
import time
from collections.abc import Iterator

from sinklab.files import run_files
from sinklab.files.place import absolute
from sinklab.files.regular import Damaged
from sinklab.folder import Folder
from sinklab.lease import NAME, Watch
from sinklab.named import spec_of
from sinklab.record import Refusal
from sinklab.train.listener import Listener

EVERY = 1.0  # seconds between two looks
AGAIN = 15.0  # seconds in which a run that was lost is started again by its supervisors, or is over


def arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument('run', metavar='RUN', help='run folder, such as runs/softmax')


def run(given: argparse.Namespace, rest: list[str]) -> int:
    from sinklab.cli.progress import Progress

    if rest:
        raise Refusal(f'{rest[0]} is unknown; see sinklab tail --help')
    folder = Folder(given.run)
    spec, name = spec_of(folder), name_of(folder)
    with contextlib.suppress(KeyboardInterrupt), Progress(name, spec, stderr=False) as progress:
        for _ in followed(folder, progress):
            time.sleep(EVERY)
        end = ending(folder)
        if end['kind'] == 'done':
            folder.warn_of_lost_lines((folder.records() or [{}])[-1], spec.optimizer.steps, 'train/loss')
        progress.note(': '.join(filter(None, [end['kind'], end.get('message', '')])))
    return 0


def name_of(folder: Folder) -> str:
    """Return the name of its row, or of the folder where there is none."""
    file, own = folder.path / 'row.json', absolute(folder.path).name
    try:
        row = run_files.read_json(file, 'row', f'the run is called {own}')
        if 'row' not in row:
            raise Damaged(f'{file} is damaged (it has no row); the run is called {own}')
        return row['row'] or own
    except FileNotFoundError:
        return own
    except Damaged as error:
        run_files.warn(file, str(error))
        return own


def followed(folder: Folder, listener: Listener) -> Iterator[None]:
    """Tells a listener of the newest attempt and record, and of what comes, as long as the run is under way."""
    from sinklab.measure.table import HEADLINE

    watch, alive, attempts = Watch(folder.path / NAME), time.monotonic(), 0
    records, byte = folder.lines_from(0)
    measured = [record for record in records[:-1] if HEADLINE.name in record]
    records = [*measured[-1:], *records[-1:]]
    while True:
        watch.look()
        if not watch.is_gone:
            alive = time.monotonic()
        wait = AGAIN if ending(folder)['kind'] == 'lost' else 0
        over = watch.is_gone and time.monotonic() - alive >= wait
        known = folder.environment().get('attempts', [])
        if len(known) > attempts:
            attempts = len(known)
            listener.begin(*folder.beginning(known))
        more, byte = folder.lines_from(byte)
        for record in [*records, *more]:
            listener.record(record, written=True)
        records = []
        if over:  # before what was written by then was read
            return
        yield


def ending(folder: Folder) -> dict:
    """How the latest attempt has ended; lost, where it has said nothing."""
    try:
        return folder.read('outcome')
    except Damaged as error:
        return dict(kind='unknown', message=str(error))
    except FileNotFoundError:
        return dict(kind='lost', message='nobody is at work there; start the same command again')
