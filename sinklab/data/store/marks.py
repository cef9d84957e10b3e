"""What object storage says of the files of a store: by that they are known again, and need not be read again."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from sinklab.files.known import list_objects
from sinklab.files.place import get_file_system
from sinklab.files.validation import read_json
from sinklab.files.whole import atomic_write
from sinklab.record import UserError

ETAGS_FILE = 'marks.json'  # of a finished store in a bucket, beside its meta.json


def list_etags(folder: Path, prefix: str = '') -> dict[str, str]:
    """Size and mark of each object of a folder whose name begins so, by one request for a thousand."""
    return {name: f'{info.size} {info.content_digest}' for name, info in list_objects(folder, prefix).items()}


def read_etags(folder: Path) -> dict[str, str]:
    """What was seen of the shards of a finished store; nothing where it came here as a copy."""
    try:
        return read_json(folder / ETAGS_FILE, dict[str, str])
    except (FileNotFoundError, UserError):
        return {}


def write_etags(folder: Path, etags: Mapping[str, str]) -> None:
    with atomic_write(folder / ETAGS_FILE) as unfinished:
        unfinished.write_text(json.dumps(etags, indent=1) + '\n', encoding='utf-8')


def read_objects(folder: Path, files: Iterable[str]) -> list[bytes]:
    """Return the bytes of small objects, which are asked for all at once."""
    paths = [os.fspath(folder / file) for file in files]
    contents_by_path = get_file_system(folder).cat(paths) if paths else {}
    return [contents_by_path[path.partition('://')[2]] for path in paths]
