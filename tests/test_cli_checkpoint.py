"""Command `sinklab checkpoint`: output and exit codes."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from commands import get_error_line, run_command
from tiny_specs import make_tiny_spec

from sinklab.checkpoint.checkpointer import Checkpointer
from sinklab.run_dir import RunDir

VALUES = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp('runs') / 'a@b run'
    checkpointer = Checkpointer(RunDir(path), make_tiny_spec().checkpoint, dict(store='0123'))
    for step in (2, 4):
        params = dict(layer=dict(w=jnp.asarray(VALUES) * step, ids=jnp.arange(3)))
        checkpointer.save(step, dict(step=jnp.int32(step), params=params))
    checkpointer.close()
    return path


@pytest.fixture
def damaged_run(run, tmp_path):
    """Return a copy of the run with a corrupt checkpoint 4."""
    path = shutil.copytree(run, tmp_path / 'run')
    (path / 'checkpoints' / '4' / 'state' / 'manifest.ocdbt').write_bytes(b'')
    return path


def test_ls_prints_one_line_per_checkpoint(run, capsys):
    code, out, _ = run_command(capsys, 'checkpoint', 'ls', run)
    assert code == 0
    heading, *lines = [line.split() for line in out.splitlines()]
    assert heading == ['step', 'bytes', 'complete']
    assert [(line[0], line[-1]) for line in lines] == [('2', 'yes'), ('4', 'yes')]


def test_ls_reports_size_and_missing_digests(run, tmp_path, capsys):
    path = shutil.copytree(run, tmp_path / 'run')
    (path / 'checkpoints' / '2' / 'digests_0.json').unlink()
    _, out, _ = run_command(capsys, 'checkpoint', 'ls', path, '--json')
    rows = json.loads(out)
    assert [(row['step'], row['is_complete']) for row in rows] == [(2, False), (4, True)]
    assert rows[1]['bytes'] == sum(
        file.stat().st_size for file in (run / 'checkpoints' / '4').rglob('*') if file.is_file()
    )


def test_verify_names_corrupt_file_and_exits_with_1(damaged_run, run, capsys):
    assert run_command(capsys, 'checkpoint', 'verify', run)[0] == 0
    code, out, _ = run_command(capsys, 'checkpoint', 'verify', damaged_run)
    assert code == 1
    assert out.splitlines() == [
        f'{damaged_run}/checkpoints/2: sound',
        next(line for line in out.splitlines() if '/checkpoints/4: state/manifest.ocdbt ' in line),
    ]
    assert run_command(capsys, 'checkpoint', 'verify', f'{damaged_run}@2')[0] == 0


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['ls', '{run}@3'], 'has no checkpoint 3; it has: 2, 4'),
        (['verify', '{run}/checkpoints'], 'contains no run; give the folder of a run'),
        (['ls', '{run}', '--fast'], '--fast is unknown; see sinklab checkpoint ls --help'),
    ],
)
def test_invalid_arguments_are_rejected_with_one_line(run, capsys, arguments, message):
    assert message in get_error_line(capsys, 'checkpoint', *(argument.format(run=run) for argument in arguments))
