"""Compiled programs of the cache are verified before jax loads them."""

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
    """A cache as jax makes it, after sinklab's change to jax."""
    from jax._src import compilation_cache

    assert compilation_cache_module.install_verified_cache()
    made, _ = compilation_cache.get_file_cache(str(tmp_path))
    return made


def entry(folder):
    (found,) = Path(folder).glob('*')
    return found


def flip(content, bit):
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def test_jax_still_makes_its_cache_from_the_private_name_that_sinklab_replaces(tmp_path):
    """Fails where a new jax has moved it: then sinklab/compilation_cache.py must follow."""
    from jax._src import compilation_cache

    assert compilation_cache_module.install_verified_cache(), f'jax {jax.__version__} has no {".".join(INSTALLED)}'
    made, _ = compilation_cache.get_file_cache(str(tmp_path))
    assert getattr(made, 'is_verified', False), 'jax does not make its cache from the name that is replaced any more'


def test_without_that_private_name_nothing_is_read_from_the_cache(monkeypatch, capsys):
    from jax._src import compilation_cache

    monkeypatch.delattr(compilation_cache, 'LRUCache')
    enabled = jax.config.jax_enable_compilation_cache
    jax.config.update('jax_enable_compilation_cache', True)  # where it is off, the warning was printed before
    try:
        assert not compilation_cache_module.install_verified_cache()
        assert not jax.config.jax_enable_compilation_cache
    finally:
        jax.config.update('jax_enable_compilation_cache', enabled)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_without_the_public_reset_nothing_is_read_from_the_cache(monkeypatch):
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
def test_devices_are_asked_for_where_the_cache_is_made_to_verify_alone():
    """`get_devices` installs the verifying cache; a verb that asks jax itself could compile without it."""
    package = Path(compilation_cache_module.__file__).parent
    asking = set()
    for path in package.rglob('*.py'):
        for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            if isinstance(node, ast.Attribute) and node.attr == 'devices' and ast.unparse(node.value) == 'jax':
                asking.add(path.relative_to(package).as_posix())
    assert asking == {'parallel/device_mesh.py'}


def test_a_verb_that_imports_jax_itself_makes_the_cache_verify():
    for path in (Path(compilation_cache_module.__file__).parent / 'cli').glob('*.py'):
        for function in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            if isinstance(function, ast.FunctionDef) and 'import jax' in ast.unparse(function).split('\n    '):
                assert 'compilation_cache.install_verified_cache()' in ast.unparse(function), (
                    f'{path.name}: {function.name}'
                )


def test_an_entry_is_read_as_it_was_put(opened, tmp_path):
    opened.put(KEY, PROGRAM)
    assert opened.get(KEY) == PROGRAM
    assert entry(tmp_path).read_bytes().endswith(PROGRAM)
    assert opened.get('jit_step-other') is None


@pytest.mark.parametrize('count', [20, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_no_flipped_bit_gets_through(opened, tmp_path, capsys, count):
    draw = random.Random(count)
    for _ in range(count):
        opened.put(KEY, PROGRAM)
        path = entry(tmp_path)
        good = path.read_bytes()
        path.write_bytes(flip(good, draw.randrange(8 * len(good))))
        assert opened.get(KEY) is None
        assert not path.exists()
    assert len(capsys.readouterr().err.splitlines()) == count


def test_no_flipped_bit_of_the_header_gets_through(opened, tmp_path):
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
def test_a_damaged_entry_is_removed_and_written_again(opened, tmp_path, capsys, damage):
    opened.put(KEY, PROGRAM)
    path = entry(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    assert opened.get(KEY) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line
    opened.put(KEY, PROGRAM)
    assert opened.get(KEY) == PROGRAM


def test_an_entry_under_the_name_of_another_is_not_read(opened, tmp_path):
    opened.put(KEY, PROGRAM)
    path = entry(tmp_path)
    shutil.copy(path, path.with_name(path.name.replace(KEY, 'jit_probe-0123')))
    assert opened.get('jit_probe-0123') is None
    assert opened.get(KEY) == PROGRAM


def test_an_entry_takes_its_name_when_it_is_whole(opened, tmp_path, monkeypatch):
    def stop(path, content):
        Path.open(path, 'wb').write(content[:100])
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(Path, 'write_bytes', stop)
    with pytest.raises(OSError, match='No space'):
        opened.put(KEY, PROGRAM)
    assert list(tmp_path.iterdir()) == []


def test_the_bound_on_the_size_of_the_cache_still_holds(tmp_path):
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


def test_entries_in_a_bucket_are_verified(bucket, capsys):
    from jax._src import compilation_cache

    made, _ = compilation_cache.get_file_cache(f'{bucket.url}/programs')
    made.put(KEY, PROGRAM)
    assert made.get(KEY) == PROGRAM
    path = made.path / f'{compilation_cache_module.NAME_FORMAT.format(KEY)}{compilation_cache_module.ENTRY_SUFFIX}'
    path.write_bytes(flip(path.read_bytes(), 5000))
    assert made.get(KEY) is None
    assert not path.exists()
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_entries_of_earlier_versions_are_removed_from_the_users_cache(opened, tmp_path, capsys):
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


def test_folders_of_the_cache_are_for_the_user_alone(tmp_path, monkeypatch):
    before = os.umask(0)
    try:
        monkeypatch.setenv('SINKLAB_CACHE', str(tmp_path / 'cache'))
        assert stat.S_IMODE(get_cache_dir().stat().st_mode) == 0o700
        assert hardware_flags.ensure_writable(str(tmp_path / 'compiled'))
        assert stat.S_IMODE((tmp_path / 'compiled').stat().st_mode) == 0o700
    finally:
        os.umask(before)


@pytest.mark.exhaustive
def test_no_flipped_bit_of_a_real_program_changes_what_is_computed(tmp_path):
    """In one process: after each flip jax forgets what it has compiled, and looks into the cache again."""
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
        wanted = jax.tree.map(bytes, jax.device_get(step(x)))
        for _ in range(200):
            (path,) = [path for path in tmp_path.iterdir() if path.name.startswith('jit__lambda')]
            good = path.read_bytes()
            path.write_bytes(flip(good, draw.randrange(8 * len(good))))
            jax.clear_caches()
            assert jax.tree.map(bytes, jax.device_get(step(x))) == wanted
            assert path.exists(), 'it was not compiled anew'
            assert path.read_bytes().startswith(compilation_cache_module.MAGIC)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


TRAIN = ('-m', 'sinklab', 'train', '--config=configs/quickstart.py:softmax', '--size=smoke')


def trained(folder, name):
    """(valid loss, standard error) of a small run by a process of its own, whose programs are kept in `folder`."""
    environment = {name: value for name, value in os.environ.items() if 'JAX_COMPILATION' not in name}
    command = [sys.executable, *TRAIN, f'--workdir={folder / name}', f'--compiled={folder / "programs"}']
    environment['SINKLAB_CACHE'] = str(folder / 'cache')
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    last = [json.loads(line) for line in (folder / name / 'metrics.jsonl').read_text().splitlines()][-1]
    return last['valid/loss'], done.stderr


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_run_whose_compiled_step_is_damaged_computes_the_same(tmp_path):
    wanted, _ = trained(tmp_path, 'first')
    entries = sorted((tmp_path / 'programs').glob('jit_step-*'))
    assert entries
    for number, path in enumerate(entries):
        good = path.read_bytes()
        path.write_bytes(flip(good, random.Random(number).randrange(8 * len(good))))
    found, said = trained(tmp_path, 'again')
    assert found == wanted
    assert all(str(path) in said for path in entries)
    assert f'{len(entries)} compiled' in said
