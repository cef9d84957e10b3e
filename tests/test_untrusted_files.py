"""Tests of validation of untrusted files: names, sizes, nesting and shapes."""

import errno
import io
import json
import os
import shutil
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from bucket_stores import upload_store
from stores import make_recipe, make_store, write_source

from sinklab.data import remote_store
from sinklab.data.sources import open_source
from sinklab.data.store import Store
from sinklab.data.store_files import read_plan, reopen_if_damaged
from sinklab.errors import UserError
from sinklab.hf import files
from sinklab.storage import untrusted_files
from sinklab.storage.paths import get_file_system, parse_path

SHA = '0' * 64
TEXTS = [f'{number} a text of some words' for number in range(30)]
ESCAPES = ['../x', 'a/../../x', '/etc/passwd', '..', '.', '', 'a//b', './a', 'a/', 'a\\b', 'a\0b', 'a\nb', 5, None]
ESCAPES += ['gs://other/x']


def get_error_message(function, *args, **kwargs):
    with pytest.raises(UserError) as result:
        function(*args, **kwargs)
    assert '\n' not in str(result.value)
    return str(result.value)


@pytest.mark.parametrize('name', ESCAPES, ids=repr)
def test_name_escaping_folder_is_rejected(name):
    assert 'meta.json' in get_error_message(untrusted_files.check_relative_name, name, 'meta.json')


@pytest.mark.parametrize('name', ['a', 'a.b', '..a', 'a..b', 'a/b/c.json', 'naïve 1', 'ocdbt.process_0/d/0f'])
def test_name_inside_folder_is_accepted(name, tmp_path):
    assert untrusted_files.resolve_name(tmp_path, name, 'meta.json') == tmp_path / name


def test_symlink_escaping_folder_is_rejected(tmp_path):
    folder = tmp_path / 'inside'
    folder.mkdir()
    (tmp_path / 'secret').write_text('secret')
    (folder / 'link').symlink_to('../secret')
    (folder / 'up').symlink_to('..')
    (folder / 'own').symlink_to('file')
    for name in ('link', 'up/secret', 'up/none'):
        assert name in get_error_message(untrusted_files.resolve_name, folder, name, 'index.json')
    assert untrusted_files.resolve_name(folder, 'own', 'index.json') == folder / 'own'


def test_hf_snapshot_symlinks_may_target_only_blobs_of_same_repository(tmp_path):
    own_repository, other_repository = (tmp_path / f'models--org--{name}' for name in ('mine', 'other'))
    for repository in (own_repository, other_repository):
        (repository / 'blobs').mkdir(parents=True)
        (repository / 'blobs' / 'abc').write_text('{}')
    snapshot = own_repository / 'snapshots' / 'main'
    snapshot.mkdir(parents=True)
    (snapshot / 'config.json').symlink_to('../../blobs/abc')
    (snapshot / 'other.json').symlink_to('../../../models--org--other/blobs/abc')
    assert not untrusted_files.is_linked_outside(snapshot / 'config.json', snapshot)
    assert untrusted_files.is_linked_outside(snapshot / 'other.json', snapshot)


@pytest.mark.parametrize('name', [name for name in ESCAPES if name != 5] + ['link.safetensors'], ids=repr)
def test_hf_index_naming_file_outside_folder_is_rejected(name, tmp_path):
    folder = tmp_path / 'theirs'
    folder.mkdir()
    (tmp_path / 'x').write_text('secret')
    (folder / 'link.safetensors').symlink_to('../x')
    (folder / files.INDEX_FILE).write_text(json.dumps(dict(weight_map=dict(a=name))))
    assert files.INDEX_FILE in get_error_message(files.list_weight_files, folder)


def test_hf_index_naming_file_in_subfolder_is_rejected(tmp_path):
    (tmp_path / 'sub').mkdir()
    (tmp_path / 'sub' / 'x.safetensors').write_bytes(b'')
    (tmp_path / files.INDEX_FILE).write_text(json.dumps(dict(weight_map=dict(a='sub/x.safetensors'))))
    message = get_error_message(files.list_weight_files, tmp_path)
    assert 'sub/x.safetensors' in message
    assert not any(word in message for word in ('not there', 'missing', 'not found'))


