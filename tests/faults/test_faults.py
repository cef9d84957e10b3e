"""Faults of one process in a run on two: all processes end promptly, and the run resumes bit for bit.

FAULTS_MOMENTS sets the number of moments of a fault (default: 1).
"""

import json
import os
import random
import signal
import time

import pytest
from job import assert_same_runs, get_messages, read_outcome
from processes import wait_for_sigterm_handler
from tiny_runs import read_timeless_records
from tiny_specs import make_case_params

from sinklab.run_dir import RunDir

pytest_plugins = ['started']
pytestmark = pytest.mark.slow
MAX_END_SECONDS = 20  # seconds within which the other processes end
MAX_COMPLETION_SECONDS = 5  # seconds within which a run completes if SIGTERM comes too late
EVENT_COUNT = 33  # events in the run of fault.py
JOIN_TIMEOUT_OPTION = '--join_timeout=12'  # only this timeout detects a process that is killed before it joins


def pytest_generate_tests(metafunc):
    if 'moment' in metafunc.fixturenames:
        metafunc.parametrize('moment', range(int(os.environ.get('FAULTS_MOMENTS', 1))))


def test_two_process_run_matches_single_process_run(undisturbed_run, single_process_run):
    """Allow for sums of four devices in another order: 2 x (4 - 1) float32 roundings of the first loss.

    After twelve steps a relative difference of 2e-7 was observed.
    """
    two_process_loss, single_process_loss = (
        read_timeless_records(path)[1]['train/loss'] for path in (undisturbed_run, single_process_run)
    )
    assert abs(two_process_loss - single_process_loss) <= 2 * 3 * 2**-24 * single_process_loss
    assert_same_runs(undisturbed_run, single_process_run, exactly=False)
    assert list_shared_files(undisturbed_run) == list_shared_files(single_process_run)
    assert RunDir(undisturbed_run).read_json('environment')['processes'] == 2
    assert read_outcome(undisturbed_run)['checkpoint'] == 12


def list_shared_files(path):
    """Return all files except those that each process writes itself."""
    relative_paths = (file.relative_to(path) for file in path.rglob('*') if file.is_file())
    return {file for file in relative_paths if file.parts[0] != 'checkpoints'}


@pytest.mark.exhaustive
def test_slurm_variables_identify_processes(job_starter, undisturbed_run, tmp_path):
    job_id = random.randrange(4096)
    variables = {'SLURM_JOB_ID': str(job_id), 'SLURM_STEP_NODELIST': 'localhost', 'SLURM_NTASKS': '2'}
    process_overrides = {i: {'PLACED': False, 'SLURM_PROCID': str(i), 'SLURM_LOCALID': str(i)} for i in range(2)}
    codes, outputs = job_starter(tmp_path / 'run', variables=variables, process_overrides=process_overrides).wait()
    assert codes == [0, 0], outputs
    assert_same_runs(tmp_path / 'run', undisturbed_run)


def inject_fault(job_starter, workdir, moment, signal_name):
    """Run a job and send a signal to one process: after a random delay if the moment is odd, otherwise at an event.

    Return the exit codes, the output, and the seconds until all processes ended.
    """
    rng = random.Random(f'{signal_name} {moment}')
    index, signal_number = rng.randrange(2), getattr(signal, f'SIG{signal_name}')
    if moment % 2:
        job = job_starter(workdir, 2, JOIN_TIMEOUT_OPTION)
        if signal_name == 'TERM':
            wait_for_sigterm_handler(job.processes[index])
        time.sleep(rng.uniform(0.2, 12))
        pid = job.processes[index].pid
        fault_time = time.monotonic()
        job.signal(pid, signal_number)
    else:
        event = rng.randrange(EVENT_COUNT)
        fault = dict(process=index, event=event, seconds=rng.uniform(0, 0.1), signal=f'SIG{signal_name}')
        variables = {'FAULT': json.dumps(fault), 'NOTES': str(workdir.parent)}
        job = job_starter(workdir, 2, JOIN_TIMEOUT_OPTION, variables=variables)
        fault_time = None
    codes, outputs = job.wait()
    fault_time = fault_time or float((workdir.parent / 'harmed').read_text())
    return codes, outputs, max(job.end_times.values()) - fault_time


