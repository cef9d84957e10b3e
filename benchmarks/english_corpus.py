"""Make a corpus of English documentation from Debian packages, for training runs.

    python -m benchmarks.english_corpus build/english
    python -m benchmarks.english_corpus build/english --packages=DIR

The script writes DIR/PACKAGE.jsonl with a document in each line: manuals, guides, and the novels of Jane Austen; 61
million characters in all. It keeps the paragraphs that are mostly words, so that code, tables and lists of options
are left out. Train on it with --config.data.source=text:'build/english/*.jsonl'.

It needs no root: `apt-get download` fetches the packages of PACKAGES in exactly these versions (110 MB), and `dpkg`
unpacks them. Where there is no apt, or where it has other versions, --packages names a folder with the files. The
script fails if the corpus does not have the SHA-256 of DIGEST. Licences are those of the packages.
"""

import gzip
import hashlib
import json
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.corpora import join_paragraphs, read_novels, run_script, split_paragraphs, unpack_package

# {package: (version, pattern of its source files)}
PACKAGES = {
    'linux-doc-6.1': ('6.1.192-2', '*.rst.txt'),
    'vim-runtime': ('2:9.0.1378-2+deb12u2', '*.txt'),
    'python3.11-doc': ('3.11.2-6+deb12u9', '*.rst.txt'),
    'perl-doc': ('5.36.0-7+deb12u4', '*.pod'),
    'git-doc': ('1:2.39.5-0+deb12u3', '*.txt'),
    'cmake-doc': ('3.25.1-1', '*.rst.txt'),
    'debian-policy': ('4.6.2.0', '*.txt'),
    'developers-reference': ('12.18', '*.txt'),
    'octave-doc': ('7.3.0-2', '*.info*.gz'),
    'maxima-doc': ('5.46.0-11', '*.info*.gz'),
    'guile-3.0-doc': ('3.0.8-2', '*.info*.gz'),
    'exim4-doc-info': ('4.96-1', '*.info*.gz'),
    'binutils-doc': ('2.40-2', '*.info*.gz'),
    'gnutls-doc': ('3.7.9-2+deb12u7', '*.info*.gz'),
    'r-doc-info': ('4.2.2.20221110-2', '*.info*.gz'),
    'zsh-doc': ('5.9-4', '*.info*.gz'),
    'autoconf-doc': ('2.71-3', '*.info*.gz'),
    'bash-doc': ('5.2.15-2', '*.info*.gz'),
    'libtool-doc': ('2.4.7-7~deb12u1', '*.info*.gz'),
    'r-cran-janeaustenr': ('1.0.0-1', None),
}
DIGEST = 'bd769ff09c1a9683f22b4ff885c647bda0e9cde9c4b28cd679896e69466f8535'
MIN_CHARACTERS = 4000  # of a document
MIN_WORDS = 8  # of a paragraph
MIN_LETTER_SHARE = 0.8  # of a paragraph: letters and spaces


def read_texts(root: Path, pattern: str | None) -> Iterator[str]:
    """Yield the source files of an unpacked package, in the order of their paths."""
    if pattern is None:
        yield from (novel for _, novel in sorted(read_novels(root).items()))
        return
    for path in sorted(root.rglob(pattern)):
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            yield (gzip.decompress(content) if path.suffix in ('.gz', '.dz') else content).decode('utf-8', 'replace')


def select_prose(text: str) -> Iterator[str]:
    """Yield the paragraphs that are mostly words, each as one line."""
    for paragraph in split_paragraphs(text):
        line = ' '.join(paragraph.split())
        num_letters = sum(character.isalpha() or character == ' ' for character in line)
        if len(re.findall(r'[A-Za-z]+', line)) >= MIN_WORDS and num_letters >= MIN_LETTER_SHARE * len(line):
            yield line


def read_documents(root: Path, pattern: str | None) -> list[str]:
    """Read the documents of an unpacked package; a paragraph that occurs again in the package is left out."""
    paragraphs = dict.fromkeys(paragraph for text in read_texts(root, pattern) for paragraph in select_prose(text))
    return [*join_paragraphs(paragraphs, MIN_CHARACTERS)]


def read_packages(package_dir: Path) -> Iterator[tuple[str, list[dict]]]:
    """Yield (name, records of the documents) for each package."""
    for package, (version, pattern) in PACKAGES.items():
        with tempfile.TemporaryDirectory() as root:
            unpack_package(package, version, package_dir, Path(root))
            yield package, [dict(text=document) for document in read_documents(Path(root), pattern)]


def write_corpus(output_dir: Path, packages: Iterable[tuple[str, list[dict]]], expected_digest: str) -> None:
    """Write DIR/NAME.jsonl with a record in each line.

    Raises:
        ValueError: The corpus has another digest. It is written all the same.
    """
    digest, num_characters = hashlib.sha256(), 0
    output_dir.mkdir(parents=True, exist_ok=True)
    for name, records in packages:
        content = ''.join(json.dumps(record) + '\n' for record in records)
        (output_dir / f'{name}.jsonl').write_text(content, encoding='utf-8')
        digest.update(content.encode())
        length = sum(len(record['text']) for record in records)
        num_characters += length
        print(f'{name}: {len(records)} documents, {length:,} characters', flush=True)
    print(f'{num_characters:,} characters, SHA-256 {digest.hexdigest()}')
    if digest.hexdigest() != expected_digest:
        raise ValueError(f'the corpus has the digest {digest.hexdigest()}, not {expected_digest}')


if __name__ == '__main__':
    run_script(__doc__, lambda folder, package_dir: write_corpus(folder, read_packages(package_dir), DIGEST))
