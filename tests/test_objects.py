"""Object storage fails: what is asked for comes, or an error in words does, in a time with a bound."""

import contextvars
import errno
import itertools
import os
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import in_turn, some
from emulators import KINDS, Answer
from etils.epath import backend
from failing import ASKED, CONTENT, always, during, fetched, once, ranged, read, sends, write

from sinklab.schema import UserError
from sinklab.storage import (
    atomic_write,
    directories,
    retry,
    untrusted_files,
)
from sinklab.storage.paths import get_file_system, parse_path, short_timeout
from sinklab.storage.untrusted_files import DamagedFileError

MINUTE = 60.0


pytestmark = pytest.mark.usefixtures('impatient')


@pytest.fixture
def brief(monkeypatch, bucket):
    """A request ends after a second without an answer, in both libraries."""
    for scheme in patience_modules():
        monkeypatch.setattr(scheme, 'REQUEST_TIMEOUT_SECONDS', 1.0)
    forget()
    yield bucket
    forget()


def patience_modules():
    from sinklab.storage import gcs, s3

    return gcs, s3


def forget():
    """The file systems that were made with other waits."""
    backend.fsspec_backend._get_filesystem.cache_clear()
    for module in patience_modules():
        module.Storage.clear_instance_cache()


WAYS = [read, fetched, ranged]


@pytest.mark.parametrize('status', some([408, 429, 500, 502, 503, 504], [408, 429, 503]))
def test_a_storage_that_is_busy_for_a_while_is_waited_for(bucket, status):
    path = parse_path(f'{bucket.url}/x')
    with bucket.proxy.treating(during(1.0, Answer(status=status))):
        write(path)
    with bucket.proxy.treating(during(1.0, Answer(status=status))):
        assert read(path) == CONTENT


@pytest.mark.parametrize(('asked', 'bucket'), in_turn(itertools.product(ASKED, KINDS)), indirect=['bucket'])
def test_one_that_is_busy_for_longer_is_refused_in_words_and_in_time(bucket, asked, capsys):
    path = parse_path(f'{bucket.url}/folder/x')
    write(path)
    begun = time.monotonic()
    with (
        short_timeout(1.0),
        bucket.proxy.treating(always(Answer(status=503))),
        pytest.raises((OSError, UserError)) as refused,
    ):
        ASKED[asked](path)
    assert time.monotonic() - begun < 4.0
    error = refused.value.__cause__ if isinstance(refused.value, UserError) else refused.value
    assert error.errno == errno.ETIMEDOUT
    assert f'{bucket.url} has not answered for' in str(refused.value)
    assert 'Traceback' not in capsys.readouterr().err


