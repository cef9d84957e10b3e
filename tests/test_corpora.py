"""Corpora of benchmarks: texts extracted from packages, and English documentation."""

import gzip
import struct
import zlib

import pytest

from benchmarks import corpora, english_corpus

MANUAL = """
Kapitel 1. Grundlagen

    Dieses Kapitel beschreibt die Grundlagen für
    Anfänger und Fortgeschrittene.

    This paragraph was not
    translated.

    | Tabelle |
    | für alle |

    $ echo für
    $ exit
"""
PROSE = 'This paragraph has a few more than eight words,\nand it wraps to a second line.'
LINE = PROSE.replace('\n', ' ')
CODE = 'x[0] = 1; y[1] = 2; z[2] = 3; f(x, y) + g(z)[0] {a: 1, b: 2, c: 3}'


def serialize_lines(lines):
    """Return a vector of strings in R's serialization, compressed with its length before it."""
    data = b'X\n' + struct.pack('>III', 3, 0x40200, 0x30500) + struct.pack('>I', 5) + b'UTF-8'
    data += struct.pack('>II', 16, len(lines))
    for line in lines:
        data += struct.pack('>II', 0x00008009, len(line.encode())) + line.encode()
    return struct.pack('>I', len(data)) + zlib.compress(data)


def test_novels_are_read_from_r_database(tmp_path):
    folder = tmp_path / 'usr/lib/R/site-library/janeaustenr/data'
    folder.mkdir(parents=True)
    novels = [['EMMA', '', 'VOLUME I'], ['PERSUASION', 'Chapter 1, éd.']]
    (folder / 'Rdata.rdb').write_bytes(b''.join(map(serialize_lines, novels)))
    assert corpora.read_novels(tmp_path) == {'Emma': 'EMMA\n\nVOLUME I', 'Persuasion': 'PERSUASION\nChapter 1, éd.'}


def test_manual_has_translated_running_text_only(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, 'MIN_CHARACTERS', 1)
    folder = tmp_path / 'usr/share/debian-reference'
    folder.mkdir(parents=True)
    (folder / 'debian-reference.de.txt.gz').write_bytes(gzip.compress(MANUAL.encode()))
    assert [*corpora.read_manual(tmp_path)] == [
        'Dieses Kapitel beschreibt die Grundlagen für\nAnfänger und Fortgeschrittene.\n\n'
    ]


def test_documents_have_whole_paragraphs_and_a_short_rest_is_dropped():
    documents = [*corpora.join_paragraphs(['a' * 5, 'b' * 5, 'c' * 12, 'd'], 10)]
    assert documents == ['aaaaa\n\nbbbbb\n\n', 'cccccccccccc\n\n']


def test_every_domain_has_a_package_and_a_digest():
    assert {package for package, _ in corpora.DOMAINS.values()} == {*corpora.PACKAGES}
    assert {*corpora.DIGESTS} == {*corpora.DOMAINS, 'long'}


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
