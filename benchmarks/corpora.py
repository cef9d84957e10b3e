"""Make text corpora of several domains from Debian packages, for measurements of open models.

    python -m benchmarks.corpora build/corpora
    python -m benchmarks.corpora build/corpora --packages=DIR

The script writes DIR/DOMAIN/NNN.txt, 200 documents for each domain, and DIR/long.txt, a whole novel for `sinklab
stream`. It needs no root: `apt-get download` fetches the packages of PACKAGES in exactly these versions, and `dpkg`
unpacks them. Where there is no apt, or where it has other versions, --packages names a folder with the five files.

| domain | Debian package | text | licence |
|---|---|---|---|
| prose, long.txt | r-cran-janeaustenr | novels of Jane Austen | texts in the public domain, package MIT |
| code | python3-networkx | Python | BSD-3-Clause |
| logs | fail2ban | log lines of 80 programs, from its tests | GPL-2+ |
| german | debian-reference-de | Debian Reference, in German | GPL-2+ |
| japanese | debian-reference-ja | Debian Reference, in Japanese | GPL-2+ |

DIGESTS has the SHA-256 of each domain and of long.txt. The script fails if it makes other texts.
"""

import argparse
import gzip
import hashlib
import itertools
import re
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

PACKAGES = {
    'r-cran-janeaustenr': '1.0.0-1',
    'python3-networkx': '2.8.8-1',
    'fail2ban': '1.0.2-2',
    'debian-reference-de': '2.100',
    'debian-reference-ja': '2.100',
}
DIGESTS = {
    'prose': '69973c504afb85ef30690b7b5ddc17e169ce8ac43936dd3ef8a4c9dae63bf4c5',
    'code': '08806d6cb1f754ef35207264b4cc92771c4872cf31034158219c242f8f09bd17',
    'logs': '7fb48b6c66e2d61d12a194f2616cc97dcc96c30811cfdd61c6631af309a309c1',
    'german': 'a156648fabcd324deb459643c7c17b15a7e788db6b2a2ddfdcfaef7b42b76a94',
    'japanese': '5b192fdc729eabbcf43894b76b64f6ebcda3661f341af29a74c8a34f28f64fe7',
    'long': 'dd08b340a56ad4a0a00718d5682528a5a5886ae0aef91c9e0fa528074fa64b75',
}
NUM_DOCUMENTS = 200
MIN_PROSE_CHARACTERS = 2500  # enough for 256 tokens
MIN_CHARACTERS = 500  # enough for 64 tokens
LONG_NOVEL = 'Emma'
STRING_HEADERS = 0x00000009, 0x00008009, 0x00040009  # R strings: without encoding, UTF-8, ASCII


def read_novels(root: Path) -> dict[str, str]:
    """Read the novels of janeaustenr by title.

    The package stores each novel as one vector of lines in R's serialization, compressed by zlib with its length
    before it.
    """
    database, novels = (root / 'usr/lib/R/site-library/janeaustenr/data/Rdata.rdb').read_bytes(), {}
    while database:
        decompressor = zlib.decompressobj()
        serialized = decompressor.decompress(database[4:])
        database = decompressor.unused_data
        lines = [*read_r_strings(serialized)]
        novels[lines[0].title()] = '\n'.join(lines)
    return novels


def read_r_strings(serialized: bytes) -> Iterator[str]:
    """Yield the strings of a serialized R vector of strings (format X, version 3)."""
    start = serialized.index(b'UTF-8') + 5  # after the native encoding
    kind, count = struct.unpack_from('>II', serialized, start)
    if kind & 0xFF != 16:
        raise ValueError(f'R object of type {kind & 0xFF}, not a vector of strings')
    start += 8
    for _ in range(count):
        header, length = struct.unpack_from('>Ii', serialized, start)
        if header not in STRING_HEADERS:
            raise ValueError(f'R string with the header {header:#x}')
        yield serialized[start + 8 : start + 8 + length].decode()
        start += 8 + length


def split_paragraphs(text: str) -> Iterator[str]:
    yield from (paragraph.strip('\n') for paragraph in re.split(r'\n\s*\n', text) if paragraph.strip())


def join_paragraphs(paragraphs: Iterable[str], min_characters: int) -> Iterator[str]:
    """Yield documents of whole paragraphs, each of at least `min_characters`; a shorter rest is dropped."""
    document = ''
    for paragraph in paragraphs:
        document += f'{paragraph}\n\n'
        if len(document) >= min_characters:
            yield document
            document = ''


def read_prose(root: Path) -> Iterator[str]:
    """Yield pieces of the novels in turn, without the one of long.txt."""
    pieces = [
        [*join_paragraphs(split_paragraphs(novel), MIN_PROSE_CHARACTERS)]
        for title, novel in sorted(read_novels(root).items())
        if title != LONG_NOVEL
    ]
    yield from (piece for pieces_in_turn in zip(*pieces, strict=False) for piece in pieces_in_turn)


