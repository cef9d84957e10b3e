"""Processes of a run: flags, cluster variables, and real processes that exchange values and end together."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from processes import find_free_port

from sinklab import process_group
from sinklab.errors import UserError
from sinklab.process_group import ProcessGroup, join_processes, list_local_devices

INVALID_ADDRESSES = 'a', ':80', 'a b:80', 'fe80::1:80', 'a:8x'


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    for name in os.environ:
        if name.startswith(('SLURM_', 'OMPI_', 'TPU_', 'KUBERNETES_', 'JOB_', 'MEGASCALE_')):
            monkeypatch.delenv(name)
    monkeypatch.setattr(process_group, 'TPU_DEVICE_PATTERNS', ())


def test_process_without_flags_or_cluster_is_single():
    assert join_processes(None, None, None, 5.0) == join_processes(None, 1, None, 5.0) == ProcessGroup(0, 1)
    assert ProcessGroup().all_gather({'a': 1}) == [{'a': 1}]


def test_single_tpu_host_is_a_single_process(monkeypatch):
    monkeypatch.setenv('TPU_WORKER_HOSTNAMES', 'localhost')
    assert join_processes(None, None, None, 5.0) == ProcessGroup()


@pytest.mark.parametrize(
    ('given', 'name'),
    [
        (('a:80', None, None), '--processes'),
        ((None, 2, None), '--coordinator'),
        ((None, None, 0), '--coordinator'),
        (('a:80', 2, 2), '--process=2'),
        (('a:80', 2, -1), '--process=-1'),
        (('a:80', 0, 0), '--processes=0'),
        *(((address, 2, 0), f'--coordinator={address}') for address in INVALID_ADDRESSES),
    ],
)
def test_flags_that_are_incomplete_or_invalid_are_refused(given, name):
    with pytest.raises(UserError) as error:
        join_processes(*given, timeout=5.0)
    assert name in str(error.value)


def test_slurm_job_with_several_tasks_needs_a_step(monkeypatch):
    monkeypatch.setenv('SLURM_JOB_ID', '7')
    assert join_processes(None, None, None, 5.0) == ProcessGroup()
    monkeypatch.setenv('SLURM_NTASKS', '4')
    with pytest.raises(UserError, match='srun'):
        join_processes(None, None, None, 5.0)


def test_process_alone_on_its_host_uses_all_gpus(monkeypatch):
    monkeypatch.setattr(process_group.glob, 'glob', lambda pattern: ['/dev/nvidia0', '/dev/nvidia1'])
    assert list_local_devices({'SLURM_STEP_TASKS_PER_NODE': '1(x4)'}) == [0, 1]
    assert list_local_devices({'SLURM_STEP_TASKS_PER_NODE': '2(x2)'}) is None
    assert list_local_devices({}) is None


def run_processes(script, count=2):
    """Run a script in several processes of a group, and return (exit code, output, errors) of each."""
    port = find_free_port()
    code = f"""
        import os, sys, time
        from sinklab.process_group import *
        index = int(sys.argv[1])
        group = join_processes('127.0.0.1:{port}', {count}, index, 60)
    """
    code = textwrap.dedent(code) + textwrap.dedent(script)
    environment = os.environ | dict(PYTHONPATH=str(Path(__file__).parents[1]), JAX_PLATFORMS='cpu')
    processes = [
        subprocess.Popen(
            [sys.executable, '-c', code, str(index)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


@pytest.mark.slow
def test_processes_exchange_values_and_raise_the_error_of_one():
    results = run_processes("""
        from sinklab.errors import UserError

        assert group.all_gather({'index': index, 'text': 'ä' * 300 * index}) == [
            {'index': 0, 'text': ''}, {'index': 1, 'text': 'ä' * 300}
        ]
        assert broadcast_from_primary(group, lambda: index) == 0
        assert run_on_all_or_raise(group, lambda: index) == index

        def refuse():
            if index == 1:
                raise UserError('no room')

        try:
            run_on_all_or_raise(group, refuse)
        except UserError as error:
            print(error)
            sys.exit(3)
    """)
    assert all(code == 3 and output.endswith('process 1: no room\n') for code, output, _ in results), results


@pytest.mark.slow
@pytest.mark.parametrize('killed', [0, 1])
def test_other_process_ends_when_one_is_killed(killed):
    results = run_processes(f"""
        group.all_gather(index)
        if index == {killed}:
            os.kill(os.getpid(), 9)
        while True:
            group.all_gather(index)
            time.sleep(0.1)
    """)
    assert results[killed][0] == -9
    assert results[1 - killed][0] not in (0, 1, 3, 130), results


@pytest.mark.slow
def test_process_keeps_its_exit_code_though_the_other_does_not_end():
    results = run_processes("""
        if index == 1:
            limit_shutdown(1)
            sys.exit(1)
        time.sleep(60)
    """)
    assert results[1][0] == 1
    assert results[0][0] not in (0, 1), results


def test_hang_timer_ends_process_with_its_stacks():
    code = 'import time; from sinklab.process_group import set_hang_timer; set_hang_timer(0.2); time.sleep(30)'
    process = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert process.returncode == -14
    assert 'Current thread' in process.stderr
