import atexit
import collections
import dataclasses
import math
import os
import re
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ.pop('COLUMNS', None)  # workers of pytest-xdist have 80, and tables would be folded

import jax
import numpy as np
import pytest
from emulators import KINDS, Bucket, Emulators
from flax import nnx
from ml_collections import ConfigDict

from sinklab import compilation_cache
from sinklab.attn import chunked
from sinklab.attn.pallas import tpu
from sinklab.config.spec import (
    NORMALIZERS_BY_SIMILARITY,
    AttentionConfig,
    Hardware,
    Spec,
)
from sinklab.config.validate import parse_config
from sinklab.configs import default
from sinklab.configs.sizes import SMOKE
from sinklab.parallel import device_mesh
from sinklab.storage import retry
from sinklab.storage.paths import short_timeout
from sinklab.train import state

# Tests compile for minutes and compute for seconds. Older emitters, where there are some (jax 0.10), take a third of
# those minutes; an extra option that is unknown is passed over.
# One LLVM module a program takes a third less than the default, which divides programs over threads.
FLAGS = (
    '--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters '
    '--xla_cpu_parallel_codegen_split_count=1'
)
# With SINKLAB_TESTS_SHIPPED=1 (`make test-shipped`) tests compile with the flags that users run with.
SHIPPED = os.environ.get('SINKLAB_TESTS_SHIPPED', '0') not in ('', '0')
if not SHIPPED:
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
compilation_cache.install_verified_cache()  # before the first test compiles, or programs of two kinds would be kept

# A layout in a test takes as many of the four devices as it names, and the others are not idle.
mesh_of = device_mesh.make_mesh
device_mesh.make_mesh = lambda hardware, given=None: mesh_of(hardware, given or jax.devices()[: wanted(hardware)])


def wanted(hardware: Hardware) -> int:
    return math.prod(getattr(hardware, axis) or 1 for axis in device_mesh.MESH_AXES)


OPERATIONS = [
    (similarity, normalizer)
    for similarity, normalizers in NORMALIZERS_BY_SIMILARITY.items()
    for normalizer in normalizers
]
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


def covering(cases: Iterable[Hashable], parts: Callable[[Hashable], Iterable[Hashable]]) -> set:
    """Return a few of the cases in which every part of any case occurs, chosen greedily.

    Args:
        cases: of which some are chosen; of cases that add as much, the first.
        parts: returns the parts of a case, for example (field, value) of each field.
    """
    having = {case: set(parts(case)) for case in cases}
    missing, chosen = set().union(*having.values()), set()
    while missing:
        best = max(having, key=lambda case: len(having[case] & missing))
        chosen.add(best)
        missing -= having[best]
    return chosen


def some(cases: Iterable, chosen: Iterable) -> list:
    """Return parameters for all cases; those that are not chosen are exhaustive."""
    chosen = list(chosen)
    return [pytest.param(case, marks=() if case in chosen else pytest.mark.exhaustive) for case in cases]


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
    return parse_config(tiny_config(**changes).to_dict())


def attention(similarity: str, normalizer: str, power: float = 2.0) -> AttentionConfig:
    """The plain operation of a pair, with what it cannot do without."""
    feature_map = 'elu1' if (similarity, normalizer) == ('identity', 'sum') else 'identity'
    power = power if normalizer == 'p_norm' else None
    return AttentionConfig(similarity, normalizer, feature_map, gain=1.0, power=power, offset=0.0)


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

    return jax.tree_util.tree_map_with_path(leaf, nnx.to_pure_dict(state.make_abstract_model(spec)[1]))


@pytest.fixture(autouse=True)
def token_cache(tmp_path_factory, monkeypatch):
    """One cache for all tests, none of the user's."""
    monkeypatch.setenv('SINKLAB_CACHE', str(tmp_path_factory.getbasetemp() / 'cache'))


@pytest.fixture
def small_blocks(monkeypatch):
    """Attention by blocks of 128, so that short sequences have several."""
    monkeypatch.setattr(tpu, 'BLOCK_SIZES', (128,))
    monkeypatch.setattr(chunked, 'CHUNK_SIZE', 48)


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


