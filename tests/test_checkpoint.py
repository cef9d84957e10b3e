"""Checkpoints whose files are damaged: a line that says which, and what to do."""

import logging
import os
import shutil
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_config

from sinklab.cli.main import main
from sinklab.folder import Folder
from sinklab.parse import parse
from sinklab.record import Refusal
from sinklab.train.checkpoint import Checkpoints

pytestmark = pytest.mark.filterwarnings('ignore:coroutine .* was never awaited')
DATA = dict(store='0123', seed=0)
STATE = dict(step=np.int32(4), params={name: np.arange(6.0).reshape(2, 3) for name in 'abc'})


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    """A folder with the checkpoints 2 and 4."""
    folder = Folder(tmp_path_factory.mktemp('run'))
    checkpoints = Checkpoints(folder, 3, DATA)
    for step in (2, 4):
        checkpoints.save(step, jax.tree.map(jnp.asarray, STATE))
    checkpoints.close()
    return folder


def truncated(part):
    return lambda path: os.truncate(path, int(part * path.stat().st_size))


def flipped(part):
    def damage(path):
        content = bytearray(path.read_bytes())
        content[int(part * len(content))] ^= 0x55
        path.write_bytes(content)

    return damage


WAYS = {
    'cut to nothing': truncated(0),
    'cut in half': truncated(0.5),
    'deleted': lambda path: path.unlink(),
    'replaced': lambda path: path.write_bytes(b'nothing of the kind'),
    'zeroed': lambda path: path.write_bytes(bytes(path.stat().st_size)),
    **{f'flipped at {part}': flipped(part) for part in (0.1, 0.3, 0.5, 0.9)},
}


def restored(folder):
    """What restoring the newest checkpoint is refused with, if it is."""
    abstract = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, STATE))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract)
    try:
        checkpoints = Checkpoints(folder, 3, DATA)
        checkpoints.restore(checkpoints.latest(), abstract)
        checkpoints.close()
    except Refusal as refusal:
        return str(refusal)


def files(folder):
    newest = folder.checkpoints / '4'
    return sorted(path.relative_to(newest) for path in newest.rglob('*') if path.is_file())


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.slow
def test_whatever_is_damaged_is_said_in_one_line_and_nothing_else_is(saved, tmp_path, way, caplog, capfd):
    assert restored(saved) is None
    refused = set()
    for number, file in enumerate(files(saved)):
        folder = Folder(tmp_path / str(number))
        shutil.copytree(saved.path, folder.path)
        WAYS[way](folder.checkpoints / '4' / file)
        if line := restored(folder):
            refused.add(file.name)
            assert len(line.splitlines()) == 1
            assert len(line) < 300 + len(str(folder))
            assert line.startswith(f'{folder.checkpoints}/4 ')
    assert caplog.records == []
    assert capfd.readouterr().err == ''
    if 'flipped' not in way:
        assert {'_CHECKPOINT_METADATA', '_METADATA', 'manifest.ocdbt'} <= refused


def test_the_line_says_where_the_run_goes_on(saved, tmp_path):
    folder = Folder(tmp_path / 'run')
    shutil.copytree(saved.path, folder.path)
    (folder.checkpoints / '4' / '_CHECKPOINT_METADATA').write_text('{"metrics": 5}')
    assert 'delete it, and the same command goes on from step 2' in restored(folder)
    shutil.rmtree(folder.checkpoints / '2')
    assert 'delete it, and the same command begins anew' in restored(folder)


def test_the_program_exits_with_that_line(saved, tmp_path, corpus, capfd):
    folder = Folder(tmp_path / 'run')
    shutil.copytree(saved.path, folder.path)
    folder.claim(parse(tiny_config(data__source=corpus).to_dict()), {})
    (folder.checkpoints / '4' / 'state' / '_METADATA').write_text('')
    config = tmp_path / 'mine.py'
    config.write_text(
        f'import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n'
        'from conftest import tiny_config\n'
        f'def get_config(row=None):\n    return tiny_config(data__source={corpus!r})\n'
    )
    assert main(['train', f'--config={config}', f'--workdir={folder}']) == 1
    (line,) = (line for line in capfd.readouterr().err.splitlines() if not line.startswith('preparing'))
    assert line.startswith(f'sinklab train: {folder}/checkpoints/4 cannot be restored (')


def test_a_failure_leaves_warnings_loggers_and_hooks_as_they_were(saved, tmp_path):
    def around():
        loggers = [logging.getLogger(name) for name in (None, 'absl', 'asyncio')]
        return [list(logger.filters) for logger in loggers], sys.unraisablehook, list(warnings.filters)

    before, folder = around(), Folder(tmp_path / 'run')
    assert restored(saved) is None
    shutil.copytree(saved.path, folder.path)
    (folder.checkpoints / '4' / 'state' / '_METADATA').write_text('')
    assert 'cannot be restored' in restored(folder)
    assert around() == before
