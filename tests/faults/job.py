"""Jobs that run `sinklab train` on several processes of this machine, as a scheduler does."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
from processes import find_free_port
from tiny_runs import read_timeless_records

from sinklab.checkpoint import checkpointer
from sinklab.run_dir import RunDir

HERE = Path(__file__).parent
DEVICES = 4


class Job:
    """Processes of one run, and their output."""

    def __init__(
        self, workdir, source, count, *options, variables=None, process_overrides=None, port=None, config=None
    ):
        self.port = port or find_free_port()
        self.start_time = time.monotonic()
        self.processes = []
        for index in range(count):
            process_flags = [f'--coordinator=127.0.0.1:{self.port}', f'--processes={count}', f'--process={index}']
            overrides = (process_overrides or {}).get(index, {})
            command = [sys.executable, '-m', 'sinklab', 'train', f'--config={config or HERE / "fault.py"}']
            command += [
                f'--config.data.source={source}',
                f'--workdir={overrides.pop("WORKDIR", workdir)}',
                f'--data={DEVICES}',
            ]
            command += [
                *options,
                *overrides.pop('OPTIONS', []),
                *(process_flags if count > 1 and overrides.pop('PLACED', True) else []),
            ]
            environment = {
                **os.environ,
                'JAX_PLATFORMS': 'cpu',
                'JAX_NUM_CPU_DEVICES': str(DEVICES // count),
                'PYTHONPATH': str(HERE.parents[1]),
                **(variables or {}),
                **overrides,
            }
            popen_options = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)
            working_folder = overrides.pop('CWD', None)
            self.processes.append(subprocess.Popen(command, env=environment, cwd=working_folder, **popen_options))

    def wait(self, timeout=120):
        """Wait for all processes, and return (exit codes, their standard errors).

        `end_times` then has the time at which each process ended.
        """
        deadline, self.end_times = time.monotonic() + timeout, {}
        outputs = {}
        readers = [
            threading.Thread(target=read_stderr, args=(outputs, index, child_process))
            for index, child_process in enumerate(self.processes)
        ]
        for reader in readers:
            reader.start()
        while len(self.end_times) < len(self.processes) and time.monotonic() < deadline:
            for index, process in enumerate(self.processes):
                if index not in self.end_times and process.poll() is not None:
                    self.end_times[index] = time.monotonic()
            time.sleep(0.05)
        hung = [index for index in range(len(self.processes)) if index not in self.end_times]
        self.kill()
        for reader in readers:
            reader.join()
        assert not hung, f'processes {hung} did not end in {timeout} s:\n' + '\n'.join(outputs.values())
        return [process.returncode for process in self.processes], [outputs[index] for index in sorted(outputs)]

    def kill(self):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def signal(self, pid, number):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def read_stderr(outputs, index, process):
    outputs[index] = process.stderr.read()
    process.wait()


def get_messages(output):
    """Return the lines that say how a process has ended, without lines of progress."""
    return [line for line in output.splitlines() if line.startswith('sinklab train: ')]


def read_parameters(workdir):
    """Return the parameters of the newest checkpoint by name, and verify its digests."""
    params = checkpointer.restore_parameters(workdir, RunDir(workdir).list_checkpoint_steps()[-1])
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def assert_same_runs(workdir, other, exactly=True):
    """Assert that two runs have equal metrics, except clock times.

    If `exactly`, their parameters must be equal, too.
    """
    records, other_records = read_timeless_records(workdir), read_timeless_records(other)
    assert [record.keys() for record in records] == [record.keys() for record in other_records]
    pairs = [
        (record[name], other[name]) for record, other in zip(records, other_records, strict=True) for name in record
    ]
    params, other_params = read_parameters(workdir), read_parameters(other)
    assert params.keys() == other_params.keys()
    if exactly:
        assert all(a == b for a, b in pairs)
        assert all(np.array_equal(params[name], other_params[name]) for name in params)
    else:  # rounding may flip the small update of a parameter whose gradient is almost 0
        np.testing.assert_allclose(*zip(*pairs, strict=True), rtol=1e-5, atol=1e-5)


def read_outcome(workdir):
    return json.loads((Path(workdir) / 'outcome.json').read_text())
