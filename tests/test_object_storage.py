"""Tests of object storage under faults: retries, bounded timeouts and complete files."""

import contextvars
import errno
import os
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import make_case_params
from emulators import Answer
from etils.epath import backend
from storage_failures import (
    CONTENT,
    STORAGE_OPERATIONS,
    answer_always,
    answer_during,
    answer_once,
    read_file,
    read_ranges,
    sends_content,
    write_file,
)

from sinklab.errors import UserError
from sinklab.storage import (
    atomic_write,
    directories,
    retry,
    untrusted_files,
)
from sinklab.storage.paths import get_file_system, limit_retry_seconds, parse_path
from sinklab.storage.untrusted_files import DamagedFileError

MINUTE = 60.0


pytestmark = pytest.mark.usefixtures('short_retries')


@pytest.fixture
def short_timeout_bucket(monkeypatch, bucket):
    """Set the request timeout to one second, and yield the bucket."""
    monkeypatch.setattr('sinklab.storage.gcs.REQUEST_TIMEOUT_SECONDS', 1.0)
    clear_file_systems()
    yield bucket
    clear_file_systems()


def clear_file_systems():
    """Clear the cached file systems, which keep the previous timeout."""
    from sinklab.storage.gcs import Storage

    backend.fsspec_backend._get_filesystem.cache_clear()
    Storage.clear_instance_cache()


READ_FUNCTIONS = [read_file, read_ranges]


@pytest.mark.parametrize('status', make_case_params([408, 429, 500, 502, 503, 504], [408, 429, 503]))
def test_storage_retries_busy_status_until_success(bucket, status):
    path = parse_path(f'{bucket.url}/x')
    with bucket.proxy.apply_rule(answer_during(1.0, Answer(status=status))):
        write_file(path)
    with bucket.proxy.apply_rule(answer_during(1.0, Answer(status=status))):
        assert read_file(path) == CONTENT


@pytest.mark.parametrize('operation', STORAGE_OPERATIONS)
def test_storage_raises_timeout_when_busy_beyond_retry_limit(bucket, operation, capsys):
    path = parse_path(f'{bucket.url}/folder/x')
    write_file(path)
    start_time = time.monotonic()
    with (
        limit_retry_seconds(1.0),
        bucket.proxy.apply_rule(answer_always(Answer(status=503))),
        pytest.raises((OSError, UserError)) as raised,
    ):
        STORAGE_OPERATIONS[operation](path)
    assert time.monotonic() - start_time < 4.0
    error = raised.value.__cause__ if isinstance(raised.value, UserError) else raised.value
    assert error.errno == errno.ETIMEDOUT
    assert bucket.url in str(raised.value)
    assert 'Traceback' not in capsys.readouterr().err


