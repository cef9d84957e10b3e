"""Tests of the compilation cache: digests of compiled programs are verified before JAX loads them."""

import ast
import json
import os
import random
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from sinklab import compilation_cache as compilation_cache_module
from sinklab.cli import hardware_flags
from sinklab.storage.cache_dir import get_cache_dir

PROGRAM = bytes(range(256)) * 40
KEY = 'jit_step-0123'
INSTALLED = ('jax._src.compilation_cache', 'LRUCache')


@pytest.fixture
def opened(tmp_path):
    """Make a cache through JAX with the verified cache installed."""
    from jax._src import compilation_cache

    assert compilation_cache_module.install_verified_cache()
    made, _ = compilation_cache.get_file_cache(str(tmp_path))
    return made


def entry(folder):
    (result,) = Path(folder).glob('*')
    return result


def flip(content, bit):
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def test_installed_verified_cache_is_used_by_jax(tmp_path):
    """Test the private name in JAX; if a new JAX renames it, adapt sinklab/compilation_cache.py."""
    from jax._src import compilation_cache

    assert compilation_cache_module.install_verified_cache(), f'jax {jax.__version__} has no {".".join(INSTALLED)}'
    made, _ = compilation_cache.get_file_cache(str(tmp_path))
    assert getattr(made, 'is_verified', False), 'JAX does not use the replaced class for its cache'


def test_missing_private_jax_name_disables_compilation_cache(monkeypatch, capsys):
    from jax._src import compilation_cache

    monkeypatch.delattr(compilation_cache, 'LRUCache')
    enabled = jax.config.jax_enable_compilation_cache
    jax.config.update('jax_enable_compilation_cache', True)  # while it is off, no warning is printed
    try:
        assert not compilation_cache_module.install_verified_cache()
        assert not jax.config.jax_enable_compilation_cache
    finally:
        jax.config.update('jax_enable_compilation_cache', enabled)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_missing_public_reset_cache_disables_compilation_cache(monkeypatch):
    from jax._src import compilation_cache
    from jax.experimental.compilation_cache import compilation_cache as public

    base = compilation_cache.LRUCache.__mro__[1]
    monkeypatch.setattr(compilation_cache, 'LRUCache', base)
    monkeypatch.delattr(public, 'reset_cache')
    enabled = jax.config.jax_enable_compilation_cache
    try:
        assert not compilation_cache_module.install_verified_cache()
        assert not jax.config.jax_enable_compilation_cache
    finally:
        jax.config.update('jax_enable_compilation_cache', enabled)


@pytest.mark.slow
def test_jax_devices_is_called_only_in_device_mesh():
    """Test that no other module calls jax.devices: `get_devices` installs the verified cache first."""
    package = Path(compilation_cache_module.__file__).parent
    asking = set()
    for path in package.rglob('*.py'):
        for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            if isinstance(node, ast.Attribute) and node.attr == 'devices' and ast.unparse(node.value) == 'jax':
                asking.add(path.relative_to(package).as_posix())
    assert asking == {'parallel/device_mesh.py'}


def test_commands_importing_jax_install_verified_cache():
    for path in (Path(compilation_cache_module.__file__).parent / 'cli').glob('*.py'):
        for function in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            if isinstance(function, ast.FunctionDef) and 'import jax' in ast.unparse(function).split('\n    '):
                assert 'compilation_cache.install_verified_cache()' in ast.unparse(function), (
                    f'{path.name}: {function.name}'
                )


def test_cache_entry_is_returned_unchanged(opened, tmp_path):
    opened.put(KEY, PROGRAM)
    assert opened.get(KEY) == PROGRAM
    assert entry(tmp_path).read_bytes().endswith(PROGRAM)
    assert opened.get('jit_step-other') is None


