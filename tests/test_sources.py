"""Document sources: equal documents from every file format, and errors for unreadable input."""

import gzip
import json
import os
import random
import sys
import tracemalloc

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stores import encode_lines, get_source_error, make_conversation, read_documents

from sinklab.data import source_files
from sinklab.data.documents import DamagedDocument, Document
from sinklab.data.sources import open_source
from sinklab.errors import format_extra_command

TEXTS = ['first\nfile', 'zwei ü 中文 😀', '\u2028 \u0085 \x00', '', ' \n', 'a "quoted" \\ line']


def split_in_halves(content):
    middle = len(content) // 2
    return content[:middle], content[middle:]


def write_parquet(path, texts, rows=2):
    pyarrow.parquet.write_table(
        pyarrow.table({'text': texts, 'id': list(range(len(texts)))}), path, row_group_size=rows
    )


WRITERS = {
    'a.jsonl': lambda path, texts: path.write_bytes(encode_lines(texts)),
    'a.jsonl.gz': lambda path, texts: path.write_bytes(
        b''.join(map(gzip.compress, split_in_halves(encode_lines(texts))))
    ),
    'a.jsonl.zst': lambda path, texts: path.write_bytes(
        b''.join(map(zstandard.compress, split_in_halves(encode_lines(texts))))
    ),
    'a.parquet': write_parquet,
}


def read_texts(source):
    return [document.text for document in read_documents(source)]


@pytest.mark.slow
@pytest.mark.parametrize('name', WRITERS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(st.characters(exclude_categories=['Cs']), max_size=50), min_size=1, max_size=9))
def test_documents_are_equal_across_file_formats(tmp_path, name, texts):
    WRITERS[name](tmp_path / name, texts)
    documents = read_documents(f'text:{tmp_path}/a.*')
    assert [document.text for document in documents] == texts
    assert len({document.name for document in documents}) == len(texts)
    assert 0 < sum(document.size for document in documents) <= (tmp_path / name).stat().st_size


@pytest.mark.parametrize(
    ('suffix', 'compress'), [('.txt', bytes), ('.txt.gz', gzip.compress), ('.txt.zst', zstandard.compress)]
)
def test_text_file_is_one_document(tmp_path, suffix, compress):
    for number, text in enumerate(TEXTS):
        (tmp_path / f'{number}{suffix}').write_bytes(compress(text.encode()))
    assert read_texts(f'text:{tmp_path}/*{suffix}') == TEXTS


def test_text_file_with_other_or_no_ending_is_one_document(tmp_path):
    texts = {
        'LICENSE': 'GPL',
        'a.log': 'zwei ü 中文 😀',
        'b.rst': '',
        'c.TXT': 'x' * (source_files.BEGINNING_BYTES - 1) + 'ü',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding='utf-8')
    assert read_texts(f'text:{tmp_path}/*') == [*texts.values()]
    assert read_texts(f'text:{tmp_path}/LICENSE') == ['GPL']


@pytest.mark.parametrize(
    'make_file',
    [
        lambda path: path.write_bytes(b'ELF \x00'),
        lambda path: path.write_bytes(gzip.compress(b'text')),
        lambda path: path.write_bytes('Öl'.encode('latin-1')),
        lambda path: os.mkfifo(path),
        lambda path: path.symlink_to('nothing'),
    ],
    ids=['nul', 'gzip', 'latin-1', 'pipe', 'dangling link'],
)
def test_file_that_is_no_text_is_refused_by_name(tmp_path, make_file):
    (tmp_path / 'a').write_text('text')
    make_file(tmp_path / 'b')
    assert f'{tmp_path}/b, which cannot be read; allowed: .txt' in get_source_error(f'text:{tmp_path}/*')


def test_document_names_do_not_depend_on_directory(tmp_path, monkeypatch):
    for folder in ('here', 'there'):
        (tmp_path / folder / 'deep').mkdir(parents=True)
        (tmp_path / folder / 'deep' / 'a.jsonl').write_bytes(encode_lines(TEXTS))
        (tmp_path / folder / 'b.txt').write_text('text')
    monkeypatch.chdir(tmp_path / 'there')
    globs = (f'text:{tmp_path}/here/**/*.*', f'text:{tmp_path}/there/**/*.*', 'text:**/*.*', 'text:./**/*.*')
    names = [[document.name for document in read_documents(glob)] for glob in globs]
    assert names[0] == names[1] == names[2] == names[3]
    assert names[0][:2] == ['b.txt', 'deep/a.jsonl:1']


