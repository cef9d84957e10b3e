"""Fake programs that record their calls, on a PATH without real ones, and launchers that call them."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from launch import command_line
from launch.code_bundle import ROOT
from sinklab import __version__

HARMLESS_PROGRAMS = (
    *('bash', 'cat', 'chmod', 'cp', 'cut', 'dirname'),
    *('ln', 'mkdir', 'rm', 'sha256sum', 'sleep', 'touch'),
)
# Only the fake uv has effects: it creates an empty wheel or an empty environment.
FAKE_PROGRAM = """#!{python} -IS
import json, os, sys
folder, name = os.path.split(os.path.abspath(sys.argv[0]))
with open(os.path.join(folder, 'calls.jsonl'), 'a') as file:
    file.write(json.dumps([name, *sys.argv[1:]]) + '\\n')
answers = json.load(open(os.path.join(folder, 'answers.json')))
command_line = ' '.join([name, *sys.argv[1:]])
results = next((results for part, results in answers.items() if part in command_line), [['', '', 0]])
if name == 'uv' and 'venv' in sys.argv and not results[0][2]:
    os.makedirs(sys.argv[-1], exist_ok=True)
if name == 'uv' and 'build' in sys.argv and not results[0][2]:
    open(os.path.join(sys.argv[sys.argv.index('--out-dir') + 1], 'sinklab-{version}-py3-none-any.whl'), 'w').close()
stdout, stderr, exit_code = results.pop(0) if len(results) > 1 else results[0]
json.dump(answers, open(os.path.join(folder, 'answers.json'), 'w'))
sys.stdout.write(stdout), sys.stderr.write(stderr)
sys.exit(exit_code)
"""


class CommandRecorders:
    """Folder of fake programs with their recorded calls and their configured answers."""

    def __init__(self, folder: Path, *names: str):
        self.folder, self.calls_path, self.answers_path = folder, folder / 'calls.jsonl', folder / 'answers.json'
        folder.mkdir()
        self.answers_path.write_text('{}')
        for name in names:
            (folder / name).write_text(FAKE_PROGRAM.format(python=sys.executable, version=__version__))
            (folder / name).chmod(0o755)
        for name in HARMLESS_PROGRAMS:
            (folder / name).symlink_to(shutil.which(name))

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, 'PATH': str(self.folder)}

    def add_answers(self, command_part: str, *results: tuple[str, str, int]) -> None:
        """Set the answers to calls whose command line contains `command_part`.

        Args:
            command_part: text to look for in the command line.
            *results: (stdout, stderr, exit code) of successive calls; the last one repeats.
        """
        stored_answers = json.loads(self.answers_path.read_text())
        self.answers_path.write_text(json.dumps({command_part: results, **stored_answers}))

    def pop_calls(self) -> list[list[str]]:
        """Return the recorded calls, and clear the record."""
        lines = self.calls_path.read_text().splitlines() if self.calls_path.exists() else []
        self.calls_path.write_text('')
        return [json.loads(line) for line in lines]


LAUNCHER_NAMES = ('queued_resources', 'jobset', 'slurm')
PROGRAM_NAMES = ('gcloud', 'kubectl', 'sbatch', 'squeue', 'scancel', 'sinklab', 'uv')
TRAIN_COMMAND = ['--', 'train', '--config=configs/scale.py:softmax_1b', '--remat=auto']
SITE_FLAGS = {
    'queued_resources': ['--accelerator=v5e-256'],
    'jobset': ['--accelerator=v5e-256', '--image=r.pkg.dev/p/i:1'],
    'slurm': ['--nodes=32', '--time=1-0'],
}
WORKDIRS = {
    'queued_resources': '--workdir=gs://b/runs/pair',
    'jobset': '--workdir=gs://b/runs/pair',
    'slurm': '--workdir=/shared/runs/pair',
}
SUBMIT_COMMANDS = {
    name: ['submit', 'pair', WORKDIRS[name], *site_flags, *TRAIN_COMMAND] for name, site_flags in SITE_FLAGS.items()
}
HOSTILE_PATH = 'gs://b/o\'brien\'s "runs"/$HOME `x` \\ *;|&'


def make_recorders(folder, monkeypatch):
    """Make recorders of all programs that launchers call, and enter a working folder with a config file."""
    recorders = CommandRecorders(folder / 'bin', *PROGRAM_NAMES)
    monkeypatch.setenv('PATH', str(recorders.folder))
    monkeypatch.chdir(folder)
    (folder / 'configs').mkdir()
    (folder / 'configs' / 'scale.py').write_text('# a config\n')
    return recorders


# Output of the recording programs, with which the commands of a page succeed.
PROGRAM_OUTPUTS = {
    'queued-resources describe': 'ACTIVE\n',
    'systemctl show': 'ActiveState=inactive\nExecMainStatus=0\nExecMainStartTimestampMonotonic=17\n',
    'projects describe': '123\n',
}


def make_command_runner(folder, monkeypatch):
    """Return run(commands), which runs those of a page in a folder with a config file and returns their calls."""
    recorders = CommandRecorders(folder / 'bin', *PROGRAM_NAMES, 'tail')
    for part, text in PROGRAM_OUTPUTS.items():
        recorders.add_answers(part, (text, '', 0))
    (recorders.folder / 'python').symlink_to(sys.executable)
    (folder / 'configs').mkdir()
    (folder / 'configs' / 'scale.py').write_text((ROOT / 'configs' / 'scale.py').read_text())
    monkeypatch.setenv('PYTHONPATH', os.pathsep.join([str(ROOT), *sys.path]))

    def run(commands):
        (folder / 'shared' / 'runs' / 'pair').mkdir(parents=True)  # folder of a started run
        script = commands.replace('/shared', f'{folder}/shared')
        result = subprocess.run(
            ['bash', '-eu', '-o', 'pipefail', '-c', script],
            cwd=folder, env=recorders.environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        return recorders.pop_calls()

    return run


def get_scheduler(name):
    return importlib.import_module(f'launch.{name}').SCHEDULER


def run_launcher(name, argv):
    return command_line.main(get_scheduler(name), argv)


def get_launcher_output(capsys, name, argv):
    code, captured = run_launcher(name, argv), capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def get_launcher_error(capsys, name, argv):
    """Run a launcher that must fail, and return its one line of error without the name of the program."""
    code, captured = run_launcher(name, argv), capsys.readouterr()
    assert (code, captured.out) == (1, '')
    (line,) = captured.err.splitlines()
    assert line.startswith(f'launch.{name}: ')
    return line.partition(': ')[2]
