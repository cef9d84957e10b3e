"""One supervisor and its child, without jax: python supervised.py JSON.

JSON holds index, count, host, port, patience (fields), folder, restarts, and the script of the child, which knows its
`group`, and may set `end`.
"""

import json
import os
import signal
import sys
import time

from sinklab.cli.processes import run_worker, supervise_run
from sinklab.folder import RunDir
from sinklab.group import ProcessGroup
from sinklab.processes import link
from sinklab.processes.cluster import ProcessInfo
from sinklab.processes.ending import ExitStatus
from sinklab.processes.patience import Timeouts
from sinklab.record import UserError

GIVEN = json.loads(sys.argv[1])


def trained(group: ProcessGroup) -> ExitStatus:
    known = dict(group=group, index=group.index, folder=RunDir(GIVEN['folder']), time=time, signal=signal, os=os)
    known |= dict(End=ExitStatus, Refusal=UserError, end=ExitStatus('done'))
    exec(GIVEN['script'], known)
    return known['end']


if link.is_supervised():
    run_worker(trained)
seat = ProcessInfo(GIVEN['index'], GIVEN['count'], GIVEN['host'], GIVEN['port'])
command, folder = [sys.executable, *sys.argv], RunDir(GIVEN['folder'])
try:
    sys.exit(supervise_run(command, seat, Timeouts(**GIVEN['patience']), folder, lambda: True, GIVEN['restarts']))
except UserError as refusal:
    sys.exit(f'sinklab train: {refusal}')
