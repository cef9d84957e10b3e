"""One run on two processes, whatever happens to one of them: it ends at once, says so, and goes on bit for bit.

At one moment of a run, or at FAULTS_MOMENTS; what was seen goes to FAULTS_FIGURES, a line each, where that is given.
"""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from conftest import some
from job import KUBERNETES, assert_same, free_port, outcome, timeless, words
from processes import wait_for_ears

from sinklab.run_dir import RunDir

pytest_plugins = ['started']
pytestmark = pytest.mark.slow
QUICK = 15  # seconds in which the others end
AT_ITS_END = 5  # seconds in which a run is done that was told to stop too late
NOTES = 36  # places that the run of fault.py comes by
NOTHING = 'SIGTERM arrived before the first step; nothing was started'
COME = '--join_timeout=12'  # who is killed before it has come can only be missed


def pytest_generate_tests(metafunc):
    if 'moment' in metafunc.fixturenames:
        metafunc.parametrize('moment', range(int(os.environ.get('FAULTS_MOMENTS', 1))))


@pytest.fixture
def seen(request):
    """Notes figures of a test."""

    def note(**figures):
        with open(os.environ.get('FAULTS_FIGURES', os.devnull), 'a') as file:
            file.write(json.dumps({'test': request.node.name, **figures}) + '\n')

    return note


def test_two_processes_are_one_run(undisturbed, alone):
    """Sums of four devices in another order: 2 x (4 - 1) roundings in float32 of the first loss, and what becomes of
    them in twelve steps, which was seen to be 2e-7 of a number."""
    ours, theirs = (timeless(path)[1]['train/loss'] for path in (undisturbed, alone))
    assert abs(ours - theirs) <= 2 * 3 * 2**-24 * theirs
    assert_same(undisturbed, alone, exactly=False)
    assert files(undisturbed) == files(alone)
    assert RunDir(undisturbed).read_json('environment')['processes'] == 2
    assert outcome(undisturbed)['checkpoint'] == 12


def files(path):
    """All files but those of which each process has its own."""
    found = (file.relative_to(path) for file in path.rglob('*') if file.is_file())
    return {file for file in found if file.parts[0] not in ('checkpoints', 'digests')}


@pytest.mark.exhaustive
def test_slurm_says_who_is_who(job, undisturbed, tmp_path):
    number = random.randrange(4096)
    shared = {'SLURM_JOB_ID': str(number), 'SLURM_STEP_NODELIST': 'localhost', 'SLURM_NTASKS': '2'}
    each = {i: {'PLACED': False, 'SLURM_PROCID': str(i), 'SLURM_LOCALID': str(i)} for i in range(2)}
    codes, said = job(tmp_path / 'run', variables=shared, each=each).wait()
    assert codes == [0, 0], said
    assert_same(tmp_path / 'run', undisturbed)


@pytest.mark.exhaustive
def test_a_jobset_says_who_is_who(job, undisturbed, tmp_path):
    (tmp_path / 'kubernetes.py').write_text(KUBERNETES.replace('ADDRESS', repr(f'127.0.0.1:{free_port()}')))
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    shared = {'KUBERNETES_SERVICE_HOST': '10.0.0.1', 'PYTHONPATH': path}
    each = {i: {'PLACED': False, 'JOB_COMPLETION_INDEX': str(i)} for i in range(2)}
    codes, said = job(tmp_path / 'run', variables=shared, each=each).wait()
    assert codes == [0, 0], said
    assert_same(tmp_path / 'run', undisturbed)


def harm(job, workdir, moment, name):
    """A run that is harmed at a moment: every other one by the clock from outside, the others at one of its places.

    Returns the exit codes, what was said, which process was harmed and when, and the seconds that the others took.
    """
    draw = random.Random(f'{name} {moment}')
    index, number = draw.randrange(2), getattr(signal, f'SIG{name}')
    if moment % 2:
        started = job(workdir, 2, COME)
        if name == 'TERM':
            wait_for_ears(started.processes[index])
        time.sleep(at := draw.uniform(0.2, 12))
        victim = started.processes[index].pid
        if name == 'KILL' and draw.random() < 0.5:
            victim = started.child(index) or victim
        harmed = time.monotonic()
        started.signal(victim, number)
    else:
        at = draw.randrange(NOTES)
        harm = f'{{"process": {index}, "event": {at}, "seconds": {draw.uniform(0, 0.1)}, "what": "SIG{name}"}}'
        started = job(workdir, 2, COME, variables={'FAULT': harm, 'NOTES': str(workdir.parent)})
        harmed = None
    codes, said = started.wait()
    harmed = harmed or float((workdir.parent / 'harmed').read_text())
    return codes, said, f'process {index}, {at}', max(started.ended.values()) - harmed


