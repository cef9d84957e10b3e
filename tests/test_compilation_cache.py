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
PRIVATE_NAME = ('jax._src.compilation_cache', 'LRUCache')


@pytest.fixture
def cache(tmp_path):
    """Make a cache through JAX with the verified cache installed."""
    from jax._src import compilation_cache

    assert compilation_cache_module.install_verified_cache()
    file_cache, _ = compilation_cache.get_file_cache(str(tmp_path))
    return file_cache


def find_entry(folder):
    (path,) = Path(folder).glob('*')
    return path


def flip_bit(content, bit):
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def test_installed_verified_cache_is_used_by_jax(tmp_path):
    """Test the private name in JAX; if a new JAX renames it, adapt sinklab/compilation_cache.py."""
    from jax._src import compilation_cache

    assert compilation_cache_module.install_verified_cache(), f'jax {jax.__version__} has no {".".join(PRIVATE_NAME)}'
    file_cache, _ = compilation_cache.get_file_cache(str(tmp_path))
    assert getattr(file_cache, 'is_verified', False), 'JAX does not use the replaced class for its cache'


def test_missing_private_jax_name_disables_compilation_cache(monkeypatch, capsys):
    from jax._src import compilation_cache

    monkeypatch.delattr(compilation_cache, 'LRUCache')
    was_enabled = jax.config.jax_enable_compilation_cache
    jax.config.update('jax_enable_compilation_cache', True)  # while it is off, no warning is printed
    try:
        assert not compilation_cache_module.install_verified_cache()
        assert not jax.config.jax_enable_compilation_cache
    finally:
        jax.config.update('jax_enable_compilation_cache', was_enabled)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_missing_public_reset_cache_disables_compilation_cache(monkeypatch):
    from jax._src import compilation_cache
    from jax.experimental.compilation_cache import compilation_cache as public_module

    base_class = compilation_cache.LRUCache.__mro__[1]
    monkeypatch.setattr(compilation_cache, 'LRUCache', base_class)
    monkeypatch.delattr(public_module, 'reset_cache')
    was_enabled = jax.config.jax_enable_compilation_cache
    try:
        assert not compilation_cache_module.install_verified_cache()
        assert not jax.config.jax_enable_compilation_cache
    finally:
        jax.config.update('jax_enable_compilation_cache', was_enabled)


@pytest.mark.slow
def test_jax_devices_is_called_only_in_device_mesh():
    """Test that no other module calls jax.devices: `get_devices` installs the verified cache first."""
    package = Path(compilation_cache_module.__file__).parent
    calling_modules = set()
    for path in package.rglob('*.py'):
        for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            if isinstance(node, ast.Attribute) and node.attr == 'devices' and ast.unparse(node.value) == 'jax':
                calling_modules.add(path.relative_to(package).as_posix())
    assert calling_modules == {'parallel/device_mesh.py'}


def test_commands_importing_jax_install_verified_cache():
    for path in (Path(compilation_cache_module.__file__).parent / 'cli').glob('*.py'):
        for function in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            if isinstance(function, ast.FunctionDef) and 'import jax' in ast.unparse(function).split('\n    '):
                assert 'compilation_cache.install_verified_cache()' in ast.unparse(function), (
                    f'{path.name}: {function.name}'
                )


def test_cache_entry_is_returned_unchanged(cache, tmp_path):
    cache.put(KEY, PROGRAM)
    assert cache.get(KEY) == PROGRAM
    assert find_entry(tmp_path).read_bytes().endswith(PROGRAM)
    assert cache.get('jit_step-other') is None


