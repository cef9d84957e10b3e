"""sinklab checkpoint: what a run has saved, as its reader sees it."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny
from orbax.checkpoint import v1 as ocp

from sinklab.checkpoint.checkpointer import Checkpointer
from sinklab.cli.main import main
from sinklab.run_dir import RunDir

VALUES = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp('runs') / 'a@b run'
    checkpoints = Checkpointer(RunDir(path), tiny().checkpoint, dict(store='0123'))
    for step in (2, 4):
        params = dict(layer=dict(w=jnp.asarray(VALUES) * step, ids=jnp.arange(3)))
        checkpoints.save(step, dict(step=jnp.int32(step), params=params))
    checkpoints.close()
    return path


@pytest.fixture
def damaged(run, tmp_path):
    """Of which 4 is not sound."""
    path = shutil.copytree(run, tmp_path / 'run')
    (path / 'checkpoints' / '4' / 'state' / 'manifest.ocdbt').write_bytes(b'')
    return path


def said(capsys, *arguments):
    """(exit code, what stands on stdout, what on stderr)."""
    code = main(['checkpoint', *map(str, arguments)])
    return code, *capsys.readouterr()


def contents(path):
    return {file: file.read_bytes() for file in path.rglob('*') if file.is_file()}


def test_ls_has_a_line_for_each_checkpoint(run, capsys):
    code, out, _ = said(capsys, 'ls', run)
    assert code == 0
    assert [line.split()[:2] for line in out.splitlines()] == [['step', '2'], ['step', '4']]


def test_ls_says_when_how_long_and_how_large(run, capsys):
    _, out, _ = said(capsys, 'ls', run, '--json')
    row = json.loads(out)[1]
    assert row['step'] == 4
    assert row['bytes'] == sum(len(content) for content in contents(run / 'checkpoints' / '4').values())
    assert row['seconds'] > 0
    assert row['saved'].startswith('20')
    assert row['digests'] == 'complete'


def test_ls_says_what_has_no_digests(run, tmp_path, capsys):
    path = shutil.copytree(run, tmp_path / 'run')
    shutil.rmtree(path / 'digests' / '2')
    _, out, _ = said(capsys, 'ls', path, '--json')
    assert 'it has no digests' in json.loads(out)[0]['digests']


def test_verify_names_what_is_damaged_and_exits_with_1(damaged, run, capsys):
    assert said(capsys, 'verify', run)[0] == 0
    code, out, _ = said(capsys, 'verify', damaged)
    assert code == 1
    assert out.splitlines() == [
        f'{damaged}/checkpoints/2: sound',
        next(line for line in out.splitlines() if '/checkpoints/4: state/manifest.ocdbt has 0 bytes' in line),
    ]
    assert said(capsys, 'verify', f'{damaged}@2')[0] == 0


def test_verify_as_json(damaged, capsys):
    _, out, _ = said(capsys, 'verify', damaged, '--json')
    assert [(row['step'], bool(row['fault'])) for row in json.loads(out)] == [(2, False), (4, True)]


def test_parameters_alone_are_read_as_the_help_says(run, tmp_path, capsys):
    code, out, _ = said(capsys, 'restore-params', f'{run}@2', f'--out={tmp_path}/params', '--dtype=bfloat16')
    assert code == 0
    assert out == f'{tmp_path}/params: 15 parameters of {run}/checkpoints/2\n'
    found = ocp.load(tmp_path / 'params')
    np.testing.assert_array_equal(found['layer']['w'], (VALUES * 2).astype(jnp.bfloat16))
    np.testing.assert_array_equal(found['layer']['ids'], np.arange(3))


def test_parameters_of_what_is_damaged_are_refused_and_those_of_a_sound_step_are_not(damaged, tmp_path, capsys):
    code, _, err = said(capsys, 'restore-params', damaged, f'--out={tmp_path}/params')
    assert code == 1
    assert 'checkpoints/4 is corrupt: state/manifest.ocdbt has 0 bytes' in err
    assert not (tmp_path / 'params').exists()
    assert said(capsys, 'restore-params', f'{damaged}@2', f'--out={tmp_path}/params')[0] == 0


def test_what_is_no_run_does_not_take_the_name_of_a_step(run, tmp_path, capsys):
    path = shutil.copytree(run, tmp_path / 'run')
    assert said(capsys, 'restore-params', f'{path}@2', f'--out={path}@2')[0] == 0
    assert said(capsys, 'verify', f'{path}@2') == (0, f'{path}/checkpoints/2: sound\n', '')


def test_a_run_is_only_read(damaged, tmp_path, capsys):
    before = contents(damaged)
    for arguments in (['ls', damaged], ['verify', damaged], ['restore-params', damaged, f'--out={tmp_path}/params']):
        said(capsys, *arguments)
    assert contents(damaged) == before


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (['ls', '{run}@3'], 'has no checkpoint 3; it has: 2, 4'),
        (['verify', '{run}/checkpoints'], 'has no checkpoints; give the folder of a run'),
        (['ls', '{run}', '--fast'], '--fast is unknown; see sinklab checkpoint ls --help'),
        (['restore-params', '{run}', '--out={run}'], 'already exists; give a new folder'),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(run, capsys, arguments, words):
    code, _, err = said(capsys, *(argument.format(run=run) for argument in arguments))
    assert code == 1
    assert words in err
    assert len(err.splitlines()) == 1
