"""Document sources: equal documents from every file format, mixtures, and errors for unreadable input."""

import gzip
import json
import os
import random
import sys
import sysconfig
import tracemalloc

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stores import encode_lines, get_source_error, make_conversation, read_documents, write_mixture

from sinklab.data.sources import open_source
from sinklab.errors import format_extra_command

TEXTS = ['first\nfile', 'zwei ü 中文 😀', '\u2028 \u0085 \x00', '', ' \n', 'a "quoted" \\ line']


def compress_zstd(content):
    return pyarrow.compress(content, 'zstd', asbytes=True)


def compress_in_two_parts(compress, content):
    middle = len(content) // 2
    return compress(content[:middle]) + compress(content[middle:])


def write_parquet(path, texts, rows=2):
    table = pyarrow.table({'text': texts, 'id': list(range(len(texts)))})
    pyarrow.parquet.write_table(table, path, row_group_size=rows)


WRITERS = {
    'a.jsonl': lambda path, texts: path.write_bytes(encode_lines(texts)),
    'a.jsonl.gz': lambda path, texts: path.write_bytes(compress_in_two_parts(gzip.compress, encode_lines(texts))),
    'a.jsonl.zst': lambda path, texts: path.write_bytes(compress_in_two_parts(compress_zstd, encode_lines(texts))),
    'a.parquet': write_parquet,
}


def read_texts(source):
    return [document.text for document in read_documents(source)]


def read_names(source):
    return [document.name for document in read_documents(source)]


@pytest.mark.slow
@pytest.mark.parametrize('name', WRITERS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(st.characters(exclude_categories=['Cs']), max_size=50), min_size=1, max_size=9))
def test_documents_are_equal_across_file_formats(tmp_path, name, texts):
    WRITERS[name](tmp_path / name, texts)
    assert read_texts(f'text:{tmp_path}/a.*') == texts
    assert len(set(read_names(f'text:{tmp_path}/a.*'))) == len(texts)


@pytest.mark.parametrize(
    ('suffix', 'compress'), [('.txt', bytes), ('.txt.gz', gzip.compress), ('.txt.zst', compress_zstd)]
)
def test_text_file_is_one_document(tmp_path, suffix, compress):
    for number, text in enumerate(TEXTS):
        (tmp_path / f'{number}{suffix}').write_bytes(compress(text.encode()))
    assert read_texts(f'text:{tmp_path}/*{suffix}') == TEXTS


def test_text_file_with_other_or_no_ending_is_one_document(tmp_path):
    texts = {'LICENSE': 'GPL', 'a.log': 'zwei ü 中文 😀', 'b.rst': '', 'c.TXT': 'x' * 10_000 + 'ü'}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding='utf-8')
    assert read_texts(f'text:{tmp_path}/*') == [*texts.values()]


@pytest.mark.parametrize(
    'make_file',
    [lambda path: path.write_bytes('Öl'.encode('latin-1')), lambda path: path.symlink_to('nothing')],
    ids=['latin-1', 'dangling link'],
)
def test_file_that_is_no_text_is_refused_by_name(tmp_path, make_file):
    make_file(tmp_path / 'b')
    assert f'{tmp_path}/b' in get_source_error(f'text:{tmp_path}/*')


def test_document_names_do_not_depend_on_directory(tmp_path, monkeypatch):
    for folder in ('here', 'there'):
        (tmp_path / folder / 'deep').mkdir(parents=True)
        (tmp_path / folder / 'deep' / 'a.jsonl').write_bytes(encode_lines(['one', 'two']))
        (tmp_path / folder / 'b.txt').write_text('text')
    monkeypatch.chdir(tmp_path / 'there')
    for pattern in (f'{tmp_path}/here/**/*.*', f'{tmp_path}/there/**/*.*', '**/*.*', './**/*.*'):
        assert read_names(f'text:{pattern}') == ['b.txt', 'deep/a.jsonl:1', 'deep/a.jsonl:2']


