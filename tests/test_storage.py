"""File operations on local disks and in buckets."""

import os

import numpy as np
import pytest

from sinklab.errors import UserError
from sinklab.storage import directories
from sinklab.storage.atomic_write import append_text, atomic_write, open_writable_folder
from sinklab.storage.paths import (
    get_file_system,
    is_remote,
    make_absolute,
    parse_path,
)


@pytest.fixture(params=['disk', pytest.param('gs', marks=pytest.mark.slow)])
def folder(request, tmp_path):
    if request.param == 'disk':
        return tmp_path
    return parse_path(f'{request.getfixturevalue("bucket").url}/some/where')


def write_files(path, content):
    with open_writable_folder(path.parent), atomic_write(path) as unfinished:
        unfinished.write_bytes(content)
    return path


@pytest.mark.parametrize('suffix', [b'', b'\n', b'\r', b'\r\n', b'\n\r\n', b'--'])
def test_atomic_write_preserves_bytes(folder, suffix):
    content = np.random.default_rng(0).bytes(1000) + suffix
    path = write_files(folder / 'inner' / 'file.bin', content)
    assert path.read_bytes() == content
    assert directories.get_stored_files(path.parent, [path.name])[path.name].size == len(content)
    assert directories.list_files(folder) == ['inner/file.bin']


def test_atomic_write_preserves_multipart_file(folder):
    content = np.random.default_rng(0).bytes((7 << 20) + 1)
    assert write_files(folder / 'large.bin', content).read_bytes() == content


def test_atomic_write_keeps_previous_content_after_exception(folder):
    path = write_files(folder / 'file', b'before')

    def write_half_and_fail():
        with atomic_write(path) as unfinished:
            unfinished.write_bytes(b'half')
            raise KeyError

    with pytest.raises(KeyError):
        write_half_and_fail()
    assert path.read_bytes() == b'before'
    assert directories.list_files(folder) == ['file']


def test_digests_differ_between_contents(folder):
    files = [write_files(folder / name, content) for name, content in (('a', b'1'), ('b', b'1'), ('c', b'2'))]
    digests = [directories.get_stored_files(folder, [path.name])[path.name].get_digest() for path in files]
    assert digests[0] == digests[1] != digests[2]


def test_append_text_appends_to_file(folder):
    for text in ('one\n', 'two\n'):
        append_text(folder / 'log', text)
    assert (folder / 'log').read_text() == 'one\ntwo\n'


def test_list_committed_excludes_deleted_folders(folder):
    for step in ('1', '2'):
        write_files(folder / step / 'inner' / 'x', b'x')
        write_files(folder / step / directories.COMMIT_MARKER, b'')
    assert sorted(directories.list_committed(folder)) == ['1', '2']
    directories.mark_deleted(folder / '1')
    assert [name for name in directories.list_committed(folder) if name.isdigit()] == ['2']
    directories.remove_folder(folder / '2')
    assert not directories.list_files(folder / '2')
    directories.remove_folder(folder / '2')


def test_move_folder_moves_all_files(folder):
    for name in ('x', 'deep/y', directories.COMMIT_MARKER):
        write_files(folder / 'old' / name, name.encode())
    directories.move_folder(folder / 'old', folder / 'new')
    assert sorted(path.name for path in directories.list_entries(folder)) == ['new']
    assert directories.list_files(folder / 'new') == sorted(['x', 'deep/y', directories.COMMIT_MARKER])
    assert (folder / 'new' / 'deep' / 'y').read_bytes() == b'deep/y'


def test_missing_folder_lists_no_entries(folder):
    missing = folder / 'missing'
    assert not missing.exists()
    assert [
        *directories.list_entries(missing),
        *directories.list_files(missing),
        *directories.list_committed(missing),
    ] == []


def test_paths_keep_given_form(folder):
    assert os.fspath(make_absolute(folder)) == str(folder)
    assert is_remote(folder) == ('://' in str(folder))
    assert parse_path(folder / 'x') == folder / 'x'


def test_write_if_match_rejects_stale_version(bucket):
    path = f'{bucket.url}/lease'
    file_system = get_file_system(parse_path(path))
    first_version = file_system.write_if_match(path, b'1', '')
    assert first_version
    assert file_system.write_if_match(path, b'2', '') is None
    assert file_system.read_with_version(path) == (b'1', first_version)
    second_version = file_system.write_if_match(path, b'3', first_version)
    assert second_version
    assert file_system.write_if_match(path, b'4', first_version) is None
    assert file_system.read_with_version(path) == (b'3', second_version)
    parse_path(path).unlink()
    assert file_system.write_if_match(path, b'5', second_version) is None


@pytest.mark.parametrize('url', ['http://x/y', 'az://b/x', 's3://b/x', 'gs://', 'gs:///', 'gs:/b/x', 'gs:b/x'])
def test_parse_path_rejects_invalid_url(url):
    with pytest.raises(UserError):
        parse_path(url)


@pytest.mark.parametrize('path', ['runs/gs:/x', 'a:b', 'gs/x'])
def test_parse_path_accepts_colon_in_local_path(path):
    assert not is_remote(parse_path(path))


def test_missing_bucket_is_named(bucket):
    missing = parse_path(f'{bucket.url}-not/x')
    with (
        pytest.raises(UserError, match=f'bucket {bucket.url}-not '),
        open_writable_folder(missing),
        atomic_write(missing) as f,
    ):
        f.write_text('x')


def test_remove_folder_deletes_remaining_files_before_raising_error(tmp_path, monkeypatch):
    for name in ('a', 'b', 'c'):
        (tmp_path / 'folder' / name).mkdir(parents=True)
        (tmp_path / 'folder' / name / 'file').write_text('x')
    unlink = os.unlink

    def fail_once_for_file(path, *args, **kwargs):
        if str(path).endswith('file') and next(failures, False):
            raise PermissionError(1, 'Operation not permitted', path)
        unlink(path, *args, **kwargs)

    failures = iter([True])
    monkeypatch.setattr(os, 'unlink', fail_once_for_file)
    with pytest.raises(OSError, match='not permitted'):
        directories.remove_folder(tmp_path / 'folder')
    assert len(list((tmp_path / 'folder').rglob('file'))) == 1
    directories.remove_folder(tmp_path / 'folder')
    assert not (tmp_path / 'folder').exists()


def test_remove_folder_deletes_symlink_without_target(tmp_path):
    (tmp_path / 'folder').mkdir()
    (tmp_path / 'link').symlink_to(tmp_path / 'folder')
    directories.remove_folder(tmp_path / 'link')
    assert [path.name for path in tmp_path.iterdir()] == ['folder']
