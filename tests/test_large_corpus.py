"""benchmarks/large_corpus.py and packed_store.py: documents of prose and code, and stores packed into files."""

from collections import Counter

import pytest

from benchmarks import large_corpus, packed_store
from sinklab.errors import UserError
from tests.stores import decode_documents, make_sharded_store

PROSE = 'This paragraph of a <b>manual</b> has more than eight words &amp; two lines.'
LINE = 'This paragraph of a manual has more than eight words & two lines.'


def count_documents(store, split):
    return Counter(text for domain in store.domains for text in decode_documents(store, split, domain))


def test_html_becomes_paragraphs_without_hidden_parts():
    page = f'\n<html><script>let a = "<p>"</script><!-- <p>none</p> --><h1>Title</h1><p class="x">{PROSE}</p></html>'
    assert [line for line in large_corpus.remove_markup(page).split('\n') if line] == ['Title', LINE]
    assert large_corpus.remove_markup('if a < b and c > d') == 'if a < b and c > d'


def test_paragraphs_that_begin_alike_are_taken_once_over_all_packages(monkeypatch):
    monkeypatch.setattr(large_corpus, 'MIN_CHARACTERS', 1)
    seen: set[str] = set()
    other = LINE.replace('manual', 'guide')
    texts = [f'{LINE}\n\n{other}', LINE.replace('eight', 'eight (8)').upper()]
    assert [*large_corpus.select_documents(texts, 'prose', seen)] == [f'{LINE}\n\n{other}']
    assert [*large_corpus.select_documents([other, f'Also: {LINE}'], 'prose', seen)] == [f'Also: {LINE}']


def test_code_loses_only_long_paragraphs_that_occur_again(monkeypatch):
    monkeypatch.setattr(large_corpus, 'MIN_CHARACTERS', 1)
    licence, file = '/* ' + 'A licence. ' * 20 + '*/', 'int a;\n\tint b;\n\nint a;\n\tint b;'
    texts = [f'{licence}\n\n{file}', f'{licence}\n\n{file}']
    assert [*large_corpus.select_documents(texts, 'code', set())] == [texts[0], file]


def test_long_file_becomes_documents_of_whole_paragraphs(monkeypatch):
    monkeypatch.setattr(large_corpus, 'MIN_CHARACTERS', 10)
    monkeypatch.setattr(large_corpus, 'MAX_CHARACTERS', 100)
    lines = [f'{letter} {LINE}' for letter in 'ABCDE']
    documents = ['\n\n'.join(lines[:2]), '\n\n'.join(lines[2:3]), '\n\n'.join(lines[3:])]
    assert [*large_corpus.select_documents(['\n\n'.join(lines), 'short'], 'prose', set())] == documents


def test_each_packed_file_makes_a_store_and_all_make_the_whole(tmp_path):
    store = make_sharded_store(tmp_path)
    packed_store.pack_store(store.path, tmp_path / 'packed', 2)
    packed_store.pack_store(store.path, tmp_path / 'again', 2)
    paths = sorted((tmp_path / 'packed').iterdir())
    assert all(path.read_bytes() == (tmp_path / 'again' / path.name).read_bytes() for path in paths)
    parts = [packed_store.unpack_store([path], tmp_path / path.name[0]) for path in paths]
    assert all(count_documents(part, 'held_out') == count_documents(store, 'held_out') for part in parts)
    train = [count_documents(part, 'train') for part in parts]
    assert train[0] + train[1] == count_documents(store, 'train')
    assert not count_documents(store, 'train') & count_documents(store, 'held_out')
    assert len({store.digest, *(part.digest for part in parts)}) == 3
    whole = packed_store.unpack_store(paths[1:], parts[0].path)
    assert whole.meta == store.meta


def test_damaged_packed_file_is_refused(tmp_path):
    packed_store.pack_store(make_sharded_store(tmp_path).path, tmp_path, 1)
    path = tmp_path / '0.tar.xz'
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r'0\.tar\.xz'):
        packed_store.unpack_store([path], tmp_path / 'unpacked')
