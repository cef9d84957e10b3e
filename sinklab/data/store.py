"""Token store: shards of token ids with digests; reading and verification.

SIDE-DOMAIN-NUMBER.ids        token ids, little-endian, one document after another
SIDE-DOMAIN-NUMBER.documents  start and key of each document, two uint64 per document
SIDE-DOMAIN-NUMBER.predicted  loss mask, one byte per token; only for sources with a loss mask
meta.json                     settings, counts and digests; it marks the store as complete
"""

import bisect
import functools
import itertools
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Literal, NotRequired, TypedDict

import msgspec
import numpy as np

from sinklab.data.source_files import translate_read_errors
from sinklab.data.tokenizer import Tokenizer, load_tokenizer, read_tokenizer_json
from sinklab.errors import UserError, format_unknown_name
from sinklab.storage.cache_dir import get_cache_dir
from sinklab.storage.files import (
    atomic_write,
    hash_file,
    list_file_infos,
    open_writable_folder,
    read_arrays,
    read_json,
    write_text,
)
from sinklab.storage.folder_lock import lock_file
from sinklab.storage.paths import get_file_system, is_remote, parse_path

FORMAT_VERSION = 3  # of all files of a store
SPLITS = ('train', 'held_out')
RECIPE_FILE, TOKENIZER_FILE, PROBE_FILE, META_FILE = 'recipe.json', 'tokenizer.json', 'probe.npz', 'meta.json'
IDS_SUFFIX, DOCUMENTS_SUFFIX, PREDICTED_SUFFIX = 'ids', 'documents', 'predicted'
DOCUMENT_DTYPE = np.dtype([('start', '<u8'), ('key', '<u8')])
# A store with at most this many bytes of ids is verified by digest on opening; `prepare --check` verifies any store.
MAX_VERIFIED_BYTES = 1 << 30
MAX_MAPPED_FILES = 512  # memory-mapped files kept open; a process may open 1,024 files by default
MAX_SAMPLE_CHARS = 160
COPY_THREADS = 8
PROGRESS_SECONDS = 10.0  # seconds between two progress lines
REMEDY = 'copy it again, or run its prepare command again, which repairs it (a store in the cache can be deleted)'
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Sha256 = Annotated[str, msgspec.Meta(pattern=r'\A[0-9a-f]{64}\Z')]


