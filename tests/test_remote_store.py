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
def mixed_store(tmp_path_factory):
    return make_sharded_store(tmp_path_factory.mktemp('mixed'))


@pytest.fixture(autouse=True)
def disk_cache(tmp_path, monkeypatch):
    """Set an empty disk cache for each test, and return its folder."""
    monkeypatch.setenv('SINKLAB_CACHE', str(tmp_path / 'cache'))
    monkeypatch.delenv('SINKLAB_CACHE_GB', raising=False)
    return tmp_path / 'cache' / 'remote'


def count_cached_bytes(disk_cache: Path) -> int:
    """Count the bytes of files in the cache."""
    return sum(path.stat().st_size for path in disk_cache.rglob('*') if path.is_file())


@pytest.mark.slow
@pytest.mark.parametrize(('num_processes', 'steps', 'batch_size'), [(1, 4, 8), (1, 60, 8), (4, 16, 8), (64, 40, 64)])
def test_remote_store_fetches_at_most_20_percent_more_than_needed(
    store, bucket, disk_cache, num_processes, steps, batch_size
):
    """Test reads by ranges, and of whole files for an epoch or more; test the first and the last process."""
    url = upload_store(store, bucket)
    changes = dict(optimizer__batch_size=batch_size, optimizer__steps=steps, valid__windows=64)
    local_spec, remote_spec = (make_store_spec(path, **changes) for path in (store.path, url))
    held_out_tokens = Store(store.path).get_tokens('held_out', '')
    for process in sorted({0, num_processes - 1}):
        shutil.rmtree(disk_cache, ignore_errors=True)
        bucket.proxy.requests.clear()
        remote_reader, local_reader = (
            make_reader(spec, process, num_processes) for spec in (remote_spec, local_spec)
        )
        for actual, expected in zip(
            remote_reader.read_training_batches(remote_spec, steps),
            local_reader.read_training_batches(local_spec, steps),
            strict=True,
        ):
            assert_exactly_equal(actual, expected)
        assert_exactly_equal(remote_reader.read_held_out(), local_reader.read_held_out())
        assert_exactly_equal(remote_reader.data.probe_PT, local_reader.data.probe_PT)
        num_windows = batch_size // num_processes * steps
        if num_processes == 1:
            num_windows = min(num_windows, len(remote_reader.data.batches.windows[0]))
        needed_bytes = 2 * (LENGTH + 1) * (num_windows + 64 // num_processes)
        needed_bytes += 2 * remote_reader.data.probe_PT.size + 16 * len(held_out_tokens.read_documents()[0])
        assert needed_bytes <= count_received_bytes(bucket) <= 1.2 * needed_bytes


@pytest.mark.parametrize('reads_whole_files', [False, True])
def test_remote_store_returns_same_rows_as_local_store(bucket, tmp_path, reads_whole_files):
    conversations = [[('user', text), ('assistant', text)] for text in make_texts(60)]
    local_store = make_store(tmp_path / 'chat', write_chat(tmp_path / 'a.jsonl', conversations), shard_tokens=900)
    steps = 400 if reads_whole_files else 3
    changes = dict(data__length=16, data__loss='assistant', data__random_first=2, data__random_last=3)
    local_spec = make_store_spec(local_store.path, optimizer__steps=steps, **changes, valid__windows=7)
    remote_spec = make_store_spec(
        upload_store(local_store, bucket), optimizer__steps=steps, **changes, valid__windows=7
    )
    remote_data, local_data = (load_prefetched_data(spec) for spec in (remote_spec, local_spec))
    for step in (0, 1, 7):
        assert_exactly_equal(
            remote_data.batches.read_rows(step, range(4)), local_data.batches.read_rows(step, range(4))
        )
    for rows in (slice(2, 5), slice(None), slice(7, 9)):
        assert_exactly_equal(remote_data.valid_NT[rows], local_data.valid_NT[rows])
    assert_exactly_equal(remote_data.probe_PT, local_data.probe_PT)
    assert remote_data.fingerprint == local_data.fingerprint


@pytest.mark.parametrize('domain', ['prose', 'code'])
def test_remote_held_out_windows_of_domain_match_local_store_across_processes(mixed_store, bucket, domain):
    changes = dict(data__length=16, data__bos='documents', valid__windows=6, valid__domain=domain)
    local_spec, remote_spec = (
        make_store_spec(path, **changes) for path in (mixed_store.path, upload_store(mixed_store, bucket))
    )
    expected = load_prefetched_data(local_spec).valid_NT
    assert_exactly_equal(
        np.concatenate([make_reader(remote_spec, process, 3).read_held_out() for process in range(3)]), expected
    )


def test_remote_store_reads_across_shard_boundaries(mixed_store, bucket):
    remote = Store(upload_store(mixed_store, bucket))
    assert remote.digest == mixed_store.digest
    for name in mixed_store.domains:
        remote_tokens, local_tokens = remote.get_tokens('train', name), mixed_store.get_tokens('train', name)
        assert_exactly_equal(
            remote_tokens.read_ids(0, len(remote_tokens)), local_tokens.read_ids(0, len(local_tokens))
        )
        assert_exactly_equal(remote_tokens.read_ids(100, 420), local_tokens.read_ids(100, 420))
        for actual, expected in zip(remote_tokens.read_documents(), local_tokens.read_documents(), strict=True):
            assert_exactly_equal(actual, expected)
    assert_exactly_equal(remote.load_probe_arrays()['random_PT'], mixed_store.load_probe_arrays()['random_PT'])
    assert remote.load_tokenizer().to_str() == mixed_store.load_tokenizer().to_str()


def test_remote_store_opens_without_reading_data_files(mixed_store, bucket):
    url = upload_store(mixed_store, bucket)
    Store(url)
    requested_paths = {request.path.partition('?')[0] for request in bucket.proxy.requests}
    assert not any(path.endswith(('ids', 'documents', 'npz', 'tokenizer.json')) for path in requested_paths)
    assert bucket.proxy.count_requests() <= 5  # includes detection of the bucket type, and whether meta.json exists


def test_remote_store_reads_consecutive_windows_in_one_request(store, bucket):
    spec = make_store_spec(upload_store(store, bucket), optimizer__steps=3)
    data = load_prefetched_data(spec)
    windows = data.batches.windows[0].windows
    bucket.proxy.requests.clear()
    data.batches.read_windows([(0, index) for index in (9, 3, 4, 5, 3)])
    assert windows.group_consecutive([9, 3, 4, 5, 3]) == [(3, 3), (9, 1)]
    assert bucket.proxy.count_requests('.ids') == 2


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(0, 400)), st.integers(1, 40))
def test_windows_are_grouped_only_if_consecutive(indices, size):
    windows = Windows([TokenArray(np.arange(size * count)) for count in (100, 7, 500)], size - 1, 'train')
    groups = windows.group_consecutive(indices)
    assert [first + i for first, count in groups for i in range(count)] == sorted(indices)
    assert all(count <= MAX_WINDOWS_PER_READ for _, count in groups)
    for first, count in groups:
        block = windows.read(first, count)
        np.testing.assert_array_equal(block, np.concatenate([windows[first + i] for i in range(count)]))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 60), st.integers(0, 99))
