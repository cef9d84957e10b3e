"""Make a corpus of English prose and C code from Debian packages, for training runs: 547 million characters.

    python -m benchmarks.large_corpus build/large --packages=DIR
    sinklab prepare --source='text:build/large/*.jsonl#domain=domain' --vocabulary=32768 --held_out=0.01 \\
      --shard_tokens=500000 --out=stores/large

The domain `prose` has the paragraphs that are mostly words, of the packages of PROSE; the domain `code` has the C
files of some folders of Linux. No paragraph of prose begins as another one does, and no long paragraph of code, as of
a licence, occurs twice. A document is a source file, or a part of a long one, so the documents that `sinklab prepare`
holds out share none of these paragraphs with the others. The script fails if the corpus does not have the SHA-256 of
DIGEST.

The packages (951 MB) are found or downloaded as in english_corpus.py; snapshot.debian.org keeps old versions. RFCs
are in the component non-free of Debian: add it to the sources of apt, or put these packages into the folder of
--packages.
"""

import html
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks import english_corpus
from benchmarks.corpora import run_script, split_paragraphs, unpack_package

RFC_PARTS = 'std', 'std-proposed', 'old-std', 'fyi-bcp', 'informational', 'experimental', 'misc', 'others'
# {package: (version, pattern of its source files)}
PROSE = english_corpus.PACKAGES | {
    **{f'doc-rfc-{part}': ('20230121-1', 'rfc*.txt.gz') for part in RFC_PARTS},
    'dict-gcide': ('0.48.5+nmu2', '*.dict.dz'),
    'dict-foldoc': ('20230119-1', '*.dict.dz'),
    'dict-jargon': ('4.4.7-3.1', '*.dict.dz'),
    'anarchism': ('15.3-3', '*.html'),
    'ada-reference-manual-2020': ('1:2020.1commit85143dcb-4', '*.info*.gz'),
    'apache2-doc': ('2.4.68-1~deb12u1', 'manual/en/**/*.html'),
    'db5.3-doc': ('5.3.28+dfsg2-1', '*.html'),
    'dpdk-doc': ('22.11.11-0+deb12u1', '*.rst.txt'),
    'erlang-doc': ('1:25.2.3+dfsg-1+deb12u4', '*.html'),
    'ghc-doc': ('9.0.2-4', '*.rst.txt'),
    'libreoffice-help-en-us': ('4:7.4.7-1+deb12u14', '*.html'),
    'lilypond-doc': ('2.24.1-2', '*.info*.gz'),
    'llvm-19-doc': ('1:19.1.7-3~deb12u1', '*.rst.txt'),
    'mh-book': ('200605-2.2', '*.html'),
    'postgresql-doc-15': ('15.18-0+deb12u1', '*.html'),
    'python-django-doc': ('3:3.2.25-0+deb12u3', '*.html'),
    'racket-doc': ('8.7+dfsg1-1', '*.html'),
    'sqlite3-doc': ('3.40.1-2+deb12u2', '*.html'),
}
LINUX = 'linux-source-6.1', '6.1.176-1'
LINUX_FOLDERS: tuple[str, ...] = ('arch/x86', 'block', 'crypto', 'drivers/md', 'drivers/pci', 'drivers/usb')
LINUX_FOLDERS += ('fs', 'kernel', 'lib', 'mm', 'net', 'security')
DIGEST = '841de1adabc8e359193fb6805754e0a4eba856fd1a41aa05f6596ede2225912d'
MIN_CHARACTERS, MAX_CHARACTERS = 1000, 100_000  # of a document; the largest one has up to one paragraph more
# A paragraph of prose is left out if these first characters have the same letters as those of an earlier one; a
# paragraph of code that is at least as long is left out if it is the same as an earlier one.
KEY_CHARACTERS = 160
NO_LETTERS = re.compile(r'[\W\d_]+')
HIDDEN = re.compile(r'<(script|style|pre)\b.*?</\1>|<!--.*?-->', re.DOTALL)
INLINE_TAG = re.compile(
    r'</?(a|abbr|b|big|cite|code|dfn|em|font|i|kbd|q|samp|small|span|strong|sub|sup|tt|var)\b[^>]*>'
)


def remove_markup(text: str) -> str:
    """Return the paragraphs of HTML or XML; other text is returned as it is."""
    if not text.lstrip().startswith('<'):
        return text
    return html.unescape(re.sub('<[^>]*>', '\n\n', INLINE_TAG.sub('', HIDDEN.sub('\n\n', text))))


def select_documents(texts: Iterable[str], domain: str, seen: set[str]) -> Iterator[str]:
    """Yield documents of the paragraphs of source files whose keys are not in `seen`, and add these to it."""
    for text in texts:
        paragraphs = english_corpus.select_prose(remove_markup(text)) if domain == 'prose' else split_paragraphs(text)
        groups: dict[int, list[str]] = {}
        length = 0
        for paragraph in paragraphs:
            key = NO_LETTERS.sub('', paragraph[:KEY_CHARACTERS]).lower() if domain == 'prose' else paragraph
            if key not in seen:
                groups.setdefault(length // MAX_CHARACTERS, []).append(paragraph)
                length += len(paragraph)
                if domain == 'prose' or len(paragraph) >= KEY_CHARACTERS:
                    seen.add(key)
        for group in groups.values():
            document = '\n\n'.join(group)
            if len(document) >= MIN_CHARACTERS:
                yield document


def read_packages(package_dir: Path) -> Iterator[tuple[str, list[dict]]]:
    """Yield (name, records of the documents) for each package of prose, and for each folder of Linux."""
    seen: set[str] = set()

    def make_records(texts: Iterable[str], domain: str) -> list[dict]:
        return [dict(text=document, domain=domain) for document in select_documents(texts, domain, seen)]

    for package, (version, pattern) in PROSE.items():
        with tempfile.TemporaryDirectory() as root:
            unpack_package(package, version, package_dir, Path(root))
            yield package, make_records(english_corpus.read_texts(Path(root), pattern), 'prose')
    with tempfile.TemporaryDirectory() as root:
        unpack_package(*LINUX, package_dir, Path(root))
        shutil.unpack_archive(Path(root) / f'usr/src/{LINUX[0]}.tar.xz', root)
        for folder in LINUX_FOLDERS:
            texts = english_corpus.read_texts(Path(root) / LINUX[0] / folder, '*.c')
            yield f'linux-{folder.replace("/", "-")}', make_records(texts, 'code')


if __name__ == '__main__':
    run_script(
        __doc__,
        lambda folder, package_dir: english_corpus.write_corpus(folder, read_packages(package_dir), DIGEST),
    )