@pytest.mark.parametrize('count', [20, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_cache_entry_with_flipped_bit_is_rejected(cache, tmp_path, capsys, count):
    rng = random.Random(count)
    for _ in range(count):
        cache.put(KEY, PROGRAM)
        path = find_entry(tmp_path)
        content = path.read_bytes()
        path.write_bytes(flip_bit(content, rng.randrange(8 * len(content))))
        assert cache.get(KEY) is None
        assert not path.exists()
    assert len(capsys.readouterr().err.splitlines()) == count


def test_cache_entry_with_flipped_header_bit_is_rejected(cache, tmp_path):
    cache.put(KEY, PROGRAM)
    path = find_entry(tmp_path)
    content = path.read_bytes()
    for bit in range(8 * compilation_cache_module.HEADER_BYTES):
        path.write_bytes(flip_bit(content, bit))
        assert cache.get(KEY) is None, bit


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
def test_cache_entry_is_removed_and_rewritten_if_damaged(cache, tmp_path, capsys, damage):
    cache.put(KEY, PROGRAM)
    path = find_entry(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    assert cache.get(KEY) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line
    cache.put(KEY, PROGRAM)
    assert cache.get(KEY) == PROGRAM


def test_cache_entry_under_name_of_another_entry_is_rejected(cache, tmp_path):
    cache.put(KEY, PROGRAM)
    path = find_entry(tmp_path)
    shutil.copy(path, path.with_name(path.name.replace(KEY, 'jit_probe-0123')))
    assert cache.get('jit_probe-0123') is None
    assert cache.get(KEY) == PROGRAM


def test_cache_entry_is_written_atomically(cache, tmp_path, monkeypatch):
    def write_partially(path, content):
        Path.open(path, 'wb').write(content[:100])
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(Path, 'write_bytes', write_partially)
    with pytest.raises(OSError, match='No space'):
        cache.put(KEY, PROGRAM)
    assert list(tmp_path.iterdir()) == []


def test_cache_size_limit_is_respected(tmp_path):
    pytest.importorskip('filelock')
    from jax._src import compilation_cache

    file_cache = compilation_cache_module.make_verified_class(compilation_cache.LRUCache)(
        str(tmp_path), max_size=3 * len(PROGRAM)
    )
    for number in range(5):
        file_cache.put(f'{KEY}{number}', PROGRAM)
    assert file_cache.get(f'{KEY}0') is None
    assert file_cache.get(f'{KEY}4') == PROGRAM
    path = (
        tmp_path / f'{compilation_cache_module.NAME_FORMAT.format(f"{KEY}4")}{compilation_cache_module.ENTRY_SUFFIX}'
    )
    path.write_bytes(flip_bit(path.read_bytes(), 9000))
    assert file_cache.get(f'{KEY}4') is None
    file_cache.put(f'{KEY}5', PROGRAM)
    assert file_cache.get(f'{KEY}5') == PROGRAM


def test_cache_entries_in_bucket_are_verified(bucket, capsys):
    from jax._src import compilation_cache

    file_cache, _ = compilation_cache.get_file_cache(f'{bucket.url}/programs')
    file_cache.put(KEY, PROGRAM)
    assert file_cache.get(KEY) == PROGRAM
    path = (
        file_cache.path / f'{compilation_cache_module.NAME_FORMAT.format(KEY)}{compilation_cache_module.ENTRY_SUFFIX}'
    )
    path.write_bytes(flip_bit(path.read_bytes(), 5000))
    assert file_cache.get(KEY) is None
    assert not path.exists()
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_cache_entries_of_earlier_versions_are_removed(cache, tmp_path, capsys):
    cache.put(KEY, PROGRAM)
    (tmp_path / 'jit_step-old-cache').write_bytes(PROGRAM)
    (tmp_path / 'jit_step-old-atime').write_bytes(PROGRAM)
    unfinished_path = tmp_path / 'jit_step-verified-cache.0123abcd.unfinished'
    unfinished_path.write_bytes(PROGRAM)
    os.utime(unfinished_path, (0, 0))
    compilation_cache_module.remove_unverified(tmp_path)
    assert cache.get(KEY) == PROGRAM
    assert len(list(tmp_path.iterdir())) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_cache_folders_are_accessible_only_to_owner(tmp_path, monkeypatch):
    old_umask = os.umask(0)
    try:
        monkeypatch.setenv('SINKLAB_CACHE', str(tmp_path / 'cache'))
        assert stat.S_IMODE(get_cache_dir().stat().st_mode) == 0o700
        assert hardware_flags.ensure_writable(str(tmp_path / 'compiled'))
        assert stat.S_IMODE((tmp_path / 'compiled').stat().st_mode) == 0o700
    finally:
        os.umask(old_umask)


@pytest.mark.exhaustive
def test_flipped_bit_in_compiled_program_does_not_change_result(tmp_path):
    """Clear the caches of JAX after each flip, so that it reads the persistent cache again in the same process."""
    from jax._src import compilation_cache

    options = dict(
        jax_compilation_cache_dir=str(tmp_path),
        jax_persistent_cache_min_compile_time_secs=0.0,
        jax_persistent_cache_min_entry_size_bytes=-1,
    )
    old_values = {name: getattr(jax.config, name) for name in options}
    step = jax.jit(jax.value_and_grad(lambda x: jnp.tanh(x @ x.T).sum() / 7))
    x = jnp.arange(64.0).reshape(8, 8) / 64
    rng = random.Random(0)
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        expected = jax.tree.map(bytes, jax.device_get(step(x)))
        for _ in range(200):
            (path,) = [path for path in tmp_path.iterdir() if path.name.startswith('jit__lambda')]
            content = path.read_bytes()
            path.write_bytes(flip_bit(content, rng.randrange(8 * len(content))))
            jax.clear_caches()
            assert jax.tree.map(bytes, jax.device_get(step(x))) == expected
            assert path.exists(), 'not recompiled'
            assert path.read_bytes().startswith(compilation_cache_module.MAGIC)
    finally:
        for name, value in old_values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


TRAIN_ARGUMENTS = ('-m', 'sinklab', 'train', '--config=configs/quickstart.py:softmax', '--size=smoke')


def run_training(folder, name):
    """Train a small run in a subprocess that caches programs in `folder`; return (valid loss, standard error)."""
    environment = {name: value for name, value in os.environ.items() if 'JAX_COMPILATION' not in name}
    command = [sys.executable, *TRAIN_ARGUMENTS, f'--workdir={folder / name}', f'--compiled={folder / "programs"}']
    environment['SINKLAB_CACHE'] = str(folder / 'cache')
    result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert result.returncode == 0, result.stderr
    last_record = [json.loads(line) for line in (folder / name / 'metrics.jsonl').read_text().splitlines()][-1]
    return last_record['valid/loss'], result.stderr


@pytest.mark.slow
@pytest.mark.exhaustive
def test_run_with_damaged_compiled_step_computes_same_loss(tmp_path):
    expected, _ = run_training(tmp_path, 'first')
    entries = sorted((tmp_path / 'programs').glob('jit_step-*'))
    assert entries
    for number, path in enumerate(entries):
        content = path.read_bytes()
        path.write_bytes(flip_bit(content, random.Random(number).randrange(8 * len(content))))
    loss, output = run_training(tmp_path, 'again')
    assert loss == expected
    assert all(str(path) in output for path in entries)
    assert f'{len(entries)} compiled' in output