# Part of the reason of a skip -> how to enable the test.
FIXES = {
    'Chromium': 'apt-get install chromium',
    'libtpu': 'rm .venv/test && make .venv/test (it needs a network)',
    'torch': 'rm .venv/test && make .venv/test (it needs a network)',
    'CUDA': '.venv/bin/uv pip install --python .venv/bin/python "jax[cuda13]"',
    'cuda13': '.venv/bin/uv pip install --python .venv/bin/python "jax[cuda13]"',
    'interpret GPU kernels': '.venv/bin/uv pip install --python .venv/bin/python --upgrade jax',
    'has no model type': '.venv/bin/uv pip install --python .venv/bin/python --upgrade transformers',
    'root': 'run the tests as root',
    'systemd': 'apt-get install systemd',
    'git': 'apt-get install git',
    'no make': 'apt-get install make',
    'not UTF-8': 'run the tests with --basetemp on a Linux file system such as ext4',
}
# Files of tests that use buckets through sinklab.storage, in `make test` on one kind of bucket each. The tests of
# that interface itself (test_object_storage*.py, test_conditional_writes.py, test_storage.py) run on both.
ONE_KIND = {
    f'test_{name}.py'
    for name in (
        *('runs_in_buckets', 'checkpoints_in_buckets', 'sources_in_buckets', 'runs_on_remote_stores', 'mixtures'),
        *('remote_store', 'remote_store_faults', 'prepare_bucket', 'untrusted_files'),
    )
}
PACKAGES = '.venv/bin/uv pip install --python .venv/bin/python -e ".[test]"'
SKIPPED: list[list[str]] = []  # [file, reason] of files that are skipped when they are collected
ALL_SLOW = re.compile(r'^pytestmark = \[?pytest\.mark\.slow\b', re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out a file whose tests are all slow where no slow test is asked for; its imports take seconds."""
    if 'not slow' not in config.option.markexpr or collection_path.suffix != '.py':
        return None
    return True if ALL_SLOW.search(collection_path.read_text(encoding='utf-8')) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that use an emulator as slow, and run the tests of profiles first.

    A request to an emulator takes milliseconds, the first import of a client seconds. jax's profiler can crash a
    process that has loaded libtpu, which other tests do.
    """
    for item in items:
        if 'emulators' in item.fixturenames:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.path.name != 'test_profile.py')
    mark_one_kind_of_bucket([item for item in items if item.path.name in ONE_KIND and 'bucket' in item.fixturenames])


def mark_one_kind_of_bucket(items: list[pytest.Item]) -> None:
    """Mark each test as exhaustive on one of the two kinds of buckets, chosen by its name, or as it says itself."""
    functions = collections.defaultdict(list)
    for item in items:
        functions[item.path.name, item.originalname].append(item)
    for name, same in functions.items():
        if not any(item.get_closest_marker('exhaustive') for item in same):
            for item in same:
                if item.callspec.params.get('bucket') == list(KINDS)[zlib.crc32(name[1].encode()) % 2]:
                    item.add_marker(pytest.mark.exhaustive)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        SKIPPED.append([report.nodeid, reason_of(report)])


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, 'workeroutput'):
        session.config.workeroutput['skipped_files'] = SKIPPED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Note which files a worker of pytest-xdist has skipped; pytest-xdist does not report them."""
    SKIPPED.extend(getattr(node, 'workeroutput', {}).get('skipped_files', []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print one line for each reason of skipped tests: how many, why, and the command that enables them."""
    files = {name for name, _ in SKIPPED}
    reports = [report for report in terminalreporter.stats.get('skipped', []) if report.nodeid not in files]
    skips = [('tests', reason_of(report)) for report in reports]
    skips += [('files', reason) for _, reason in sorted({(name, reason) for name, reason in SKIPPED})]
    for line in skip_lines(skips):
        terminalreporter.write_line(line)


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the reason of a skipped test or file, without pytest's prefix."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return reason.removeprefix('Skipped: ')


def skip_lines(skips: list[tuple[str, str]]) -> list[str]:
    """Return a line for each kind of skip.

    Args:
        skips: pairs of what was skipped ('tests' or 'files') and the reason.
    """
    groups = collections.defaultdict(list)
    for what, reason in skips:
        fix = next((fix for part, fix in FIXES.items() if part in reason), PACKAGES)
        groups[what, 'the installed transformers is too old' if 'model type' in reason else reason, fix].append(
            reason
        )
    return [
        f'skipped {len(reasons)} {what if len(reasons) > 1 else what[:-1]}: {reason}; to run: {fix}'
        for (what, reason, fix), reasons in sorted(groups.items())
    ]


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
    monkeypatch.setattr(retry, 'FIRST_PAUSE_SECONDS', 0.05)
    retry.LAST_WARNING_TIMES.clear()
    with short_timeout(20.0):
        yield
