"""docs/pods.md: every command of it, against programs that note how they are called."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from recorders import TOOLS, WHERE, Recorders, scheduler

from configs.scale import BILLION
from launch.command import COMMON
from launch.job import AGAIN
from sinklab.cli.main import parser
from sinklab.processes.ending import CAUSES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / 'docs' / 'pods.md').read_text(encoding='utf-8')
BLOCK = r'^```console\n(.*?)^```'
# What the other programs say for the page to come to its end.
SAID = {
    'queued-resources describe': 'ACTIVE\n',
    'systemctl show': 'ActiveState=inactive\nExecMainStatus=0\nExecMainStartTimestampMonotonic=17\n',
    'projects describe': '123\n',
}


def sections():
    """{heading: its commands}."""
    _, *parts = re.split(r'^## ', PAGE, flags=re.MULTILINE)
    found = {text.partition('\n')[0]: ''.join(re.findall(BLOCK, text, re.MULTILINE | re.DOTALL)) for text in parts}
    return {heading: commands for heading, commands in found.items() if commands}


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """ran(commands) -> the calls that they make, in a folder with the config files."""
    made = Recorders(tmp_path / 'bin', *TOOLS, 'xpk', 'sky', 'tail')
    for part, text in SAID.items():
        made.answer(part, (text, '', 0))
    (made.folder / 'python').symlink_to(sys.executable)
    (tmp_path / 'configs').mkdir()
    (tmp_path / 'configs' / 'scale.py').write_text((ROOT / 'configs' / 'scale.py').read_text())
    monkeypatch.setenv('PYTHONPATH', os.pathsep.join([str(ROOT), *sys.path]))

    def run(commands):
        (tmp_path / 'shared' / 'runs' / 'pair').mkdir(parents=True)  # of a run that has begun
        script = commands.replace('/shared', f'{tmp_path}/shared')
        said = subprocess.run(
            ['bash', '-eu', '-o', 'pipefail', '-c', script],
            cwd=tmp_path, env=made.environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert said.returncode == 0, said.stderr
        return made.heard()

    return run


@pytest.mark.slow
@pytest.mark.parametrize('section', sections())
def test_every_command_runs_and_what_it_names_is_there(section, ran, tmp_path):
    calls = ran(sections()[section])
    known = parser()
    for call in calls:
        if call[0] == 'sinklab':
            known.parse_known_args(call[1:])
        for word in call:
            name, _, path = word.rpartition('=')
            written = name in ('--filename', '--metadata-from-file=startup-script') and '://' not in path
            assert not written or (tmp_path / path).is_file(), call
    launched = re.findall(r'^python -m launch\.(\w+) (\w+)', sections()[section], re.MULTILINE)
    assert len(calls) >= len(launched)


def test_every_verb_of_every_launcher_is_on_the_page():
    shown = set(re.findall(r'^python -m launch\.(\w+) (\w+)', PAGE, re.MULTILINE))
    assert shown == {(name, verb) for name in WHERE for verb in COMMON | scheduler(name).verbs}


def test_exit_codes_stand_where_the_launchers_have_them():
    rows = dict(re.findall(r'^\| ([\d, ]+) \| [^|]+\| ([^|]+) \|', PAGE.partition('**What comes back.**')[2], re.M))
    codes = {int(code): words.strip() for row, words in rows.items() for code in row.split(',')}
    assert {code for code, words in codes.items() if 'over' not in words} == set(AGAIN)
    assert codes.keys() == {code for _, code in CAUSES.values()} | set(AGAIN)


def test_the_estimates_are_those_of_the_formula():
    layers, width, ffn = (BILLION[f'model.{name}'] for name in ('layers', 'width', 'ffn_width'))
    tokens, length, vocabulary = 512 * 2048, 2048, 50_000
    parameters = layers * (4 * width**2 + 3 * width * ffn) + vocabulary * width
    work = 6 * parameters * tokens + 6 * layers * width * length * tokens
    assert f'{work:.1e}' == '8.3e+15'
    assert '8.3e15 FLOPs' in PAGE
    for name, chips, peak in (('v5e-256', 256, 197e12), ('16 H100', 16, 989e12)):
        seconds = work / (0.4 * chips * peak)
        hours = seconds * BILLION['optimizer.steps'] / 3600
        row = f'| {name} | {seconds:.2f} | {hours:.1f} | {chips * hours:,.0f} | {2 * chips * hours:,.0f} P |'
        assert row in PAGE, row
    assert f'add {256 * 10 * 600 / 3600:.0f} chip-hours' in PAGE
