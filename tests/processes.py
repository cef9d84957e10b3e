"""Processes of a run that tests start, stop and kill; they do not train."""

import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

TESTS_FOLDER = Path(__file__).parent
SHORT_TIMEOUTS = dict(join=20.0, heartbeat=3, settle=0.5, orderly_exit=10.0, shutdown=2.0, early_stop=2.0)
ENDLESS_SCRIPT = "group.report_progress('step', 1, None)\nwhile True: time.sleep(0.1)\n"
LISTENING_SCRIPT = 'heard = []\nsignal.signal(signal.SIGTERM, lambda number, _: heard.append(number))\n'


def find_free_port():
    """Return a port that is free and that the system does not give to outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)  # Linux gives out those from 32,768 on
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(('127.0.0.1', port))
            return port


class Run:
    """Processes of one run, started as a scheduler starts them."""

    def __init__(self, folder):
        self.folder, self.port, self.processes = folder, find_free_port(), []

    def start(self, script, indices=(0, 1), count=2, restarts=0, host='127.0.0.1', **timeouts):
        for index in indices:
            arguments = dict(index=index, count=count, port=self.port, folder=str(self.folder), script=script)
            arguments |= dict(timeouts={**SHORT_TIMEOUTS, **timeouts}, restarts=restarts, host=host)
            process = subprocess.Popen(
                [sys.executable, str(TESTS_FOLDER / 'supervised_process.py'), json.dumps(arguments)],
                env={**os.environ, 'PYTHONPATH': str(TESTS_FOLDER.parent)},
                stderr=subprocess.PIPE,
                text=True,
            )
            self.processes.append(process)
        return self

    def wait_for_results(self, timeout=30):
        """Wait for all processes, and return (exit code, lines of stderr) of each."""
        outputs = [process.communicate(timeout=timeout)[1].splitlines() for process in self.processes]
        return [(process.returncode, lines) for process, lines in zip(self.processes, outputs, strict=True)]

    def wait_for(self, name, seconds=20):
        """Wait until the processes have created a file."""
        start = time.monotonic()
        while not (self.folder / name).exists():
            assert time.monotonic() - start < seconds, name
            time.sleep(0.05)


def manage_run(folder):
    """Yield a run in a folder, and kill its processes at the end of the test."""
    (folder / 'config.json').write_text('{}')
    run = Run(folder)
    yield run
    for process in run.processes:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.communicate()


def wait_for_sigterm_handler(process, seconds=20):
    """Wait until a process handles SIGTERM or has ended. Python takes some tenths of a second to start."""
    status, deadline = Path(f'/proc/{process.pid}/status'), time.monotonic() + seconds
    while process.poll() is None and not int(re.search(r'SigCgt:\s(\w+)', status.read_text())[1], 16) >> 14 & 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)


TOUCH_SCRIPT = "(folder.path / f'here-{index}').touch()\n"


def get_child_pid(process):
    return int(Path(f'/proc/{process.pid}/task/{process.pid}/children').read_text().split()[0])


def get_single_line(results):
    """Check that each process has printed one line, and return the line of process 0 without its prefix."""
    assert all(len(lines) == 1 for _, lines in results), results
    assert all(lines[0].startswith('sinklab train: ') for _, lines in results), results
    return results[0][1][0].removeprefix('sinklab train: ')


def wait_for_exit(pid):
    """Return whether a process ends within five seconds."""
    for _ in range(50):
        if not Path(f'/proc/{pid}').exists():
            return True
        time.sleep(0.1)
    return False


def make_run(processes):
    run = Run(None)
    run.processes = processes
    return run
