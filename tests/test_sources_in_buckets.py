"""Sources in buckets: equal documents to local files, and one-line errors."""

import contextlib
import dataclasses
import glob
import gzip
import json
import time
import tracemalloc

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from emulators import Answer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sinklab.storage.atomic_write import upload_file
from stores import encode_lines, get_source_error, make_texts, read_documents, write_mixture

from sinklab.data import source_files
from sinklab.data.sources import open_source
from sinklab.errors import UserError
from sinklab.storage.paths import limit_retry_seconds, parse_path

TEXTS = make_texts(40)
FILE_CONTENTS = {
    'a.jsonl': encode_lines(TEXTS[:10]),
    'deep/b.jsonl.gz': gzip.compress(encode_lines(TEXTS[10:20])),
    'deep/er/c.jsonl.zst': zstandard.compress(encode_lines(TEXTS[20:30])),
    'd.txt': 'ein Text für sich\r\n'.encode(),
    '.hidden.txt': b'hidden',
    'deep/.hidden/e.txt': b'hidden, too',
    'odd name#1 [x].txt': b'odd',
    'empty.txt': b'',
}


def write_texts(folder, contents):
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def upload_files(folder, url):
    """Upload the files of a folder to a bucket."""
    for path in folder.rglob('*'):
        if path.is_file():
            upload_file(path, parse_path(f'{url}/{path.relative_to(folder).as_posix()}'))


@pytest.fixture
def folder_and_url(tmp_path, bucket):
    """Return a folder and the URL of its copy in a bucket."""
    write_texts(tmp_path / 'corpus', FILE_CONTENTS)
    pyarrow.parquet.write_table(
        pyarrow.table({'text': TEXTS[30:]}), tmp_path / 'corpus' / 'f.parquet', row_group_size=3
    )
    upload_files(tmp_path / 'corpus', f'{bucket.url}/some/corpus')
    return tmp_path / 'corpus', f'{bucket.url}/some/corpus'


PATTERNS = [
    *('*.jsonl', '**/*.jsonl*', '*.{txt,jsonl,parquet}', '{deep/*.gz,deep/**/*.zst}', 'd.txt', '**/?.txt', '**'),
    *(
        '.*.txt',
        'deep/.hidden/*',
        '[a-d].*',
        '[!a]*.txt',
        'odd name#1 [x].txt',
        'odd*.txt',
        '*/*',
        'deep/**',
        '**/**/*',
    ),
]


@pytest.mark.parametrize('pattern', PATTERNS)
def test_glob_matches_same_files_in_bucket_as_on_disk(folder_and_url, pattern):
    folder, url = folder_and_url
    names = [name for name, _ in source_files.glob_files(f'{folder}/{pattern}')]
    assert names
    assert [name for name, _ in source_files.glob_objects(f'{url}/{pattern}')] == names


PATHS = st.lists(st.text('a.*', min_size=1, max_size=3), min_size=1, max_size=3)
PATTERN_PARTS = st.sampled_from(['*', '**', '?', 'a', '.a', '.*', '[!a]', 'a*', '*a', 'a.a'])


@settings(max_examples=200, deadline=None)
@given(st.lists(PATHS, min_size=1, max_size=6), st.lists(PATTERN_PARTS, min_size=1, max_size=4))
@example([['a', 'a']], ['*', '*', '**'])
@pytest.mark.slow
def test_is_glob_match_agrees_with_glob_module(tmp_path_factory, file_paths, pattern_parts):
    folder = tmp_path_factory.mktemp('tree')
    for path_parts in file_paths:
        with contextlib.suppress(OSError):  # a file in place of a folder, or . and ..
            write_texts(folder, {'/'.join(path_parts): b''})
    all_paths = [path.relative_to(folder).as_posix() for path in folder.rglob('*') if path.is_file()]
    glob_paths = [
        path for path in glob.glob('/'.join(pattern_parts), root_dir=folder, recursive=True) if path in all_paths
    ]
    assert sorted(path for path in all_paths if source_files.is_glob_match(path.split('/'), pattern_parts)) == sorted(
        set(glob_paths)
    )


