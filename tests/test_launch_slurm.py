"""The script of a SLURM job: when it is queued again; and two processes of a faked cluster that train under it."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from recorders import RUN, SUBMIT, launched, printed, recorded

from launch.job import RETRY_EXIT_CODES

ROOT = Path(__file__).parents[1]
# As srun does: the command once on each host, with who it is; the largest of their exit codes.
SRUN = """#!{python} -IS
import json, os, subprocess, sys
command = sys.argv[1:]
while command[0].startswith('--'):
    del command[0]
shared = dict(SLURM_STEP_NODELIST='localhost', SLURM_NTASKS='2', SLURM_STEP_TASKS_PER_NODE='1(x2)', SLURM_LOCALID='0')
tasks = [subprocess.Popen(command, env=os.environ | shared | dict(SLURM_PROCID=str(i))) for i in range(2)]
with open(os.path.join(os.path.dirname(sys.argv[0]), 'step'), 'w') as file:
    json.dump([task.pid for task in tasks], file)
sys.exit(max(code if code >= 0 else 128 - code for code in [task.wait() for task in tasks]))
"""


@pytest.fixture
def recorders(tmp_path, monkeypatch):
    return recorded(tmp_path, monkeypatch)


def script_of(capsys, *options):
    given = [one.replace('/shared', '/the shared') for one in SUBMIT['slurm']]
    printed_ = printed(capsys, 'slurm', [*given[:2], *options, *given[2:]])
    return re.search(r"job.sh' <<'END'\n(.*?)^END$", printed_, re.MULTILINE | re.DOTALL)[1]


def told(script):
    """{option: value} of the lines that sbatch reads, which end at the first command."""
    head = script.partition('\nended=')[0].splitlines()[1:]
    assert all(line.startswith('#SBATCH --') for line in head)
    return {name: value for name, _, value in (line[10:].partition('=') for line in head)}


def test_sbatch_is_asked_for_hosts_a_signal_ahead_of_time_and_to_queue_it_again(recorders, capsys):
    options = told(script_of(capsys, '--save=170', '--partition=gpu', '--account=sinks'))
    expected = {
        **{'job-name': 'pair', 'nodes': '32', 'ntasks-per-node': '1', 'gpus-per-node': '8', 'time': '1-0'},
        **{'signal': 'TERM@180', 'requeue': '', 'open-mode': 'append', 'partition': 'gpu', 'account': 'sinks'},
        **{'exclusive': '', 'output': "'/the shared/code/%x-%j.log'"},
    }
    assert options == expected


def test_a_sweep_is_an_array_of_which_each_element_runs_its_own(recorders, capsys, tmp_path):
    given = [one.replace(':softmax_1b', '').replace('/shared', str(tmp_path)) for one in SUBMIT['slurm']]
    argv = [*given[:2], '--execute', '--rows=a,b', '--seeds=0,1', '--at_once=3', *given[2:]]
    assert launched('slurm', argv) == 0
    (submitted,) = (call for call in recorders.heard() if call[0] == 'sbatch')
    assert told(Path(submitted[1]).read_text())['array'] == '0-3%3'
    (recorders.folder / 'srun').symlink_to(recorders.folder / 'sinklab')
    for index, run in enumerate(('a-0', 'b-0', 'a-1', 'b-1')):
        environment = {**recorders.environment, 'SLURM_ARRAY_TASK_ID': str(index)}
        subprocess.run(['bash', submitted[1]], env=environment, check=True)
        (call,) = recorders.heard()
        assert call[:3] == ['srun', '--kill-on-bad-exit=0', '--wait=120']
        assert f'--workdir=gs://b/runs/pair/{run} ' in Path(call[-1]).read_text()


@pytest.mark.slow
@pytest.mark.parametrize('code', [0, 1, 2, 3, 70, 126, 127, 130, *RETRY_EXIT_CODES])
@pytest.mark.parametrize('restarts', [0, 49, 50])
def test_it_is_queued_again_on_codes_that_ask_for_it_and_so_often(code, restarts, recorders, capsys, tmp_path):
    for name in ('srun', 'scontrol'):
        (recorders.folder / name).symlink_to(recorders.folder / 'sinklab')
    recorders.answer('srun', ('', '', code))
    (tmp_path / 'job.sh').write_text(script_of(capsys))
    environment = {**recorders.environment, 'SLURM_JOB_ID': '7', 'SLURM_RESTART_COUNT': str(restarts)}
    assert subprocess.run(['bash', 'job.sh'], env=environment).returncode == code
    again = code in RETRY_EXIT_CODES and restarts < 50
    assert recorders.heard()[1:] == [['scontrol', 'requeue', '7']] * again


def test_each_start_has_a_secret_of_its_own_unless_one_is_given(recorders, capsys, tmp_path):
    (recorders.folder / 'srun').write_text('#!/bin/bash\necho "$SINKLAB_RUN_SECRET" >> secrets\n')
    (recorders.folder / 'srun').chmod(0o755)
    (tmp_path / 'job.sh').write_text(script_of(capsys))
    for given in ({}, {}, {'SINKLAB_RUN_SECRET': 'given'}):
        subprocess.run(['bash', 'job.sh'], env={**recorders.environment, **given}, check=True)
    first, second, third = Path('secrets').read_text().split()
    assert len(first) == len(second) == 36
    assert first != second
    assert third == 'given'


def test_an_element_of_an_array_is_queued_again_and_not_its_array(recorders, capsys, tmp_path):
    """The last element of an array has the number of the array."""
    for name in ('srun', 'scontrol'):
        (recorders.folder / name).symlink_to(recorders.folder / 'sinklab')
    recorders.answer('srun', ('', '', 42))
    (tmp_path / 'job.sh').write_text(script_of(capsys))
    element = dict(SLURM_JOB_ID='8', SLURM_ARRAY_JOB_ID='8', SLURM_ARRAY_TASK_ID='3')
    subprocess.run(['bash', 'job.sh'], env={**recorders.environment, **element})
    assert recorders.heard()[1:] == [['scontrol', 'requeue', '8_3']]


@pytest.mark.slow
def test_what_slurm_ends_as_a_whole_is_left_to_slurm(recorders, capsys, tmp_path):
    """The script waits for the save, and asks for nothing."""
    (recorders.folder / 'srun').write_text('#!/bin/bash\ntouch begun; sleep 1; touch saved; exit 42\n')
    (recorders.folder / 'srun').chmod(0o755)
    (recorders.folder / 'scontrol').symlink_to(recorders.folder / 'sinklab')
    (tmp_path / 'job.sh').write_text(script_of(capsys))
    running = subprocess.Popen(['bash', 'job.sh'], env={**recorders.environment, 'SLURM_JOB_ID': '7'})
    wait(lambda: Path('begun').exists())
    running.terminate()
    assert running.wait(20) == 42
    assert Path('saved').exists()
    assert recorders.heard() == []


def test_what_sbatch_cannot_read_is_refused(recorders, capsys):
    argv = [one.replace('/shared', '/a\\b') for one in SUBMIT['slurm']]
    assert launched('slurm', argv) == 1
    assert 'contains a backslash or a line break' in capsys.readouterr().err


def wait(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


class Cluster:
    """Runs the script of a job, ahead of its limit sends the signal that it asks for, and queues it again."""

    def __init__(self, recorders, script):
        self.folder, self.script, self.recorders = recorders.folder, script, recorders
        (self.folder / 'srun').write_text(SRUN.format(python=sys.executable))
        (self.folder / 'srun').chmod(0o755)
        (self.folder / 'scontrol').unlink(missing_ok=True)
        (self.folder / 'scontrol').symlink_to(self.folder / 'sinklab')
        self.number = random.randrange(10_000)

    def begin(self, restarts):
        own = dict(SLURM_JOB_ID=str(self.number), SLURM_RESTART_COUNT=str(restarts))
        return subprocess.Popen(['bash', self.script], env={**self.recorders.environment, **own})

    def run(self, *limits):
        """Exit codes of its attempts; each but the last is signalled when a limit, a function, says so."""
        codes = []
        for restarts, limit in enumerate([*limits, None]):
            running = self.begin(restarts)
            if limit:
                wait(lambda limit=limit, running=running: limit() or running.poll() is not None, 120)
                self.signal()
            codes.append(running.wait(180))
            if ['scontrol', 'requeue', str(self.number)] not in self.recorders.heard():
                break
        return codes

    def signal(self):
        name, _, seconds = told(Path(self.script).read_text())['signal'].partition('@')
        assert int(seconds) == 60
        for task in json.loads((self.folder / 'step').read_text()):
            os.kill(task, getattr(signal, f'SIG{name}'))


@pytest.fixture
def submitted(recorders, corpus, monkeypatch):
    """submitted(name) -> (a cluster with a job, its run folder, its notes); what it runs is of this tree."""
    (Path('fault.py')).write_text((ROOT / 'tests' / 'faults' / 'fault.py').read_text())
    monkeypatch.setenv('JAX_NUM_CPU_DEVICES', '2')

    def submit(name):
        here, notes = Path.cwd() / name, Path.cwd() / name / 'its notes'
        notes.mkdir(parents=True)
        places = [
            f'--workdir={here}/run',
            f'--code={here}/the code',
            f'--compiled={Path.cwd()}/compiled',
        ]
        variables = [f'--env={text}' for text in ('PAUSE=0.2', f'NOTES={notes}', f'PYTHONPATH={ROOT}')]
        asked = [*RUN[:2], '--config=fault.py', f'--config.data.source={corpus}', '--data=4']
        options = ['--execute', '--nodes=2', '--gpus=2', '--time=1:00:00', '--grace=60', *places, *variables]
        assert launched('slurm', ['submit', name, *options, *asked]) == 0
        program = here / 'the code' / 'env' / 'bin' / 'sinklab'
        program.parent.mkdir()
        program.write_text(f'#!/bin/bash\nexec {sys.executable} -m sinklab "$@"\n')
        program.chmod(0o755)
        (script,) = (call[1] for call in recorders.heard() if call[0] == 'sbatch')
        return Cluster(recorders, script), here / 'run', notes

    return submit


def at_step(notes, step):
    """Whether both processes have come to a step."""
    return lambda: all((notes / str(i)).exists() and f' {step}\n' in (notes / str(i)).read_text() for i in range(2))


@pytest.mark.exhaustive  # that codes have it queued again is tested above, that runs go on bit for bit in test_loop
def test_two_processes_that_are_told_to_stop_ahead_of_time_end_in_the_bits_of_those_that_are_not(submitted):
    from sinklab.checkpoint import checkpointer
    from sinklab.run_dir import RunDir

    cluster, run, notes = submitted('stopped')
    assert cluster.run(at_step(notes, 4), at_step(notes, 8)) == [42, 42, 0]
    quiet, undisturbed, _ = submitted('quiet')
    assert quiet.run() == [0]
    assert len(RunDir(run).read_environment()['attempts']) == 3
    steps = [RunDir(path).list_checkpoint_steps()[-1] for path in (run, undisturbed)]
    assert steps == [12, 12]
    assert digest(checkpointer.restore_parameters(run, 12)) == digest(
        checkpointer.restore_parameters(undisturbed, 12)
    )


def digest(parameters):
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(parameters)
    return {jax.tree_util.keystr(path): (leaf.shape, leaf.tobytes()) for path, leaf in leaves}
