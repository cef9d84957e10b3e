"""Token store: shards of token ids with digests, memory-mapped from disk or read from a bucket."""

import bisect
import errno
import functools
import hashlib
import itertools
import os
import resource
from collections.abc import Callable, Iterable

import numpy as np

from sinklab.data import store_files
from sinklab.data.disk_cache import is_worth_fetching, reserve_disk_cache
from sinklab.data.remote_store import CachedArray, RemoteArray, RemoteStore, get_reader_pool
from sinklab.data.store_files import (
    DOCUMENT_DTYPE,
    DOCUMENTS_SUFFIX,
    IDS_SUFFIX,
    META_FILE,
    PREDICTED_SUFFIX,
    PROBE_FILE,
    SIDES,
    TOKENIZER_FILE,
    Shard,
    digest_file,
    parse_shard,
)
from sinklab.data.tokenizer import Tokenizer, parse_tokenizer
from sinklab.schema import UserError, format_unknown_name
from sinklab.storage.paths import is_remote, parse_path
from sinklab.storage.untrusted_files import is_lasting_error, is_linked_outside, load_npz

# A store with at most this many bytes of ids is verified by digest on opening; `prepare --check` verifies any store.
MAX_VERIFIED_BYTES = 1 << 30
MAX_MAPPED_FILES = 1 << 14  # memory-mapped files kept open, if the system allows it


class TokenArray:
    """The tokens of one side of one domain, presented as one array over all shards."""

    def __init__(self, store: 'Store', shards: list[Shard]):
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
        parts = self.store.map_reads(lambda shard: self.store.get_array(shard, DOCUMENTS_SUFFIX)[:], self.shards)
        starts = [part['start'].astype(np.int64) + first for part, first in zip(parts, self.starts[:-1], strict=True)]
        keys = [part['key'] for part in parts]
        return np.concatenate([np.zeros(0, np.int64), *starts]), np.concatenate([np.zeros(0, np.uint64), *keys])


