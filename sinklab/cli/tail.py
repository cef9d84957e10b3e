"""a run that is under way, followed in the words of its own terminal

example:
  sinklab tail runs/softmax
"""

import argparse
import contextlib
import time
from collections.abc import Iterator

from sinklab.cli.config import spec_of
from sinklab.folder import Folder
from sinklab.lease import is_left
from sinklab.record import Refusal
from sinklab.train.listener import Listener

EVERY = 1.0  # seconds between two looks
AGAIN = 15.0  # seconds in which a run that was lost is started again by its supervisors, or is over


def arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument('run', metavar='RUN', help='a run folder; it is only read')


def run(given: argparse.Namespace, rest: list[str]) -> int:
    from sinklab.cli.progress import Progress

    if rest:
        raise Refusal(f'{rest[0]} is unknown; see sinklab tail --help')
    folder = Folder(given.run)
    spec, name = spec_of(folder), folder.read('row').get('row') or folder.path.absolute().name
    with contextlib.suppress(KeyboardInterrupt), Progress(name, spec) as progress:
        for _ in followed(folder, progress):
            time.sleep(EVERY)
        end = ending(folder)
        progress.note(': '.join(filter(None, [end['kind'], end['message']])))
    return 0


def followed(folder: Folder, listener: Listener) -> Iterator[None]:
    """Tells a listener of the newest attempt, and of what comes, as long as the run is under way."""
    byte, attempts, alive = 0, 0, time.monotonic()
    while True:
        alive = alive if is_left(folder.path) else time.monotonic()
        over = time.monotonic() - alive > (AGAIN if ending(folder)['kind'] == 'lost' else 0)
        known = folder.environment().get('attempts', [])
        if len(known) > attempts:
            attempts, newest = len(known), known[-1]
            listener.begin(newest['step'], newest['attention'], newest.get('changes', []))
        records, next_byte = folder.lines_from(byte)
        for record in records if byte else records[-1:]:
            listener.record(record, written=True)
        byte = next_byte
        if over:  # before what was written by then was read
            return
        yield


def ending(folder: Folder) -> dict:
    """How the latest attempt has ended; lost, where it has said nothing."""
    try:
        return folder.read('outcome')
    except FileNotFoundError:
        return dict(kind='lost', message='nobody is at work there; start the same command again')