def test_documents_and_sizes_in_bucket_match_local_files(folder_and_url):
    folder, url = folder_and_url
    for suffix in ('**/*.{txt,jsonl,jsonl.gz,jsonl.zst,parquet}', 'd.txt', 'f.parquet#field=text'):
        assert read_documents(f'text:{url}/{suffix}') == read_documents(f'text:{folder}/{suffix}')


def test_text_without_ending_in_bucket_matches_local_file(folder_and_url):
    folder, url = folder_and_url
    for name, content in {'LICENSE': b'text ' * 4000, 'log/a.bin': b'ELF \0', 'log/empty': b''}.items():
        write_texts(folder, {name: content})
        parse_path(f'{url}/{name}').write_bytes(content)
    for suffix in ('LICENSE', 'log/empty'):
        assert read_documents(f'text:{url}/{suffix}') == read_documents(f'text:{folder}/{suffix}')
    assert f'{url}/log/a.bin, which cannot be read' in get_source_error(f'text:{url}/log/*')


def test_mixture_in_bucket_matches_local_mixture(folder_and_url, tmp_path, bucket):
    folder, url = folder_and_url
    components = {
        name: {'source': f'text:{{}}/{suffix}'} for name, suffix in (('one', '*.jsonl'), ('two', '**/*.zst'))
    }
    local_components, bucket_components = (
        {name: {'source': component['source'].format(root)} for name, component in components.items()}
        for root in (folder, url)
    )
    local_source = write_mixture(tmp_path, local_components)
    parse_path(f'{url}/mixture.json').write_text(json.dumps(bucket_components))
    assert read_documents(f'mixture:{url}/mixture.json') == read_documents(local_source)
    assert f'{url}/none.json' in get_source_error(f'mixture:{url}/none.json')


def test_identity_changes_when_object_changes(folder_and_url):
    _, url = folder_and_url
    source = f'text:{url}/**/*.jsonl*'
    identity = open_source(source).identity
    assert open_source(source).identity == identity
    parse_path(f'{url}/a.jsonl').write_bytes(encode_lines([*TEXTS[:9], 'x' * len(TEXTS[9])]))
    assert open_source(source).identity != identity