class ShardDigests(TypedDict):
    """SHA-256 of the files of a shard, by suffix."""

    ids: Sha256
    documents: Sha256
    predicted: NotRequired[Sha256]


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
    sha256: ShardDigests

    @property
    def digests(self) -> dict[str, str]:
        """Digests by file name."""
        return {f'{self.name}.{suffix}': digest for suffix, digest in self.sha256.items()}


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

    Raises:
        UserError: There is no finished store, or the store is damaged.
    """

    def __init__(self, path: str | os.PathLike):
        self.name = os.fspath(path)
        self.path = copy_store(parse_path(path)) if is_remote(path) else Path(path)
        self.meta, self.shards = read_meta(self.path)
        self.dtype = np.dtype(self.meta['dtype'])
        self.get_array = functools.lru_cache(MAX_MAPPED_FILES)(self.open_array)
        self.verify_files()

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

    def read_tokenizer_json(self) -> str:
        return read_tokenizer_json(self.path / TOKENIZER_FILE)

    def load_tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.path / TOKENIZER_FILE)

    def load_probe_arrays(self) -> dict[str, np.ndarray]:
        return read_arrays(self.path / PROBE_FILE, remedy=REMEDY)

    def get_dtype(self, suffix: str) -> np.dtype:
        dtypes = {IDS_SUFFIX: self.dtype, DOCUMENTS_SUFFIX: DOCUMENT_DTYPE, PREDICTED_SUFFIX: np.dtype(np.uint8)}
        return dtypes[suffix]

    def open_array(self, shard: Shard, suffix: str) -> np.ndarray:
        return np.memmap(self.path / f'{shard.name}.{suffix}', self.get_dtype(suffix), 'r').view(np.ndarray)

    def verify_files(self) -> None:
        """Raise UserError if a file is missing or has a wrong size or, in a small store, a wrong digest."""
        for shard in self.shards:
            for suffix in shard.sha256:
                count = shard.documents if suffix == DOCUMENTS_SUFFIX else shard.tokens
                path, size = self.path / f'{shard.name}.{suffix}', count * self.get_dtype(suffix).itemsize
                if not path.exists() or path.stat().st_size != size:
                    raise UserError(f'{self} is damaged: {path.name} is missing or has not {size:,} bytes; {REMEDY}')
        digests = {TOKENIZER_FILE: self.meta['tokenizer'], PROBE_FILE: self.meta['probe']}
        if sum(shard.tokens for shard in self.shards) * self.dtype.itemsize <= MAX_VERIFIED_BYTES:
            digests |= list_shard_digests(self.shards)
        if damaged := next(find_damaged_files(self.path, digests), None):
            raise UserError(f'{self} is damaged: {damaged}; {REMEDY}')


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
        number, parts = bisect.bisect_right(self.starts, start) - 1, []
        while start < end:
            first = self.starts[number]
            parts.append(self.store.get_array(self.shards[number], suffix)[start - first : end - first])
            start, number = self.starts[number + 1], number + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def read_documents(self) -> tuple[np.ndarray, np.ndarray]:
        """Return arrays (start, key) of all documents."""
        parts = [self.store.get_array(shard, DOCUMENTS_SUFFIX) for shard in self.shards]
        starts = [part['start'].astype(np.int64) + first for part, first in zip(parts, self.starts[:-1], strict=True)]
        keys = [part['key'] for part in parts]
        return np.concatenate([np.zeros(0, np.int64), *starts]), np.concatenate([np.zeros(0, np.uint64), *keys])


def read_meta(folder: Path, remedy: str = REMEDY) -> tuple[dict, list[Shard]]:
    """Read and validate meta.json of a local store or one in a bucket, and return it with its shards.

    Raises:
        UserError: There is no finished store, the file is damaged, or its format version is not supported.
    """
    try:
        meta = read_json(folder / META_FILE, StoreMeta, remedy)
    except FileNotFoundError as error:
        is_unfinished = (folder / RECIPE_FILE).exists()
        remedy = 'run its prepare command again to resume' if is_unfinished else 'make one with sinklab prepare'
        raise UserError(f'{folder} contains no finished token store; {remedy}') from error
    return meta, msgspec.convert(meta['shards'], list[Shard])


def list_shard_digests(shards: list[Shard]) -> dict[str, str]:
    """Return the digests of the files of shards, by file name."""
    return {name: digest for shard in shards for name, digest in shard.digests.items()}


def find_damaged_files(folder: Path, digests: dict[str, str]) -> Iterator[str]:
    """Yield a message for each file that is missing or has not its digest."""
    for name, digest in digests.items():
        try:
            if hash_file(folder / name) != digest:
                yield f'the sha256 of {name} differs from that of the store'
        except FileNotFoundError:
            yield f'{name} is missing'


def copy_store(source: Path) -> Path:
    """Copy a store from a bucket into the cache, verify it, and return its folder; a complete copy is used again.

    Raises:
        UserError: The store is damaged or unfinished, or the cache cannot be written.
    """
    meta, shards = read_meta(source)
    folder = get_cache_dir() / 'stores' / meta['digest']
    digests = {TOKENIZER_FILE: meta['tokenizer'], PROBE_FILE: meta['probe']} | list_shard_digests(shards)
    infos = list_file_infos(source)
    file_system = get_file_system()

    def copy_file(name: str) -> int:
        if name not in infos:
            raise UserError(f'{source} is damaged: {name} is missing; {REMEDY}')
        if not (folder / name).exists():
            with atomic_write(folder / name) as temporary_path, translate_read_errors(source / name):
                file_system.get_file(os.fspath(source / name), os.fspath(temporary_path))
                if hash_file(temporary_path) != digests[name]:
                    raise UserError(f'{source} is damaged: the sha256 of {name} differs from its record; {REMEDY}')
        return infos[name]['size']

    def print_wait() -> None:
        print(f'another process copies {source} to {folder}; waiting for it', file=sys.stderr, flush=True)

    with open_writable_folder(folder), lock_file(folder / '.lock', -1, print_wait):
        if (folder / META_FILE).exists():
            return folder
        total = sum(infos[name]['size'] for name in digests if name in infos)
        print(f'copying {source} to {folder}, {total / 1e6:,.0f} MB', file=sys.stderr, flush=True)
        copied, print_time = 0, time.monotonic()
        with ThreadPoolExecutor(COPY_THREADS) as pool:
            for size in pool.map(copy_file, digests):
                copied += size
                if time.monotonic() - print_time > PROGRESS_SECONDS:
                    print(f'copied {copied / 1e6:,.0f} of {total / 1e6:,.0f} MB', file=sys.stderr, flush=True)
                    print_time = time.monotonic()
        write_text(folder / META_FILE, (source / META_FILE).read_text())
    return folder


def find_problems(store: Store, vocabulary: int) -> Iterator[str]:
    """Check the digests, counts and ids of all files of a store, and yield a message for each problem.

    Args:
        store: The token store.
        vocabulary: Every id must be below this number.
    """
    for shard in store.shards:
        damages = list(find_damaged_files(store.path, shard.digests))
        problems = damages or (
            f'{shard.name}: {problem}' for problem in find_shard_problems(store, shard, vocabulary)
        )
        yield from problems
    probe = store.load_probe_arrays()
    if max(int(ids.max()) for ids in probe.values()) >= store.meta['vocabulary']:
        yield 'probe.npz has ids beyond the tokenizer'


def find_shard_problems(store: Store, shard: Shard, vocabulary: int) -> Iterator[str]:
    ids = store.open_array(shard, IDS_SUFFIX)
    starts = store.open_array(shard, DOCUMENTS_SUFFIX)['start'].astype(np.int64)
    ends = np.append(starts[1:], len(ids)) - 1
    if starts[0] != 0 or not (ends >= starts).all():
        yield 'its documents are not contiguous'
    elif not np.array_equal(np.flatnonzero(ids == store.meta['end_token']), ends):
        yield f'token {store.meta["end_token"]} does not end each document, or is inside one'
    if store.has_bos and not (ids[starts] == store.meta['fixed_token']).all():
        yield f'not all of its documents begin with token {store.meta["fixed_token"]}'
    if (largest := int(ids.max())) != shard.largest_id or largest >= vocabulary:
        yield f'its largest id is {largest}; {shard.largest_id} is recorded, and ids below {vocabulary} are allowed'


def summarize_store(store: Store, length: int, batch_size: int, hosts: int) -> dict:
    """Summarize a store: its settings, counts, windows and batches.

    Args:
        store: The token store.
        length: Tokens per sequence; a window has one token more.
        batch_size: Sequences per batch.
        hosts: Number of hosts. `rows_per_host` is None if the hosts do not divide the batch evenly.
    """
    windows = {
        split: {name: len(store.get_tokens(split, name)) // (length + 1) for name in store.domains}
        for split in SPLITS
    }
    names = ('source', 'digest', 'vocabulary', 'bos', 'end_token', 'fixed_token', 'held_out', 'masked', 'weights')
    return dict(
        **{name: store.meta[name] for name in names},
        domains=store.meta['domains'],
        dropped=store.meta['dropped'],
        shards=len(store.shards),
        length=length,
        windows=windows,
        batch_size=batch_size,
        batches=sum(windows['train'].values()) // batch_size,
        hosts=hosts,
        rows_per_host=None if batch_size % hosts else batch_size // hosts,
    )


def decode_samples(store: Store, count: int) -> list[str]:
    """Decode the beginnings of the first `count` documents of each split."""
    tokenizer, texts = store.load_tokenizer(), []
    for split in SPLITS:
        tokens = next(tokens for tokens in (store.get_tokens(split, name) for name in store.domains) if len(tokens))
        starts, _ = tokens.read_documents()
        for start, end in zip(starts[:count], [*starts[1:], len(tokens)], strict=False):
            ids = tokens.read_ids(int(start), min(int(end), int(start) + MAX_SAMPLE_CHARS)).tolist()
            text = tokenizer.decode(ids, skip_special_tokens=False)
            texts.append(f'{split}: {" ".join(text.split())[:MAX_SAMPLE_CHARS]}')
    return texts