def test_a_process_is_killed(job, undisturbed, tmp_path, moment, seen):
    """The others end, and the same command on 2, 1 or 4 processes goes on."""
    codes, said, where, seconds = harm(job, tmp_path / 'run', moment, 'KILL')
    if codes != [0, 0]:  # it was killed after its last word
        assert 0 not in codes, said
        survivors = [said[index] for index in range(2) if codes[index] > 0]
        assert all(len(words(one)) == 1 for one in survivors), said
        assert seconds < QUICK, said
    count = (1, 2, 4)[moment % 3]
    again, told = job(tmp_path / 'run', count).wait()
    assert again == [0] * count, told
    assert_same(tmp_path / 'run', undisturbed, exactly=count == 2)
    seen(where=where, seconds=round(seconds, 2), codes=codes, words=[words(one) for one in said], again=count)


@pytest.mark.exhaustive
def test_a_process_is_told_to_stop(job, undisturbed, tmp_path, moment, seen):
    """All save the same step, exit 42, and go on bit for bit."""
    codes, said, where, seconds = harm(job, tmp_path / 'run', moment, 'TERM')
    assert codes == [42, 42] or (codes == [0, 0] and seconds < AT_ITS_END), said
    if codes == [42, 42] and RunDir(tmp_path / 'run').has_run():
        kept = outcome(tmp_path / 'run')
        assert (kept['kind'], kept['exit_code']) == ('stopped', 42)
        assert kept['message'].endswith((f'saved at step {kept["checkpoint"]}', NOTHING))
    again, told = job(tmp_path / 'run').wait()
    assert again == [0, 0], told
    assert_same(tmp_path / 'run', undisturbed)
    seen(where=where, seconds=round(seconds, 2), codes=codes, words=[words(one) for one in said])


@pytest.mark.exhaustive
def test_a_process_that_stands_still_is_named(job, undisturbed, tmp_path, seen):
    harm = '{"process": 1, "event": 12, "seconds": 0, "what": "SIGSTOP"}'
    started = job(tmp_path / 'run', variables={'FAULT': harm, 'NOTES': str(tmp_path)})
    codes, said = started.wait()
    assert codes == [42, 42], said
    assert all('process 1' in line for one in said for line in words(one)), said
    assert job(tmp_path / 'run').wait()[0] == [0, 0]
    assert_same(tmp_path / 'run', undisturbed)
    seconds = max(started.ended.values()) - float((tmp_path / 'harmed').read_text())
    seen(words=[words(one) for one in said], seconds=round(seconds, 2))


@pytest.mark.exhaustive
def test_all_diverge_at_the_same_step(job, tmp_path):
    codes, said = job(tmp_path / 'run', 2, '--config.optimizer.peak_learning_rate=1e30').wait()
    assert codes == [3, 3], said
    assert words(said[0]) == words(said[1])
    assert 'the run has diverged' in words(said[0])[0]


@pytest.mark.exhaustive
def test_two_jobs_in_one_folder(job, undisturbed, tmp_path, seen):
    first = job(tmp_path / 'run', variables={'PAUSE': '1'})
    until = time.monotonic() + 60
    while not (tmp_path / 'run' / 'metrics.jsonl').exists() and time.monotonic() < until:
        time.sleep(0.1)
    codes, said = job(tmp_path / 'run').wait()
    assert codes == [1, 1], said
    assert all('is in use: another job (process' in line for one in said for line in words(one)), said
    assert first.wait()[0] == [0, 0]
    assert_same(tmp_path / 'run', undisturbed)
    seen(words=[words(one) for one in said])


DIFFERENT = {
    'config': {'OPTIONS': ['--config.seed=1']},
    'layout': {'OPTIONS': ['--remat']},
    'attention': {'OPTIONS': ['--attention=dense']},
    'refusal': {'OPTIONS': ['--config.optimizer.stps=1']},
    'devices': {'JAX_NUM_CPU_DEVICES': '1'},
    **{name: {'OTHER': name} for name in ('versions', 'commit', 'data', 'backend')},
}