def test_glob_expands_braces(tmp_path, monkeypatch):
    for name in ('a/one.txt', 'a/two.jsonl', 'b/one.txt', 'b/deep/{x}.txt', 'c,d.txt', '{a,b}.txt'):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(encode_lines(['text']))
    monkeypatch.chdir(tmp_path)
    for pattern, names in {
        'a/*.{txt,jsonl}': ['one.txt', 'two.jsonl:1'],
        'a/{one.txt,two.jsonl,none.txt}': ['one.txt', 'two.jsonl:1'],
        '{a,b}/one.txt': ['a/one.txt', 'b/one.txt'],
        '{a,{b,c}}/*.{txt,jsonl}': ['a/one.txt', 'a/two.jsonl:1', 'b/one.txt'],
        'b/deep/{x}.txt': ['{x}.txt'],
        '{a,b}.txt': ['{a,b}.txt'],
    }.items():
        assert [document.name for document in read_documents(f'text:{pattern}')] == names, pattern
        assert [document.name for document in read_documents(f'text:{tmp_path}/{pattern}')] == names, pattern
    assert 'text:a/*.{md,rst}' in get_source_error('text:a/*.{md,rst}')


def test_stdlib_source_holds_library_modules_without_tests():
    names = [document.name for document in read_documents('stdlib')]
    assert 'json/decoder.py' in names
    assert 'unittest/case.py' in names
    assert not any(part in ('test', 'tests') for name in names for part in name.split('/'))
    assert len(names) > 300
    assert names == sorted(names)


