"""One supervisor and its child, without jax: python supervised_process.py JSON.

JSON holds index, count, host, port, patience (fields), folder, restarts, and the script of the child, which knows its
`group`, and may set `end`.
"""

import json
import os
import signal
import sys
import time

from sinklab.cli.process_flags import run_worker, supervise_run
from sinklab.errors import UserError
from sinklab.process_group import ProcessGroup
from sinklab.run_dir import RunDir
from sinklab.supervisor import worker_client
from sinklab.supervisor.cluster import ProcessInfo
from sinklab.supervisor.exit_status import ExitStatus
from sinklab.supervisor.messages import Timeouts

GIVEN = json.loads(sys.argv[1])


def trained(group: ProcessGroup) -> ExitStatus:
    known = dict(group=group, index=group.index, folder=RunDir(GIVEN['folder']), time=time, signal=signal, os=os)
    known |= dict(End=ExitStatus, Refusal=UserError, end=ExitStatus('done'))
    exec(GIVEN['script'], known)
    return known['end']


if worker_client.is_supervised():
    run_worker(trained)
seat = ProcessInfo(GIVEN['index'], GIVEN['count'], GIVEN['host'], GIVEN['port'])
command, folder = [sys.executable, *sys.argv], RunDir(GIVEN['folder'])
try:
    sys.exit(supervise_run(command, seat, Timeouts(**GIVEN['patience']), folder, lambda: True, GIVEN['restarts']))
except UserError as refusal:
    sys.exit(f'sinklab train: {refusal}')
