import atexit
import dataclasses
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ.pop('COLUMNS', None)  # workers of pytest-xdist have 80, and tables would be folded

import jax
import numpy as np
import pytest
from emulators import KINDS, Bucket, Emulators
from flax import nnx
from ml_collections import ConfigDict

from configs import default
from configs.sizes import SMOKE
from sinklab import devices, program_cache
from sinklab.attend import chunked
from sinklab.attend.kernels import tpu
from sinklab.files import patience
from sinklab.files.place import hasty
from sinklab.parse import parse
from sinklab.spec import PAIRS, Attention, Hardware, Spec
from sinklab.train import state

# Tests compile for minutes and compute for seconds. Older emitters, where there are some (jax 0.10), take a third of
# those minutes; an extra option that is unknown is passed over.
# One LLVM module a program takes a third less than the default, which divides programs over threads.
FLAGS = (
    '--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters '
    '--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_enable_concurrency_optimized_scheduler=false'
)
os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {FLAGS}'
jax.config.update('jax_num_cpu_devices', 4)
# Most tests compile the same few programs again: let them, and the processes that they start, find each other's.
if 'SINKLAB_TESTS_COMPILED' not in os.environ:
    os.environ['SINKLAB_TESTS_COMPILED'] = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, os.environ['SINKLAB_TESTS_COMPILED'], ignore_errors=True)
for name, value in dict(
    jax_compilation_cache_dir=os.environ['SINKLAB_TESTS_COMPILED'], jax_persistent_cache_min_compile_time_secs=0.1
).items():
    os.environ[name.upper()] = str(value)
    jax.config.update(name, value)
program_cache.install()  # before the first test compiles, or programs of two kinds would be kept

# A layout in a test takes as many of the four devices as it names, and the others are not idle.
mesh_of = devices.mesh
devices.mesh = lambda hardware, given=None: mesh_of(hardware, given or jax.devices()[: wanted(hardware)])


def wanted(hardware: Hardware) -> int:
    return math.prod(getattr(hardware, axis) or 1 for axis in devices.AXES)


OPERATIONS = [(similarity, normalizer) for similarity, normalizers in PAIRS.items() for normalizer in normalizers]
# Some of them, in which every similarity occurs, and every normalizer.
COVERING = [
    *(('exp', 'sum'), ('exp', 'plus_one'), ('softpick', 'sum'), ('sigmoid', 'none'), ('elu1', 'p_norm')),
    *(('relu', 'count'), ('identity', 'clamped')),
]


def in_turn(pairs: Iterable[tuple]) -> list:
    """Of the pairs of a product in which two values alternate, one for each of the first; the rest is exhaustive."""
    return [
        pytest.param(*pair, marks=pytest.mark.exhaustive if number % 4 in (1, 2) else ())
        for number, pair in enumerate(pairs)
    ]


TINY = {
    **SMOKE,
    'optimizer.peak_learning_rate': 1e-2,
    'optimizer.warmup_steps': 2,
    'optimizer.steps': 8,
    'probe.keys': 3,
}


def tiny_config(**changes) -> ConfigDict:
    """The default at a size that compiles in a second; changes name fields with __ for the dot."""
    config = default.get_config()
    config.update_from_flattened_dict({**TINY, **{name.replace('__', '.'): value for name, value in changes.items()}})
    return config


def tiny(**changes) -> Spec:
    return parse(tiny_config(**changes).to_dict())


def attention(similarity: str, normalizer: str, power: float = 2.0) -> Attention:
    """The plain operation of a pair, with what it cannot do without."""
    feature_map = 'elu1' if (similarity, normalizer) == ('identity', 'sum') else 'identity'
    power = power if normalizer == 'p_norm' else None
    return Attention(similarity, normalizer, feature_map, gain=1.0, power=power, offset=0.0)


def operation(spec: Spec, similarity: str, normalizer: str) -> Spec:
    return dataclasses.replace(
        spec, model=dataclasses.replace(spec.model, attention=attention(similarity, normalizer))
    )


def drawn(spec: Spec, deviation: float = 0.4) -> dict:
    """Parameters that leave no part of a model without effect: scores far from 0, gains that are not 1."""
    rng = np.random.default_rng(0)

    def leaf(path, abstract):
        gain = path[-1].key == 'gain_D'
        return np.float32(gain + (0.3 if gain else deviation) * rng.normal(size=abstract.shape))

    return jax.tree_util.tree_map_with_path(leaf, nnx.to_pure_dict(state.architecture(spec)[1]))


@pytest.fixture(autouse=True)
def token_cache(tmp_path_factory, monkeypatch):
    """One cache for all tests, none of the user's."""
    monkeypatch.setenv('SINKLAB_CACHE', str(tmp_path_factory.getbasetemp() / 'cache'))


@pytest.fixture
def small_blocks(monkeypatch):
    """Attention by blocks of 128, so that short sequences have several."""
    monkeypatch.setattr(tpu, 'BLOCKS', (128,))
    monkeypatch.setattr(chunked, 'CHUNK', 48)


@pytest.fixture(scope='session')
def corpus(tmp_path_factory) -> str:
    """A source of 40 small documents of made-up words."""
    folder = tmp_path_factory.mktemp('corpus')
    rng = np.random.default_rng(0)
    words = [''.join(rng.choice(list('abcdefghijklmnop'), rng.integers(2, 7))) for _ in range(80)]
    for number in range(40):
        text = ' '.join(rng.choice(words, 120, p=np.arange(1, 81) / 3240))
        (folder / f'{number:02}.txt').write_text(text, encoding='utf-8')
    return f'text:{folder}/*.txt'


@pytest.fixture
def config(tmp_path, corpus):
    """A config file of a user's own, tiny."""
    path = tmp_path / 'mine.py'
    path.write_text(
        f'import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n'
        'from conftest import tiny_config\n'
        f'def get_config(row=None):\n    return tiny_config(data__source={corpus!r})\n'
    )
    return str(path)


@pytest.fixture(scope='session')
def whole(corpus, tmp_path_factory):
    """(path, records) of a run that nothing happened to."""
    from runs import spec, train

    path = tmp_path_factory.mktemp('runs') / 'whole'
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('SINKLAB_CACHE', str(path.parent / 'cache'))
        return path, train(spec(corpus), path)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MB."""
    path = tmp_path / 'disk'
    path.mkdir()
    mounted = subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=2m', 'tmpfs', path], capture_output=True)
    if mounted.returncode:
        pytest.skip('only root may mount the small file system that this test fills')
    yield path
    subprocess.run(['umount', '-l', path], check=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever asks an emulator is slow: a request takes milliseconds, the first import of a library seconds."""
    for item in items:
        if 'emulators' in item.fixturenames:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope='session')
def emulators() -> Iterator[Emulators]:
    running = Emulators()
    yield running
    running.close()


@pytest.fixture(params=KINDS)
def bucket(request: pytest.FixtureRequest, emulators: Emulators, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A new bucket of each kind of object storage, that this process and those that it starts can reach."""
    made = emulators.bucket(request.param)
    for name, value in made.variables.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Requests to object storage are asked again in seconds for minutes."""
    monkeypatch.setattr(patience, 'PAUSE', 0.05)
    patience.LAST.clear()
    with hasty(20.0):
        yield
