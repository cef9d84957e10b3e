"""The shell of launchers: that it is well written, and what the loop does that looks after a queued resource."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from recorders import HARD, SUBMIT, printed, recorded

from launch import queued_resources

PLACES = (Path(sys.executable).parent / 'shellcheck', shutil.which('shellcheck'))
SHELLCHECK = next((str(path) for path in PLACES if path and Path(path).exists()), None)
SYSTEMD = shutil.which('systemd-analyze')
INTENDED = '--exclude=SC2016'  # a $ in single quotes, which is to stay one
QUEUED = ['gcloud', 'compute', 'tpus', 'queued-resources']


@pytest.fixture
def recorders(tmp_path, monkeypatch):
    return recorded(tmp_path, monkeypatch)


def files(script):
    """{path: text} of the files that a plan's script writes."""
    found = re.findall(r"^cat > ([^\n]*) <<'(END_*)'\n(.*?)^\2$", script, re.MULTILINE | re.DOTALL)
    return {path.strip("'").rpartition('/')[2]: text for path, _, text in found}


def hard(name):
    given = [one for one in SUBMIT[name] if not one.startswith('--workdir')]
    return [*given[:2], f'--workdir={HARD}', "--env=WORDS=a 'b' $c", *given[2:]]


def sweep():
    given = [one.replace(':softmax_1b', '') for one in SUBMIT['slurm']]
    return [*given[:2], '--rows=a,b', '--at_once=1', *given[2:]]


GIVEN = {
    'queued_resources': ('queued_resources', hard('queued_resources')),
    'jobset': ('jobset', hard('jobset')),
    'slurm': ('slurm', SUBMIT['slurm']),
    'sweep': ('slurm', sweep()),
}


@pytest.mark.skipif(not SHELLCHECK, reason='shellcheck, of the extra test, is not installed')
@pytest.mark.parametrize('case', GIVEN)
def test_shellcheck_finds_nothing(case, recorders, capsys, tmp_path):
    script = printed(capsys, *GIVEN[case])
    scripts = {name: text for name, text in files(script).items() if name.endswith('.sh')}
    for name, text in {'plan.sh': script, **scripts}.items():
        (tmp_path / name).write_text(text)
        said = subprocess.run([SHELLCHECK, INTENDED, name], cwd=tmp_path, capture_output=True, text=True)
        assert said.returncode == 0, said.stdout


@pytest.mark.skipif(not SYSTEMD, reason='there is no systemd here')
def test_systemd_finds_nothing(recorders, capsys, tmp_path):
    unit = tmp_path / 'sinklab.service'
    unit.write_text(files(printed(capsys, *GIVEN['queued_resources']))['sinklab.service'])
    said = subprocess.run([SYSTEMD, 'verify', unit], capture_output=True, text=True)
    assert [line for line in said.stderr.splitlines() if 'sinklab.service' in line] == []


def test_a_host_that_boots_gets_the_code_makes_its_environment_and_begins(tmp_path, monkeypatch, capsys):
    made = recorded(tmp_path, monkeypatch)
    for name in ('systemctl', 'python3', 'cp'):
        (made.folder / name).unlink(missing_ok=True)
        (made.folder / name).symlink_to(made.folder / 'sinklab')
    monkeypatch.setattr(queued_resources, 'FOLDER', str(tmp_path / 'host'))
    written = files(printed(capsys, 'queued_resources', SUBMIT['queued_resources']))
    (tmp_path / 'host').mkdir()
    for name, text in {**written, 'pins.txt': 'jax\n', 'sinklab-0.whl': ''}.items():
        (tmp_path / 'host' / name).write_text(text)
    for environments in (1, 0):  # at the first boot, and at every other
        subprocess.run(['bash', tmp_path / 'host' / 'boot.sh'], check=True, env=made.environment)
        calls = made.heard()
        assert calls[0] == [
            'gcloud',
            'storage',
            'rsync',
            '--recursive',
            'gs://b/runs/code/pair/pair',
            f'{tmp_path}/host',
        ]
        by_uv = [call for call in calls if call[0] == 'uv']
        assert [call[:2] for call in by_uv] == [['uv', 'venv'], ['uv', 'pip'], ['uv', 'pip']] * environments
        of_index = [call for call in by_uv if 'pins.txt' in call]
        assert all({'--require-hashes', '--no-deps'} <= {*call} for call in of_index)
        assert len(of_index) == environments
        assert calls[-3:] == [
            ['cp', f'{tmp_path}/host/sinklab.service', '/run/systemd/system/'],
            ['systemctl', 'daemon-reload'],
            ['systemctl', 'start', '--no-block', 'sinklab'],
        ]
        # Of several hosts the first to boot puts its secret beside the code, and all take it from there.
        mine, put, taken = tmp_path / 'host' / 'mine', *(call[2:] for call in calls[1:3])
        assert put == ['cp', '--if-generation-match=0', str(mine), 'gs://b/runs/code/pair/pair/secret']
        assert taken == ['cp', 'gs://b/runs/code/pair/pair/secret', str(tmp_path / 'host' / 'secret')]
        assert (len(mine.read_text()), mine.stat().st_mode & 0o777) == (37, 0o600)
    assert (tmp_path / 'host' / 'env' / 'made').exists()
    assert (tmp_path / 'host' / 'env').stat().st_mode & 0o077 == 0, 'what is made there is for root alone'


