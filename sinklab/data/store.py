"""Token store: shards of token ids with digests; reading, verification, and copying from a bucket.

SIDE-DOMAIN-NUMBER.ids        token ids, little-endian, one document after another
SIDE-DOMAIN-NUMBER.documents  start and key of each document, two uint64 per document
SIDE-DOMAIN-NUMBER.predicted  loss mask, one byte per token; only for sources with a loss mask
meta.json                     settings, counts and digests; it marks the store as complete
"""

import bisect
import contextlib
import functools
import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, TypedDict

import msgspec
import numpy as np

from sinklab.data.tokenizer import Tokenizer, load_tokenizer, read_tokenizer_json
from sinklab.errors import UserError, format_error, format_unknown_name, print_status
from sinklab.storage.files import hash_file, list_entries, open_writable_folder, read_json, write_text
from sinklab.storage.folder_lock import lock_file
from sinklab.storage.paths import get_cache_dir, get_file_system, is_remote, parse_path

FORMAT_VERSION = 3  # of all files of a store
SPLITS = ('train', 'held_out')
RECIPE_FILE, TOKENIZER_FILE, PROBE_FILE, META_FILE = 'recipe.json', 'tokenizer.json', 'probe.npz', 'meta.json'
IDS_SUFFIX, DOCUMENTS_SUFFIX, PREDICTED_SUFFIX = 'ids', 'documents', 'predicted'
LOCK_FILE = '.lock'
DOCUMENT_DTYPE = np.dtype([('start', '<u8'), ('key', '<u8')])
# A store with at most this many bytes of ids is verified by digest on opening; `prepare --check` verifies any store.
MAX_VERIFIED_BYTES = 1 << 30
MAX_MAPPED_FILES = 512  # memory-mapped files kept open; a process may open 1,024 files by default
MAX_SHOWN_CHARS = 160
REMEDY = 'copy it again, or delete it and run its prepare command again'
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Sha256 = Annotated[str, msgspec.Meta(pattern=r'\A[0-9a-f]{64}\Z')]


class Shard(msgspec.Struct, frozen=True, eq=False, forbid_unknown_fields=True):
    """The record of a finished shard."""

    name: Annotated[str, msgspec.Meta(pattern=r'\A(train|held_out)-\d{3,}-\d{5,}\Z')]
    split: Literal['train', 'held_out'] = msgspec.field(name='side')
    domain: str
    tokens: Count
    documents: Count
    bytes: Count  # bytes of the documents in UTF-8
    largest_id: Count = msgspec.field(name='largest')
    documents_sha256: Sha256 = msgspec.field(name='said')  # digest of the digests of the documents
    sha256: dict[Annotated[str, msgspec.Meta(pattern=r'\A(ids|documents|predicted)\Z')], Sha256]  # by suffix


class DomainCounts(TypedDict):
    """Documents, tokens and bytes of a domain in each split."""

    name: str
    train: dict[str, Count]
    held_out: dict[str, Count]


class StoreMeta(TypedDict):
    """Fields of meta.json."""

    format: Literal[3]
    digest: Annotated[str, msgspec.Meta(pattern=r'\A[0-9a-f]{16}\Z')]  # of the tokens, and of how to read them
    source: str
    tokenizer: Sha256
    vocabulary: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    dtype: Literal['<u2', '<u4']
    bos: str
    end_token: Count
    fixed_token: Count
    held_out: float
    masked: bool
    weights: dict[str, float]
    domains: list[DomainCounts]
    dropped: dict[str, Count]
    probe: Sha256
    shards: list[Shard]


