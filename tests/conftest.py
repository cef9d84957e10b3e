import atexit
import math
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ.pop('COLUMNS', None)  # pytest-xdist sets 80, at which tables wrap

import jax
import numpy as np
import pytest
from commands import write_config
from emulators import bucket, emulator  # noqa: F401 - fixtures
from jax.experimental.compilation_cache import compilation_cache as jax_compilation_cache

from sinklab.attn import chunked
from sinklab.attn.pallas import tpu
from sinklab.config.spec import Layout
from sinklab.parallel import device_mesh
from sinklab.storage import files

# Tests compile for minutes and compute for seconds. The older emitters of jax 0.10 take a third of the compile time,
# and one LLVM module per program a third less than the default. An unknown extra option is ignored.
FAST_COMPILE_FLAGS = (
    '--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters '
    '--xla_cpu_parallel_codegen_split_count=1'
)
# With SINKLAB_TESTS_SHIPPED=1 (`make test-shipped`) tests compile with the flags of users.
USES_SHIPPED_FLAGS = os.environ.get('SINKLAB_TESTS_SHIPPED', '0') not in ('', '0')
if not USES_SHIPPED_FLAGS:
    os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {FAST_COMPILE_FLAGS}'
jax.config.update('jax_num_cpu_devices', 4)
# Most tests compile the same few programs. All tests and the processes that they start share one compilation cache.
if 'SINKLAB_TESTS_COMPILED' not in os.environ:
    os.environ['SINKLAB_TESTS_COMPILED'] = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, os.environ['SINKLAB_TESTS_COMPILED'], ignore_errors=True)
CACHE_SETTINGS = dict(
    jax_compilation_cache_dir=os.environ['SINKLAB_TESTS_COMPILED'], jax_persistent_cache_min_compile_time_secs=0.1
)
for name, value in CACHE_SETTINGS.items():
    os.environ[name.upper()] = str(value)
    jax.config.update(name, value)

# In a test, a mesh takes only as many of the four devices as the layout needs.
make_unpatched_mesh = device_mesh.make_mesh
device_mesh.make_mesh = lambda layout, mesh_devices=None: make_unpatched_mesh(
    layout, mesh_devices or jax.devices()[: count_devices(layout)]
)


def count_devices(layout: Layout) -> int:
    return math.prod(getattr(layout, axis) or 1 for axis in device_mesh.MESH_AXES)


@pytest.fixture(autouse=True)
def token_cache(tmp_path_factory, monkeypatch):
    """Set one token cache for all tests, apart from the cache of the user."""
    monkeypatch.setenv('SINKLAB_CACHE', str(tmp_path_factory.getbasetemp() / 'cache'))


@pytest.fixture(autouse=True)
def compilation_cache_settings():
    """Restore the compilation cache of all tests after a command that ran in this process with its own."""
    yield
    settings = {**CACHE_SETTINGS, 'jax_enable_compilation_cache': True}
    if any(getattr(jax.config, name) != value for name, value in settings.items()):
        for name, value in settings.items():
            jax.config.update(name, value)
        jax_compilation_cache.reset_cache()  # it remembers whether it is enabled


@pytest.fixture
def small_blocks(monkeypatch):
    """Set small attention blocks, so that short sequences have several blocks."""
    monkeypatch.setattr(tpu, 'BLOCK_SIZES', (128,))
    monkeypatch.setattr(chunked, 'CHUNK_SIZE', 48)


@pytest.fixture(scope='session')
def corpus(tmp_path_factory) -> str:
    """Write 40 small documents of random words, and return their source."""
    folder = tmp_path_factory.mktemp('corpus')
    rng = np.random.default_rng(0)
    words = [''.join(rng.choice(list('abcdefghijklmnop'), rng.integers(2, 7))) for _ in range(80)]
    for number in range(40):
        text = ' '.join(rng.choice(words, 120, p=np.arange(1, 81) / 3240))
        (folder / f'{number:02}.txt').write_text(text, encoding='utf-8')
    return f'text:{folder}/*.txt'


@pytest.fixture
def config(tmp_path, corpus):
    return write_config(tmp_path / 'mine.py', data__source=corpus)


@pytest.fixture(scope='session')
def finished_run(corpus, tmp_path_factory):
    """Train a tiny run without interruption, and return its path and records."""
    from tiny_runs import make_spec, train_run

    path = tmp_path_factory.mktemp('runs') / 'whole'
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('SINKLAB_CACHE', str(path.parent / 'cache'))
        return path, train_run(make_spec(corpus), path)


@pytest.fixture
def recorders(tmp_path, monkeypatch):
    from command_recorders import make_recorders

    return make_recorders(tmp_path, monkeypatch)


@pytest.fixture
def run_commands(tmp_path, monkeypatch):
    from command_recorders import make_command_runner

    return make_command_runner(tmp_path, monkeypatch)


@pytest.fixture
def no_disk_delay(monkeypatch):
    """Do not wait for files that a network file system might show late."""
    monkeypatch.setattr(files, 'SHARED_DISK_SECONDS', 0.0)


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of 2 MB, and yield its path."""
    path = tmp_path / 'disk'
    path.mkdir()
    mount_result = subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=2m', 'tmpfs', path], capture_output=True)
    if mount_result.returncode:
        pytest.skip('only root may mount the small file system that this test fills')
    yield path
    subprocess.run(['umount', '-l', path], check=True)


ALL_SLOW_PATTERN = re.compile(r'^pytestmark = \[?pytest\.mark\.slow\b', re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore a file whose tests are all slow if slow tests are deselected; its imports take seconds."""
    if 'not slow' not in config.option.markexpr or collection_path.suffix != '.py':
        return None
    return True if ALL_SLOW_PATTERN.search(collection_path.read_text(encoding='utf-8')) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that use an emulator as slow, and run the tests of profiles first.

    The first import of a client of buckets takes seconds. The profiler of jax can crash a process that has loaded
    libtpu, and other tests load libtpu.
    """
    for item in items:
        if 'emulator' in item.fixturenames:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.path.name != 'test_profile.py')
