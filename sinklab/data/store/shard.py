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
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from sinklab.files.regular import is_lasting_error
from sinklab.files.validation import check_relative_name
from sinklab.files.whole import atomic_write
from sinklab.record import UserError

FORMAT_VERSION = 3  # of all that a store holds
SIDES = ('train', 'held_out')
RECIPE_FILE, TOKENIZER_FILE, PROBE_FILE, META_FILE = 'recipe.json', 'tokenizer.json', 'probe.npz', 'meta.json'
IDS_SUFFIX, DOCUMENTS_SUFFIX, PREDICTED_SUFFIX = 'ids', 'documents', 'predicted'
DOCUMENT_DTYPE = np.dtype([('start', '<u8'), ('key', '<u8')])
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Sha256 = Annotated[str, msgspec.Meta(pattern=r'\A[0-9a-f]{64}\Z')]


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """The record of a finished shard."""

    name: str
    side: Literal['train', 'held_out']
    domain: str
    tokens: Count
    documents: Count
    bytes: Count  # of their texts in UTF-8
    largest: Count  # id
    said: Sha256  # digest of the digests of its documents
    sha256: dict[Literal['ids', 'documents', 'predicted'], Sha256]  # by suffix

    def find_damage(self, read: Callable[[str], bytes]) -> str | None:
        """Return what is wrong with its files, if anything is; `read` gives the content of a file by its name.

        Raises:
            OSError: a disk or a bucket does not answer.
        """
        for suffix, digest in self.sha256.items():
            file = f'{self.name}.{suffix}'
            try:
                content = read(file)
            except OSError as error:
                if not is_lasting_error(error):  # of a disk or a bucket that does not answer, the file is not to blame
                    raise
                return f'{file} cannot be read ({error.strerror or error})'
            if hashlib.sha256(content).hexdigest() != digest:
                return f'{file} is not as it was written (its sha256 differs)'
        return None

    @property
    def file_names(self) -> list[str]:
        return [f'{self.name}.{suffix}' for suffix in self.sha256]

    def write_record(self, folder: Path, etags: Mapping[str, str] | None = None) -> None:
        """Its record, by which it counts as finished; in a bucket with the marks of its files."""
        record = dataclasses.asdict(self) | (dict(marks=etags) if etags else {})
        with atomic_write(folder / f'{self.name}.json') as unfinished:
            unfinished.write_text(json.dumps(record), encoding='utf-8')


def parse_shard(record: Any, file: Path) -> Shard:
    """Return the shard of a record that was read from a file.

    Raises:
        Refusal: a field is missing, unknown or of another type, or the name does not lie in the folder of the store.
    """
    fields = {field.name for field in dataclasses.fields(Shard)}
    try:
        if isinstance(record, dict) and (unknown := record.keys() - fields):
            raise msgspec.ValidationError(f'unknown field {min(unknown)!a}')
        shard = msgspec.convert(record, Shard)
    except msgspec.ValidationError as error:
        raise UserError(f'{file} has a damaged record of a shard ({error}); bring the store anew') from error
    check_relative_name(shard.name, file)
    if '/' in shard.name or IDS_SUFFIX not in shard.sha256 or DOCUMENTS_SUFFIX not in shard.sha256:
        raise UserError(f'{file} has a damaged record of the shard {shard.name!a}; bring the store anew')
    return shard


def digest_file(file: Path) -> str:
    """Its sha256; of nothing, where there is no file."""
    return hashlib.sha256(file.read_bytes() if file.exists() else b'').hexdigest()
