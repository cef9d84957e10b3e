"""Tests of conditional writes, deletions and moves in a bucket, also with lost responses."""

import threading

import pytest
from emulators import Answer
from storage_failures import answer_once, write_file

from sinklab.storage import directories
from sinklab.storage.paths import get_file_system, parse_path

pytestmark = pytest.mark.usefixtures('short_retries')


def test_conditional_write_with_lost_response_recognizes_own_object(bucket):
    path = f'{bucket.url}/lease'
    file_system = get_file_system(parse_path(path))
    version = ''
    for number in range(3):
        with bucket.proxy.apply_rule(answer_once(Answer(is_dropped=True), path='lease')):
            content = f'token {number}'.encode()
            version = file_system.write_if_match(path, content, version)
        assert version
        assert file_system.read_with_version(path) == (content, version)
    with bucket.proxy.apply_rule(answer_once(Answer(is_dropped=True), path='lease')):
        assert file_system.write_if_match(path, b'of another', '') is None
    assert file_system.read_with_version(path) == (content, version)


def test_conditional_write_overtaken_by_other_writer_fails(bucket):
    path = f'{bucket.url}/lease'
    file_system = get_file_system(parse_path(path))
    first_version = file_system.write_if_match(path, b'before', '')

    def overtake(method, name):
        if 'lease' in name and not lease_requests:
            lease_requests.append(True)
            file_system.write_if_match(path, b'of another', first_version)
            return Answer(status=503)
        return None

    lease_requests = []
    with bucket.proxy.apply_rule(overtake):
        assert file_system.write_if_match(path, b'late', first_version) is None
    assert file_system.read_with_version(path)[0] == b'of another'


def test_conditional_write_succeeds_for_one_of_two_concurrent_writers(bucket):
    file_system = get_file_system(parse_path(bucket.url + '/x'))
    for number in range(50):
        path, results = f'{bucket.url}/lease-{number}', []
        barrier = threading.Barrier(2)

        def write_in_race(name, path=path, results=results, barrier=barrier):
            barrier.wait()
            if version := file_system.write_if_match(path, name, ''):
                results.append((name, version))

        threads = [threading.Thread(target=write_in_race, args=(f'{number} {name}'.encode(),)) for name in 'ab']
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [file_system.read_with_version(path)] == results


def test_deletion_with_lost_response_succeeds(bucket):
    path = parse_path(f'{bucket.url}/x')
    write_file(path)
    with bucket.proxy.apply_rule(lambda method, _: method == 'DELETE' and answers.pop() if answers else None):
        answers = [Answer(is_dropped=True)]
        path.unlink()
    assert not answers
    assert not path.exists()


def test_move_folder_uses_few_requests(bucket, monkeypatch):
    folder = parse_path(f'{bucket.url}/folder')
    for number in range(150):
        get_file_system(folder).pipe_file(f'{folder}/{number // 10}/{number}', b'x')
    write_file(folder / directories.COMMIT_MARKER, b'')
    bucket.proxy.requests.clear()
    directories.move_folder(folder, parse_path(f'{bucket.url}/other'))
    assert directories.list_files(folder) == []
    assert len(directories.list_files(parse_path(f'{bucket.url}/other'))) == 151
    assert len(bucket.proxy.requests) <= 2 * 151 + 10, 'a copy is one request, and so is a deletion'


def test_move_folder_treats_glob_characters_as_literal(bucket):
    folder = parse_path(f'{bucket.url}/folder')
    for name in ('a[1]', 'a1', 'b*'):
        write_file(folder / 'old' / name, name.encode())
    write_file(folder / 'b2', b'')
    directories.move_folder(folder / 'old', folder / 'new')
    assert directories.list_files(folder) == ['b2', 'new/a1', 'new/a[1]', 'new/b*']
