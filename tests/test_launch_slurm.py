"""Tests of the script of a SLURM job."""

import re
import subprocess
import time
from pathlib import Path

import pytest
from command_recorders import SUBMIT_COMMANDS, get_launcher_output, run_launcher


def make_script(capsys, *options):
    arguments = [argument.replace('/shared', '/the shared') for argument in SUBMIT_COMMANDS['slurm']]
    output = get_launcher_output(capsys, 'slurm', [*arguments[:2], *options, *arguments[2:]])
    return re.search(r"job.sh'\) <<'END_OF_FILE'\n(.*?)^END_OF_FILE$", output, re.MULTILINE | re.DOTALL)[1]


def parse_options(script):
    """Return {option: value} of the lines that sbatch reads, which end at the first command."""
    option_lines = script.partition('\nended=')[0].splitlines()[1:]
    assert all(line.startswith('#SBATCH --') for line in option_lines)
    return {name: value for name, _, value in (line[10:].partition('=') for line in option_lines)}


def test_script_has_sbatch_options_for_hosts_signal_and_requeue(recorders, capsys):
    options = parse_options(make_script(capsys, '--grace=180', '--partition=gpu', '--account=sinks'))
    expected = {
        **{'job-name': 'pair', 'nodes': '32', 'ntasks-per-node': '1', 'gpus-per-node': '8', 'time': '1-0'},
        **{'signal': 'TERM@180', 'requeue': '', 'open-mode': 'append', 'partition': 'gpu', 'account': 'sinks'},
        **{'exclusive': '', 'output': "'/the shared/runs/code/pair/%x-%j.log'"},
    }
    assert options == expected


def test_sweep_is_job_array_with_one_run_per_element(recorders, capsys, tmp_path):
    arguments = [
        argument.replace(':softmax_1b', '').replace('/shared', str(tmp_path)) for argument in SUBMIT_COMMANDS['slurm']
    ]
    argv = [*arguments[:2], '--execute', '--rows=a,b', '--seeds=0,1', *arguments[2:]]
    assert run_launcher('slurm', argv) == 0
    (sbatch_call,) = (call for call in recorders.pop_calls() if call[0] == 'sbatch')
    assert parse_options(Path(sbatch_call[1]).read_text())['array'] == '0-3'
    (recorders.folder / 'srun').symlink_to(recorders.folder / 'sinklab')
    for index, run in enumerate(('a-0', 'b-0', 'a-1', 'b-1')):
        environment = {**recorders.environment, 'SLURM_ARRAY_TASK_ID': str(index)}
        subprocess.run(['bash', sbatch_call[1]], env=environment, check=True)
        (call,) = recorders.pop_calls()
        assert call[:3] == ['srun', '--kill-on-bad-exit=0', '--wait=120']
        assert f'--workdir={tmp_path}/runs/pair/{run} ' in Path(call[-1]).read_text()
    assert run_launcher('slurm', ['stop', *argv[1:]]) == 0
    assert {call[-1] for call in recorders.pop_calls()} == {'--name=pair'}


@pytest.mark.slow
@pytest.mark.parametrize('code', [0, 1, 3, 130, 75, 137, 143])
@pytest.mark.parametrize('restarts', [49, 50])
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
    while not Path('begun').exists():
        time.sleep(0.05)
    process.terminate()
    assert process.wait(20) == 143
    assert Path('saved').exists()
    assert recorders.pop_calls() == []
