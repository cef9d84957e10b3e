"""Tests of conditional writes, deletions and moves in a bucket, also with lost responses."""

import threading

import pytest
from emulators import Answer
from storage_failures import once, write

from sinklab.storage import directories
from sinklab.storage.paths import get_file_system, parse_path

pytestmark = pytest.mark.usefixtures('impatient')


def test_conditional_write_with_lost_response_recognizes_own_object(bucket):
    path = f'{bucket.url}/lease'
    at = get_file_system(parse_path(path))
    mark = ''
    for number in range(3):
        with bucket.proxy.treating(once(Answer(lost=True), path='lease')):
            content = f'token {number}'.encode()
            mark = at.write_if_match(path, content, mark)
        assert mark
        assert at.read_with_version(path) == (content, mark)
    with bucket.proxy.treating(once(Answer(lost=True), path='lease')):
        assert at.write_if_match(path, b'of another', '') is None
    assert at.read_with_version(path) == (content, mark)


def test_conditional_write_overtaken_by_other_writer_fails(bucket):
    path = f'{bucket.url}/lease'
    at = get_file_system(parse_path(path))
    first = at.write_if_match(path, b'before', '')

    def overtaken(method, name):
        if 'lease' in name and not heard:
            heard.append(True)
            at.write_if_match(path, b'of another', first)
            return Answer(status=503)
        return None

    heard = []
    with bucket.proxy.treating(overtaken):
        assert at.write_if_match(path, b'late', first) is None
    assert at.read_with_version(path)[0] == b'of another'


@pytest.mark.parametrize('bucket', ['s3'], indirect=True)
def test_conditional_write_retries_after_conflict_response(bucket):
    path = f'{bucket.url}/lease'
    text = '<Error><Code>ConditionalRequestConflict</Code><Message>conflict</Message></Error>'
    with bucket.proxy.treating(once(Answer(status=409, text=text), 'PUT')):
        assert get_file_system(parse_path(path)).write_if_match(path, b'x', '')


def test_conditional_write_succeeds_for_one_of_two_concurrent_writers(bucket):
    at = get_file_system(parse_path(bucket.url + '/x'))
    for number in range(50):
        path, won = f'{bucket.url}/lease-{number}', []
        gate = threading.Barrier(2)

        def race(name, path=path, won=won, gate=gate):
            gate.wait()
            if mark := at.write_if_match(path, name, ''):
                won.append((name, mark))

        threads = [threading.Thread(target=race, args=(f'{number} {name}'.encode(),)) for name in 'ab']
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [at.read_with_version(path)] == won


def test_deletion_with_lost_response_succeeds(bucket):
    path = parse_path(f'{bucket.url}/x')
    write(path)
    with bucket.proxy.treating(lambda method, name: deleted(method, name) and gone.pop() if gone else None):
        gone = [Answer(lost=True)]
        path.unlink()
    assert not gone
    assert not path.exists()


def deleted(method, path):
    return method == 'DELETE' or (method == 'POST' and 'delete' in path)


def test_move_folder_uses_few_requests(bucket, monkeypatch):
    folder = parse_path(f'{bucket.url}/folder')
    for number in range(150):
        get_file_system(folder).pipe_file(f'{folder}/{number // 10}/{number}', b'x')
    write(folder / directories.COMMIT_MARKER, b'')
    bucket.proxy.requests.clear()
    directories.move_folder(folder, parse_path(f'{bucket.url}/other'))
    assert directories.list_files(folder) == []
    assert len(directories.list_files(parse_path(f'{bucket.url}/other'))) == 151
    asked = len(bucket.proxy.requests)
    assert asked <= (2 * 151 + 10), 'a copy is one request of GCS, and two of S3; a deletion one of GCS, none of S3'


def test_move_folder_treats_glob_characters_as_literal(bucket):
    folder = parse_path(f'{bucket.url}/folder')
    for name in ('a[1]', 'a1', 'b*'):
        write(folder / 'old' / name, name.encode())
    write(folder / 'b2', b'')
    directories.move_folder(folder / 'old', folder / 'new')
    assert directories.list_files(folder) == ['b2', 'new/a1', 'new/a[1]', 'new/b*']
