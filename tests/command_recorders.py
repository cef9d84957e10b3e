"""Programs that note how they are called, on a PATH where nothing else answers, and launchers that call them."""

import importlib
import json
import os
import shutil
import sys
from pathlib import Path

from launch import command_line

HARMLESS = ('bash', 'cp', 'mkdir', 'cat', 'dirname', 'sha256sum', 'cut', 'touch', 'ln', 'rm', 'sleep', 'chmod')
# uv alone does something: an empty wheel, and an empty environment.
PROGRAM = """#!{python} -IS
import json, os, sys
here, name = os.path.split(os.path.abspath(sys.argv[0]))
with open(os.path.join(here, 'calls.jsonl'), 'a') as file:
    file.write(json.dumps([name, *sys.argv[1:]]) + '\\n')
answers = json.load(open(os.path.join(here, 'answers.json')))
words = ' '.join([name, *sys.argv[1:]])
turns = next((turns for part, turns in answers.items() if part in words), [['', '', 0]])
if name == 'uv' and 'venv' in sys.argv and not turns[0][2]:
    os.makedirs(sys.argv[-1], exist_ok=True)
if name == 'uv' and 'build' in sys.argv and not turns[0][2]:
    open(os.path.join(sys.argv[sys.argv.index('--out-dir') + 1], 'sinklab-0.0-py3-none-any.whl'), 'w').close()
said, wrong, code = turns.pop(0) if len(turns) > 1 else turns[0]
json.dump(answers, open(os.path.join(here, 'answers.json'), 'w'))
sys.stdout.write(said), sys.stderr.write(wrong)
sys.exit(code)
"""


class Recorders:
    """A folder of such programs, what they have heard, and what they are to say."""

    def __init__(self, folder: Path, *names: str):
        self.folder, self.calls, self.answers = folder, folder / 'calls.jsonl', folder / 'answers.json'
        folder.mkdir()
        self.answers.write_text('{}')
        for name in names:
            (folder / name).write_text(PROGRAM.format(python=sys.executable))
            (folder / name).chmod(0o755)
        for name in HARMLESS:
            (folder / name).symlink_to(shutil.which(name))

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, 'PATH': str(self.folder)}

    def answer(self, part: str, *turns: tuple[str, str, int]) -> None:
        """(stdout, stderr, exit code) for calls whose words hold a part, one after another; the last stays."""
        known = json.loads(self.answers.read_text())
        self.answers.write_text(json.dumps({part: turns, **known}))

    def heard(self) -> list[list[str]]:
        """The calls so far, which are forgotten."""
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        self.calls.write_text('')
        return [json.loads(line) for line in lines]


NAMES = ('queued_resources', 'jobset', 'slurm')
TOOLS = ('gcloud', 'kubectl', 'sbatch', 'squeue', 'scancel', 'sinklab', 'uv', 'aws')
RUN = ['--', 'train', '--config=configs/scale.py:softmax_1b', '--remat=auto']
WHERE = {
    'queued_resources': ['--accelerator=v5e-256', '--project=p', '--zone=z'],
    'jobset': ['--accelerator=v5e-256', '--project=p', '--image=r.pkg.dev/p/i:1'],
    'slurm': ['--nodes=32', '--time=1-0', '--code=/shared/code'],
}
SUBMIT = {name: ['submit', 'pair', '--workdir=gs://b/runs/pair', *where, *RUN] for name, where in WHERE.items()}
HARD = 'gs://b/o\'brien\'s "runs"/$HOME `x` \\ *;|&'


def recorded(folder, monkeypatch):
    """Recorders of all that launchers call, in a working folder that holds a config file."""
    made = Recorders(folder / 'bin', *TOOLS)
    monkeypatch.setenv('PATH', str(made.folder))
    monkeypatch.chdir(folder)
    (folder / 'configs').mkdir()
    (folder / 'configs' / 'scale.py').write_text('# a config\n')
    return made


def scheduler(name):
    return importlib.import_module(f'launch.{name}').SCHEDULER


def launched(name, argv):
    return command_line.main(scheduler(name), argv)


def printed(capsys, name, argv):
    code, out = launched(name, argv), capsys.readouterr()
    assert code == 0, out.err
    return out.out


def refused(capsys, name, argv):
    """The one line of a refusal."""
    code, out = launched(name, argv), capsys.readouterr()
    assert (code, out.out) == (1, '')
    (line,) = out.err.splitlines()
    assert line.startswith(f'launch.{name}: ')
    return line.partition(': ')[2]
