"""Stores and sources in buckets: the same content as on a disk, and one copy of a store in the cache."""

import gzip
import multiprocessing

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from stores import encode_lines, get_source_error, make_recipe, make_sharded_store, make_texts, read_documents
from tiny_specs import make_tiny_spec

from sinklab.data.prepare import prepare_store
from sinklab.data.run_data import load_run_data
from sinklab.data.sources import open_source
from sinklab.data.store import Store
from sinklab.errors import UserError
from sinklab.storage.paths import get_file_system, parse_path

TEXTS = make_texts(30)


def upload_folder(folder, url):
    """Upload the files of a folder to a bucket, and return its URL."""
    for path in folder.rglob('*'):
        if path.is_file():
            get_file_system().put_file(path, f'{url}/{path.relative_to(folder).as_posix()}')
    return url


@pytest.fixture
def corpus_and_url(tmp_path, bucket):
    """Return a folder with files of every format, and the URL of its copy in a bucket."""
    folder = tmp_path / 'corpus'
    (folder / 'deep' / '.hidden').mkdir(parents=True)
    (folder / 'a.jsonl').write_bytes(encode_lines(TEXTS[:10]))
    (folder / 'deep' / 'b.jsonl.gz').write_bytes(gzip.compress(encode_lines(TEXTS[10:20])))
    (folder / 'deep' / '.hidden' / 'c.txt').write_text('hidden')
    (folder / 'deep' / 'd.jsonl.zst').write_bytes(pyarrow.compress(encode_lines(TEXTS[20:25]), 'zstd', asbytes=True))
    (folder / 'odd name#1 [x].txt').write_text('odd')
    (folder / 'LICENSE').write_text('text ' * 4000)
    pyarrow.parquet.write_table(pyarrow.table({'text': TEXTS[25:]}), folder / 'e.parquet', row_group_size=2)
    return folder, upload_folder(folder, f'{bucket.url}/corpus')


@pytest.mark.parametrize(
    'pattern',
    ['LICENSE', '**', 'deep/.hidden/*', '[a-d].*', 'odd name#1 [[]x].txt', '**/*.jsonl*', 'e.parquet#field=text'],
)
def test_source_in_bucket_has_the_documents_of_the_files(corpus_and_url, pattern):
    folder, url = corpus_and_url
    documents = read_documents(f'text:{folder}/{pattern}')
    assert documents
    assert read_documents(f'text:{url}/{pattern}') == documents


def test_identity_changes_with_the_content_of_an_object(corpus_and_url):
    _, url = corpus_and_url
    identity = open_source(f'text:{url}/*.jsonl').identity
    assert open_source(f'text:{url}/*.jsonl').identity == identity
    parse_path(f'{url}/a.jsonl').write_bytes(encode_lines([*TEXTS[:9], 'x' * len(TEXTS[9])]))
    assert open_source(f'text:{url}/*.jsonl').identity != identity


@pytest.mark.parametrize('suffix', ['/*.tsv', '/none.txt', '-not/*.txt', '/cut.jsonl.gz'])
def test_missing_or_truncated_object_is_refused_in_one_line(bucket, suffix):
    parse_path(f'{bucket.url}/cut.jsonl.gz').write_bytes(gzip.compress(encode_lines(TEXTS))[:-9])
    assert f'{bucket.url}{suffix} ' in get_source_error(f'text:{bucket.url}{suffix}')


def test_store_is_not_prepared_in_a_bucket(bucket):
    with pytest.raises(UserError):
        prepare_store(make_recipe('stdlib'), parse_path(f'{bucket.url}/store'))
    assert not parse_path(f'{bucket.url}/store').exists()


@pytest.fixture(scope='module')
def store(tmp_path_factory):
    return make_sharded_store(tmp_path_factory.mktemp('made'))


@pytest.fixture
def store_url(store, bucket, tmp_path, monkeypatch):
    monkeypatch.setenv('SINKLAB_CACHE', str(tmp_path / 'cache'))
    return upload_folder(store.path, f'{bucket.url}/store')


def count_file_requests(bucket):
    return sum('.ids' in request.path and 'alt=media' in request.path for request in bucket.proxy.requests)


def test_store_in_bucket_is_copied_once_and_gives_the_same_data(store, store_url, bucket):
    def load(path):
        fields = dict(data__source=f'store:{path}', data__bos='documents', data__held_out=0.2)
        return load_run_data(make_tiny_spec(**fields))

    local, remote = load(store.path), load(store_url)
    assert remote.fingerprint == local.fingerprint
    np.testing.assert_array_equal(remote.valid_NT, local.valid_NT)
    np.testing.assert_array_equal(remote.batches.read_rows(3, range(4)), local.batches.read_rows(3, range(4)))
    num_requests = count_file_requests(bucket)
    assert num_requests == len(store.shards)
    Store(store_url)
    assert count_file_requests(bucket) == num_requests


def test_processes_copy_each_file_once(store, store_url, bucket):
    context = multiprocessing.get_context('spawn')
    processes = [context.Process(target=Store, args=(store_url,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert count_file_requests(bucket) == len(store.shards)


@pytest.mark.parametrize('name', ['train-000-00000.ids', 'tokenizer.json'])
def test_damaged_or_missing_file_of_a_store_in_a_bucket_is_named(store_url, name):
    path = parse_path(f'{store_url}/{name}')
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(UserError, match=name):
        Store(store_url)
    path.unlink()
    with pytest.raises(UserError, match=name):
        Store(store_url)
    path.write_bytes(content)
    Store(store_url)
    with pytest.raises(UserError, match=f'{store_url}/none '):
        Store(f'{store_url}/none')