def make_large_lines(num_lines, size=30_000, seed=0):
    rng = np.random.default_rng(seed)
    return encode_lines(rng.bytes(size // 2).hex() for _ in range(num_lines))


@pytest.mark.slow
def test_large_file_is_streamed_and_read_once(bucket, tmp_path):
    (tmp_path / 'a.jsonl').write_bytes(make_large_lines(1000))
    upload_files(tmp_path, bucket.url)
    size = (tmp_path / 'a.jsonl').stat().st_size
    bucket.proxy.requests.clear()
    tracemalloc.start()
    num_characters = sum(
        len(document.text) for document in open_source(f'text:{bucket.url}/a.jsonl').read_documents()
    )
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_characters == 1000 * 30_000
    received = sum(request.response_bytes for request in bucket.proxy.find_requests('a.jsonl', method='GET'))
    assert size <= received < size + 20_000
    assert peak < 60 << 20


def test_parquet_source_reads_only_needed_columns(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(source_files, 'BLOCK_BYTES', 1 << 16)
    rng = np.random.default_rng(0)
    other_values = [rng.bytes(300_000) for _ in range(20)]
    table = pyarrow.table({'before': other_values, 'text': [f'{n} text' for n in range(20)], 'more': other_values})
    pyarrow.parquet.write_table(table, tmp_path / 'a.parquet', row_group_size=4, compression=None)
    upload_files(tmp_path, bucket.url)
    bucket.proxy.requests.clear()
    assert [document.text for document in read_documents(f'text:{bucket.url}/a.parquet')] == table['text'].to_pylist()
    assert (
        sum(request.response_bytes for request in bucket.proxy.requests) < (tmp_path / 'a.parquet').stat().st_size / 3
    )


COMPRESSORS = {'a.jsonl': bytes, 'a.jsonl.gz': gzip.compress, 'a.jsonl.zst': zstandard.compress}


@pytest.mark.parametrize('name', COMPRESSORS)
def test_truncated_file_is_reported_as_on_disk(bucket, tmp_path, name):
    (tmp_path / name).write_bytes(COMPRESSORS[name](encode_lines(TEXTS))[:-9])
    upload_files(tmp_path, bucket.url)
    if name == 'a.jsonl':
        *_, last_document = read_documents(f'text:{bucket.url}/{name}')
        assert last_document == dataclasses.replace(
            read_documents(f'text:{tmp_path}/{name}')[-1], location=f'{bucket.url}/{name}, line 40'
        )
    else:
        assert get_source_error(f'text:{bucket.url}/{name}') == get_source_error(f'text:{tmp_path}/{name}').replace(
            str(tmp_path), bucket.url
        )


def fail_requests(times, path='.jsonl', method='GET', **answer_fields):
    """Return a rule that fails the first `times` requests for a path."""
    num_remaining = [times]

    def answer_request(requested_method, requested_path):
        if requested_method != method or path not in requested_path or not num_remaining[0]:
            return None
        num_remaining[0] -= 1
        return Answer(**answer_fields)

    return answer_request


@pytest.mark.slow
@pytest.mark.parametrize('answer_fields', [dict(status=503), dict(max_sent_bytes=1000)], ids=['503', 'cut'])
def test_transient_storage_failures_are_retried(folder_and_url, bucket, answer_fields):
    folder, url = folder_and_url
    with bucket.proxy.apply_rule(fail_requests(3, **answer_fields)):
        assert read_documents(f'text:{url}/**/*.jsonl*') == read_documents(f'text:{folder}/**/*.jsonl*')
        assert not bucket.proxy.rules[0]('GET', '.jsonl')  # all failures have occurred


def test_file_overwritten_while_read_is_refused(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(source_files, 'BLOCK_BYTES', 1 << 12)
    (tmp_path / 'a.jsonl').write_bytes(encode_lines(make_texts(4000)))
    upload_files(tmp_path, bucket.url)
    documents = open_source(f'text:{bucket.url}/a.jsonl').read_documents()
    next(documents)
    (tmp_path / 'a.jsonl').write_bytes(encode_lines(make_texts(4000, seed=1)))
    upload_files(tmp_path, bucket.url)
    with pytest.raises(UserError, match=f'^{bucket.url}/a.jsonl .*changed'):
        list(documents)


def test_missing_object_or_bucket_is_refused(folder_and_url, bucket):
    _, url = folder_and_url
    assert f'text:{url}/*.tsv' in get_source_error(f'text:{url}/*.tsv')
    assert f'text:{url}/none.txt' in get_source_error(f'text:{url}/none.txt')
    assert f'text:{url} ' in get_source_error(f'text:{url}')
    for suffix in ('x.txt', '*.txt', '**/*.{txt,jsonl}'):
        assert f'bucket {bucket.url}-not ' in get_source_error(f'text:{bucket.url}-not/{suffix}')
    assert f'{bucket.url[:-1]}*/*.txt ' in get_source_error(f'text:{bucket.url[:-1]}*/*.txt')
    parse_path(f'{url}/a.csv').write_bytes(b'\0')
    assert f'{url}/a.csv' in get_source_error(f'text:{url}/**')
    assert 'az://bucket/*.txt ' in get_source_error('text:az://bucket/*.txt')


@pytest.mark.parametrize('pattern', ['*.jsonl', 'a.jsonl'])
def test_permission_error_is_reported(folder_and_url, bucket, pattern):
    _, url = folder_and_url
    with bucket.proxy.apply_rule(lambda method, path: Answer(status=403)):
        message = get_source_error(f'text:{url}/{pattern}')
    assert f'{bucket.url} ' in message
    assert 'account' in message
    with bucket.proxy.apply_rule(fail_requests(99, status=403, method='GET', path='a.jsonl')):
        assert 'account' in get_source_error(f'text:{url}/a.jsonl')


@pytest.mark.slow
def test_unresponsive_storage_is_reported_within_timeout(folder_and_url, bucket):
    _, url = folder_and_url
    start_time = time.monotonic()
    with bucket.proxy.apply_rule(lambda method, path: Answer(status=503)), limit_retry_seconds(2):
        assert f'{bucket.url} ' in get_source_error(f'text:{url}/*.jsonl')
    assert time.monotonic() - start_time < 10.0
