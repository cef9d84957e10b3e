"""Supervisor and its child without jax: python supervised_process.py JSON.

JSON contains index, count, host, port, timeouts (fields of Timeouts), folder, restarts, and the script of the child.
The script can use `group`, and may set `exit_status`.
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
from sinklab.supervisor import worker
from sinklab.supervisor.cluster import ProcessInfo
from sinklab.supervisor.exit_status import ExitStatus
from sinklab.supervisor.worker import Timeouts

ARGUMENTS = json.loads(sys.argv[1])


def run_script(group: ProcessGroup) -> ExitStatus:
    namespace = dict(
        group=group, index=group.process_index, folder=RunDir(ARGUMENTS['folder']), time=time, signal=signal, os=os
    )
    namespace |= dict(ExitStatus=ExitStatus, UserError=UserError, exit_status=ExitStatus('done'))
    exec(ARGUMENTS['script'], namespace)
    return namespace['exit_status']


if worker.is_supervised():
    run_worker(run_script)
process_info = ProcessInfo(ARGUMENTS['index'], ARGUMENTS['count'], ARGUMENTS['host'], ARGUMENTS['port'])
command, folder = [sys.executable, *sys.argv], RunDir(ARGUMENTS['folder'])
try:
    sys.exit(
        supervise_run(
            command, process_info, Timeouts(**ARGUMENTS['timeouts']), folder, lambda: True, ARGUMENTS['restarts']
        )
    )
except UserError as error:
    sys.exit(f'sinklab train: {error}')