@pytest.mark.parametrize(
    'content',
    [
        b'',
        b'{',
        b'\xff\xfe{}',
        b'[]',
        b'null',
        b'"a"',
        b'[' * 100_000,
        b'{"a":' * 5000 + b'1' + b'}' * 5000,
        b'{"a": ' + b'[' * 70 + b']' * 70 + b'}',
        b'{"a": ' + b'9' * 5000 + b'}',
        b'{"a": 1}' + b' ' * 1000,
    ],
    ids=lambda content: content[:12],
)
def test_json_damaged_oversized_or_too_deep_is_rejected(content, tmp_path):
    path = tmp_path / 'some.json'
    path.write_bytes(content)
    assert str(path) in get_error_message(
        untrusted_files.read_json, path, max_bytes=50_000 if len(content) > 1100 else 1000
    )


def test_json_within_limits_is_parsed(tmp_path):
    path = tmp_path / 'some.json'
    path.write_text('{"a": [[1, 2.5, null, "\u00e4"]], "b": Infinity}', encoding='utf-8')
    assert untrusted_files.read_json(path) == {'a': [[1, 2.5, None, 'ä']], 'b': float('inf')}
    with pytest.raises(FileNotFoundError):
        untrusted_files.read_json(tmp_path / 'none.json')


@pytest.mark.parametrize('make', [os.mkfifo, os.mkdir], ids=['fifo', 'folder'])
def test_json_path_of_fifo_or_folder_is_rejected_without_blocking(make, tmp_path):
    make(tmp_path / 'some.json')
    assert 'some.json' in get_error_message(untrusted_files.read_json, tmp_path / 'some.json')


IO_ERRORS = [
    OSError(errno.EIO, os.strerror(errno.EIO)),
    OSError(errno.ESTALE, os.strerror(errno.ESTALE)),
    TimeoutError(errno.ETIMEDOUT, 'the bucket does not answer'),
    ConnectionResetError(errno.ECONNRESET, 'the bucket does not answer'),
]


class FailingFile(io.BytesIO):
    """File that raises an I/O error when it is read."""

    def __init__(self, error):
        super().__init__(bytes(100))
        self.error = error

    def fail(self, *_):
        raise self.error

    read = readinto = fileno = fail


@pytest.mark.parametrize('error', IO_ERRORS, ids=lambda error: errno.errorcode[error.errno])
def test_io_error_of_disk_or_bucket_is_not_reported_as_corrupt_file(error, tmp_path, monkeypatch):
    data_recipe = make_recipe(source := write_source(tmp_path / 'a.jsonl', TEXTS))
    (tmp_path / 'recipe.json').write_text('{}')
    (tmp_path / 'meta.json').write_text('{}')
    monkeypatch.setattr(untrusted_files, 'open_regular_file', lambda path: FailingFile(error))
    for read in (
        lambda: untrusted_files.read_json(tmp_path / 'meta.json'),
        lambda: untrusted_files.load_npz(tmp_path / 'probe.npz'),
        lambda: reopen_if_damaged(tmp_path),
        lambda: read_plan(tmp_path, data_recipe, open_source(source)),
        lambda: remote_store.read_etags(tmp_path),
        lambda: files.read_json_object(tmp_path / 'config.json'),
    ):
        with pytest.raises(type(error)) as result:
            read()
        assert result.value is error


@pytest.mark.parametrize('error', IO_ERRORS, ids=lambda error: errno.errorcode[error.errno])
def test_io_error_while_reading_shards_keeps_store_complete(error, store_copy, monkeypatch):
    def fail(*_):
        raise error

    read_bytes = Path.read_bytes
    with monkeypatch.context() as patch:
        patch.setattr(Path, 'read_bytes', lambda path: fail() if path.suffix == '.ids' else read_bytes(path))
        for open_store in (reopen_if_damaged, Store):
            with pytest.raises(type(error)):
                open_store(store_copy)
    assert reopen_if_damaged(store_copy)


