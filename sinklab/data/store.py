"""Token store: shards of token ids with digests; writing, reading from disk or a bucket, and verification."""

import array
import bisect
import dataclasses
import errno
import functools
import hashlib
import itertools
import os
import resource
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from sinklab.data import remote_store, store_files
from sinklab.data.remote_store import (
    CachedArray,
    RemoteArray,
    RemoteStore,
    is_worth_fetching,
    reserve_disk_cache,
)
from sinklab.data.store_files import (
    DOCUMENT_DTYPE,
    DOCUMENTS_SUFFIX,
    IDS_SUFFIX,
    META_FILE,
    PREDICTED_SUFFIX,
    PROBE_FILE,
    SPLITS,
    TOKENIZER_FILE,
    Shard,
    digest_file,
    parse_shard,
)
from sinklab.data.tokenizer import Tokenizer, parse_tokenizer
from sinklab.errors import UserError, format_unknown_name
from sinklab.storage import directories
from sinklab.storage.atomic_write import TEMPORARY_SUFFIX, upload_file
from sinklab.storage.paths import is_remote, parse_path
from sinklab.storage.untrusted_files import (
    is_linked_outside,
    is_permanent_read_error,
    load_npz,
    parse_json,
)
from sinklab.thread_pools import get_reader_pool

# A store with at most this many bytes of ids is verified by digest on opening; `prepare --check` verifies any store.
MAX_VERIFIED_BYTES = 1 << 30
MAX_MAPPED_FILES = 1 << 14  # memory-mapped files kept open, if the system allows it


class TokenArray:
    """The tokens of one split of one domain, presented as one array over all shards."""

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
        self.get_array, self.disk_cache = functools.lru_cache(increase_open_file_limit())(self.open_array), None
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

    def get_tokens(self, split: str, domain: str) -> TokenArray:
        return TokenArray(self, [shard for shard in self.shards if (shard.split, shard.domain) == (split, domain)])

    @property
    def remote_version(self) -> str | None:
        """Digest of the sizes and versions of all files of a remote store on opening; None if local."""
        files = [file for shard in self.shards for file in shard.file_names]
        return self.remote_store and self.remote_store.compute_version(
            [*files, META_FILE, TOKENIZER_FILE, PROBE_FILE]
        )

    def count_bytes(self, suffixes: Iterable[str], *splits: str) -> int:
        """Count the bytes of shard files with some suffixes, of the given splits or of all."""
        shards = [shard for shard in self.shards if shard.split in (splits or SPLITS)]
        return sum(self.compute_file_sizes(shard)[suffix] for shard in shards for suffix in suffixes)

    def read_tokenizer_json(self) -> str:
        return self.read_verified_file(TOKENIZER_FILE, self.meta['tokenizer']).decode()

    def load_tokenizer(self) -> Tokenizer:
        return parse_tokenizer(self.read_tokenizer_json(), str(self.path / TOKENIZER_FILE))

    def load_probe_arrays(self) -> dict[str, np.ndarray]:
        return load_npz(
            self.read_verified_file(PROBE_FILE, self.meta['probe']), self.path / PROBE_FILE, 'copy the store again'
        )

    def read_file(self, file: str) -> bytes:
        return self.remote_store.read(file) if self.is_remote else (self.path / file).read_bytes()

    def read_verified_file(self, file: str, expected_digest: str) -> bytes:
        """Read a file and verify its digest if the store is remote; local files were verified on opening."""
        content = self.read_file(file)
        if self.is_remote and hashlib.sha256(content).hexdigest() != expected_digest:
            self.raise_damaged(f'{file} differs from the one that the store was prepared with')
        return content

    def map_reads(self, function: Callable, items: Iterable) -> list:
        """Apply a reading function to items and return the results in order, in parallel for a remote store."""
        if not self.is_remote:
            return [function(item) for item in items]
        return get_reader_pool().map(function, items)

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
        is_cached = self.disk_cache and shard.split == 'train' and suffix != DOCUMENTS_SUFFIX
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
                self.check_file_size(f'{shard.name}.{suffix}', size)
            if with_digests and (damage := shard.find_damage(self.read_file)):
                self.raise_damaged(damage)
        for file, expected_digest in ((TOKENIZER_FILE, self.meta['tokenizer']), (PROBE_FILE, self.meta['probe'])):
            if self.is_remote and file not in self.remote_store.object_infos:
                self.raise_damaged(f'{file} is missing')
            if not self.is_remote and digest_file(self.path / file) != expected_digest:
                self.raise_damaged(f'{file} differs from the one that the store was prepared with')

    def check_links(self, file: str) -> None:
        path = self.path / file
        # Shard names contain no folder, so only a symbolic link can point outside the store.
        if not self.is_remote and os.path.islink(path) and is_linked_outside(path, self.path):
            raise UserError(f'{path} is a link to {path.resolve()}, outside of the store; replace it with a copy')

    def check_file_size(self, file: str, size: int) -> None:
        try:
            actual_size = self.get_file_size(file)
        except OSError as error:
            if not is_permanent_read_error(error):
                raise
            self.raise_damaged(f'{file} cannot be read ({error.strerror or error})')
        if actual_size != size:
            self.raise_damaged(f'{file} has {actual_size:,} bytes instead of {size:,}')

    def get_file_size(self, file: str) -> int:
        if not self.is_remote:
            return (self.path / file).stat().st_size
        if file not in self.remote_store.object_infos:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return self.remote_store.object_infos[file].size

    def raise_damaged(self, damage: str) -> None:
        raise UserError(
            f'{self} is damaged: {damage}; copy the file again, or run its prepare command again, which repairs it '
            '(a store in the cache can be deleted)'
        )


