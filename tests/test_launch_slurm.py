"""Tests of the script of a SLURM job, also with two processes of a simulated cluster."""

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
from command_recorders import SUBMIT_COMMANDS, TRAIN_COMMAND, get_launcher_output, make_recorders, run_launcher

ROOT = Path(__file__).parents[1]
# Replaces srun: runs the command once for each host with its task variables; exits with the largest exit code.
SRUN_SCRIPT = """#!{python} -IS
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
    return make_recorders(tmp_path, monkeypatch)


def make_script(capsys, *options):
    arguments = [argument.replace('/shared', '/the shared') for argument in SUBMIT_COMMANDS['slurm']]
    output = get_launcher_output(capsys, 'slurm', [*arguments[:2], *options, *arguments[2:]])
    return re.search(r"job.sh' <<'END'\n(.*?)^END$", output, re.MULTILINE | re.DOTALL)[1]


def parse_options(script):
    """Return {option: value} of the lines that sbatch reads, which end at the first command."""
    option_lines = script.partition('\nended=')[0].splitlines()[1:]
    assert all(line.startswith('#SBATCH --') for line in option_lines)
    return {name: value for name, _, value in (line[10:].partition('=') for line in option_lines)}


def test_script_has_sbatch_options_for_hosts_signal_and_requeue(recorders, capsys):
    options = parse_options(make_script(capsys, '--save=170', '--partition=gpu', '--account=sinks'))
    expected = {
        **{'job-name': 'pair', 'nodes': '32', 'ntasks-per-node': '1', 'gpus-per-node': '8', 'time': '1-0'},
        **{'signal': 'TERM@180', 'requeue': '', 'open-mode': 'append', 'partition': 'gpu', 'account': 'sinks'},
        **{'exclusive': '', 'output': "'/the shared/code/%x-%j.log'"},
    }
    assert options == expected


def test_sweep_is_job_array_with_one_run_per_element(recorders, capsys, tmp_path):
    arguments = [
        argument.replace(':softmax_1b', '').replace('/shared', str(tmp_path)) for argument in SUBMIT_COMMANDS['slurm']
    ]
    argv = [*arguments[:2], '--execute', '--rows=a,b', '--seeds=0,1', '--at_once=3', *arguments[2:]]
    assert run_launcher('slurm', argv) == 0
    (sbatch_call,) = (call for call in recorders.pop_calls() if call[0] == 'sbatch')
    assert parse_options(Path(sbatch_call[1]).read_text())['array'] == '0-3%3'
    (recorders.folder / 'srun').symlink_to(recorders.folder / 'sinklab')
    for index, run in enumerate(('a-0', 'b-0', 'a-1', 'b-1')):
        environment = {**recorders.environment, 'SLURM_ARRAY_TASK_ID': str(index)}
        subprocess.run(['bash', sbatch_call[1]], env=environment, check=True)
        (call,) = recorders.pop_calls()
        assert call[:3] == ['srun', '--kill-on-bad-exit=0', '--wait=120']
        assert f'--workdir=gs://b/runs/pair/{run} ' in Path(call[-1]).read_text()


@pytest.mark.slow
@pytest.mark.parametrize('code', [0, 1, 3, 130, 2, 75, 134, 137, 143])
@pytest.mark.parametrize('restarts', [0, 49, 50])
def test_script_requeues_job_on_retry_exit_codes_up_to_limit(code, restarts, recorders, capsys, tmp_path):
    for name in ('srun', 'scontrol'):
        (recorders.folder / name).symlink_to(recorders.folder / 'sinklab')
    recorders.add_answers('srun', ('', '', code))
    (tmp_path / 'job.sh').write_text(make_script(capsys))
    environment = {**recorders.environment, 'SLURM_JOB_ID': '7', 'SLURM_RESTART_COUNT': str(restarts)}
    assert subprocess.run(['bash', 'job.sh'], env=environment).returncode == code
    is_requeued = code not in (0, 1, 3, 130) and restarts < 50
    assert recorders.pop_calls()[1:] == [['scontrol', 'requeue', '7']] * is_requeued


def test_script_requeues_only_its_array_task(recorders, capsys, tmp_path):
    """Test the last task of an array, whose job id is that of the array."""
    for name in ('srun', 'scontrol'):
        (recorders.folder / name).symlink_to(recorders.folder / 'sinklab')
    recorders.add_answers('srun', ('', '', 143))
    (tmp_path / 'job.sh').write_text(make_script(capsys))
    variables = dict(SLURM_JOB_ID='8', SLURM_ARRAY_JOB_ID='8', SLURM_ARRAY_TASK_ID='3')
    subprocess.run(['bash', 'job.sh'], env={**recorders.environment, **variables})
    assert recorders.pop_calls()[1:] == [['scontrol', 'requeue', '8_3']]


@pytest.mark.slow
def test_script_does_not_requeue_after_termination_by_slurm(recorders, capsys, tmp_path):
    """Test that the script waits for the save and runs no command."""
    (recorders.folder / 'srun').write_text('#!/bin/bash\ntouch begun; sleep 1; touch saved; exit 143\n')
    (recorders.folder / 'srun').chmod(0o755)
    (recorders.folder / 'scontrol').symlink_to(recorders.folder / 'sinklab')
    (tmp_path / 'job.sh').write_text(make_script(capsys))
    process = subprocess.Popen(['bash', 'job.sh'], env={**recorders.environment, 'SLURM_JOB_ID': '7'})
    wait_until(lambda: Path('begun').exists())
    process.terminate()
    assert process.wait(20) == 143
    assert Path('saved').exists()
    assert recorders.pop_calls() == []


def test_workdir_with_backslash_is_rejected(recorders, capsys):
    argv = [argument.replace('/shared', '/a\\b') for argument in SUBMIT_COMMANDS['slurm']]
    assert run_launcher('slurm', argv) == 1
    assert 'backslash' in capsys.readouterr().err


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Cluster:
    """Simulated cluster that runs the script of a job, signals it before its limit and requeues it."""

    def __init__(self, recorders, script):
        self.folder, self.script, self.recorders = recorders.folder, script, recorders
        (self.folder / 'srun').write_text(SRUN_SCRIPT.format(python=sys.executable))
        (self.folder / 'srun').chmod(0o755)
        (self.folder / 'scontrol').unlink(missing_ok=True)
        (self.folder / 'scontrol').symlink_to(self.folder / 'sinklab')
        self.job_id = random.randrange(10_000)

    def start_attempt(self, restarts):
        variables = dict(SLURM_JOB_ID=str(self.job_id), SLURM_RESTART_COUNT=str(restarts))
        return subprocess.Popen(['bash', self.script], env={**self.recorders.environment, **variables})

    def run(self, *conditions):
        """Return the exit codes of the attempts.

        Each attempt but the last is signalled when its condition, a function, returns True.
        """
        codes = []
        for restarts, condition in enumerate([*conditions, None]):
            process = self.start_attempt(restarts)
            if condition:
                wait_until(
                    lambda condition=condition, process=process: condition() or process.poll() is not None, 120
                )
                self.signal()
            codes.append(process.wait(180))
            if ['scontrol', 'requeue', str(self.job_id)] not in self.recorders.pop_calls():
                break
        return codes

    def signal(self):
        name, _, seconds = parse_options(Path(self.script).read_text())['signal'].partition('@')
        assert int(seconds) == 60
        for pid in json.loads((self.folder / 'step').read_text()):
            os.kill(pid, getattr(signal, f'SIG{name}'))


@pytest.fixture
def submit_job(recorders, corpus, monkeypatch):
    """Return a function submit(name) -> (cluster with a job, run folder, notes).

    The job runs the code of this tree.
    """
    (Path('fault.py')).write_text((ROOT / 'tests' / 'faults' / 'fault.py').read_text())
    monkeypatch.setenv('JAX_NUM_CPU_DEVICES', '2')

    def submit(name):
        folder, notes = Path.cwd() / name, Path.cwd() / name / 'its notes'
        notes.mkdir(parents=True)
        path_flags = [
            f'--workdir={folder}/run',
            f'--code={folder}/the code',
            f'--compiled={Path.cwd()}/compiled',
        ]
        variables = [f'--env={text}' for text in ('PAUSE=0.2', f'NOTES={notes}', f'PYTHONPATH={ROOT}')]
        arguments = [*TRAIN_COMMAND[:2], '--config=fault.py', f'--config.data.source={corpus}', '--data=4']
        options = ['--execute', '--nodes=2', '--gpus=2', '--time=1:00:00', '--grace=60', *path_flags, *variables]
        assert run_launcher('slurm', ['submit', name, *options, *arguments]) == 0
        program = folder / 'the code' / 'env' / 'bin' / 'sinklab'
        program.parent.mkdir()
        program.write_text(f'#!/bin/bash\nexec {sys.executable} -m sinklab "$@"\n')
        program.chmod(0o755)
        (script,) = (call[1] for call in recorders.pop_calls() if call[0] == 'sbatch')
        return Cluster(recorders, script), folder / 'run', notes

    return submit


def make_step_condition(notes, step):
    """Return a function that returns whether both processes have reached a step."""
    return lambda: all((notes / str(i)).exists() and f' {step}\n' in (notes / str(i)).read_text() for i in range(2))


@pytest.mark.exhaustive  # requeueing is tested above, and exact resume in test_loop
def test_preempted_processes_end_with_same_parameters_as_undisturbed_ones(submit_job):
    from sinklab.checkpoint import checkpointer
    from sinklab.run_dir import RunDir

    cluster, run, notes = submit_job('stopped')
    assert cluster.run(make_step_condition(notes, 4), make_step_condition(notes, 8)) == [143, 143, 0]
    undisturbed_cluster, undisturbed_run, _ = submit_job('quiet')
    assert undisturbed_cluster.run() == [0]
    assert len(RunDir(run).read_environment()['attempts']) == 3
    steps = [RunDir(path).list_checkpoint_steps()[-1] for path in (run, undisturbed_run)]
    assert steps == [12, 12]
    assert digest(checkpointer.restore_parameters(run, 12)) == digest(
        checkpointer.restore_parameters(undisturbed_run, 12)
    )


def digest(parameters):
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(parameters)
    return {jax.tree_util.keystr(path): (leaf.shape, leaf.tobytes()) for path, leaf in leaves}