def test_killed_process_ends_run_and_run_resumes(job_starter, undisturbed_run, tmp_path, moment):
    """Resume with the same command on 1, 2 or 4 processes."""
    codes, outputs, seconds = inject_fault(job_starter, tmp_path / 'run', moment, 'KILL')
    if codes != [0, 0]:  # otherwise it was killed after the end of the run
        assert 0 not in codes, outputs
        assert seconds < MAX_END_SECONDS, outputs
    process_count = (1, 2, 4)[moment % 3]
    resumed_codes, resumed_outputs = job_starter(tmp_path / 'run', process_count).wait()
    assert resumed_codes == [0] * process_count, resumed_outputs
    assert_same_runs(tmp_path / 'run', undisturbed_run, exactly=process_count == 2)


@pytest.mark.exhaustive
def test_sigterm_saves_same_step_and_run_resumes(job_starter, undisturbed_run, tmp_path, moment):
    """Check that all processes save the same step, exit with 143 and resume bit for bit.

    A process that stops before the first step saves nothing, and jax aborts the other one.
    """
    codes, outputs, seconds = inject_fault(job_starter, tmp_path / 'run', moment, 'TERM')
    assert 0 not in codes or (codes == [0, 0] and seconds < MAX_COMPLETION_SECONDS), outputs
    if codes == [143, 143]:
        outcome = read_outcome(tmp_path / 'run')
        assert (outcome['kind'], outcome['exit_code']) == ('stopped', 143)
        assert outcome['message'].endswith(f'step {outcome["checkpoint"]}')
    resumed_codes, resumed_outputs = job_starter(tmp_path / 'run').wait()
    assert resumed_codes == [0, 0], resumed_outputs
    assert_same_runs(tmp_path / 'run', undisturbed_run)


@pytest.mark.exhaustive
def test_divergence_ends_all_processes_at_same_step(job_starter, tmp_path):
    codes, outputs = job_starter(tmp_path / 'run', 2, '--config.optimizer.peak_learning_rate=1e30').wait()
    assert codes == [3, 3], outputs
    assert get_messages(outputs[0]) == get_messages(outputs[1])
    assert 'diverged' in get_messages(outputs[0])[0]


DIFFERENCES = {
    'config': {'OPTIONS': ['--config.seed=1']},
    'layout': {'OPTIONS': ['--remat=full']},
    'attention': {'OPTIONS': ['--attention=dense']},
    'refusal': {'OPTIONS': ['--config.optimizer.stps=1']},
    'devices': {'JAX_NUM_CPU_DEVICES': '1'},
    **{name: {'OTHER': name} for name in ('versions', 'commit', 'data', 'backend')},
}


# Each of these is detected in a different phase of the start; the others share a phase with one of these.
REPRESENTATIVE_DIFFERENCES = 'config', 'refusal', 'devices', 'versions', 'data'


@pytest.mark.parametrize('difference', make_case_params(DIFFERENCES, REPRESENTATIVE_DIFFERENCES))
def test_difference_on_one_process_is_reported_by_all_processes(job_starter, tmp_path, difference):
    job = job_starter(tmp_path / 'run', process_overrides={1: dict(DIFFERENCES[difference])})
    codes, outputs = job.wait()
    assert codes == [1, 1], outputs
    messages = [get_messages(output) for output in outputs]
    assert [len(output) for output in messages] == [1, 1], outputs
    assert all('process 1' in line for (line,) in messages)
    seconds = max(job.end_times.values()) - job.start_time
    assert seconds < 20
    assert not (tmp_path / 'run').exists()


@pytest.mark.exhaustive
def test_unshared_folder_is_rejected(job_starter, tmp_path):
    """Start each process in a different directory with the same relative workdir."""
    process_overrides = {}
    for index in range(2):
        (tmp_path / str(index)).mkdir()
        process_overrides[index] = {'CWD': str(tmp_path / str(index)), 'WORKDIR': 'run'}
    codes, outputs = job_starter('run', process_overrides=process_overrides).wait()
    assert codes == [1, 1], outputs
    assert all('process 1' in output and 'process 0' in output for output in outputs), outputs
    assert not (tmp_path / '0' / 'run').exists()