def make_npy(header, data=b''):
    text = header if isinstance(header, bytes) else repr(header).encode()
    return b'\x93NUMPY\x01\x00' + struct.pack('<H', len(text)) + text + data


def make_npz(content, name='a.npy'):
    file = io.BytesIO()
    with zipfile.ZipFile(file, 'w', zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    return file.getvalue()


def make_claimed_header(**changes):
    return dict(descr='<f4', fortran_order=False, shape=(2,)) | changes


VALID_ARCHIVE = make_npz(make_npy(make_claimed_header(), bytes(8)))
INVALID_ARCHIVES = {
    'empty': b'',
    'no archive': b'x' * 100,
    'truncated': VALID_ARCHIVE[: len(VALID_ARCHIVE) // 2],
    'a plain array': make_npy(make_claimed_header(), bytes(8)),
    'no array in it': make_npz(b'hello', 'a.txt'),
    'no header': make_npz(b'hello'),
    'a million million elements': make_npz(make_npy(make_claimed_header(shape=(10**12,)), bytes(8))),
    'a product that overflows': make_npz(make_npy(make_claimed_header(shape=(2**40, 2**40)), bytes(8))),
    'a negative side': make_npz(make_npy(make_claimed_header(shape=(-2,)), bytes(8))),
    'a side that is text': make_npz(make_npy(make_claimed_header(shape=('2',)), bytes(8))),
    'more data than its shape': make_npz(make_npy(make_claimed_header(), bytes(12))),
    'pickled objects': make_npz(make_npy(make_claimed_header(descr='|O'), bytes(16))),
    'pickled fields': make_npz(make_npy(make_claimed_header(descr=[('a', '|O')]), bytes(16))),
    'an unknown dtype': make_npz(make_npy(make_claimed_header(descr='<q99'), bytes(8))),
    'code for a header': make_npz(make_npy(b'__import__("os").system("false")', bytes(8))),
    'a nested header': make_npz(make_npy(b'(' * 5000, bytes(8))),
    'a long header': make_npz(b'\x93NUMPY\x02\x00' + struct.pack('<I', 1 << 31)),
    'another version': make_npz(b'\x93NUMPY\x09\x00' + bytes(20)),
}


@pytest.mark.parametrize('case', INVALID_ARCHIVES)
def test_npz_damaged_pickled_or_oversized_is_rejected_without_allocation(case, tmp_path):
    path = tmp_path / 'some.npz'
    path.write_bytes(INVALID_ARCHIVES[case])
    tracemalloc.start()
    try:
        assert str(path) in get_error_message(untrusted_files.load_npz, path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_npz_above_uncompressed_size_limit_is_rejected(monkeypatch):
    monkeypatch.setattr(untrusted_files, 'MAX_ARRAY_BYTES', 1 << 20)
    file = io.BytesIO()
    np.savez_compressed(file, a=np.zeros(1 << 20))
    assert '1,048,576' in get_error_message(untrusted_files.load_npz, file.getvalue(), 'some.npz')


def test_npz_written_by_numpy_is_loaded_unchanged(tmp_path):
    arrays = dict(
        a=np.arange(6.0).reshape(2, 3),
        fortran=np.asfortranarray(np.ones((3, 2), np.float16)),
        empty=np.zeros((0, 5), np.int32),
        scalar=np.array('text'),
        records=np.zeros(3, [('start', '<u8'), ('key', '<u8')]),
        flags=np.array([True, False]),
    )
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / 'some.npz', **arrays)
        result = untrusted_files.load_npz(tmp_path / 'some.npz')
        assert result.keys() == arrays.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(result[name], array)
            assert result[name].dtype == array.dtype


def make_tensor_header(**changes):
    return dict(dtype='F32', shape=[2], data_offsets=[0, 8]) | changes


INVALID_HEADERS = {
    'offsets beyond the file': ({'a': make_tensor_header(shape=[20], data_offsets=[0, 80])}, 8),
    'overlap': ({'a': make_tensor_header(), 'b': make_tensor_header(data_offsets=[4, 12])}, 12),
    'a hole': ({'a': make_tensor_header(), 'b': make_tensor_header(data_offsets=[12, 20])}, 20),
    'offsets backwards': ({'a': make_tensor_header(data_offsets=[8, 0])}, 8),
    'an unknown dtype': ({'a': make_tensor_header(dtype='X9')}, 8),
    'another length than its shape': ({'a': make_tensor_header(shape=[3])}, 8),
    'a shape that overflows': ({'a': make_tensor_header(shape=[2**62, 2**62])}, 8),
    'a negative side': ({'a': make_tensor_header(shape=[-2])}, 8),
    'data after the last': ({'a': make_tensor_header()}, 16),
    'text for a tensor': ({'a': 'x'}, 8),
    'a list': ([], 0),
    'nested lists': (b'[' * 100_000, 0),
    'nested objects': (b'{"a":' * 5000, 0),
    'a dtype that is not read': ({'a': make_tensor_header(dtype='I64', shape=[1])}, 8),
}


@pytest.mark.parametrize('case', [*INVALID_HEADERS, 'a header of 2^63 bytes', 'a header of 200 MB'])
def test_safetensors_with_invalid_header_are_rejected(case, tmp_path):
    """Test checks of the safetensors library: offsets, overlap, dtypes, shapes, and at most 100 MB of header."""
    pytest.importorskip('safetensors')
    header, size = INVALID_HEADERS.get(case, ({'a': make_tensor_header()}, 8))
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = {'a header of 2^63 bytes': 2**63, 'a header of 200 MB': 200 << 20}.get(case, len(text))
    with (tmp_path / files.MODEL_FILE).open('wb') as file:
        file.write(struct.pack('<Q', length) + text + bytes(size))
        if length == 200 << 20:
            file.truncate(length + 8)
    assert files.MODEL_FILE in get_error_message(files.SafetensorsReader, tmp_path)


@pytest.fixture(scope='module')
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp('store')
    return make_store(folder / 'store', write_source(folder / 'a.jsonl', TEXTS))


def change_meta_fields(folder, **changes):
    """Change fields of the first shard of a store, or of the store itself."""
    file = folder / 'meta.json'
    meta = json.loads(file.read_text())
    for field, value in changes.items():
        entry = meta['shards'][0] if field in meta['shards'][0] else meta
        entry[field] = value
    file.write_text(json.dumps(meta))


@pytest.fixture
def store_copy(store, tmp_path):
    return shutil.copytree(store.path, tmp_path / 'store')


INVALID_FIELDS = {
    **{f'a shard called {name!r}': dict(name=name) for name in ESCAPES},
    'a shard in a folder': dict(name='a/b'),
    'a suffix that leads out': dict(sha256={'ids/../../x': SHA}),
    'no ids': dict(sha256={'documents': SHA}),
    'a digest that is none': dict(sha256={'ids': '..', 'documents': SHA}),
    'a digest that leads out': dict(digest='../../outside'),
    'a digest with a line end': dict(digest='0' * 16 + '\n'),
    'a digest of a file with a line end': dict(sha256={'ids': SHA + '\n', 'documents': SHA}),
    'a digest of the tokenizer with a line end': dict(tokenizer=SHA + '\n'),
    'a count that is text': dict(tokens='5'),
    'a negative count': dict(tokens=-1),
    'a count of 10^30': dict(tokens=10**30),
    'a side of another kind': dict(side='test'),
    'a dtype of objects': dict(dtype='|O'),
    'no list of shards': dict(shards=5),
    'a shard that is null': dict(shards=[None]),
    'domains that are text': dict(domains='abc'),
    'weights that are a list': dict(weights=[]),
}


@pytest.mark.parametrize('case', INVALID_FIELDS)
def test_store_with_invalid_meta_field_is_rejected(case, store_copy):
    change_meta_fields(store_copy, **INVALID_FIELDS[case])
    assert 'meta.json' in get_error_message(Store, store_copy)


@pytest.mark.parametrize(
    'text', ['[]', 'null', '5', '"a"', '{}', '[' * 100_000, '{"format": 3}'], ids=lambda text: text[:9]
)
def test_store_with_malformed_meta_file_is_rejected(text, store_copy):
    (store_copy / 'meta.json').write_text(text)
    assert 'meta.json' in get_error_message(Store, store_copy)
    assert 'meta.json' in get_error_message(reopen_if_damaged, store_copy)


def test_store_with_shard_symlink_escaping_it_is_rejected(store_copy):
    (path,) = store_copy.glob('train-*.ids')
    path.rename(store_copy.parent / 'elsewhere')
    path.symlink_to(store_copy.parent / 'elsewhere')
    assert path.name in get_error_message(Store, store_copy)


def test_store_does_not_resolve_paths_of_regular_files(store_copy, monkeypatch):
    resolved = []
    resolve = Path.resolve
    monkeypatch.setattr(Path, 'resolve', lambda path, **kwargs: resolved.append(path) or resolve(path, **kwargs))
    Store(store_copy)
    assert not [path for path in resolved if path.suffix in ('.ids', '.documents')]


@pytest.mark.parametrize(
    'changes', [dict(name='../../../outside'), dict(digest='../../outside')], ids=lambda change: min(change)
)
def test_store_in_bucket_with_escaping_name_leaves_files_outside_cache_unchanged(
    changes, store, bucket, tmp_path, monkeypatch
):
    monkeypatch.setenv('SINKLAB_CACHE', str(tmp_path / 'cache'))
    (tmp_path / 'outside').mkdir()
    (tmp_path / 'outside' / 'mine.unfinished').write_text('keep')
    url = upload_store(store, bucket)
    meta = json.loads((store.path / 'meta.json').read_text())
    (meta if 'digest' in changes else meta['shards'][0]).update(changes)
    get_file_system(parse_path(url)).pipe_file(f'{url}/meta.json', json.dumps(meta).encode())

    def read_store():
        result = Store(url)
        result.enable_disk_cache(1.0, ('ids',))
        result.get_tokens('train', result.domains[0]).read_ids(0, 5)

    assert 'meta.json' in get_error_message(read_store)
    assert [path.name for path in (tmp_path / 'outside').iterdir()] == ['mine.unfinished']
    assert not list((tmp_path / 'cache').rglob('*.ids'))


@pytest.mark.parametrize('text', ['{', 'null', '[]', '{"name": "../x"}', '[' * 100_000], ids=lambda text: text[:9])
def test_unfinished_store_rebuilds_damaged_record(text, tmp_path):
    source, folder = write_source(tmp_path / 'a.jsonl', TEXTS), tmp_path / 'again'
    complete_store = make_store(folder, source)
    for shard in complete_store.shards:
        shard.write_record(folder)
    (folder / 'meta.json').unlink()
    min(folder.glob('train-*.json')).write_text(text)
    assert make_store(folder, source).digest == complete_store.digest


def test_unfinished_store_in_bucket_rebuilds_non_utf8_record(tmp_path, bucket, monkeypatch):
    class AlteredFileSystem:
        """File system that returns a record that is not UTF-8. Some emulators do not store such an object."""

        def __init__(self, path):
            self.path = path

        def cat(self, paths):
            return get_file_system(folder).cat(paths) | {self.path: b'{"name": "\xff"}'}

        def __getattr__(self, name):
            return getattr(get_file_system(folder), name)

    source, folder = write_source(tmp_path / 'a.jsonl', TEXTS), parse_path(f'{bucket.url}/store')
    complete_store = make_store(folder, source)
    etags = remote_store.list_object_digests(folder)
    for shard in complete_store.shards:
        shard.write_record(folder, {file: etags[file] for file in shard.file_names})
    (folder / 'meta.json').unlink()
    record = folder / f'{next(shard.name for shard in complete_store.shards if shard.split == "train")}.json'
    monkeypatch.setattr(
        remote_store, 'get_file_system', lambda folder: AlteredFileSystem(os.fspath(record).partition('://')[2])
    )
    assert make_store(folder, source).digest == complete_store.digest
