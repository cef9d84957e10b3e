"""Tests of stores in buckets: equal data, few requests, limits of the disk cache, and errors."""

import gc
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from bucket_stores import (
    LENGTH,
    assert_exactly_equal,
    count_received_bytes,
    load_prefetched_data,
    make_large_store,
    make_reader,
    make_store_spec,
    read_batches,
    upload_store,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import TokenArray, make_sharded_store, make_store, make_texts, write_chat

from sinklab.data import remote_store
from sinklab.data.remote_store import compute_coverage
from sinklab.data.store import Store
from sinklab.data.windows import (
    MAX_WINDOWS_PER_READ,
    ShuffledBatches,
    TransformedWindows,
    Windows,
)
from sinklab.errors import UserError


@pytest.fixture(scope='module')
def store(tmp_path_factory):
    return make_large_store(tmp_path_factory.mktemp('large'))


@pytest.fixture(scope='module')
def mixed(tmp_path_factory):
    return make_sharded_store(tmp_path_factory.mktemp('mixed'))


@pytest.fixture(autouse=True)
def disk(tmp_path, monkeypatch):
    """Set an empty disk cache for each test; return its folder."""
    monkeypatch.setenv('SINKLAB_CACHE', str(tmp_path / 'cache'))
    monkeypatch.delenv('SINKLAB_CACHE_GB', raising=False)
    return tmp_path / 'cache' / 'remote'


def kept(disk: Path) -> int:
    """Count the bytes of files in the cache."""
    return sum(path.stat().st_size for path in disk.rglob('*') if path.is_file())


@pytest.mark.slow
@pytest.mark.parametrize('bucket', ['s3', pytest.param('gs', marks=pytest.mark.exhaustive)], indirect=True)
@pytest.mark.parametrize(('count', 'steps', 'batch'), [(1, 4, 8), (1, 60, 8), (4, 16, 8), (64, 40, 64)])
def test_remote_store_fetches_at_most_20_percent_more_than_needed(store, bucket, disk, count, steps, batch):
    """Test reads by ranges, and of whole files for an epoch or more; test the first and the last process."""
    url = upload_store(store, bucket)
    changes = dict(optimizer__batch_size=batch, optimizer__steps=steps, valid__windows=64)
    near, far = (make_store_spec(path, **changes) for path in (store.path, url))
    texts = Store(store.path).get_tokens('held_out', '')
    for number in sorted({0, count - 1}):
        shutil.rmtree(disk, ignore_errors=True)
        bucket.proxy.requests.clear()
        one, other = (make_reader(spec, number, count) for spec in (far, near))
        for found, wanted in zip(one.batches(far, steps), other.batches(near, steps), strict=True):
            assert_exactly_equal(found, wanted)
        assert_exactly_equal(one.held_out(), other.held_out())
        assert_exactly_equal(one.data.probe_PT, other.data.probe_PT)
        windows = batch // count * steps
        if count == 1:
            windows = min(windows, len(one.data.batches.windows[0]))
        needed = 2 * (LENGTH + 1) * (windows + 64 // count)
        needed += 2 * one.data.probe_PT.size + 16 * len(texts.read_documents()[0])
        assert count_received_bytes(bucket) <= 1.2 * needed
        assert count_received_bytes(bucket) >= needed if count > 1 else True


@pytest.mark.parametrize('whole', [False, True])
def test_remote_store_returns_same_rows_as_local_store(bucket, tmp_path, whole):
    talks = [[('user', text), ('assistant', text)] for text in make_texts(60)]
    local = make_store(tmp_path / 'chat', write_chat(tmp_path / 'a.jsonl', talks), shard_tokens=900)
    steps = 400 if whole else 3
    changes = dict(data__length=16, data__loss='assistant', data__random_first=2, data__random_last=3)
    near = make_store_spec(local.path, optimizer__steps=steps, **changes, valid__windows=7)
    far = make_store_spec(upload_store(local, bucket), optimizer__steps=steps, **changes, valid__windows=7)
    one, other = (load_prefetched_data(spec) for spec in (far, near))
    for step in (0, 1, 7):
        assert_exactly_equal(one.batches.read_rows(step, range(4)), other.batches.read_rows(step, range(4)))
    for rows in (slice(2, 5), slice(None), slice(7, 9)):
        assert_exactly_equal(one.valid_NT[rows], other.valid_NT[rows])
    assert_exactly_equal(one.probe_PT, other.probe_PT)
    assert one.fingerprint == other.fingerprint


@pytest.mark.parametrize('domain', ['prose', 'code'])
def test_remote_held_out_windows_of_domain_match_local_store_across_processes(mixed, bucket, domain):
    changes = dict(data__length=16, data__bos='documents', valid__windows=6, valid__domain=domain)
    near, far = (make_store_spec(path, **changes) for path in (mixed.path, upload_store(mixed, bucket)))
    wanted = load_prefetched_data(near).valid_NT
    assert_exactly_equal(np.concatenate([make_reader(far, number, 3).held_out() for number in range(3)]), wanted)


def test_remote_store_reads_across_shard_boundaries(mixed, bucket):
    far = Store(upload_store(mixed, bucket))
    assert far.digest == mixed.digest
    for name in mixed.domains:
        one, other = far.get_tokens('train', name), mixed.get_tokens('train', name)
        assert_exactly_equal(one.read_ids(0, len(one)), other.read_ids(0, len(other)))
        assert_exactly_equal(one.read_ids(100, 420), other.read_ids(100, 420))
        for found, wanted in zip(one.read_documents(), other.read_documents(), strict=True):
            assert_exactly_equal(found, wanted)
    assert_exactly_equal(far.load_probe_arrays()['random_PT'], mixed.load_probe_arrays()['random_PT'])
    assert far.load_tokenizer().to_str() == mixed.load_tokenizer().to_str()


def test_remote_store_opens_without_reading_data_files(mixed, bucket):
    url = upload_store(mixed, bucket)
    Store(url)
    files = {request.path.partition('?')[0] for request in bucket.proxy.requests}
    assert not any(path.endswith(('ids', 'documents', 'npz', 'tokenizer.json')) for path in files)
    assert bucket.proxy.count() <= 5  # includes detection of the bucket type, and whether meta.json exists


def test_remote_store_reads_consecutive_windows_in_one_request(store, bucket):
    spec = make_store_spec(upload_store(store, bucket), optimizer__steps=3)
    data = load_prefetched_data(spec)
    windows = data.batches.windows[0].windows
    bucket.proxy.requests.clear()
    data.batches.read_windows([(0, at) for at in (9, 3, 4, 5, 3)])
    assert windows.group_consecutive([9, 3, 4, 5, 3]) == [(3, 3), (9, 1)]
    assert bucket.proxy.count('.ids') == 2


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(0, 400)), st.integers(1, 40))
def test_windows_are_grouped_only_if_consecutive(numbers, size):
    windows = Windows([TokenArray(np.arange(size * count)) for count in (100, 7, 500)], size - 1, 'train')
    runs = windows.group_consecutive(numbers)
    assert [first + i for first, count in runs for i in range(count)] == sorted(numbers)
    assert all(count <= MAX_WINDOWS_PER_READ for _, count in runs)
    for first, count in runs:
        together = windows.read(first, count)
        np.testing.assert_array_equal(together, np.concatenate([windows[first + i] for i in range(count)]))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 60), st.integers(0, 99))