@pytest.mark.parametrize('bucket', some(KINDS, ['gs']), indirect=True)
def test_a_storage_that_does_not_answer_is_told_of_once(bucket, monkeypatch, capsys):
    monkeypatch.setattr(retry, 'WARN_AFTER_SECONDS', 0.3)
    path = parse_path(f'{bucket.url}/x')
    write(path)
    with bucket.proxy.treating(during(2.0, Answer(status=503))):
        threads = [threading.Thread(target=read, args=(path,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f'{bucket.url} does not answer')


@pytest.mark.parametrize('way', WAYS)
def test_a_connection_that_is_lost_in_the_middle_of_a_file_loses_nothing(bucket, way):
    path = parse_path(f'{bucket.url}/x')
    write(path)
    left = [0, 1, 50_000, 99_999]
    with bucket.proxy.treating(
        lambda method, name: Answer(bytes=left.pop()) if left and method == 'GET' and '/x' in name else None
    ):
        assert way(path) == CONTENT
    assert not left


@pytest.mark.parametrize('way', WAYS)
def test_a_file_whose_second_half_never_comes_is_asked_for_again(brief, way):
    path = parse_path(f'{brief.url}/x')
    write(path)
    begun = time.monotonic()
    with brief.proxy.treating(once(Answer(bytes=50_000, stalls=30.0), 'GET', '/x')):
        assert way(path) == CONTENT
    assert time.monotonic() - begun < 10.0


@pytest.mark.parametrize('bucket', some(KINDS, ['s3']), indirect=True)
def test_a_slow_answer_is_waited_for(bucket):
    path = parse_path(f'{bucket.url}/x')
    with bucket.proxy.treating(always(Answer(seconds=1.0))):
        write(path)
        assert read(path) == CONTENT


def test_an_answer_that_never_comes_is_waited_for_in_vain_for_a_time_with_a_bound(brief):
    path = parse_path(f'{brief.url}/x')
    begun = time.monotonic()
    with (
        short_timeout(2.0),
        brief.proxy.treating(always(Answer(seconds=8.0))),
        pytest.raises(OSError, match='not answered'),
    ):
        write(path)
    assert time.monotonic() - begun < 6.0


@pytest.mark.parametrize('stalls', [0.0, 30.0])
def test_a_connection_that_is_lost_while_a_file_is_sent_loses_nothing(brief, stalls):
    path, content = parse_path(f'{brief.url}/x'), CONTENT * 60  # more than a connection takes that nobody reads
    rule, left = sends, [Answer(taken=100_000, stalls=stalls)]
    with brief.proxy.treating(lambda *request: left.pop() if left and rule(*request) else None):
        write(path, content)
    assert not left
    assert read(path) == content


@pytest.fixture
def in_parts(monkeypatch):
    monkeypatch.setattr(atomic_write, 'UPLOAD_PART_BYTES', 5 << 20)
    return np.random.default_rng(1).bytes((12 << 20) + 7)


FAULTS = dict(busy=Answer(status=503), lost=Answer(lost=True), cut=Answer(taken=1 << 20), unread=Answer(bytes=0))


@pytest.mark.parametrize(('fault', 'bucket'), in_turn(itertools.product(FAULTS, KINDS)), indirect=['bucket'])
def test_a_large_file_is_whole_whatever_happens_to_each_of_its_requests(bucket, in_parts, fault):
    path = parse_path(f'{bucket.url}/x')
    write(path, in_parts)
    asked = len(bucket.proxy.requests)
    assert asked > 3
    for number in range(asked):
        parse_path(path).unlink()
        seen = []

        def rule(*request, seen=seen, number=number):
            seen.append(request)
            return FAULTS[fault] if len(seen) == number + 1 and request[0] in ('POST', 'PUT') else None

        with bucket.proxy.treating(rule):
            write(path, in_parts)
        assert read(path) == in_parts


def test_half_an_upload_is_no_object(bucket, in_parts):
    path = parse_path(f'{bucket.url}/x')
    seen = []

    def rule(method, name):
        if sends(method, name):
            seen.append(name)
        return Answer(status=503) if len(seen) > 1 else None

    with short_timeout(0.5), bucket.proxy.treating(rule), pytest.raises(OSError, match='has not answered'):
        write(path, in_parts)
    assert not path.exists()
    assert directories.list_files(path.parent) == []
    write(path, b'before')
    seen.clear()
    with short_timeout(0.5), bucket.proxy.treating(rule), pytest.raises(OSError, match='has not answered'):
        write(path, in_parts)
    assert read(path) == b'before'


def test_nothing_is_left_on_the_disk_of_what_fails(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
    path = parse_path(f'{bucket.url}/x')
    write(path)
    with short_timeout(0.3), bucket.proxy.treating(always(Answer(status=503))):
        with pytest.raises(OSError, match='not answered'):
            write(path, CONTENT * 40)
        with pytest.raises(OSError, match='not answered'):
            get_file_system(path).get_file(os.fspath(path), os.fspath(tmp_path / 'fetched'))
    with (
        short_timeout(0.3),
        bucket.proxy.treating(always(Answer(bytes=1000), 'GET')),
        pytest.raises(OSError, match='answered'),
    ):
        get_file_system(path).get_file(os.fspath(path), os.fspath(tmp_path / 'fetched'))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
def test_a_minute_in_which_the_storage_is_busy_is_survived_by_those_who_wait_as_long_as_usual(bucket, monkeypatch):
    monkeypatch.setattr(retry, 'FIRST_PAUSE_SECONDS', 0.5)
    there, path = (parse_path(f'{bucket.url}/{name}') for name in ('there', 'x'))
    write(there)
    busy = bucket.proxy.treating(during(MINUTE, Answer(status=503)))
    with short_timeout(retry.DEFAULT_RETRY_SECONDS), busy, ThreadPoolExecutor(2) as pool:
        both = [pool.submit(contextvars.copy_context().run, *what) for what in ((read, there), (write, path))]
        assert both[0].result() == CONTENT
        both[1].result()
    assert read(path) == CONTENT


def put(bucket, content):
    path = parse_path(f'{bucket.url}/file.json')
    get_file_system(path).pipe_file(os.fspath(path), content)
    bucket.proxy.requests.clear()
    return path


def test_an_object_that_is_too_large_is_refused_without_being_fetched(bucket):
    path = put(bucket, bytes(10 << 20))
    with pytest.raises(DamagedFileError, match=r'file\.json is damaged .*at most 1,000 are allowed'):
        untrusted_files.read_regular_file(path, max_bytes=1000)
    assert sum(request.received for request in bucket.proxy.requests) < 10_000


@pytest.mark.parametrize('size', [0, 1, 10])
@pytest.mark.parametrize('start', [0, 1, 9, 10, 11])
def test_an_object_is_read_from_a_byte_on_in_one_request_like_a_file(bucket, tmp_path, size, start):
    content = bytes(range(size))
    path = put(bucket, content)
    (tmp_path / 'file').write_bytes(content)
    assert (
        untrusted_files.read_regular_file(path, start, max_bytes=10)
        == untrusted_files.read_regular_file(tmp_path / 'file', start, max_bytes=10)
        == content[start:]
    )
    assert len(bucket.proxy.requests) == 1


def test_an_object_without_bytes_is_empty_where_the_storage_has_no_range_of_it(bucket):
    """GCS answers so, unlike its emulator."""
    path = put(bucket, b'')
    with bucket.proxy.treating(always(Answer(status=416, text='Request range not satisfiable'), 'GET')):
        assert untrusted_files.read_regular_file(path) == b''


def test_an_object_that_is_not_there_is_not_found(bucket):
    with pytest.raises(FileNotFoundError):
        untrusted_files.read_regular_file(parse_path(f'{bucket.url}/none.json'))