def read_code(root: Path) -> Iterator[str]:
    for path in sorted((root / 'usr/lib/python3/dist-packages/networkx').rglob('*.py')):
        code = path.read_text(encoding='utf-8')
        if 'tests' not in path.parts and len(code) >= MIN_CHARACTERS:
            yield code


def read_logs(root: Path) -> Iterator[str]:
    """Yield log lines of each program, without the comments of fail2ban's tests."""
    for path in sorted((root / 'usr/lib/python3/dist-packages/fail2ban/tests/files/logs').rglob('*')):
        if path.is_file():
            lines = path.read_text(encoding='utf-8', errors='replace').splitlines()
            lines = [line for line in lines if line.strip() and not line.startswith('#')]
            yield from (document.replace('\n\n', '\n') for document in join_paragraphs(lines, MIN_CHARACTERS))


def read_manual(root: Path) -> Iterator[str]:
    """Yield the translated running text of the Debian Reference, without headings, tables and commands."""
    (path,) = (root / 'usr/share/debian-reference').glob('*.txt.gz')
    paragraphs = (
        '\n'.join(line.strip() for line in paragraph.splitlines())
        for paragraph in split_paragraphs(gzip.decompress(path.read_bytes()).decode())
        if paragraph.startswith('    ')
    )
    is_command_or_table = re.compile(r'\|$|^[$#<]', re.MULTILINE)
    yield from join_paragraphs(
        (text for text in paragraphs if '\n' in text and not text.isascii() and not is_command_or_table.search(text)),
        MIN_CHARACTERS,
    )


DOMAINS: dict[str, tuple[str, Callable[[Path], Iterator[str]]]] = {
    'prose': ('r-cran-janeaustenr', read_prose),
    'code': ('python3-networkx', read_code),
    'logs': ('fail2ban', read_logs),
    'german': ('debian-reference-de', read_manual),
    'japanese': ('debian-reference-ja', read_manual),
}


def find_package(package: str, version: str, folder: Path) -> Path:
    """Return the file of a package in a folder; download it if it is not there."""
    name = f'{package}_{version.replace(":", "%3a")}_all.deb'
    if not (folder / name).is_file():
        command = ['apt-get', 'download', f'{package}={version}']
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, 'stderr', '') or str(error)
            sys.exit(
                f'{package} {version} cannot be downloaded: {reason.strip()}; '
                f'run apt-get update, or put {name} into --packages=DIR'
            )
    return folder / name


def unpack_package(package: str, version: str, package_dir: Path, root: Path) -> None:
    """Unpack a package into a folder; download it first if it is not in `package_dir`."""
    path = find_package(package, version, package_dir)
    try:
        subprocess.run(['dpkg', '-x', str(path), str(root)], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, 'stderr', '') or str(error)
        sys.exit(f'{path} cannot be unpacked: {reason.strip()}; remove it to download it again')


def compute_digest(documents: list[str]) -> str:
    return hashlib.sha256('\0'.join(documents).encode()).hexdigest()


def write_corpora(output_dir: Path, package_dir: Path) -> None:
    """Write all domains and the long text.

    Raises:
        ValueError: A text is not the one of DIGESTS.
    """
    texts: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as temp_dir:
        roots = {package: Path(temp_dir) / package for package in PACKAGES}
        for package, root in roots.items():
            unpack_package(package, PACKAGES[package], package_dir, root)
        for domain, (package, read_documents) in DOMAINS.items():
            texts[domain] = [*itertools.islice(read_documents(roots[package]), NUM_DOCUMENTS)]
        texts['long'] = [read_novels(roots['r-cran-janeaustenr'])[LONG_NOVEL]]
    for name, documents in texts.items():
        digest = compute_digest(documents)
        print(f'{name}: {len(documents)} documents, {sum(map(len, documents)):,} characters, SHA-256 {digest}')
        if digest != DIGESTS.get(name):
            raise ValueError(f'{name} has the digest {digest}, not {DIGESTS.get(name)}')
        for number, document in enumerate(documents):
            path = output_dir / ('long.txt' if name == 'long' else f'{name}/{number:03}.txt')
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(document, encoding='utf-8')


def run_script(description: str, write: Callable[[Path, Path], None]) -> None:
    """Parse the arguments of a script that makes texts, and call write(folder, folder of packages)."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', type=Path, metavar='DIR')
    parser.add_argument('--packages', type=Path, metavar='DIR', help='keep the packages here, or take them from here')
    args = parser.parse_args()
    if args.packages:
        args.packages.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temp_dir:
        try:
            write(args.folder, args.packages or Path(temp_dir))
        except ValueError as error:
            sys.exit(str(error))


if __name__ == '__main__':
    run_script(__doc__, write_corpora)