@pytest.mark.parametrize('count', [20, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_cache_entry_with_flipped_bit_is_rejected(opened, tmp_path, capsys, count):
    draw = random.Random(count)
    for _ in range(count):
        opened.put(KEY, PROGRAM)
        path = entry(tmp_path)
        good = path.read_bytes()
        path.write_bytes(flip(good, draw.randrange(8 * len(good))))
        assert opened.get(KEY) is None
        assert not path.exists()
    assert len(capsys.readouterr().err.splitlines()) == count


def test_cache_entry_with_flipped_header_bit_is_rejected(opened, tmp_path):
    opened.put(KEY, PROGRAM)
    path = entry(tmp_path)
    good = path.read_bytes()
    for bit in range(8 * compilation_cache_module.HEADER_BYTES):
        path.write_bytes(flip(good, bit))
        assert opened.get(KEY) is None, bit


@pytest.mark.parametrize(
    'damage',
    [
        lambda content: b'',
        lambda content: content[: len(content) // 2],
        lambda content: content + b'x',
        lambda content: content[compilation_cache_module.HEADER_BYTES :],
        lambda content: content[: compilation_cache_module.HEADER_BYTES],
    ],
    ids=['empty', 'truncated', 'longer', 'without digest', 'digest alone'],
)
def test_cache_entry_is_removed_and_rewritten_if_damaged(opened, tmp_path, capsys, damage):
    opened.put(KEY, PROGRAM)
    path = entry(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    assert opened.get(KEY) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line
    opened.put(KEY, PROGRAM)
    assert opened.get(KEY) == PROGRAM


def test_cache_entry_under_name_of_another_entry_is_rejected(opened, tmp_path):
    opened.put(KEY, PROGRAM)
    path = entry(tmp_path)
    shutil.copy(path, path.with_name(path.name.replace(KEY, 'jit_probe-0123')))
    assert opened.get('jit_probe-0123') is None
    assert opened.get(KEY) == PROGRAM


def test_cache_entry_is_written_atomically(opened, tmp_path, monkeypatch):
    def stop(path, content):
        Path.open(path, 'wb').write(content[:100])
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(Path, 'write_bytes', stop)
    with pytest.raises(OSError, match='No space'):
        opened.put(KEY, PROGRAM)
    assert list(tmp_path.iterdir()) == []


def test_cache_size_limit_is_respected(tmp_path):
    pytest.importorskip('filelock')
    from jax._src import compilation_cache

    made = compilation_cache_module.make_verified_class(compilation_cache.LRUCache)(
        str(tmp_path), max_size=3 * len(PROGRAM)
    )
    for number in range(5):
        made.put(f'{KEY}{number}', PROGRAM)
    assert made.get(f'{KEY}0') is None
    assert made.get(f'{KEY}4') == PROGRAM
    path = (
        tmp_path / f'{compilation_cache_module.NAME_FORMAT.format(f"{KEY}4")}{compilation_cache_module.ENTRY_SUFFIX}'
    )
    path.write_bytes(flip(path.read_bytes(), 9000))
    assert made.get(f'{KEY}4') is None
    made.put(f'{KEY}5', PROGRAM)
    assert made.get(f'{KEY}5') == PROGRAM


def test_cache_entries_in_bucket_are_verified(bucket, capsys):
    from jax._src import compilation_cache

    made, _ = compilation_cache.get_file_cache(f'{bucket.url}/programs')
    made.put(KEY, PROGRAM)
    assert made.get(KEY) == PROGRAM
    path = made.path / f'{compilation_cache_module.NAME_FORMAT.format(KEY)}{compilation_cache_module.ENTRY_SUFFIX}'
    path.write_bytes(flip(path.read_bytes(), 5000))
    assert made.get(KEY) is None
    assert not path.exists()
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_cache_entries_of_earlier_versions_are_removed(opened, tmp_path, capsys):
    opened.put(KEY, PROGRAM)
    (tmp_path / 'jit_step-old-cache').write_bytes(PROGRAM)
    (tmp_path / 'jit_step-old-atime').write_bytes(PROGRAM)
    stray = tmp_path / 'jit_step-verified-cache.0123abcd.unfinished'
    stray.write_bytes(PROGRAM)
    os.utime(stray, (0, 0))
    compilation_cache_module.remove_unverified(tmp_path)
    assert opened.get(KEY) == PROGRAM
    assert len(list(tmp_path.iterdir())) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_cache_folders_are_accessible_only_to_owner(tmp_path, monkeypatch):
    before = os.umask(0)
    try:
        monkeypatch.setenv('SINKLAB_CACHE', str(tmp_path / 'cache'))
        assert stat.S_IMODE(get_cache_dir().stat().st_mode) == 0o700
        assert hardware_flags.ensure_writable(str(tmp_path / 'compiled'))
        assert stat.S_IMODE((tmp_path / 'compiled').stat().st_mode) == 0o700
    finally:
        os.umask(before)


@pytest.mark.exhaustive
def test_flipped_bit_in_compiled_program_does_not_change_result(tmp_path):
    """Clear the caches of JAX after each flip, so that it reads the persistent cache again in the same process."""
    from jax._src import compilation_cache

    options = dict(
        jax_compilation_cache_dir=str(tmp_path),
        jax_persistent_cache_min_compile_time_secs=0.0,
        jax_persistent_cache_min_entry_size_bytes=-1,
    )
    before = {name: getattr(jax.config, name) for name in options}
    step = jax.jit(jax.value_and_grad(lambda x: jnp.tanh(x @ x.T).sum() / 7))
    x = jnp.arange(64.0).reshape(8, 8) / 64
    draw = random.Random(0)
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        expected = jax.tree.map(bytes, jax.device_get(step(x)))
        for _ in range(200):
            (path,) = [path for path in tmp_path.iterdir() if path.name.startswith('jit__lambda')]
            good = path.read_bytes()
            path.write_bytes(flip(good, draw.randrange(8 * len(good))))
            jax.clear_caches()
            assert jax.tree.map(bytes, jax.device_get(step(x))) == expected
            assert path.exists(), 'not recompiled'
            assert path.read_bytes().startswith(compilation_cache_module.MAGIC)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


TRAIN = ('-m', 'sinklab', 'train', '--config=configs/quickstart.py:softmax', '--size=smoke')


def run_training(folder, name):
    """Train a small run in a subprocess that caches programs in `folder`; return (valid loss, standard error)."""
    environment = {name: value for name, value in os.environ.items() if 'JAX_COMPILATION' not in name}
    command = [sys.executable, *TRAIN, f'--workdir={folder / name}', f'--compiled={folder / "programs"}']
    environment['SINKLAB_CACHE'] = str(folder / 'cache')
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    last = [json.loads(line) for line in (folder / name / 'metrics.jsonl').read_text().splitlines()][-1]
    return last['valid/loss'], done.stderr


@pytest.mark.slow
@pytest.mark.exhaustive
def test_run_with_damaged_compiled_step_computes_same_loss(tmp_path):
    expected, _ = run_training(tmp_path, 'first')
    entries = sorted((tmp_path / 'programs').glob('jit_step-*'))
    assert entries
    for number, path in enumerate(entries):
        good = path.read_bytes()
        path.write_bytes(flip(good, random.Random(number).randrange(8 * len(good))))
    result, output = run_training(tmp_path, 'again')
    assert result == expected
    assert all(str(path) in output for path in entries)
    assert f'{len(entries)} compiled' in output