# Each of these comes to light at another place of a start: the rest is said where one of these is.
PLACES = 'config', 'refusal', 'devices', 'versions', 'data'


@pytest.mark.parametrize('what', some(DIFFERENT, PLACES))
def test_what_differs_on_one_process_is_named_by_all(job, tmp_path, what, seen):
    started = job(tmp_path / 'run', each={1: dict(DIFFERENT[what])})
    codes, said = started.wait()
    assert codes == [1, 1], said
    lines = [words(one) for one in said]
    assert [len(one) for one in lines] == [1, 1], said
    assert all('process 1' in line for (line,) in lines)
    seconds = max(started.ended.values()) - started.start
    assert seconds < 20
    assert not (tmp_path / 'run').exists()
    seen(words=lines, seconds=round(seconds, 2))


@pytest.mark.exhaustive
def test_a_folder_that_is_not_shared(job, tmp_path):
    """One name, two disks: each process is in a directory of its own, and the name is relative."""
    places = {}
    for index in range(2):
        (tmp_path / str(index)).mkdir()
        places[index] = {'CWD': str(tmp_path / str(index)), 'WORKDIR': 'run'}
    codes, said = job('run', each=places).wait()
    assert codes == [1, 1], said
    assert all('process 1 does not see in run what process 0 writes there' in one for one in said), said
    assert not (tmp_path / '0' / 'run').exists()


@pytest.mark.exhaustive
def test_a_disk_that_is_full(job, undisturbed, small_disk):
    harm = {'FAULT': '{"process": 0, "event": 20, "seconds": 0, "what": "FILL"}', 'NOTES': str(small_disk.parent)}
    codes, said = job(small_disk / 'run', variables=harm).wait()
    assert codes == [1, 1], said
    assert all('make room and run the same command again' in line for one in said for line in words(one)), said
    (small_disk / 'run' / 'ballast').unlink()
    assert job(small_disk / 'run').wait()[0] == [0, 0]
    assert_same(small_disk / 'run', undisturbed)


@pytest.mark.exhaustive
def test_a_folder_that_vanishes(job, undisturbed, tmp_path):
    harm = {'FAULT': '{"process": 0, "event": 20, "seconds": 0, "what": "VANISH"}', 'NOTES': str(tmp_path)}
    codes, said = job(tmp_path / 'run', variables=harm).wait()
    assert 0 not in codes, said
    assert all(len(words(one)) == 1 for one in said), said
    shutil.rmtree(tmp_path / 'run', ignore_errors=True)
    (tmp_path / 'gone').rename(tmp_path / 'run')
    assert job(tmp_path / 'run').wait()[0] == [0, 0]
    assert_same(tmp_path / 'run', undisturbed)


@pytest.mark.exhaustive
def test_a_damaged_checkpoint_is_passed_over_by_all(job, undisturbed, tmp_path):
    shutil.copytree(undisturbed, tmp_path / 'run')
    newest = tmp_path / 'run' / 'checkpoints' / '12'
    blob = max((file for file in newest.rglob('*') if file.is_file()), key=lambda file: file.stat().st_size)
    content = bytearray(blob.read_bytes())
    content[len(content) // 2] ^= 1
    blob.write_bytes(content)
    codes, said = job(tmp_path / 'run').wait()
    assert codes == [0, 0], said
    assert 'checkpoints/12 is skipped' in said[0]
    assert_same(tmp_path / 'run', undisturbed)


@pytest.mark.exhaustive
def test_a_restart_compiles_nothing_and_a_supervisor_restarts_by_itself(job, undisturbed, tmp_path):
    once = {'FAULT': '{"process": 1, "event": 25, "seconds": 0, "what": "SIGKILL"}', 'NOTES': str(tmp_path)}
    codes, said = job(tmp_path / 'run', 2, '--restarts=2', variables={**once, 'ONCE': '1'}).wait(200)
    assert codes == [0, 0], said
    assert [line for line in said[0].splitlines() if 'programs: ' in line][-1].count(': 0 compiled, ') == 1, said
    assert_same(tmp_path / 'run', undisturbed)
