"""What object storage knows of its objects, so that they need not be read."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from sinklab.files.place import storage

CONTENT = ('md5Hash', 'crc32c', 'ETag')  # what storage says of a content, the best first


@dataclasses.dataclass(frozen=True)
class Known:
    """Bytes of an object, a digest of its content with its kind, and its version, another once it is written over."""

    size: int
    content: str
    version: str
    unpacked: bool = False  # by the storage, when it is read


def known(about: Mapping) -> Known:
    content = next(f'{kind} {about[kind]}' for kind in CONTENT if about.get(kind))
    version = str(about.get('generation') or about['ETag'])
    return Known(int(about['size']), content, version, about.get('contentEncoding') == 'gzip')


def listing(folder: Path, prefix: str = '') -> dict[str, Known]:
    """All objects below a folder, by their paths in it; those that begin so. A request for a thousand."""
    root = os.fspath(folder).partition('://')[2] + '/'
    found = storage(folder).find(os.fspath(folder), detail=True, prefix=prefix)
    return {path.removeprefix(root): known(about) for path, about in found.items() if not path.endswith('/')}