class Store:
    """A finished token store; one in a bucket is copied to the cache and read there.

    Its digest covers the tokens and the settings needed to read them. It does not depend on the location.

    Args:
        path: The folder of the store, local or in a bucket.
        verify: Whether to compare the digests of all files; None: those of a small store only.

    Raises:
        UserError: There is no finished store, or the store is damaged.
    """

    def __init__(self, path: str | os.PathLike, verify: bool | None = None):
        self.name = os.fspath(path)
        self.path = copy_store(parse_path(path)) if is_remote(path) else Path(path)
        self.meta, self.shards = read_meta(self.path)
        self.dtype = np.dtype(self.meta['dtype'])
        self.get_array = functools.lru_cache(MAX_MAPPED_FILES)(self.open_array)
        if verify is None:
            verify = sum(shard.tokens for shard in self.shards) * self.dtype.itemsize <= MAX_VERIFIED_BYTES
        self.verify_files(verify)

    def __str__(self) -> str:
        return self.name

    @property
    def digest(self) -> str:
        return self.meta['digest']

    @property
    def has_bos(self) -> bool:
        """Return whether each document begins with BOS."""
        return self.meta['bos'] == 'documents'

    @property
    def domains(self) -> list[str]:
        return [domain['name'] for domain in self.meta['domains']]

    def resolve_domains(self, domain: str | None, field: str) -> list[str]:
        """Return the domain that a config field names, or all domains for None.

        Raises:
            UserError: The store has no such domain; the message names `field`.
        """
        names = [name for name in self.domains if domain in (None, name)]
        if not names:
            raise UserError(format_unknown_name(f'{field} = {domain!r}', str(domain), self.domains, 'domains'))
        return names

    def get_tokens(self, split: str, domain: str) -> 'TokenArray':
        return TokenArray(self, [shard for shard in self.shards if (shard.split, shard.domain) == (split, domain)])

    def count_windows(self, split: str, length: int) -> dict[str, int]:
        """Count the windows of `length` + 1 tokens of a split, by domain."""
        return {name: len(self.get_tokens(split, name)) // (length + 1) for name in self.domains}

    def read_tokenizer_json(self) -> str:
        return read_tokenizer_json(self.path / TOKENIZER_FILE)

    def load_tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.path / TOKENIZER_FILE)

    def decode_beginnings(self, count: int) -> list[str]:
        """Decode the beginnings of the first `count` documents of each split."""
        tokenizer = self.load_tokenizer()
        lines = []
        for split in SPLITS:
            tokens = next(tokens for name in self.domains if len(tokens := self.get_tokens(split, name)))
            starts, _ = tokens.read_documents()
            for start, end in zip(starts[:count], [*starts[1:], len(tokens)], strict=False):
                ids = tokens.read_ids(start, min(end, start + MAX_SHOWN_CHARS)).tolist()
                text = ' '.join(tokenizer.decode(ids, skip_special_tokens=False).split())
                lines.append(f'{split}: {text[:MAX_SHOWN_CHARS]}')
        return lines

    def get_dtype(self, suffix: str) -> np.dtype:
        dtypes = {IDS_SUFFIX: self.dtype, DOCUMENTS_SUFFIX: DOCUMENT_DTYPE, PREDICTED_SUFFIX: np.dtype(np.uint8)}
        return dtypes[suffix]

    def open_array(self, shard: Shard, suffix: str) -> np.ndarray:
        return np.memmap(self.path / f'{shard.name}.{suffix}', self.get_dtype(suffix), 'r').view(np.ndarray)

    def verify_files(self, with_shards: bool) -> None:
        """Raise UserError if a shard has a wrong size, or a file a wrong digest; of shards only `with_shards`."""
        for shard in self.shards:
            for suffix in shard.sha256:
                count = shard.documents if suffix == DOCUMENTS_SUFFIX else shard.tokens
                path = self.path / f'{shard.name}.{suffix}'
                size = count * self.get_dtype(suffix).itemsize
                if not path.exists() or path.stat().st_size != size:
                    raise UserError(f'{self} is damaged: {path.name} is missing or has not {size:,} bytes; {REMEDY}')
        for name, digest in list_digests(self.meta, self.shards if with_shards else []).items():
            if not (self.path / name).exists() or hash_file(self.path / name) != digest:
                raise UserError(f'{self} is damaged: {name} is missing, or differs from its sha256; {REMEDY}')


