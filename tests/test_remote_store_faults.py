"""Tests of token stores in buckets that change, are corrupt or do not respond."""

import itertools
import json
import threading
from pathlib import Path

import pytest
from bucket_stores import (
    assert_exactly_equal,
    count_received_bytes,
    load_prefetched_data,
    make_large_store,
    make_store_spec,
    read_batches,
    upload_store,
)
from emulators import Answer

from sinklab.data.store import (
    Store,
    decode_samples,
    find_problems,
    summarize_store,
)
from sinklab.errors import UserError
from sinklab.exit_status import ExitStatus
from sinklab.storage.paths import get_file_system, limit_retry_seconds, parse_path
from sinklab.train.run_outcome import classify_error


@pytest.fixture(scope='module')
def store(tmp_path_factory):
    return make_large_store(tmp_path_factory.mktemp('large'))


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    """Give each test its own cache."""
    monkeypatch.setenv('SINKLAB_CACHE', str(tmp_path / 'cache'))


@pytest.mark.parametrize('steps', [4, 500])
@pytest.mark.parametrize('change', ['rewritten', 'gone'])
def test_store_that_changes_during_run_is_rejected_with_one_line(store, bucket, steps, change):
    url = upload_store(store, bucket)
    data = load_prefetched_data(make_store_spec(url, optimizer__steps=steps))
    for shard in store.shards:
        file_url = f'{url}/{shard.name}.ids'
        get_file_system(parse_path(url)).rm_file(file_url)
        if change == 'rewritten':
            get_file_system(parse_path(url)).pipe_file(
                file_url, bytes((Path(store.path) / f'{shard.name}.ids').stat().st_size)
            )
    with pytest.raises(UserError, match=r'train-\d+-\d+\.ids') as error:
        [data.batches.read_rows(step, range(4)) for step in range(3)]
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    ('name', 'damage'),
    [
        *itertools.product(['train-000-00000.ids', 'held_out-000-00000.documents'], ['missing', 'shorter']),
        ('probe.npz', 'missing'),
    ],
)
def test_missing_or_truncated_file_is_rejected_at_open(store, bucket, name, damage):
    url = upload_store(store, bucket)
    content = (Path(store.path) / name).read_bytes()
    get_file_system(parse_path(url)).rm_file(f'{url}/{name}')
    if damage == 'shorter':
        get_file_system(parse_path(url)).pipe_file(f'{url}/{name}', content[:-1])
    with pytest.raises(UserError, match=name) as error:
        Store(url)
    assert '\n' not in str(error.value)


def test_truncated_probe_file_is_rejected_when_read(store, bucket):
    url = upload_store(store, bucket)
    content = (Path(store.path) / 'probe.npz').read_bytes()
    get_file_system(parse_path(url)).pipe_file(f'{url}/probe.npz', content[:-1])
    remote_store = Store(url)
    with pytest.raises(UserError, match=r'probe\.npz') as error:
        remote_store.load_probe_arrays()
    assert '\n' not in str(error.value)


def test_corrupt_file_is_detected_when_read_completely(store, bucket):
    url = upload_store(store, bucket)
    for shard in store.shards:
        file = Path(store.path) / f'{shard.name}.ids'
        get_file_system(parse_path(url)).pipe_file(f'{url}/{file.name}', file.read_bytes()[:-1] + b'\x07')
    assert any('sha256' in problem for problem in find_problems(Store(url), 300))
    with pytest.raises(UserError, match='sha256'):
        read_batches(make_store_spec(url, optimizer__batch_size=8, optimizer__steps=500), 60)


def test_verification_reads_each_file_once(store, bucket):
    url = upload_store(store, bucket)
    remote_store = Store(url)
    assert list(find_problems(remote_store, 300)) == []
    assert count_received_bytes(bucket) <= 1.05 * sum(path.stat().st_size for path in Path(store.path).iterdir())
    local_store = Store(store.path)
    assert decode_samples(remote_store, 2) == decode_samples(local_store, 2)
    assert json.dumps(summarize_store(remote_store, 16, 4, 1)) == json.dumps(summarize_store(local_store, 16, 4, 1))


@pytest.mark.slow
@pytest.mark.parametrize('steps', [4, 500])
@pytest.mark.parametrize('fault', ['busy', 'cut'])
def test_range_reads_retry_after_busy_or_broken_responses(store, bucket, steps, fault):
    local_spec, remote_spec = (
        make_store_spec(path, optimizer__steps=steps) for path in (store.path, upload_store(store, bucket))
    )
    remaining, lock = [6], threading.Lock()

    def answer_request(method, path):
        if method != 'GET' or '.ids' not in path:
            return None
        with lock:
            remaining[0] -= 1
            return (
                None if remaining[0] < 0 else Answer(status=503) if fault == 'busy' else Answer(max_sent_bytes=1000)
            )

    local_batches, remote_batches = (load_prefetched_data(spec).batches for spec in (local_spec, remote_spec))
    with bucket.proxy.apply_rule(answer_request):
        for step in range(4):
            assert_exactly_equal(local_batches.read_rows(step, range(4)), remote_batches.read_rows(step, range(4)))
    assert remaining[0] < 0


@pytest.mark.slow
def test_unresponsive_storage_ends_reads_with_timeout_error(store, bucket):
    data = load_prefetched_data(make_store_spec(upload_store(store, bucket), optimizer__steps=4))
    with (
        bucket.proxy.apply_rule(lambda method, path: Answer(status=503) if '.ids' in path else None),
        limit_retry_seconds(1.0),
        pytest.raises(OSError, match=bucket.url) as error,
    ):
        data.batches.read_rows(0, range(4))
    assert classify_error(error.value) == ExitStatus('lost', error.value.strerror)


def test_folder_without_store_in_bucket_is_rejected(bucket):
    with pytest.raises(UserError, match=f'{bucket.url}/nothing'):
        Store(f'{bucket.url}/nothing')
