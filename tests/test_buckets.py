"""Sources in buckets: the documents of the same files on a disk, or a line that says what is the matter."""

import contextlib
import dataclasses
import glob
import gzip
import json
import tracemalloc

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from emulators import Answer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from stores import corpus_of, found, lines, mixture, refused

from sinklab.data import source_files
from sinklab.data.sources import open_source
from sinklab.schema import UserError
from sinklab.storage.atomic_write import upload_file
from sinklab.storage.paths import parse_path, short_timeout

TEXTS = corpus_of(40)
PACKED = {
    'a.jsonl': lines(TEXTS[:10]),
    'deep/b.jsonl.gz': gzip.compress(lines(TEXTS[10:20])),
    'deep/er/c.jsonl.zst': zstandard.compress(lines(TEXTS[20:30])),
    'd.txt': 'ein Text für sich\r\n'.encode(),
    '.hidden.txt': b'hidden',
    'deep/.hidden/e.txt': b'hidden, too',
    'odd name#1 [x].txt': b'odd',
    'empty.txt': b'',
}


def filled(folder, content):
    for name, said in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(said)


def sent(folder, url):
    """What a folder holds, in a bucket."""
    for path in folder.rglob('*'):
        if path.is_file():
            upload_file(path, parse_path(f'{url}/{path.relative_to(folder).as_posix()}'))


@pytest.fixture
def both(tmp_path, bucket):
    """(a folder, the same in a bucket)"""
    filled(tmp_path / 'corpus', PACKED)
    pyarrow.parquet.write_table(
        pyarrow.table({'text': TEXTS[30:]}), tmp_path / 'corpus' / 'f.parquet', row_group_size=3
    )
    sent(tmp_path / 'corpus', f'{bucket.url}/some/corpus')
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
def test_a_pattern_matches_in_a_bucket_what_it_matches_on_a_disk(both, pattern):
    folder, url = both
    names = [name for name, _ in source_files.glob_files(f'{folder}/{pattern}')]
    assert names
    assert [name for name, _ in source_files.glob_objects(f'{url}/{pattern}')] == names


NAME = st.lists(st.text('a.*', min_size=1, max_size=3), min_size=1, max_size=3)
PART = st.sampled_from(['*', '**', '?', 'a', '.a', '.*', '[!a]', 'a*', '*a', 'a.a'])


@settings(max_examples=200, deadline=None)
@given(st.lists(NAME, min_size=1, max_size=6), st.lists(PART, min_size=1, max_size=4))
@example([['a', 'a']], ['*', '*', '**'])
@pytest.mark.slow
def test_a_path_fits_every_pattern_by_which_glob_finds_it(tmp_path_factory, names, pattern):
    folder = tmp_path_factory.mktemp('tree')
    for name in names:
        with contextlib.suppress(OSError):  # a file where a folder should be, or . and ..
            filled(folder, {'/'.join(name): b''})
    there = [path.relative_to(folder).as_posix() for path in folder.rglob('*') if path.is_file()]
    by_glob = [path for path in glob.glob('/'.join(pattern), root_dir=folder, recursive=True) if path in there]
    assert sorted(path for path in there if source_files.is_glob_match(path.split('/'), pattern)) == sorted(
        set(by_glob)
    )


def test_documents_and_their_sizes_are_those_of_the_same_files_on_a_disk(both):
    folder, url = both
    for rest in ('**/*.{txt,jsonl,jsonl.gz,jsonl.zst,parquet}', 'd.txt', 'f.parquet#field=text'):
        assert found(f'text:{url}/{rest}') == found(f'text:{folder}/{rest}')


def test_a_mixture_may_lie_in_a_bucket_and_name_patterns_there(both, tmp_path, bucket):
    folder, url = both
    components = {name: {'source': f'text:{{}}/{rest}'} for name, rest in (('one', '*.jsonl'), ('two', '**/*.zst'))}
    here, there = (
        {name: {'source': part['source'].format(root)} for name, part in components.items()} for root in (folder, url)
    )
    local = mixture(tmp_path, here)
    parse_path(f'{url}/mixture.json').write_text(json.dumps(there))
    assert found(f'mixture:{url}/mixture.json') == found(local)
    assert 'cannot be read' in refused(f'mixture:{url}/none.json')


def test_identity_follows_what_the_storage_says_of_each_file(both):
    _, url = both
    given = f'text:{url}/**/*.jsonl*'
    before = open_source(given).identity
    assert open_source(given).identity == before
    parse_path(f'{url}/a.jsonl').write_bytes(lines([*TEXTS[:9], 'x' * len(TEXTS[9])]))
    assert open_source(given).identity != before