class TokenArray:
    """The tokens of one split of one domain, presented as one array over all shards."""

    def __init__(self, store: Store, shards: list[Shard]):
        self.store, self.shards = store, shards
        self.starts = [0, *itertools.accumulate(shard.tokens for shard in shards)]

    def __len__(self) -> int:
        return self.starts[-1]

    def read_ids(self, start: int, end: int) -> np.ndarray:
        return self.read(IDS_SUFFIX, start, end)

    def read_loss_mask(self, start: int, end: int) -> np.ndarray:
        return self.read(PREDICTED_SUFFIX, start, end)

    def read(self, suffix: str, start: int, end: int) -> np.ndarray:
        number = bisect.bisect_right(self.starts, start) - 1
        parts = []
        while start < end:
            first = self.starts[number]
            parts.append(self.store.get_array(self.shards[number], suffix)[start - first : end - first])
            start = self.starts[number + 1]
            number = number + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def read_documents(self) -> tuple[np.ndarray, np.ndarray]:
        """Return arrays (start, key) of all documents."""
        parts = [self.store.get_array(shard, DOCUMENTS_SUFFIX) for shard in self.shards]
        starts = [part['start'].astype(np.int64) + first for part, first in zip(parts, self.starts[:-1], strict=True)]
        keys = [part['key'] for part in parts]
        return np.concatenate([np.zeros(0, np.int64), *starts]), np.concatenate([np.zeros(0, np.uint64), *keys])


def read_meta(folder: Path) -> tuple[dict, list[Shard]]:
    """Read and validate meta.json of a local store or one in a bucket, and return it with its shards.

    Raises:
        UserError: There is no finished store, the file is damaged, or its format version is not supported.
    """
    try:
        meta = read_json(folder / META_FILE, StoreMeta, REMEDY)
    except FileNotFoundError as error:
        is_unfinished = (folder / RECIPE_FILE).exists()
        remedy = 'run its prepare command again to resume' if is_unfinished else 'make one with sinklab prepare'
        raise UserError(f'{folder} contains no finished token store; {remedy}') from error
    return meta, msgspec.convert(meta['shards'], list[Shard])


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Create a folder if it is missing, and hold its lock, after waiting for other processes that hold it.

    After an error, the lock file is deleted, and the folder if it is empty, unless something was written there.
    """
    with open_writable_folder(folder), lock_file(folder / LOCK_FILE, math.inf):
        entries = list_entries(folder)
        try:
            yield
        except BaseException:
            if list_entries(folder) == entries:
                with contextlib.suppress(OSError):
                    (folder / LOCK_FILE).unlink()
                    folder.rmdir()
            raise


def list_digests(meta: dict, shards: list[Shard]) -> dict[str, str]:
    """Return the digests of the tokenizer, of the probe sequences and of shards, by file name."""
    digests = {TOKENIZER_FILE: meta['tokenizer'], PROBE_FILE: meta['probe']}
    return digests | {f'{shard.name}.{suffix}': digest for shard in shards for suffix, digest in shard.sha256.items()}


def copy_store(source: Path) -> Path:
    """Copy a store from a bucket into the cache and return its folder; a complete copy is used again.

    The copy has meta.json once all files are complete, with their digests.

    Raises:
        UserError: The store is damaged or unfinished, or the cache cannot be written.
    """
    meta, shards = read_meta(source)
    folder = get_cache_dir() / 'stores' / meta['digest']
    digests = list_digests(meta, shards)
    with lock_folder(folder):
        if (folder / META_FILE).exists():
            return folder
        num_bytes = sum(shard.tokens for shard in shards) * np.dtype(meta['dtype']).itemsize
        print_status(f'copying {source} to {folder}, {num_bytes / 1e6:,.0f} MB')
        try:
            get_file_system().get([f'{source}/{name}' for name in digests], [str(folder / name) for name in digests])
        except OSError as error:
            raise UserError(f'{source} cannot be copied ({format_error(error)}); {REMEDY}') from error
        for name, digest in digests.items():
            if hash_file(folder / name) != digest:
                raise UserError(f'{source} is damaged: {name} differs from its sha256; {REMEDY}')
        write_text(folder / META_FILE, (source / META_FILE).read_text())
    return folder