def test_storage_warns_once_across_threads(bucket, monkeypatch, capsys):
    monkeypatch.setattr(retry, 'WARN_AFTER_SECONDS', 0.3)
    path = parse_path(f'{bucket.url}/x')
    write_file(path)
    with bucket.proxy.apply_rule(answer_during(2.0, Answer(status=503))):
        threads = [threading.Thread(target=read_file, args=(path,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(bucket.url)


@pytest.mark.parametrize('read', READ_FUNCTIONS)
def test_read_resumes_after_lost_connections(bucket, read):
    path = parse_path(f'{bucket.url}/x')
    write_file(path)
    remaining_sizes = [0, 1, 50_000, 99_999]
    with bucket.proxy.apply_rule(
        lambda method, name: (
            Answer(max_sent_bytes=remaining_sizes.pop())
            if remaining_sizes and method == 'GET' and '/x' in name
            else None
        )
    ):
        assert read(path) == CONTENT
    assert not remaining_sizes


@pytest.mark.parametrize('read', READ_FUNCTIONS)
def test_read_retries_after_stalled_response(short_timeout_bucket, read):
    path = parse_path(f'{short_timeout_bucket.url}/x')
    write_file(path)
    start_time = time.monotonic()
    with short_timeout_bucket.proxy.apply_rule(
        answer_once(Answer(max_sent_bytes=50_000, close_delay_seconds=30.0), 'GET', '/x')
    ):
        assert read(path) == CONTENT
    assert time.monotonic() - start_time < 10.0


def test_storage_waits_for_slow_response(bucket):
    path = parse_path(f'{bucket.url}/x')
    with bucket.proxy.apply_rule(answer_always(Answer(delay_seconds=1.0))):
        write_file(path)
        assert read_file(path) == CONTENT


def test_write_raises_within_bound_without_response(short_timeout_bucket):
    path = parse_path(f'{short_timeout_bucket.url}/x')
    start_time = time.monotonic()
    with (
        limit_retry_seconds(2.0),
        short_timeout_bucket.proxy.apply_rule(answer_always(Answer(delay_seconds=8.0))),
        pytest.raises(OSError, match='answered'),
    ):
        write_file(path)
    assert time.monotonic() - start_time < 6.0


@pytest.mark.parametrize('close_delay_seconds', [0.0, 30.0])
def test_write_retries_after_lost_connection(short_timeout_bucket, close_delay_seconds):
    # The content is larger than the buffer of a connection that is not read.
    path, content = parse_path(f'{short_timeout_bucket.url}/x'), CONTENT * 60
    rule, remaining_answers = sends_content, [Answer(max_read_bytes=100_000, close_delay_seconds=close_delay_seconds)]
    with short_timeout_bucket.proxy.apply_rule(
        lambda *request: remaining_answers.pop() if remaining_answers and rule(*request) else None
    ):
        write_file(path, content)
    assert not remaining_answers
    assert read_file(path) == content


@pytest.fixture
def multipart_content(monkeypatch):
    """Set small upload parts, and return content of three parts."""
    monkeypatch.setattr(atomic_write, 'UPLOAD_PART_BYTES', 5 << 20)
    return np.random.default_rng(1).bytes((12 << 20) + 7)


FAULTS = dict(
    busy=Answer(status=503),
    lost=Answer(is_dropped=True),
    cut=Answer(max_read_bytes=1 << 20),
    unread=Answer(max_sent_bytes=0),
)


@pytest.mark.parametrize('fault', FAULTS)
def test_multipart_upload_is_complete_after_fault_in_any_request(bucket, multipart_content, fault):
    path = parse_path(f'{bucket.url}/x')
    write_file(path, multipart_content)
    num_requests = len(bucket.proxy.requests)
    assert num_requests > 3
    for number in range(num_requests):
        parse_path(path).unlink()
        requests = []

        def rule(*request, requests=requests, number=number):
            requests.append(request)
            return FAULTS[fault] if len(requests) == number + 1 and request[0] in ('POST', 'PUT') else None

        with bucket.proxy.apply_rule(rule):
            write_file(path, multipart_content)
        assert read_file(path) == multipart_content


def test_multipart_upload_that_fails_leaves_previous_object(bucket, multipart_content):
    path = parse_path(f'{bucket.url}/x')
    uploads = []

    def rule(method, name):
        if sends_content(method, name):
            uploads.append(name)
        return Answer(status=503) if len(uploads) > 1 else None

    with limit_retry_seconds(0.5), bucket.proxy.apply_rule(rule), pytest.raises(OSError, match='answered'):
        write_file(path, multipart_content)
    assert not path.exists()
    assert directories.list_files(path.parent) == []
    write_file(path, b'before')
    uploads.clear()
    with limit_retry_seconds(0.5), bucket.proxy.apply_rule(rule), pytest.raises(OSError, match='answered'):
        write_file(path, multipart_content)
    assert read_file(path) == b'before'


def test_failed_upload_leaves_no_temporary_files(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
    path = parse_path(f'{bucket.url}/x')
    with (
        limit_retry_seconds(0.3),
        bucket.proxy.apply_rule(answer_always(Answer(status=503))),
        pytest.raises(OSError, match='answered'),
    ):
        write_file(path, CONTENT * 40)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
def test_storage_survives_busy_minute_with_default_timeout(bucket, monkeypatch):
    monkeypatch.setattr(retry, 'FIRST_PAUSE_SECONDS', 0.5)
    existing_path, new_path = (parse_path(f'{bucket.url}/{name}') for name in ('there', 'x'))
    write_file(existing_path)
    busy = bucket.proxy.apply_rule(answer_during(MINUTE, Answer(status=503)))
    with limit_retry_seconds(retry.DEFAULT_RETRY_SECONDS), busy, ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(contextvars.copy_context().run, *call)
            for call in ((read_file, existing_path), (write_file, new_path))
        ]
        assert futures[0].result() == CONTENT
        futures[1].result()
    assert read_file(new_path) == CONTENT


def upload_object(bucket, content):
    path = parse_path(f'{bucket.url}/file.json')
    get_file_system(path).pipe_file(os.fspath(path), content)
    bucket.proxy.requests.clear()
    return path


def test_read_regular_file_rejects_large_object_without_download(bucket):
    path = upload_object(bucket, bytes(10 << 20))
    with pytest.raises(DamagedFileError, match=r'file\.json.*1,000'):
        untrusted_files.read_regular_file(path, max_bytes=1000)
    assert sum(request.response_bytes for request in bucket.proxy.requests) < 10_000


@pytest.mark.parametrize('size', [0, 1, 10])
@pytest.mark.parametrize('start', [0, 1, 9, 10, 11])
def test_read_regular_file_reads_object_from_offset_in_one_request(bucket, tmp_path, size, start):
    content = bytes(range(size))
    path = upload_object(bucket, content)
    (tmp_path / 'file').write_bytes(content)
    assert (
        untrusted_files.read_regular_file(path, start, max_bytes=10)
        == untrusted_files.read_regular_file(tmp_path / 'file', start, max_bytes=10)
        == content[start:]
    )
    assert len(bucket.proxy.requests) == 1


def test_read_regular_file_returns_empty_object_for_status_416(bucket):
    """GCS returns status 416 for an empty object, unlike its emulator."""
    path = upload_object(bucket, b'')
    with bucket.proxy.apply_rule(answer_always(Answer(status=416, text='Request range not satisfiable'), 'GET')):
        assert untrusted_files.read_regular_file(path) == b''


def test_read_regular_file_raises_file_not_found_for_missing_object(bucket):
    with pytest.raises(FileNotFoundError):
        untrusted_files.read_regular_file(parse_path(f'{bucket.url}/none.json'))
