"""Size, content digest and version of objects in a bucket, as its listing reports them."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from sinklab.storage.paths import get_file_system

CONTENT_DIGEST_KEYS = ('md5Hash', 'crc32c', 'ETag')  # of the metadata; the best first


@dataclasses.dataclass(frozen=True)
class ObjectInfo:
    """The size, content digest with its kind, and version of an object."""

    size: int
    content_digest: str
    version: str
    is_decompressed: bool = False  # the storage decompresses it when it is read


def parse_object_info(metadata: Mapping) -> ObjectInfo:
    content_digest = next(f'{kind} {metadata[kind]}' for kind in CONTENT_DIGEST_KEYS if metadata.get(kind))
    version = str(metadata.get('generation') or metadata['ETag'])
    return ObjectInfo(int(metadata['size']), content_digest, version, metadata.get('contentEncoding') == 'gzip')


def list_objects(folder: Path, prefix: str = '') -> dict[str, ObjectInfo]:
    """Return all objects below a folder whose relative paths begin with `prefix`.

    One request lists a thousand objects.
    """
    root = os.fspath(folder).partition('://')[2] + '/'
    objects = get_file_system(folder).find(os.fspath(folder), detail=True, prefix=prefix)
    return {
        path.removeprefix(root): parse_object_info(metadata)
        for path, metadata in objects.items()
        if not path.endswith('/')
    }