@pytest.mark.slow
def test_compute_coverage_matches_fraction_of_windows_read(each, processes, steps, seed):
    count = 16 * each * processes
    batches = ShuffledBatches(
        [TransformedWindows(Windows([TokenArray(np.arange(count))], 0, 't'), make_store_spec('').data, 9, False)],
        seed,
        each * processes,
    )
    seen = {place for step in range(steps) for place in batches.get_indices(step, range(each))}
    epochs = batches.count_epochs_per_set(steps)[0]
    assert abs(len(seen) / count - compute_coverage(1 / processes, epochs)) < 0.15


@pytest.mark.slow
def test_disk_cache_keeps_completely_read_files(store, bucket, disk):
    spec = make_store_spec(upload_store(store, bucket), optimizer__batch_size=8, optimizer__steps=200)
    before = read_batches(spec, 60)
    size = store.count_bytes(['ids'], 'train')
    assert size <= kept(disk) <= size + 100
    bucket.proxy.requests.clear()
    after = read_batches(spec, 60)
    assert bucket.proxy.count('train-000') == 0
    assert_exactly_equal(before.batches.read_rows(3, range(8)), after.batches.read_rows(3, range(8)))


def test_disk_cache_skips_store_above_size_limit(store, bucket, disk, monkeypatch):
    size = store.count_bytes(['ids'], 'train')
    monkeypatch.setenv('SINKLAB_CACHE_GB', str((size - 1) / 1e9))
    data = read_batches(make_store_spec(upload_store(store, bucket), optimizer__steps=500), 20)
    assert data.batches.read_rows(0, range(4)).shape == (4, LENGTH + 1)
    assert kept(disk) <= 100