def test_stdlib_source_holds_library_modules_without_tests():
    names = read_names('stdlib')
    assert {'json/decoder.py', 'unittest/case.py'} < set(names)
    assert not any(part in ('test', 'tests') for name in names for part in name.split('/'))
    assert len(names) > 300
    assert names == sorted(names)


def test_files_of_stdlib_are_cut_before_functions_and_classes(tmp_path, monkeypatch):
    (tmp_path / 'a.py').write_text(
        'import os\n\nclass A:\n    x = 1\n\n    @property\n    def b(self):\n        return 2\n\n\n'
        'async def c():\n    pass\n'
    )
    monkeypatch.setattr(sysconfig, 'get_path', {'stdlib': tmp_path}.get)
    source = open_source('stdlib:functions')
    assert [(document.name, document.text) for document in source.read_documents()] == [
        ('a.py:1', 'import os\n\n'),
        ('a.py:3', 'class A:\n    x = 1\n\n'),
        ('a.py:6', '@property\ndef b(self):\n    return 2\n\n\n'),
        ('a.py:11', 'async def c():\n    pass\n'),
    ]
    assert source.identity != open_source('stdlib').identity


@pytest.mark.parametrize(
    ('name', 'content', 'problem'),
    [
        ('a.txt', b'caf\xe9', 'position 3'),
        ('a.jsonl', b'{"text": "x"}\n{"body": "y"}\n', 'line 2 has no field "text"'),
        ('a.jsonl', b'{"text": 3}\n', 'line 1'),
        ('a.jsonl', b'{"text": "x"', 'line 1'),
        ('a.jsonl', b'["x"]\n', 'line 1'),
        ('a.jsonl', b'{"text": "x"}\n{"text": "caf\xe9"}\n', 'line 2'),
        ('a.jsonl', b'{"text": "\\ud800"}\n', 'line 1'),
    ],
)
def test_damaged_document_is_named(tmp_path, name, content, problem):
    (tmp_path / name).write_bytes(content)
    error = get_source_error(f'text:{tmp_path}/*')
    assert f'{tmp_path}/{name}' in error
    assert problem in error


@pytest.mark.parametrize('value', [None, b'\xff'])
def test_null_and_non_utf8_parquet_values_are_named(tmp_path, value):
    values = pyarrow.array([b'ok', value], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({'text': values}), tmp_path / 'a.parquet')
    assert 'row 2' in get_source_error(f'text:{tmp_path}/a.parquet')


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
        ('text:/nowhere/*.txt', 'text:/nowhere/*.txt'),
        ('txt:a', 'text:GLOB'),
        ('text:{}/caf\udce9.txt', r'caf\udce9.txt'),
        ('stdlib:x', ':x'),
        ('text:{}/*', 'b.pdf'),
        ('text:{}/a.parquet#field=body', "'body'"),
        ('text:{}/a.parquet#fild=body', 'fild=body'),
        ('chat:{}/b.pdf', 'b.pdf'),
        ('tfds:{}', 'dataset_info.json'),
        ('tfds:no_such_data_set', 'no_such_data_set'),
        ('mixture:{}/none.json', 'none.json'),
    ],
)
def test_invalid_source_is_refused(tmp_path, source, message):
    write_parquet(tmp_path / 'a.parquet', ['x'])
    (tmp_path / 'b.pdf').write_bytes(b'%PDF-1.7\n%\xe2\xe3\xcf\xd3\n')
    assert message in get_source_error(source.format(tmp_path))


def test_field_option_reads_renamed_and_nested_fields(tmp_path):
    records = [{'body': {'text': 'one'}, 'meta': {'set': 'A'}}, {'body': {'text': 'two'}, 'meta': {'set': 'B'}}]
    (tmp_path / 'a.jsonl').write_text(''.join(json.dumps(record) + '\n' for record in records))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / 'a.parquet')
    for name in ('a.jsonl', 'a.parquet'):
        documents = read_documents(f'text:{tmp_path}/{name}#field=body.text,domain=meta.set')
        assert [(document.text, document.domain) for document in documents] == [('one', 'A'), ('two', 'B')]