@pytest.mark.slow
def test_compute_coverage_matches_fraction_of_windows_read(rows_per_process, num_processes, steps, seed):
    num_windows = 16 * rows_per_process * num_processes
    batches = ShuffledBatches(
        [
            TransformedWindows(
                Windows([TokenArray(np.arange(num_windows))], 0, 't'), make_store_spec('').data, 9, False
            )
        ],
        seed,
        rows_per_process * num_processes,
    )
    seen_windows = {index for step in range(steps) for index in batches.get_indices(step, range(rows_per_process))}
    epochs = batches.count_epochs_per_set(steps)[0]
    assert abs(len(seen_windows) / num_windows - compute_coverage(1 / num_processes, epochs)) < 0.15


@pytest.mark.slow
def test_disk_cache_keeps_completely_read_files(store, bucket, disk_cache):
    spec = make_store_spec(upload_store(store, bucket), optimizer__batch_size=8, optimizer__steps=200)
    first_data = read_batches(spec, 60)
    size = store.count_bytes(['ids'], 'train')
    assert size <= count_cached_bytes(disk_cache) <= size + 100
    bucket.proxy.requests.clear()
    second_data = read_batches(spec, 60)
    assert bucket.proxy.count_requests('train-000') == 0
    assert_exactly_equal(first_data.batches.read_rows(3, range(8)), second_data.batches.read_rows(3, range(8)))