def increase_open_file_limit() -> int:
    """Raise the soft limit of open files, and return how many files may be mapped: half of the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = 2 * MAX_MAPPED_FILES if hard == resource.RLIM_INFINITY else min(2 * MAX_MAPPED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    return MAX_MAPPED_FILES if soft == resource.RLIM_INFINITY else min(MAX_MAPPED_FILES, max(soft, target) // 2)


CHECKED_SUFFIXES = IDS_SUFFIX, DOCUMENTS_SUFFIX  # files of a shard whose contents are checked
MAX_SAMPLE_CHARS = 160


def find_problems(store: Store, vocabulary: int) -> Iterator[str]:
    """Check the digests, counts and ids of all files of a store, and yield a message for each problem.

    Each file is read once, and one shard is in memory at a time.

    Args:
        store: The token store.
        vocabulary: Every id must be below this number.
    """
    for shard in store.shards:
        contents: dict[str, bytes] = {}
        if damage := shard.find_damage(functools.partial(read_and_memoize, contents, store.read_file)):
            yield damage
        else:
            arrays = {
                suffix: np.frombuffer(contents[f'{shard.name}.{suffix}'], store.get_dtype(suffix))
                for suffix in CHECKED_SUFFIXES
            }
            yield from (
                f'{shard.name}: {problem}' for problem in find_shard_problems(store, shard, arrays, vocabulary)
            )
    probe = store.load_probe_arrays()
    if max(int(ids.max()) for ids in probe.values()) >= store.meta['vocabulary']:
        yield 'probe.npz has ids beyond the tokenizer'


def read_and_memoize(contents: dict[str, bytes], read: Callable[[str], bytes], file: str) -> bytes:
    contents[file] = read(file)
    return contents[file]


def find_shard_problems(store: Store, shard: Shard, arrays: dict[str, np.ndarray], vocabulary: int) -> Iterator[str]:
    ids, starts = arrays[IDS_SUFFIX], arrays[DOCUMENTS_SUFFIX]['start'].astype(np.int64)
    if len(ids) != shard.tokens or len(starts) != shard.documents:
        yield f'{len(ids)} tokens of {len(starts)} documents, but {shard.tokens} of {shard.documents} are recorded'
        return
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


class HashingWriter:
    """File writer that computes the sha256 while writing, and renames or uploads the complete file."""

    def __init__(self, path: Path, scratch: Path):
        self.path, self.unfinished_path = path, scratch / f'{path.name}{TEMPORARY_SUFFIX}'
        self.file, self.hasher = self.unfinished_path.open('wb'), hashlib.sha256()

    def write(self, content: bytes) -> None:
        self.file.write(content)
        self.hasher.update(content)

    def finish(self) -> str:
        """Flush the file to disk, rename or upload it, and return its sha256."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        if is_remote(self.path):
            upload_file(self.unfinished_path, self.path)
            self.unfinished_path.unlink()
        else:
            self.unfinished_path.replace(self.path)
        return self.hasher.hexdigest()