def large(lines_of, size=30_000, seed=0):
    rng = np.random.default_rng(seed)
    return lines(rng.bytes(size // 2).hex() for _ in range(lines_of))


@pytest.mark.slow
def test_a_large_file_is_streamed_and_read_once(bucket, tmp_path):
    (tmp_path / 'a.jsonl').write_bytes(large(1000))
    sent(tmp_path, bucket.url)
    size = (tmp_path / 'a.jsonl').stat().st_size
    bucket.proxy.requests.clear()
    tracemalloc.start()
    texts = sum(len(document.text) for document in open_source(f'text:{bucket.url}/a.jsonl').read_documents())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert texts == 1000 * 30_000
    received = sum(request.received for request in bucket.proxy.found('a.jsonl', method='GET'))
    assert size <= received < size + 20_000
    assert peak < 60 << 20


def test_of_a_table_the_columns_that_are_needed_are_read(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(source_files, 'BLOCK_BYTES', 1 << 16)
    rng = np.random.default_rng(0)
    other = [rng.bytes(300_000) for _ in range(20)]
    table = pyarrow.table({'before': other, 'text': [f'{n} text' for n in range(20)], 'more': other})
    pyarrow.parquet.write_table(table, tmp_path / 'a.parquet', row_group_size=4, compression=None)
    sent(tmp_path, bucket.url)
    bucket.proxy.requests.clear()
    assert [document.text for document in found(f'text:{bucket.url}/a.parquet')] == table['text'].to_pylist()
    assert sum(request.received for request in bucket.proxy.requests) < (tmp_path / 'a.parquet').stat().st_size / 3


PACKS = {'a.jsonl': bytes, 'a.jsonl.gz': gzip.compress, 'a.jsonl.zst': zstandard.compress}


@pytest.mark.parametrize('name', PACKS)
def test_what_is_cut_off_is_said_as_on_a_disk(bucket, tmp_path, name):
    (tmp_path / name).write_bytes(PACKS[name](lines(TEXTS))[:-9])
    sent(tmp_path, bucket.url)
    if name == 'a.jsonl':
        *_, last = found(f'text:{bucket.url}/{name}')
        assert last == dataclasses.replace(
            found(f'text:{tmp_path}/{name}')[-1], location=f'{bucket.url}/{name}, line 40'
        )
    else:
        assert refused(f'text:{bucket.url}/{name}') == refused(f'text:{tmp_path}/{name}').replace(
            str(tmp_path), bucket.url
        )


def failing(times, path='.jsonl', method='GET', **how):
    """A rule by which the first so many requests for a path come to nothing."""
    left = [times]

    def rule(asked, at):
        if asked != method or path not in at or not left[0]:
            return None
        left[0] -= 1
        return Answer(**how)

    return rule


@pytest.mark.slow
@pytest.mark.parametrize('how', [dict(status=503), dict(bytes=1000)], ids=['503', 'cut'])
def test_a_storage_that_fails_for_a_while_costs_time_alone(both, bucket, how):
    folder, url = both
    with bucket.proxy.treating(failing(3, **how)):
        assert found(f'text:{url}/**/*.jsonl*') == found(f'text:{folder}/**/*.jsonl*')
        assert not bucket.proxy.rules[0]('GET', '.jsonl')  # all of them have happened


def test_a_file_that_is_written_over_while_it_is_read_is_refused(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(source_files, 'BLOCK_BYTES', 1 << 12)
    (tmp_path / 'a.jsonl').write_bytes(lines(corpus_of(4000)))
    sent(tmp_path, bucket.url)
    documents = open_source(f'text:{bucket.url}/a.jsonl').read_documents()
    next(documents)
    (tmp_path / 'a.jsonl').write_bytes(lines(corpus_of(4000, seed=1)))
    sent(tmp_path, bucket.url)
    with pytest.raises(UserError, match=f'^{bucket.url}/a.jsonl has changed since the command started'):
        list(documents)


def test_what_is_not_there_is_said(both, bucket):
    _, url = both
    assert f'text:{url}/*.tsv matches no file' in refused(f'text:{url}/*.tsv')
    assert f'text:{url}/none.txt matches no file' in refused(f'text:{url}/none.txt')
    assert f'text:{url} is a folder' in refused(f'text:{url}')
    for rest in ('x.txt', '*.txt', '**/*.{txt,jsonl}'):
        assert f'the bucket {bucket.url}-not does not exist' in refused(f'text:{bucket.url}-not/{rest}')
    assert 'name of one bucket' in refused(f'text:{bucket.url[:-1]}*/*.txt')
    parse_path(f'{url}/a.csv').write_bytes(b'1')
    assert f'matches {url}/a.csv, which cannot be read; allowed' in refused(f'text:{url}/**')
    assert 'neither local nor in a bucket' in refused('text:az://bucket/*.txt')


@pytest.mark.parametrize('pattern', ['*.jsonl', 'a.jsonl'])
def test_a_permission_that_is_refused_is_said(both, bucket, pattern):
    _, url = both
    with bucket.proxy.treating(lambda method, path: Answer(status=403)):
        said = refused(f'text:{url}/{pattern}')
    assert 'cannot be read: ' in said
    assert 'refuses this account' in said
    with bucket.proxy.treating(failing(99, status=403, method='GET', path='a.jsonl')):
        assert 'refuses this account' in refused(f'text:{url}/a.jsonl')


@pytest.mark.slow
def test_a_storage_that_does_not_answer_is_said_in_time(both, bucket):
    _, url = both
    with bucket.proxy.treating(lambda method, path: Answer(status=503)), short_timeout(2):
        assert 'has not answered for' in refused(f'text:{url}/*.jsonl')
