"""What a store holds: shards, which are the tokens of documents in files, each with a record.

SIDE-DOMAIN-NUMBER.ids        the ids, little-endian, one document after another
SIDE-DOMAIN-NUMBER.documents  where each document starts, and its key: two uint64 a document
SIDE-DOMAIN-NUMBER.predicted  a byte a token, where documents tell what is to be predicted from what is not
SIDE-DOMAIN-NUMBER.json       the record, until meta.json holds it
marks.json                    in a bucket: what the storage says of these files
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from sinklab.files.whole import whole

FORMAT = 3  # of all that a store holds
SIDES = ('train', 'held_out')
RECIPE, TOKENIZER, PROBE, META = 'recipe.json', 'tokenizer.json', 'probe.npz', 'meta.json'
IDS, DOCUMENTS, PREDICTED = 'ids', 'documents', 'predicted'
DOCUMENT = np.dtype([('start', '<u8'), ('key', '<u8')])


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """The record of a finished shard."""

    name: str
    side: str  # train or held_out
    domain: str
    tokens: int
    documents: int
    bytes: int  # of their texts in UTF-8
    largest: int  # id
    said: str  # digest of the digests of its documents
    sha256: dict[str, str]  # by suffix

    def damage(self, read: Callable[[str], bytes]) -> str | None:
        """What is wrong with its files, if anything is; `read` gives the content of a file by its name."""
        for suffix, digest in self.sha256.items():
            file = f'{self.name}.{suffix}'
            try:
                content = read(file)
            except OSError as error:
                return f'{file} cannot be read ({error.strerror or error})'
            if hashlib.sha256(content).hexdigest() != digest:
                return f'{file} is not as it was written (its sha256 differs)'
        return None

    @property
    def files(self) -> list[str]:
        return [f'{self.name}.{suffix}' for suffix in self.sha256]

    def write(self, folder: Path, marks: Mapping[str, str] | None = None) -> None:
        """Its record, by which it counts as finished; in a bucket with the marks of its files."""
        said = dataclasses.asdict(self) | (dict(marks=marks) if marks else {})
        with whole(folder / f'{self.name}.json') as unfinished:
            unfinished.write_text(json.dumps(said), encoding='utf-8')


def digest(file: Path) -> str:
    """Its sha256; of nothing, where there is no file."""
    return hashlib.sha256(file.read_bytes() if file.exists() else b'').hexdigest()