def test_what_a_host_runs_is_told_the_secret(tmp_path, monkeypatch, capsys):
    made = recorded(tmp_path, monkeypatch)
    monkeypatch.setattr(queued_resources, 'FOLDER', str(tmp_path / 'host'))
    written = files(printed(capsys, 'queued_resources', SUBMIT['queued_resources']))
    program = tmp_path / 'host' / 'env' / 'bin' / 'sinklab'
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/bash\necho "$SINKLAB_RUN_SECRET"\n')
    program.chmod(0o755)
    (tmp_path / 'host' / 'secret').write_text('of this run\n')
    (tmp_path / 'run.sh').write_text(written['run.sh'])
    said = subprocess.run(['bash', 'run.sh'], env=made.environment, cwd=tmp_path, capture_output=True, text=True)
    assert said.stdout == 'of this run\n'


@pytest.fixture
def keep(recorders, capsys, tmp_path):
    """keep(restarts) -> (exit code, what it said, calls) of the loop, which does not wait between two looks."""

    def run(restarts=2):
        given = SUBMIT['queued_resources']
        script = printed(capsys, 'queued_resources', [*given[:2], f'--restarts={restarts}', *given[2:]])
        (tmp_path / 'keep.sh').write_text(files(script)['keep.sh'])
        said = subprocess.run(
            ['bash', 'keep.sh'],
            env={**recorders.environment, 'EVERY': '0'},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return said.returncode, said.stdout, [call[len(QUEUED)] for call in recorders.heard() if call[:4] == QUEUED]

    return run


def shown(state, status=0, since=17):
    text = f'ActiveState={state}\nResult=success\nExecMainStatus={status}\nExecMainStartTimestampMonotonic={since}\n'
    return text, '', 0


def test_what_is_taken_away_is_made_again_and_given_back_when_it_is_done(recorders, keep):
    states = ('WAITING_FOR_RESOURCES', 'PROVISIONING', 'ACTIVE', 'SUSPENDING', 'SUSPENDED', 'ACTIVE', 'ACTIVE')
    recorders.answer('describe', *((f'{state}\n', '', 0) for state in states))
    recorders.answer('systemctl show', shown('active'), shown('activating'), shown('inactive'))
    code, said, calls = keep()
    assert (code, calls) == (0, ['describe'] * 5 + ['delete', 'create'] + ['describe'] * 2 + ['delete'])
    assert said.startswith('the run is over\nActiveState=inactive\n')


def test_a_host_that_has_not_come_to_its_run_is_waited_for(recorders, keep):
    recorders.answer('describe', ('ACTIVE\n', '', 0))
    recorders.answer(
        'systemctl show', shown('inactive', since=0), shown('active'), ('', 'no ssh', 255), shown('failed', 1)
    )
    code, _, calls = keep()
    assert (code, calls) == (1, ['describe'] * 4 + ['delete'])


def test_it_is_made_again_no_more_often_than_said(recorders, keep):
    recorders.answer('describe', ('SUSPENDED\n', '', 0))
    code, said, calls = keep(restarts=2)
    assert (code, calls) == (1, ['describe', 'delete', 'create'] * 2 + ['describe'])
    assert said == 'taken away once more than --restarts allows\n'


def test_what_is_not_there_is_not_asked_for_ever(recorders, keep):
    recorders.answer('describe', ('', 'ERROR: NOT_FOUND\n', 1))
    code, said, calls = keep()
    assert (code, calls, said) == (1, ['describe'] * 5, 'it is not there, or cannot be asked\n')