class Store:
    """A finished token store, local or in a bucket.

    Its digest covers the tokens and the settings needed to read them. It does not depend on the location.

    Args:
        path: The folder of the store.

    Raises:
        UserError: There is no finished store, or the store is damaged.
    """

    def __init__(self, path: str | os.PathLike):
        self.path, self.is_remote = parse_path(path), is_remote(path)
        # List the objects before reading any, so that every later change of an object is detected.
        self.remote_store = RemoteStore(self.path) if self.is_remote else None
        self.meta = store_files.read_meta(self.path)
        self.shards = [parse_shard(record, self.path / META_FILE) for record in self.meta['shards']]
        self.dtype = np.dtype(self.meta['dtype'])
        self.get_array, self.disk_cache = functools.lru_cache(raise_open_file_limit())(self.open_array), None
        self.verify_files(with_digests=not self.is_remote and self.count_bytes((IDS_SUFFIX,)) <= MAX_VERIFIED_BYTES)

    def __str__(self) -> str:
        return str(self.path)

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

    def get_tokens(self, side: str, domain: str) -> TokenArray:
        return TokenArray(self, [shard for shard in self.shards if (shard.side, shard.domain) == (side, domain)])

    @property
    def remote_version(self) -> str | None:
        """Digest of the sizes and versions of all files of a remote store on opening; None if local."""
        files = [file for shard in self.shards for file in shard.file_names]
        return self.remote_store and self.remote_store.compute_version(
            [*files, META_FILE, TOKENIZER_FILE, PROBE_FILE]
        )

    def count_bytes(self, suffixes: Iterable[str], *sides: str) -> int:
        """Count the bytes of shard files with some suffixes, on the given sides or on all."""
        shards = [shard for shard in self.shards if shard.side in (sides or SIDES)]
        return sum(self.compute_file_sizes(shard)[suffix] for shard in shards for suffix in suffixes)

    def read_tokenizer_json(self) -> str:
        return self.read_verified_file(TOKENIZER_FILE, self.meta['tokenizer']).decode()

    def load_tokenizer(self) -> Tokenizer:
        return parse_tokenizer(self.read_tokenizer_json(), str(self.path / TOKENIZER_FILE))

    def load_probe_arrays(self) -> dict[str, np.ndarray]:
        return load_npz(
            self.read_verified_file(PROBE_FILE, self.meta['probe']), self.path / PROBE_FILE, 'bring the store anew'
        )

    def read_file(self, file: str) -> bytes:
        return self.remote_store.read(file) if self.is_remote else (self.path / file).read_bytes()

    def read_verified_file(self, file: str, expected_digest: str) -> bytes:
        """Read a file and verify its digest if the store is remote; local files were verified on opening."""
        content = self.read_file(file)
        if self.is_remote and hashlib.sha256(content).hexdigest() != expected_digest:
            self.raise_damaged(f'{file} is not the one that it was made with')
        return content

    def map_reads(self, function: Callable, items: Iterable) -> list:
        """Apply a reading function to items and return the results in order, in parallel for a remote store."""
        return get_reader_pool().map(function, items) if self.is_remote else [function(item) for item in items]

    def enable_disk_cache(self, coverage: float, suffixes: Iterable[str]) -> None:
        """Fetch whole training files of a remote store to the disk cache, if that is worthwhile and they fit.

        Args:
            coverage: Fraction of the training windows that will be read.
            suffixes: Suffixes of the files that will be read, which count for the size.
        """
        if self.is_remote and is_worth_fetching(coverage):
            self.disk_cache = reserve_disk_cache(self.digest, self.count_bytes(suffixes, 'train'))
            self.get_array.cache_clear()

    def get_dtype(self, suffix: str) -> np.dtype:
        return {IDS_SUFFIX: self.dtype, DOCUMENTS_SUFFIX: DOCUMENT_DTYPE, PREDICTED_SUFFIX: np.dtype(np.uint8)}[
            suffix
        ]

    def open_array(self, shard: Shard, suffix: str) -> np.ndarray | RemoteArray:
        file, dtype = f'{shard.name}.{suffix}', self.get_dtype(suffix)
        if not self.is_remote:
            return np.memmap(self.path / file, dtype, 'r').view(np.ndarray)
        arguments = self.remote_store, file, dtype, shard.sha256[suffix]
        is_cached = self.disk_cache and shard.side == 'train' and suffix != DOCUMENTS_SUFFIX
        return CachedArray(*arguments, self.disk_cache.folder) if is_cached else RemoteArray(*arguments)

    def compute_file_sizes(self, shard: Shard) -> dict[str, int]:
        """Compute the expected sizes in bytes of the files of a shard, by suffix."""
        counts = {IDS_SUFFIX: shard.tokens, PREDICTED_SUFFIX: shard.tokens, DOCUMENTS_SUFFIX: shard.documents}
        return {suffix: counts[suffix] * self.get_dtype(suffix).itemsize for suffix in shard.sha256}

    def verify_files(self, with_digests: bool) -> None:
        """Raise UserError if a file is missing or has a wrong size or, with `with_digests`, a wrong digest."""
        for shard in self.shards:
            for suffix, size in self.compute_file_sizes(shard).items():
                self.check_links(f'{shard.name}.{suffix}')
                self.check_size(f'{shard.name}.{suffix}', size)
            if with_digests and (damage := shard.find_damage(self.read_file)):
                self.raise_damaged(damage)
        for file, expected_digest in ((TOKENIZER_FILE, self.meta['tokenizer']), (PROBE_FILE, self.meta['probe'])):
            if self.is_remote and file not in self.remote_store.object_infos:
                self.raise_damaged(f'{file} is not there')
            if not self.is_remote and digest_file(self.path / file) != expected_digest:
                self.raise_damaged(f'{file} is not the one that it was made with')

    def check_links(self, file: str) -> None:
        path = self.path / file
        # Shard names contain no folder, so only a symbolic link can point outside the store.
        if not self.is_remote and os.path.islink(path) and is_linked_outside(path, self.path):
            raise UserError(f'{path} is a link that leads out of the store, to {path.resolve()}; put a copy there')

    def check_size(self, file: str, size: int) -> None:
        try:
            actual_size = self.get_file_size(file)
        except OSError as error:
            if not is_lasting_error(error):
                raise
            self.raise_damaged(f'{file} cannot be read ({error.strerror or error})')
        if actual_size != size:
            self.raise_damaged(f'{file} has {actual_size:,} bytes of {size:,}')

    def get_file_size(self, file: str) -> int:
        if not self.is_remote:
            return (self.path / file).stat().st_size
        if file not in self.remote_store.object_infos:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return self.remote_store.object_infos[file].size

    def raise_damaged(self, damage: str) -> None:
        raise UserError(
            f'{self} is damaged: {damage}; bring the file anew, or give its prepare command again, which mends it (a '
            'store in the cache may be deleted)'
        )


def raise_open_file_limit() -> int:
    """Raise the soft limit of open files, and return how many files may be mapped: half of the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = 2 * MAX_MAPPED_FILES if hard == resource.RLIM_INFINITY else min(2 * MAX_MAPPED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    return MAX_MAPPED_FILES if soft == resource.RLIM_INFINITY else min(MAX_MAPPED_FILES, max(soft, target) // 2)
