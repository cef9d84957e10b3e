"""Tests of the shell scripts of launchers, with linters and with recorded commands."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_recorders import HOSTILE_PATH, SUBMIT_COMMANDS, get_launcher_output, make_recorders

from launch import code_bundle, queued_resources
from sinklab import __version__

SHELLCHECK_PATHS = (Path(sys.executable).parent / 'shellcheck', shutil.which('shellcheck'))
SHELLCHECK = next((str(path) for path in SHELLCHECK_PATHS if path and Path(path).exists()), None)
SYSTEMD = shutil.which('systemd-analyze')
SHELLCHECK_EXCLUDE = '--exclude=SC2016'  # a $ in single quotes is intended


def extract_files(script):
    """Return {name: text} of the files that the script of a plan writes."""
    matches = re.findall(
        r"^\(umask 077 && cat > ([^\n]*)\) <<'END_OF_FILE'\n(.*?)^END_OF_FILE$", script, re.MULTILINE | re.DOTALL
    )
    return {path.strip("'").rpartition('/')[2]: text for path, text in matches}


def make_hostile_arguments(name):
    launch_arguments = [argument for argument in SUBMIT_COMMANDS[name] if not argument.startswith('--workdir')]
    return [*launch_arguments[:2], f'--workdir={HOSTILE_PATH}', "--env=WORDS=a 'b' $c", *launch_arguments[2:]]


def make_sweep_arguments():
    launch_arguments = [argument.replace(':softmax_1b', '') for argument in SUBMIT_COMMANDS['slurm']]
    return [*launch_arguments[:2], '--rows=a,b', *launch_arguments[2:]]


CASES = {
    'queued_resources': ('queued_resources', make_hostile_arguments('queued_resources')),
    'jobset': ('jobset', make_hostile_arguments('jobset')),
    'slurm': ('slurm', SUBMIT_COMMANDS['slurm']),
    'sweep': ('slurm', make_sweep_arguments()),
}


@pytest.mark.skipif(not SHELLCHECK, reason='shellcheck, of the extra test, is not installed')
@pytest.mark.parametrize('case', CASES)
def test_scripts_pass_shellcheck(case, recorders, capsys, tmp_path):
    script = get_launcher_output(capsys, *CASES[case])
    scripts = {name: text for name, text in extract_files(script).items() if name.endswith('.sh')}
    for name, text in {'plan.sh': script, **scripts}.items():
        (tmp_path / name).write_text(text)
        process = subprocess.run([SHELLCHECK, SHELLCHECK_EXCLUDE, name], cwd=tmp_path, capture_output=True, text=True)
        assert process.returncode == 0, process.stdout


@pytest.mark.parametrize('case', CASES)
def test_jobs_install_all_packages_except_uv_and_own_wheel_by_hashes(case, recorders, capsys):
    texts = extract_files(get_launcher_output(capsys, *CASES[case])).values()
    installs = [line for text in texts for line in text.splitlines() if 'pip install' in line]
    hashed_installs = [line for line in installs if {'--require-hashes', '--no-deps'} <= set(line.split())]
    assert [line.split()[-1] for line in hashed_installs] == ['pins.txt']
    assert {line.split()[-1] for line in installs if line not in hashed_installs} <= {'uv', code_bundle.WHEEL_PATTERN}


@pytest.mark.skipif(not SYSTEMD, reason='there is no systemd here')
def test_unit_file_passes_systemd_verify(recorders, capsys, tmp_path):
    unit = tmp_path / 'sinklab.service'
    unit.write_text(extract_files(get_launcher_output(capsys, *CASES['queued_resources']))['sinklab.service'])
    process = subprocess.run([SYSTEMD, 'verify', unit], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert [line for line in process.stderr.splitlines() if 'sinklab.service' in line] == []


def test_boot_script_copies_code_installs_environment_and_starts_run(tmp_path, monkeypatch, capsys):
    boot_recorders = make_recorders(tmp_path, monkeypatch)
    for name in ('systemctl', 'python3', 'cp'):
        (boot_recorders.folder / name).unlink(missing_ok=True)
        (boot_recorders.folder / name).symlink_to(boot_recorders.folder / 'sinklab')
    monkeypatch.setattr(queued_resources, 'INSTALL_FOLDER', str(tmp_path / 'host'))
    script_files = extract_files(get_launcher_output(capsys, 'queued_resources', SUBMIT_COMMANDS['queued_resources']))
    (tmp_path / 'host').mkdir()
    for name, text in {**script_files, 'pins.txt': 'jax\n', f'sinklab-{__version__}-py3-none-any.whl': ''}.items():
        (tmp_path / 'host' / name).write_text(text)
    for num_environments in (1, 0):  # at the first boot and at a later one
        subprocess.run(['bash', tmp_path / 'host' / 'boot.sh'], check=True, env=boot_recorders.environment)
        calls = boot_recorders.pop_calls()
        bucket_folder = 'gs://b/runs/code/pair/pair'
        assert calls[0] == ['gcloud', 'storage', 'rsync', '--recursive', bucket_folder, f'{tmp_path}/host']
        uv_calls = [call for call in calls if call[0] == 'uv']
        assert [call[:2] for call in uv_calls] == [['uv', 'venv'], ['uv', 'pip'], ['uv', 'pip']] * num_environments
        pinned_calls = [call for call in uv_calls if 'pins.txt' in call]
        assert all({'--require-hashes', '--no-deps'} <= {*call} for call in pinned_calls)
        assert len(pinned_calls) == num_environments
        assert calls[-3:] == [
            ['cp', f'{tmp_path}/host/sinklab.service', '/run/systemd/system/'],
            ['systemctl', 'daemon-reload'],
            ['systemctl', 'start', '--no-block', 'sinklab'],
        ]
        gcloud_calls = [call for call in calls if call[0] == 'gcloud']
        assert gcloud_calls == calls[:1], 'a host may only read the folder of the code'
    assert (tmp_path / 'host' / 'env' / 'made').exists()
    assert (tmp_path / 'host' / 'env').stat().st_mode & 0o077 == 0, 'what is made there is for root alone'


@pytest.fixture
def run_keep_script(recorders, capsys, tmp_path):
    """Return a function run_keep_script(restarts) that runs keep.sh without waits between polls.

    It returns (exit code, output, verbs of the calls that concern the queued resource).
    """

    def run(restarts=2):
        argv = SUBMIT_COMMANDS['queued_resources']
        script = get_launcher_output(capsys, 'queued_resources', [*argv[:2], f'--restarts={restarts}', *argv[2:]])
        (tmp_path / 'keep.sh').write_text(extract_files(script)['keep.sh'])
        environment = {**recorders.environment, 'POLL_SECONDS': '0'}
        process = subprocess.run(['bash', 'keep.sh'], env=environment, capture_output=True, text=True, timeout=60)
        calls = [call[4] for call in recorders.pop_calls() if call[3] == 'queued-resources']
        return process.returncode, process.stdout, calls

    return run


def make_show_result(state, status=0, start_time=17):
    text = f'ActiveState={state}\nExecMainStatus={status}\nExecMainStartTimestampMonotonic={start_time}\n'
    return text, '', 0


NO_SSH = ('', 'no ssh', 255)
NOT_STARTED = make_show_result('inactive', start_time=0)


def test_keep_script_recreates_preempted_resource_and_deletes_it_at_end(recorders, run_keep_script):
    states = ('WAITING_FOR_RESOURCES', 'PROVISIONING', 'ACTIVE', 'SUSPENDING', 'SUSPENDED', 'ACTIVE', 'ACTIVE')
    recorders.add_answers('describe', *((f'{state}\n', '', 0) for state in states))
    recorders.add_answers(
        'systemctl show', make_show_result('active'), make_show_result('activating'), make_show_result('inactive')
    )
    code, output, calls = run_keep_script()
    assert (code, calls) == (0, ['describe'] * 5 + ['delete', 'create'] + ['describe'] * 2 + ['delete'])
    assert '\nActiveState=inactive\n' in output


@pytest.mark.parametrize(('last', 'code'), [(make_show_result('failed', 1), 1), (make_show_result('inactive'), 0)])
def test_keep_script_waits_for_run_and_exits_as_it_does(last, code, recorders, run_keep_script):
    recorders.add_answers('describe', ('ACTIVE\n', '', 0))
    ssh_failures = [NO_SSH] * 3
    recorders.add_answers('systemctl show', NOT_STARTED, make_show_result('active'), *ssh_failures, last)
    assert run_keep_script()[0] == code


def test_keep_script_stops_after_restart_limit(recorders, run_keep_script):
    recorders.add_answers('describe', ('SUSPENDED\n', '', 0))
    code, _, calls = run_keep_script(restarts=2)
    assert (code, calls) == (1, ['describe', 'delete', 'create'] * 2 + ['describe'])


def test_keep_script_stops_if_resource_is_not_found(recorders, run_keep_script):
    recorders.add_answers('describe', ('', 'ERROR: NOT_FOUND\n', 1))
    code, _, calls = run_keep_script()
    assert (code, set(calls)) == (1, {'describe'})


def test_keep_script_repeats_deletion_that_fails(recorders, run_keep_script):
    recorders.add_answers('describe', ('ACTIVE\n', '', 0))
    recorders.add_answers('systemctl show', make_show_result('inactive'))
    recorders.add_answers('delete', ('', 'ERROR: UNAVAILABLE\n', 1), ('', '', 0))
    code, _, calls = run_keep_script()
    assert (code, calls.count('delete')) == (0, 2)


def test_keep_script_continues_while_state_cannot_be_read(recorders, run_keep_script):
    failures = [('', 'ERROR: Reauthentication failed.\n', 1)] * 20
    recorders.add_answers('describe', *failures, ('ACTIVE\n', '', 0))
    recorders.add_answers('systemctl show', make_show_result('inactive'))
    code, _, calls = run_keep_script()
    assert (code, calls[-1]) == (0, 'delete')