@pytest.mark.slow
@pytest.mark.parametrize('bucket', ['gs', pytest.param('s3', marks=pytest.mark.exhaustive)], indirect=True)
def test_disk_cache_evicts_least_recently_used_store_but_not_store_in_use(store, bucket, disk, monkeypatch, tmp_path):
    other = make_large_store(tmp_path, count=61)
    size = max(found.count_bytes(['ids'], 'train') for found in (store, other))
    monkeypatch.setenv('SINKLAB_CACHE_GB', str(1.5 * size / 1e9))
    specs = [
        make_store_spec(upload_store(found, bucket, name), optimizer__batch_size=8, optimizer__steps=500)
        for found, name in ((store, 'one'), (other, 'other'))
    ]
    one = read_batches(specs[0], 60)
    assert (disk / store.digest).exists()
    two = read_batches(specs[1], 30)  # by ranges, while the other store is in use
    assert [path.name for path in disk.iterdir() if path.is_dir()] == [store.digest]
    assert kept(disk) <= 1.5 * size
    del one, two
    gc.collect()
    read_batches(specs[1], 60)
    assert [path.name for path in disk.iterdir() if path.is_dir()] == [other.digest]
    assert kept(disk) <= 1.5 * size


def test_disk_cache_removes_unfinished_files_of_killed_process(disk):
    disk.mkdir(parents=True)
    (disk / 'x').mkdir()
    (disk / 'x' / 'train.ids.123.unfinished').write_bytes(b'half')
    assert remote_store.reserve_disk_cache('x', 10)
    assert not list(disk.rglob('*.unfinished'))


def test_unwritable_disk_cache_does_not_affect_reads(store, bucket, tmp_path, monkeypatch):
    (tmp_path / 'file').write_text('in the way')
    monkeypatch.setenv('SINKLAB_CACHE', str(tmp_path / 'file'))
    near, far = (make_store_spec(path, optimizer__steps=500) for path in (store.path, upload_store(store, bucket)))
    assert_exactly_equal(*(load_prefetched_data(spec).batches.read_rows(1, range(4)) for spec in (near, far)))


def test_full_disk_does_not_affect_reads(store, bucket, small_disk, monkeypatch):
    monkeypatch.setenv('SINKLAB_CACHE', str(small_disk))
    monkeypatch.setenv('SINKLAB_CACHE_GB', '1')
    (small_disk / 'other').write_bytes(bytes(1_700_000))
    near, far = (make_store_spec(path, optimizer__steps=500) for path in (store.path, upload_store(store, bucket)))
    one, other = (load_prefetched_data(spec).batches for spec in (near, far))
    for step in range(60):
        assert_exactly_equal(one.read_rows(step, range(4)), other.read_rows(step, range(4)))


@pytest.mark.parametrize('given', ['much', 'nan', 'inf'])
def test_invalid_disk_cache_limit_is_rejected(store, bucket, given, monkeypatch):
    monkeypatch.setenv('SINKLAB_CACHE_GB', given)
    with pytest.raises(UserError, match=f'SINKLAB_CACHE_GB={given}'):
        load_prefetched_data(make_store_spec(upload_store(store, bucket), optimizer__steps=500))


@pytest.mark.slow
def test_remote_store_supports_concurrent_threads(mixed, bucket):
    url = upload_store(mixed, bucket)
    wanted = mixed.get_tokens('train', 'code').read_ids(0, 100)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: Store(url).get_tokens('train', 'code').read_ids(0, 100), range(16)))
    assert all(np.array_equal(ids, wanted) for ids in found)
