"""benchmarks/corpora.py: how texts are extracted from packages."""

import gzip
import struct
import zlib

import pytest

from benchmarks import corpora

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


def test_r_object_that_is_no_vector_of_strings_is_rejected():
    with pytest.raises(ValueError):
        list(corpora.read_r_strings(b'UTF-8' + struct.pack('>II', 14, 0)))


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
