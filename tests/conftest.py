import atexit
import dataclasses
import math
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ.pop('COLUMNS', None)  # pytest-xdist sets 80, at which tables wrap

import jax
import numpy as np
import pytest
from emulators import Bucket, Emulator
from etils.epath import backend as epath_backend
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache as jax_compilation_cache
from ml_collections import ConfigDict

from sinklab.attn import chunked
from sinklab.attn.pallas import tpu
from sinklab.config.spec import (
    NORMALIZERS_BY_SIMILARITY,
    AttentionConfig,
    Layout,
    Spec,
)
from sinklab.config.validate import parse_config
from sinklab.configs import default
from sinklab.configs.sizes import SMOKE
from sinklab.parallel import device_mesh
from sinklab.train import state

# Tests compile for minutes and compute for seconds. The older emitters, which jax 0.10 still has, take a third of the
# compile time. An unknown extra option is ignored.
# One LLVM module per program takes a third less time than the default, which splits programs over threads.
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


OPERATIONS = [
    (similarity, normalizer)
    for similarity, normalizers in NORMALIZERS_BY_SIMILARITY.items()
    for normalizer in normalizers
]
# A subset in which every similarity and every normalizer occurs.
COVERING_OPERATIONS = [
    *(('exp', 'sum'), ('exp', 'plus_one'), ('softpick', 'sum'), ('sigmoid', 'none'), ('elu1', 'p_norm')),
    *(('relu', 'count'), ('identity', 'clamped')),
]


def choose_covering_cases(cases: Iterable[Hashable], get_parts: Callable[[Hashable], Iterable[Hashable]]) -> set:
    """Return a few of the cases in which every part of any case occurs, chosen greedily."""
    parts_by_case = {case: set(get_parts(case)) for case in cases}
    missing, chosen = set().union(*parts_by_case.values()), set()
    while missing:
        best = max(parts_by_case, key=lambda case: len(parts_by_case[case] & missing))
        chosen.add(best)
        missing -= parts_by_case[best]
    return chosen


def make_case_params(cases: Iterable, chosen: Iterable) -> list:
    """Return parameters for all cases, and mark those that are not chosen as exhaustive."""
    chosen = list(chosen)
    return [pytest.param(case, marks=() if case in chosen else pytest.mark.exhaustive) for case in cases]


TINY_FIELDS = {
    **SMOKE,
    'optimizer.peak_learning_rate': 1e-2,
    'optimizer.warmup_steps': 2,
    'optimizer.steps': 8,
    'probe.keys': 3,
}


def make_tiny_config(**changes) -> ConfigDict:
    """Return the default config at a size that compiles in a second, with changes: __ stands for the dot."""
    config = default.get_config()
    config.update_from_flattened_dict(
        {**TINY_FIELDS, **{name.replace('__', '.'): value for name, value in changes.items()}}
    )
    return config


def make_tiny_spec(**changes) -> Spec:
    return parse_config(make_tiny_config(**changes).to_dict())


def make_attention_config(similarity: str, normalizer: str, power: float = 2.0) -> AttentionConfig:
    """Return the config of an operation, with the feature map and the power that it requires."""
    feature_map = 'elu1' if (similarity, normalizer) == ('identity', 'sum') else 'identity'
    power = power if normalizer == 'p_norm' else None
    return AttentionConfig(similarity, normalizer, feature_map, gain=1.0, power=power, offset=0.0)


def replace_operation(spec: Spec, similarity: str, normalizer: str) -> Spec:
    return dataclasses.replace(
        spec, model=dataclasses.replace(spec.model, attention=make_attention_config(similarity, normalizer))
    )


def draw_params(spec: Spec, deviation: float = 0.4) -> dict:
    """Draw parameters that give every part of a model an effect: scores far from 0, gains that are not 1."""
    rng = np.random.default_rng(0)

    def draw_leaf(path, abstract):
        gain = path[-1].key in ('gain_D', 'gain_HK')
        return np.float32(gain + (0.3 if gain else deviation) * rng.normal(size=abstract.shape))

    return jax.tree_util.tree_map_with_path(draw_leaf, nnx.to_pure_dict(state.make_abstract_model(spec)[1]))


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
    """Write a config file of a tiny model, as a user would, and return its path."""
    path = tmp_path / 'mine.py'
    path.write_text(
        f'import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n'
        'from conftest import make_tiny_config\n'
        f'def get_config(row=None):\n    return make_tiny_config(data__source={corpus!r})\n'
    )
    return str(path)


@pytest.fixture(scope='session')
def finished_run(corpus, tmp_path_factory):
    """Train a tiny run without interruption, and return its path and records."""
    from tiny_runs import make_spec, train_run

    path = tmp_path_factory.mktemp('runs') / 'whole'
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('SINKLAB_CACHE', str(path.parent / 'cache'))
        return path, train_run(make_spec(corpus), path)


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


@pytest.fixture(scope='session')
def emulator() -> Iterator[Emulator]:
    session_emulator = Emulator()
    yield session_emulator
    session_emulator.close()


@pytest.fixture
def bucket(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """Make a bucket, and set the environment variables by which all processes find it."""
    new_bucket = emulator.make_bucket()
    epath_backend.fsspec_backend._get_filesystem.cache_clear()  # it keeps the token of an earlier environment
    for name, value in new_bucket.variables.items():
        monkeypatch.setenv(name, value)
    return new_bucket
