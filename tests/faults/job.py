"""`sinklab train` on several processes of this machine, as a scheduler starts it."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from orbax.checkpoint import v1 as ocp

from sinklab.folder import Folder

HERE = Path(__file__).parent
CLOCK = ('seconds', 'speed/tokens_per_second')
DEVICES = 4


def free_port():
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        return listener.getsockname()[1]


class Job:
    """Some processes of one run, and what they say."""

    def __init__(self, workdir, source, count, *options, variables=None, each=None, port=None, config=None):
        self.port = port or free_port()
        self.start = time.monotonic()
        self.processes = []
        for index in range(count):
            place = [f'--coordinator=127.0.0.1:{self.port}', f'--processes={count}', f'--process={index}']
            own = (each or {}).get(index, {})
            command = [sys.executable, '-m', 'sinklab', 'train', f'--config={config or HERE / "fault.py"}']
            command += [
                f'--config.data.source={source}',
                f'--workdir={own.pop("WORKDIR", workdir)}',
                f'--data={DEVICES}',
            ]
            command += [*options, *own.pop('OPTIONS', []), *(place if count > 1 and own.pop('PLACED', True) else [])]
            environment = {
                **os.environ,
                'JAX_PLATFORMS': 'cpu',
                'JAX_NUM_CPU_DEVICES': str(DEVICES // count),
                'PYTHONPATH': str(HERE.parents[1]),
                **(variables or {}),
                **own,
            }
            streams = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)
            self.processes.append(subprocess.Popen(command, env=environment, **streams))

    def wait(self, timeout=120):
        """(exit codes, what each said); `ended` has the seconds since the start at which each did."""
        deadline, self.ended = time.monotonic() + timeout, {}
        while len(self.ended) < len(self.processes) and time.monotonic() < deadline:
            for index, process in enumerate(self.processes):
                if index not in self.ended and process.poll() is not None:
                    self.ended[index] = time.monotonic() - self.start
            time.sleep(0.05)
        hung = [index for index in range(len(self.processes)) if index not in self.ended]
        for process in self.processes:
            process.kill()
        said = [process.communicate()[1] for process in self.processes]
        assert not hung, f'processes {hung} did not end in {timeout} s:\n' + '\n'.join(said)
        return [process.returncode for process in self.processes], said

    def child(self, index):
        """The process id of the one that trains, under its supervisor."""
        children = Path(f'/proc/{self.processes[index].pid}/task/{self.processes[index].pid}/children')
        return int(children.read_text().split()[0])


def words(said):
    """The lines of a supervisor, without those of progress."""
    return [line for line in said.splitlines() if line.startswith('sinklab train: ')]


def timeless(workdir):
    return [{k: v for k, v in record.items() if k not in CLOCK} for record in Folder(workdir).records()]


def parameters(workdir):
    step = Folder(workdir).checkpoint_steps()[-1]
    state = ocp.load(Path(workdir) / 'checkpoints' / str(step), checkpointable_name='state')
    return {'/'.join(map(str, path)): np.asarray(leaf) for path, leaf in leaves(state)}


def leaves(tree, at=()):
    for name, part in tree.items() if isinstance(tree, dict) else enumerate(tree or ()):
        if isinstance(part, dict | list | tuple):
            yield from leaves(part, (*at, name))
        elif part is not None:
            yield (*at, name), part


def outcome(workdir):
    return json.loads((Path(workdir) / 'outcome.json').read_text())