@dataclasses.dataclass(frozen=True)
class DocumentEntry:
    """Key, digest and size of a document, which a shard records besides the tokens."""

    key: int
    digest: bytes
    bytes: int


class ShardWriter:
    """Writer of one unfinished shard."""

    def __init__(self, folder: Path, scratch: Path, name: str, masked: bool):
        self.folder, self.scratch, self.name = folder, scratch, name
        suffixes = (IDS_SUFFIX, PREDICTED_SUFFIX) if masked else (IDS_SUFFIX,)
        self.writers = {suffix: HashingWriter(folder / f'{name}.{suffix}', scratch) for suffix in suffixes}
        self.keys, self.starts, self.hasher = array.array('Q'), array.array('Q'), hashlib.sha256()
        self.tokens = self.bytes = self.largest_id = 0

    def begin_document(self, entry: DocumentEntry) -> None:
        self.keys.append(entry.key)
        self.starts.append(self.tokens)
        self.hasher.update(entry.digest)
        self.bytes += entry.bytes

    def add(self, ids: np.ndarray, predicted: bool) -> None:
        self.writers[IDS_SUFFIX].write(ids.tobytes())
        if PREDICTED_SUFFIX in self.writers:
            self.writers[PREDICTED_SUFFIX].write(bytes([predicted]) * len(ids))
        self.tokens += len(ids)
        self.largest_id = max(self.largest_id, int(ids.max(initial=0)))

    def finish(self, split: str, domain: str) -> tuple[Shard, dict[str, str]]:
        """Finish the files, write the record and return (shard, etags of its files); no etags on a local disk."""
        self.writers[DOCUMENTS_SUFFIX] = HashingWriter(self.folder / f'{self.name}.{DOCUMENTS_SUFFIX}', self.scratch)
        columns = [np.frombuffer(column, np.uint64) for column in (self.starts, self.keys)]
        self.writers[DOCUMENTS_SUFFIX].write(np.rec.fromarrays(columns, dtype=DOCUMENT_DTYPE).tobytes())
        shard = Shard(
            name=self.name,
            split=split,
            domain=domain,
            tokens=self.tokens,
            documents=len(self.keys),
            bytes=self.bytes,
            largest_id=self.largest_id,
            documents_sha256=self.hasher.hexdigest(),
            sha256={suffix: file.finish() for suffix, file in self.writers.items()},
        )
        etags = remote_store.list_object_digests(self.folder, f'{self.name}.') if is_remote(self.folder) else {}
        shard_etags = {file: etags[file] for file in shard.file_names if etags}
        shard.write_record(self.folder, shard_etags)
        return shard, shard_etags


