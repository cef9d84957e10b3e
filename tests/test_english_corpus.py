"""benchmarks/english_corpus.py: which paragraphs of documentation become documents."""

import gzip

import pytest

from benchmarks import corpora, english_corpus

PROSE = 'This paragraph has a few more than eight words,\nand it wraps to a second line.'
LINE = PROSE.replace('\n', ' ')
CODE = 'x[0] = 1; y[1] = 2; z[2] = 3; f(x, y) + g(z)[0] {a: 1, b: 2, c: 3}'


def test_paragraphs_that_are_mostly_words_become_lines():
    assert [*english_corpus.select_prose(f'{PROSE}\n\n{CODE}\n\nToo few words.\n \n{PROSE}')] == [LINE, LINE]


def test_documents_have_each_paragraph_once_and_enough_characters(tmp_path, monkeypatch):
    monkeypatch.setattr(english_corpus, 'MIN_CHARACTERS', len(LINE) + 10)
    (tmp_path / 'a.info.gz').write_bytes(gzip.compress(f'{PROSE}\n\n{PROSE}'.encode()))
    (tmp_path / 'b.info.gz').write_bytes(gzip.compress(f'{PROSE} Again.\n\nOther: {PROSE}'.encode()))
    (tmp_path / 'c.txt').write_text(PROSE)
    assert english_corpus.read_documents(tmp_path, '*.info*.gz') == [f'{LINE}\n\n{LINE} Again.\n\n']


def test_package_of_folder_is_found_by_version_with_epoch(tmp_path, monkeypatch):
    path = tmp_path / 'git-doc_1%3a2.39.5_all.deb'
    path.touch()
    assert corpora.find_package('git-doc', '1:2.39.5', tmp_path) == path
    monkeypatch.setenv('PATH', '')
    with pytest.raises(SystemExit, match='cannot be downloaded'):
        corpora.find_package('git-doc', '1:2.39.6', tmp_path)
