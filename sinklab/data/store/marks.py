"""What object storage says of the files of a store: by that they are known again, and need not be read again."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from sinklab.files.known import listing
from sinklab.files.place import storage
from sinklab.files.validation import read_json
from sinklab.files.whole import whole
from sinklab.record import Refusal

MARKS = 'marks.json'  # of a finished store in a bucket, beside its meta.json


def seen(folder: Path, prefix: str = '') -> dict[str, str]:
    """Size and mark of each object of a folder whose name begins so, by one request for a thousand."""
    return {name: f'{known.size} {known.content}' for name, known in listing(folder, prefix).items()}


def kept(folder: Path) -> dict[str, str]:
    """What was seen of the shards of a finished store; nothing where it came here as a copy."""
    try:
        return read_json(folder / MARKS, dict[str, str])
    except (FileNotFoundError, Refusal):
        return {}


def keep(folder: Path, marks: Mapping[str, str]) -> None:
    with whole(folder / MARKS) as unfinished:
        unfinished.write_text(json.dumps(marks, indent=1) + '\n', encoding='utf-8')


def contents(folder: Path, files: Iterable[str]) -> list[bytes]:
    """Return the bytes of small objects, which are asked for all at once."""
    paths = [os.fspath(folder / file) for file in files]
    found = storage(folder).cat(paths) if paths else {}
    return [found[path.partition('://')[2]] for path in paths]