class ShardedWriter:
    """Stream of documents of one split of one domain, written to shards; shards finished earlier are kept.

    The reader of the pipeline calls `advance_past_finished` for each document. The writer adds the documents for
    which it returned False.
    """

    def __init__(
        self, folders: tuple[Path, Path], split: str, domain: str, number: int, shard_tokens: int, masked: bool
    ):
        (self.folder, self.scratch), self.split, self.domain, self.number = folders, split, domain, number
        self.shard_tokens, self.masked, self.shard_writer = shard_tokens, masked, None
        self.etags: dict[str, str] = {}  # etags of the shard files, if the store is in a bucket
        self.shards = self.find_remote_shards() if is_remote(self.folder) else self.find_local_shards()
        self.pending_shards = list(self.shards)  # finished shards whose documents the source has not yielded yet
        self.num_skipped, self.hasher = 0, hashlib.sha256()

    def format_shard_name(self, number: int) -> str:
        return f'{self.split}-{self.number:03}-{number:05}'

    def find_local_shards(self) -> list[Shard]:
        """Return the finished shards before the first one that is missing or damaged.

        The records of all later shards are deleted, so that these shards count as unfinished.
        """
        shards = []
        while (record := self.folder / f'{self.format_shard_name(len(shards))}.json').exists():
            parsed = self.parse_shard_info(record, record.read_bytes())
            if not parsed or parsed[0].find_damage(lambda file: (self.folder / file).read_bytes()):
                break
            shard, _ = parsed  # a record that was copied from a bucket contains etags, which do not matter here
            shards.append(shard)
        for stale_record in sorted(self.folder.glob(f'{self.split}-{self.number:03}-*.json')):
            if stale_record.stem >= self.format_shard_name(len(shards)):
                stale_record.unlink()
        return shards

    def parse_shard_info(self, file: Path, content: bytes) -> tuple[Shard, dict | None] | None:
        """Return (shard, etags) of a record; None if it is damaged, so that the shard is written again."""
        try:
            fields = parse_json(content, file)
            etags = fields.pop('marks', None)
            shard = parse_shard(fields, file)
        except UserError:
            return None
        return (shard, etags) if shard.name == file.name.removesuffix('.json') else None

    def find_remote_shards(self) -> list[Shard]:
        """Return the finished shards of a bucket before the first one that is missing or damaged.

        The sizes and etags of the listing identify the files, so that no shard file is read.
        """
        current_etags, shards = remote_store.list_object_digests(self.folder, self.format_shard_name(0)[:-5]), []
        record_files = list(
            itertools.takewhile(
                current_etags.__contains__, (f'{self.format_shard_name(n)}.json' for n in range(len(current_etags)))
            )
        )
        for file, content in zip(record_files, remote_store.read_objects(self.folder, record_files), strict=True):
            parsed = self.parse_shard_info(self.folder / file, content)
            if not parsed:
                break
            shard, shard_etags = parsed  # a record that was copied from a local disk contains no etags
            if shard_etags != {file: current_etags.get(file) for file in shard.file_names}:
                break
            shards.append(shard)
            self.etags |= shard_etags
        stale_records = [
            file
            for file in current_etags
            if file.endswith('.json') and file >= f'{self.format_shard_name(len(shards))}.json'
        ]
        directories.remove_files(self.folder, stale_records)
        return shards

    def advance_past_finished(self, entry: DocumentEntry) -> bool:
        """Return whether a finished shard contains the document, and verify the documents of each such shard.

        Raises:
            UserError: The documents of the source differ from those of a finished shard.
        """
        if not self.pending_shards:
            return False
        self.num_skipped += 1
        self.hasher.update(entry.digest)
        if self.num_skipped == self.pending_shards[0].documents:
            if self.hasher.hexdigest() != self.pending_shards[0].documents_sha256:
                raise UserError(f'the source has changed since {self.folder} was begun; delete that, or give another')
            self.pending_shards.pop(0)
            self.num_skipped, self.hasher = 0, hashlib.sha256()
        return True

    def begin_document(self, entry: DocumentEntry) -> None:
        if self.shard_writer is None:
            self.shard_writer = ShardWriter(
                self.folder, self.scratch, self.format_shard_name(len(self.shards)), self.masked
            )
        self.shard_writer.begin_document(entry)

    def add(self, ids: np.ndarray, predicted: bool) -> None:
        self.shard_writer.add(ids, predicted)

    def end_document(self) -> None:
        """End a document, and finish the shard if it has `shard_tokens` tokens or more."""
        if self.shard_writer.tokens >= self.shard_tokens:
            self.finish()

    def finish(self) -> None:
        if self.shard_writer:
            shard, shard_etags = self.shard_writer.finish(self.split, self.domain)
            self.shards.append(shard)
            self.etags |= shard_etags
            self.shard_writer = None