def test_disk_cache_skips_store_above_size_limit(store, bucket, disk_cache, monkeypatch):
    size = store.count_bytes(['ids'], 'train')
    monkeypatch.setenv('SINKLAB_CACHE_GB', str((size - 1) / 1e9))
    data = read_batches(make_store_spec(upload_store(store, bucket), optimizer__steps=500), 20)
    assert data.batches.read_rows(0, range(4)).shape == (4, LENGTH + 1)
    assert count_cached_bytes(disk_cache) <= 100


@pytest.mark.slow
def test_disk_cache_evicts_least_recently_used_store_but_not_store_in_use(
    store, bucket, disk_cache, monkeypatch, tmp_path
):
    other_store = make_large_store(tmp_path, count=61)
    size = max(large_store.count_bytes(['ids'], 'train') for large_store in (store, other_store))
    monkeypatch.setenv('SINKLAB_CACHE_GB', str(1.5 * size / 1e9))
    specs = [
        make_store_spec(upload_store(large_store, bucket, name), optimizer__batch_size=8, optimizer__steps=500)
        for large_store, name in ((store, 'one'), (other_store, 'other'))
    ]
    first_data = read_batches(specs[0], 60)
    assert (disk_cache / store.digest).exists()
    second_data = read_batches(specs[1], 30)  # reads ranges, because the other store is in use
    assert [path.name for path in disk_cache.iterdir() if path.is_dir()] == [store.digest]
    assert count_cached_bytes(disk_cache) <= 1.5 * size
    del first_data, second_data
    gc.collect()
    read_batches(specs[1], 60)
    assert [path.name for path in disk_cache.iterdir() if path.is_dir()] == [other_store.digest]
    assert count_cached_bytes(disk_cache) <= 1.5 * size


def test_disk_cache_removes_unfinished_files_of_killed_process(disk_cache):
    disk_cache.mkdir(parents=True)
    (disk_cache / 'x').mkdir()
    (disk_cache / 'x' / 'train.ids.123.unfinished').write_bytes(b'half')
    assert remote_store.reserve_disk_cache('x', 10)
    assert not list(disk_cache.rglob('*.unfinished'))


def test_unwritable_disk_cache_does_not_affect_reads(store, bucket, tmp_path, monkeypatch):
    (tmp_path / 'file').write_text('in the way')
    monkeypatch.setenv('SINKLAB_CACHE', str(tmp_path / 'file'))
    local_spec, remote_spec = (
        make_store_spec(path, optimizer__steps=500) for path in (store.path, upload_store(store, bucket))
    )
    assert_exactly_equal(
        *(load_prefetched_data(spec).batches.read_rows(1, range(4)) for spec in (local_spec, remote_spec))
    )


def test_full_disk_does_not_affect_reads(store, bucket, small_disk, monkeypatch):
    monkeypatch.setenv('SINKLAB_CACHE', str(small_disk))
    monkeypatch.setenv('SINKLAB_CACHE_GB', '1')
    (small_disk / 'other').write_bytes(bytes(1_700_000))
    local_spec, remote_spec = (
        make_store_spec(path, optimizer__steps=500) for path in (store.path, upload_store(store, bucket))
    )
    local_batches, remote_batches = (load_prefetched_data(spec).batches for spec in (local_spec, remote_spec))
    for step in range(60):
        assert_exactly_equal(local_batches.read_rows(step, range(4)), remote_batches.read_rows(step, range(4)))


@pytest.mark.parametrize('limit', ['much', 'nan', 'inf'])
def test_invalid_disk_cache_limit_is_rejected(store, bucket, limit, monkeypatch):
    monkeypatch.setenv('SINKLAB_CACHE_GB', limit)
    with pytest.raises(UserError, match=f'SINKLAB_CACHE_GB={limit}'):
        load_prefetched_data(make_store_spec(upload_store(store, bucket), optimizer__steps=500))


@pytest.mark.slow
def test_remote_store_supports_concurrent_threads(mixed_store, bucket):
    url = upload_store(mixed_store, bucket)
    expected = mixed_store.get_tokens('train', 'code').read_ids(0, 100)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: Store(url).get_tokens('train', 'code').read_ids(0, 100), range(16)))
    assert all(np.array_equal(ids, expected) for ids in results)
