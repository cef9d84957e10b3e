"""Files and folders on a disk and in a bucket: atomic writes, checked reads, exclusive use."""

import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from sinklab.errors import UserError
from sinklab.storage import files
from sinklab.storage.files import DamagedFileError, atomic_write, read_arrays, read_json
from sinklab.storage.folder_lock import FolderTakenError, hold_folder
from sinklab.storage.paths import check_checkpoint_path, find_common_folder, join_path, make_relative, parse_path
from sinklab.train.run_outcome import describe_storage_error, is_permanent_error


@pytest.fixture(params=['disk', pytest.param('gs', marks=pytest.mark.slow)])
def folder(request, tmp_path):
    if request.param == 'disk':
        return tmp_path
    return parse_path(f'{request.getfixturevalue("bucket").url}/some/where')


def write_file(path, content):
    with files.open_writable_folder(path.parent), atomic_write(path) as temporary_path:
        temporary_path.write_bytes(content)
    return path


def test_atomic_write_preserves_bytes(folder):
    content = np.random.default_rng(0).bytes(1000) + b'\n\r\n--'
    path = write_file(folder / 'inner' / 'file.bin', content)
    assert path.read_bytes() == content
    assert files.list_file_infos(folder)['inner/file.bin']['size'] == len(content)


def test_failed_atomic_write_keeps_previous_content(folder):
    path = write_file(folder / 'file', b'before')

    def write_half():
        with atomic_write(path) as temporary_path:
            temporary_path.write_bytes(b'half')
            raise KeyError

    with pytest.raises(KeyError):
        write_half()
    assert path.read_bytes() == b'before'
    assert list(files.list_file_infos(folder)) == ['file']


def test_folder_is_removed_with_its_files(folder):
    for name in ('x', 'deep/y'):
        write_file(folder / 'new' / name, name.encode())
    assert sorted(files.list_file_infos(folder)) == ['new/deep/y', 'new/x']
    assert [path.name for path in files.list_entries(folder)] == ['new']
    files.remove_folder(folder / 'new')
    files.remove_folder(folder / 'new')  # it does not exist
    assert not files.list_file_infos(folder)
    assert not files.list_entries(folder / 'new')


@pytest.mark.parametrize('content', ['', '{"a": ', '[]', '{"a": "x"}', '{"a": NaN}', '{"\xff": 1}', '[' * 100_000])
def test_read_json_refuses_content_that_does_not_match(folder, content):
    path = write_file(folder / 'file.json', content.encode('latin-1'))
    with pytest.raises(DamagedFileError) as error:
        read_json(path, dict[str, int])
    assert str(path) in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_read_json_returns_unknown_fields(tmp_path):
    path = write_file(tmp_path / 'file.json', b'{"a": 1, "b": "x"}')
    assert read_json(path) == {'a': 1, 'b': 'x'}


def test_read_arrays_refuses_pickles_and_truncated_files(tmp_path):
    np.savez(tmp_path / 'good.npz', a=np.arange(3), b=np.ones(2))
    assert list(read_arrays(tmp_path / 'good.npz', ['b', 'c'])) == ['b']
    np.savez(tmp_path / 'pickle.npz', a=np.array([dict()], object))
    (tmp_path / 'short.npz').write_bytes((tmp_path / 'good.npz').read_bytes()[:-30])
    for name in ('pickle', 'short'):
        with pytest.raises(DamagedFileError, match=name):
            read_arrays(tmp_path / f'{name}.npz')


@pytest.mark.parametrize(
    ('path', 'start', 'relative_path'),
    [
        ('/r/a', '/r/b', '../a'),
        ('gs://x/r/a', 'gs://x/r/b', '../a'),
        ('gs://x/a', '/r/b', 'gs://x/a'),
        ('gs://x/a', 'gs://y/a', '../../x/a'),
        ('/r/a', 'gs://x/a', '/r/a'),
    ],
)
def test_relative_path_leads_back(path, start, relative_path):
    path, start = parse_path(path), parse_path(start)
    assert make_relative(path, start) == relative_path
    assert join_path(start, relative_path) == path


def test_common_folder_exists_within_one_bucket_only():
    assert find_common_folder([parse_path('gs://x/r/a'), parse_path('gs://x/r/b')]) == parse_path('gs://x/r')
    with pytest.raises(UserError):
        find_common_folder([parse_path('gs://x/a'), parse_path('/r/b')])


@pytest.mark.parametrize('url', ['http://x/y', 's3://b/x', 'gs://', 'gs:///', 'gs:/b/x', 'gs:b/x'])
def test_invalid_url_is_refused(url):
    with pytest.raises(UserError):
        parse_path(url)


@pytest.mark.parametrize('name', ['a[x]', 'a\\b', 'a*', 'a?'])
def test_path_that_orbax_cannot_read_is_refused(tmp_path, name):
    check_checkpoint_path(tmp_path / ' ]{}%20#~|:;&\'"$!@=+,()ü日')
    with pytest.raises(UserError):
        check_checkpoint_path(tmp_path / name / 'run')


HOLD = (
    'import sys, time; from sinklab.storage.folder_lock import hold_folder\n'
    'with hold_folder(__import__("pathlib").Path(sys.argv[1])): print("held", flush=True); time.sleep(60)'
)


def test_folder_on_disk_is_refused_until_its_process_is_dead(tmp_path):
    with subprocess.Popen([sys.executable, '-c', HOLD, tmp_path], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b'held\n'
        start = time.monotonic()
        with pytest.raises(UserError, match=str(process.pid)), hold_folder(tmp_path):
            pass
        assert time.monotonic() - start < 5
        process.send_signal(signal.SIGKILL)
    with hold_folder(tmp_path) as check_owner:
        check_owner()


def test_waiting_job_gets_folder_when_it_is_free(tmp_path):
    with subprocess.Popen(
        [sys.executable, '-c', HOLD.replace('60', '1'), tmp_path], stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        (tmp_path / 'config.json').touch()
        with hold_folder(tmp_path, wait_seconds=30):
            pass


def test_newer_job_takes_over_folder_in_bucket(bucket):
    folder = parse_path(f'{bucket.url}/run')
    with hold_folder(folder) as check_first:
        check_first()
        with hold_folder(folder) as check_second:
            check_second()
            with pytest.raises(FolderTakenError):
                check_first()


def test_missing_bucket_is_named(bucket):
    with pytest.raises(UserError, match=f'{bucket.url}-not'), hold_folder(parse_path(f'{bucket.url}-not/x')):
        pass


def test_unwritable_folder_is_named(tmp_path):
    (tmp_path / 'file').touch()
    with pytest.raises(UserError, match=str(tmp_path / 'file')), files.open_writable_folder(tmp_path / 'file'):
        pass


def test_storage_errors_are_classified_by_whether_a_restart_helps(tmp_path):
    class StatusError(OSError):
        code = 403

    errors = [OSError(28, 'No space left', '/r/a'), PermissionError(13, 'x'), StatusError(), OSError('Forbidden: x')]
    assert list(map(is_permanent_error, errors)) == [True] * 4
    assert not any(map(is_permanent_error, [OSError(5, 'Input/output error'), TimeoutError(), ValueError(28)]))
    assert describe_storage_error(errors[0]) == '/r/a cannot be used (No space left)'