@pytest.mark.parametrize(
    ('name', 'content', 'message'),
    [
        ('a.txt', b'caf\xe9', 'is not UTF-8 (byte 3)'),
        ('a.jsonl', b'{"text": "x"}\n{"body": "y"}\n', 'line 2 has no field "text"'),
        ('a.jsonl', b'{"text": 3}\n', 'line 1 has a "text" that is not text'),
        ('a.jsonl', b'{"text": "x"', 'line 1 is not JSON'),
        ('a.jsonl', b'["x"]\n', 'line 1 is not a JSON object'),
        ('a.jsonl', b'{"text": "x"}\n{"text": "caf\xe9"}\n', 'line 2 is not UTF-8'),
        ('a.jsonl', b'{"text": "\\ud800"}\n', 'line 1 has an incomplete character'),
    ],
)
def test_damaged_document_is_reported_by_location_and_others_are_read(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    documents = read_documents(f'text:{tmp_path}/*')
    damaged = [document for document in documents if isinstance(document, DamagedDocument)]
    assert [message in f'{document.location} {document.reason}' for document in damaged] == [True]
    assert all(document.text == 'x' for document in documents if isinstance(document, Document))


@pytest.mark.parametrize('name', ['a.jsonl.gz', 'a.jsonl.zst', 'a.parquet'])
def test_damaged_file_is_refused_by_name(tmp_path, name):
    WRITERS[name](tmp_path / name, TEXTS * 200)
    complete_content = (tmp_path / name).read_bytes()
    for content in (complete_content[:-3], complete_content[: len(complete_content) // 3], b'nothing of the kind'):
        (tmp_path / name).write_bytes(content)
        assert f'{tmp_path}/{name} ' in get_source_error(f'text:{tmp_path}/a.*')


@pytest.mark.parametrize(
    ('source', 'message'),
    [
        ('text:/nowhere/*.txt', 'text:/nowhere/*.txt matches no file; quote the pattern'),
        ('txt:a', 'txt:a is unknown (sources: stdlib, text:GLOB'),
        ('stdlib:x', 'remove :x'),
        ('text:{}/*', 'which cannot be read; allowed: .txt'),
        ('text:{}/a.parquet#field=body', "has no column 'body' (columns: text, id)"),
        ('text:{}/a.parquet#fild=body', 'has the option fild=body; allowed after #'),
        ('chat:{}/b.pdf', 'cannot be read'),
        ('tfds:{}', 'contains no data set'),
        ('tfds:no_such_data_set', 'is neither a folder nor in the catalogue'),
        ('mixture:{}/none.json', 'cannot be read'),
    ],
)
def test_invalid_source_is_refused(tmp_path, source, message):
    write_parquet(tmp_path / 'a.parquet', ['x'])
    (tmp_path / 'b.pdf').write_bytes(b'%PDF-1.7\n%\xe2\xe3\xcf\xd3\n')
    assert message in get_source_error(source.format(tmp_path))


def test_field_option_reads_renamed_and_nested_fields(tmp_path):
    records = [{'body': {'text': 'one'}, 'meta': {'set': 'A'}}, {'body': {'text': 'two'}, 'meta': {'set': 'B'}}]
    (tmp_path / 'a.jsonl').write_text(''.join(json.dumps(record) + '\n' for record in records))
    json_documents = read_documents(f'text:{tmp_path}/a.jsonl#field=body.text,domain=meta.set')
    assert [(document.text, document.domain) for document in json_documents] == [('one', 'A'), ('two', 'B')]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / 'a.parquet')
    parquet_documents = read_documents(f'text:{tmp_path}/a.parquet#field=body.text,domain=meta.set')
    assert [(document.text, document.domain) for document in parquet_documents] == [('one', 'A'), ('two', 'B')]


@pytest.mark.slow
def test_reading_holds_one_document_in_memory(tmp_path):
    rng = random.Random(0)
    texts = [f'{rng.getrandbits(40_000):x}' for _ in range(3000)]  # incompressible text
    for name, compress in (('a.jsonl', bytes), ('a.jsonl.gz', gzip.compress), ('a.jsonl.zst', zstandard.compress)):
        (tmp_path / name).write_bytes(compress(encode_lines(texts)))
    write_parquet(tmp_path / 'a.parquet', texts, rows=500)
    for path in tmp_path.iterdir():
        tracemalloc.start()
        assert sum(1 for _ in open_source(f'text:{path}').read_documents()) == 3000
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 6e6, path  # of 30 MB


def test_chat_source_marks_only_assistant_messages_for_loss(tmp_path):
    turns = make_conversation(('system', 'be kind'), ('user', 'hello'), ('assistant', 'good day'), ('user', 'bye'))
    (tmp_path / 'a.jsonl').write_text(json.dumps(turns))
    chat = open_source(f'chat:{tmp_path}/a.jsonl')
    assert chat.masked
    (document,) = chat.read_documents()
    assert document.parts == (
        ('<|system|>\nbe kind\n<|user|>\nhello\n<|assistant|>\n', False),
        ('good day', True),
        ('\n<|user|>\nbye', False),
    )


@pytest.mark.parametrize(
    ('record', 'message'),
    [
        (make_conversation(('user', 'hello')), 'has no message of an assistant'),
        (
            make_conversation(('robot', 'hello'), ('assistant', 'x')),
            "a message with the role 'robot' (allowed: system, user, assistant)",
        ),
        ({'messages': 'hello'}, 'not a list of messages'),
        ({'messages': [{'role': 'assistant'}]}, 'has no field "content"'),
        ({'text': 'hello'}, 'has no field "messages"'),
    ],
)
def test_invalid_chat_record_is_damaged_document(tmp_path, record, message):
    (tmp_path / 'a.jsonl').write_text(json.dumps(record))
    (damaged,) = read_documents(f'chat:{tmp_path}/a.jsonl')
    assert message in damaged.reason


def test_null_and_non_utf8_parquet_values_are_damaged_documents(tmp_path):
    values = pyarrow.array([b'ok', None, b'\xff'], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({'text': values}), tmp_path / 'a.parquet')
    first, null, bytes_ = read_documents(f'text:{tmp_path}/a.parquet')
    assert (first.text, '"text"' in null.reason, 'UTF-8 (byte 0)' in bytes_.reason) == ('ok', True, True)


def test_damaged_record_reason_is_one_short_line(tmp_path):
    (tmp_path / 'a.jsonl').write_text(json.dumps({f'field\n{number}': 1 for number in range(5000)}))
    (damaged,) = read_documents(f'text:{tmp_path}/a.jsonl')
    assert '\n' not in damaged.reason
    assert len(damaged.reason) < 400


@pytest.mark.parametrize(('name', 'library'), [('a.jsonl.zst', 'zstandard'), ('a.parquet', 'pyarrow')])
def test_missing_library_is_named_with_install_command(tmp_path, monkeypatch, name, library):
    WRITERS[name](tmp_path / name, TEXTS)
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setitem(sys.modules, f'{library}.parquet', None)
    assert all(
        part in get_source_error(f'text:{tmp_path}/{name}')
        for part in (name, f' {library}', format_extra_command('data'))
    )


def test_source_identity_changes_with_files_and_options(tmp_path):
    (tmp_path / 'a.jsonl').write_bytes(encode_lines(['one'], body='two'))
    source = f'text:{tmp_path}/a.jsonl'
    identity = open_source(source).identity
    assert json.loads(json.dumps(identity)) == json.loads(json.dumps(open_source(source).identity))
    assert open_source(f'{source}#field=body').identity != identity
    os.utime(tmp_path / 'a.jsonl', (1, 1))
    assert open_source(source).identity != identity