@pytest.mark.slow
def test_reading_holds_one_document_in_memory(tmp_path):
    rng = random.Random(0)
    texts = [f'{rng.getrandbits(40_000):x}' for _ in range(3000)]  # incompressible text
    for name in ('a.jsonl', 'a.jsonl.gz', 'a.jsonl.zst'):
        WRITERS[name](tmp_path / name, texts)
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
    ('record', 'word'),
    [
        (make_conversation(('user', 'hello')), 'assistant'),
        (make_conversation(('robot', 'hello'), ('assistant', 'x')), "'robot'"),
        ({'messages': 'hello'}, 'messages'),
        ({'messages': [{'role': 'assistant'}]}, '"content"'),
        ({'text': 'hello'}, '"messages"'),
    ],
)
def test_invalid_chat_record_is_damaged_document(tmp_path, record, word):
    (tmp_path / 'a.jsonl').write_text(json.dumps(record))
    assert word in get_source_error(f'chat:{tmp_path}/a.jsonl')


@pytest.mark.parametrize('name', ['a.jsonl.zst', 'a.parquet'])
def test_missing_library_is_named_with_install_command(tmp_path, monkeypatch, name):
    WRITERS[name](tmp_path / name, TEXTS)
    monkeypatch.setitem(sys.modules, 'pyarrow', None)
    monkeypatch.setitem(sys.modules, 'pyarrow.parquet', None)
    message = get_source_error(f'text:{tmp_path}/{name}')
    assert all(part in message for part in (name, ' pyarrow', format_extra_command('data')))


def test_source_identity_changes_with_files_and_options(tmp_path):
    (tmp_path / 'a.jsonl').write_bytes(encode_lines(['one'], body='two'))
    source = f'text:{tmp_path}/a.jsonl'
    identity = open_source(source).identity
    assert json.loads(json.dumps(identity)) == json.loads(json.dumps(open_source(source).identity))
    assert open_source(f'{source}#field=body').identity != identity
    os.utime(tmp_path / 'a.jsonl', (1, 1))
    assert open_source(source).identity != identity


@pytest.fixture
def component_dir(tmp_path):
    (tmp_path / 'a.jsonl').write_bytes(encode_lines(['one', 'two']))
    (tmp_path / 'b.txt').write_text('three')
    (tmp_path / 'c.jsonl').write_text(json.dumps(make_conversation(('assistant', 'x'))))
    return tmp_path


def test_mixture_keeps_document_domains_and_normalizes_weights(component_dir):
    a, b = (dict(source=f'text:{component_dir}/{name}') for name in ('a.jsonl', 'b.txt'))
    mixture = write_mixture(component_dir, dict(A=a | dict(weight=3), B=b | dict(weight=1)))
    assert open_source(mixture).weights == (('A', 0.75), ('B', 0.25))
    assert [(document.domain, document.name, document.text) for document in read_documents(mixture)] == [
        ('A', 'A/a.jsonl:1', 'one'),
        ('A', 'A/a.jsonl:2', 'two'),
        ('B', 'B/b.txt', 'three'),
    ]
    assert open_source(write_mixture(component_dir, dict(A=a, B=b))).weights is None


@pytest.mark.parametrize(
    ('components', 'word'),
    [
        ({}, 'component'),
        (dict(A=dict(source='text:{}/a.jsonl', weight=1), B=dict(source='text:{}/b.txt')), 'weight for B'),
        (dict(A=dict(source='text:{}/a.jsonl', weight=-1)), '.weight'),
        (dict(A=dict(source='text:{}/a.jsonl', wight=1)), 'wight'),
        (dict(A=dict(source='text:{}/none')), '/none'),
        (dict(A=dict(source='mixture:{}/m.json')), 'mixture'),
        (dict(A=dict(source='text:{}/a.jsonl'), B=dict(source='chat:{}/c.jsonl')), 'chat:'),
    ],
)
def test_mixture_refuses_invalid_component(component_dir, components, word):
    for component in components.values():
        component['source'] = component['source'].format(component_dir)
    assert word in get_source_error(write_mixture(component_dir, components))
