"""Writer of token-store shards, which keeps the shards that an earlier attempt finished."""

import array
import dataclasses
import hashlib
import itertools
import os
from pathlib import Path

import numpy as np

from sinklab.data import remote_store
from sinklab.data.store_files import (
    DOCUMENT_DTYPE,
    DOCUMENTS_SUFFIX,
    IDS_SUFFIX,
    PREDICTED_SUFFIX,
    Shard,
    parse_shard,
)
from sinklab.schema import UserError
from sinklab.storage import directories
from sinklab.storage.atomic_write import upload_file
from sinklab.storage.paths import is_remote
from sinklab.storage.untrusted_files import parse_json


class HashingWriter:
    """A file that is hashed as it grows, and gets its name, or goes to its bucket, when it is whole."""

    def __init__(self, path: Path, scratch: Path):
        self.path, self.unfinished_path = path, scratch / f'{path.name}.unfinished'
        self.file, self.hasher = self.unfinished_path.open('wb'), hashlib.sha256()

    def write(self, content: bytes) -> None:
        self.file.write(content)
        self.hasher.update(content)

    def finish(self) -> str:
        """Its digest, when it lies on the disk, or in the bucket."""
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
    """What a shard notes of a document, beside its tokens."""

    key: int
    digest: bytes
    bytes: int


class ShardWriter:
    """A shard that documents are added to."""

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

    def finish(self, side: str, domain: str) -> tuple[Shard, dict[str, str]]:
        """The record of what is written now, and in a bucket the marks of its files."""
        self.writers[DOCUMENTS_SUFFIX] = HashingWriter(self.folder / f'{self.name}.{DOCUMENTS_SUFFIX}', self.scratch)
        columns = [np.frombuffer(column, np.uint64) for column in (self.starts, self.keys)]
        self.writers[DOCUMENTS_SUFFIX].write(np.rec.fromarrays(columns, dtype=DOCUMENT_DTYPE).tobytes())
        shard = Shard(
            name=self.name,
            side=side,
            domain=domain,
            tokens=self.tokens,
            documents=len(self.keys),
            bytes=self.bytes,
            largest=self.largest_id,
            said=self.hasher.hexdigest(),
            sha256={suffix: file.finish() for suffix, file in self.writers.items()},
        )
        etags = remote_store.list_etags(self.folder, f'{self.name}.') if is_remote(self.folder) else {}
        shard_etags = {file: etags[file] for file in shard.file_names if etags}
        shard.write_record(self.folder, shard_etags)
        return shard, shard_etags


class ShardStream:
    """The documents of one side of one domain, in shards; those that were finished before are kept.

    One end of a pipeline asks `passes` of each document, and the other adds those that did not pass.
    """

    def __init__(
        self, folders: tuple[Path, Path], side: str, domain: str, number: int, shard_tokens: int, masked: bool
    ):
        (self.folder, self.scratch), self.side, self.domain, self.number = folders, side, domain, number
        self.shard_tokens, self.masked, self.shard_writer = shard_tokens, masked, None
        self.etags: dict[str, str] = {}  # of the files of its shards, in a bucket
        self.shards = self.find_remote_shards() if is_remote(self.folder) else self.find_local_shards()
        self.pending_shards = list(self.shards)  # finished shards whose documents are still to come by
        self.num_skipped, self.hasher = 0, hashlib.sha256()

    def format_shard_name(self, number: int) -> str:
        return f'{self.side}-{self.number:03}-{number:05}'

    def find_local_shards(self) -> list[Shard]:
        """The finished shards up to the first that is missing or damaged; no later one counts as finished."""
        shards = []
        while (record := self.folder / f'{self.format_shard_name(len(shards))}.json').exists():
            parsed = self.parse_record(record, record.read_bytes())
            if not parsed or parsed[0].find_damage(lambda file: (self.folder / file).read_bytes()):
                break
            shard, _ = parsed  # it has marks where it is a copy from a bucket
            shards.append(shard)
        for stale_record in sorted(self.folder.glob(f'{self.side}-{self.number:03}-*.json')):
            if stale_record.stem >= self.format_shard_name(len(shards)):
                stale_record.unlink()
        return shards

    def parse_record(self, file: Path, content: bytes) -> tuple[Shard, dict | None] | None:
        """Return the shard of a record and its marks; None where that is damaged, so that the shard is made anew."""
        try:
            fields = parse_json(content, file)
            etags = fields.pop('marks', None)
            shard = parse_shard(fields, file)
        except UserError:
            return None
        return (shard, etags) if shard.name == file.name.removesuffix('.json') else None

    def find_remote_shards(self) -> list[Shard]:
        """The same of a bucket, where no file is read for that: its size and its mark say what it is."""
        current_etags, shards = remote_store.list_etags(self.folder, self.format_shard_name(0)[:-5]), []
        record_files = list(
            itertools.takewhile(
                current_etags.__contains__, (f'{self.format_shard_name(n)}.json' for n in range(len(current_etags)))
            )
        )
        for file, content in zip(record_files, remote_store.read_objects(self.folder, record_files), strict=True):
            parsed = self.parse_record(self.folder / file, content)
            if not parsed:
                break
            shard, shard_etags = parsed  # no marks where it is a copy from a disk
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

    def skip_finished(self, entry: DocumentEntry) -> bool:
        """Whether a finished shard has the document."""
        if not self.pending_shards:
            return False
        self.num_skipped += 1
        self.hasher.update(entry.digest)
        if self.num_skipped == self.pending_shards[0].documents:
            if self.hasher.hexdigest() != self.pending_shards[0].said:
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
        """A document is complete, and with it perhaps a shard."""
        if self.shard_writer.tokens >= self.shard_tokens:
            self.finish()

    def finish(self) -> None:
        if self.shard_writer:
            shard, shard_etags = self.shard_writer.finish(self.side, self.domain)
            self.shards.append(shard)
            self.etags |= shard_etags
            self.shard_writer = None
