"""One supervisor and its child, without jax: python supervised.py JSON.

JSON holds index, count, host, port, patience (fields), folder, restarts, and the script of the child, which knows its
`group`, and may set `end`.
"""

import json
import os
import signal
import sys
import time

from sinklab.cli.processes import child, supervise
from sinklab.folder import Folder
from sinklab.group import Group
from sinklab.processes import link
from sinklab.processes.cluster import Seat
from sinklab.processes.ending import End
from sinklab.processes.patience import Patience
from sinklab.record import Refusal

GIVEN = json.loads(sys.argv[1])


def trained(group: Group) -> End:
    known = dict(group=group, index=group.index, folder=Folder(GIVEN['folder']), time=time, signal=signal, os=os)
    known |= dict(End=End, Refusal=Refusal, end=End('done'))
    exec(GIVEN['script'], known)
    return known['end']


if link.supervised():
    child(trained)
seat = Seat(GIVEN['index'], GIVEN['count'], GIVEN['host'], GIVEN['port'])
command, folder = [sys.executable, *sys.argv], Folder(GIVEN['folder'])
try:
    sys.exit(supervise(command, seat, Patience(**GIVEN['patience']), folder, lambda: True, GIVEN['restarts']))
except Refusal as refusal:
    sys.exit(f'sinklab train: {refusal}')
