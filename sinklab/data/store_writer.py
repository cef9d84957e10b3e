"""Writer of token-store shards that resumes after the shards of an earlier attempt."""

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
    """File writer that computes the sha256 while writing, and renames or uploads the complete file."""

    def __init__(self, path: Path, scratch: Path):
        self.path, self.unfinished_path = path, scratch / f'{path.name}.unfinished'
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

    def finish(self, side: str, domain: str) -> tuple[Shard, dict[str, str]]:
        """Finish the files, write the record and return (shard, etags of its files); no etags on a local disk."""
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
    """Stream of documents of one side of one domain, written to shards; shards finished earlier are kept.

    The reader of the pipeline calls `skip_finished` for each document. The writer adds the documents for which
    `skip_finished` returned False.
    """

    def __init__(
        self, folders: tuple[Path, Path], side: str, domain: str, number: int, shard_tokens: int, masked: bool
    ):
        (self.folder, self.scratch), self.side, self.domain, self.number = folders, side, domain, number
        self.shard_tokens, self.masked, self.shard_writer = shard_tokens, masked, None
        self.etags: dict[str, str] = {}  # etags of the shard files, if the store is in a bucket
        self.shards = self.find_remote_shards() if is_remote(self.folder) else self.find_local_shards()
        self.pending_shards = list(self.shards)  # finished shards whose documents the source has not yielded yet
        self.num_skipped, self.hasher = 0, hashlib.sha256()

    def format_shard_name(self, number: int) -> str:
        return f'{self.side}-{self.number:03}-{number:05}'

    def find_local_shards(self) -> list[Shard]:
        """Return the finished shards before the first one that is missing or damaged.

        The records of all later shards are deleted, so that these shards count as unfinished.
        """
        shards = []
        while (record := self.folder / f'{self.format_shard_name(len(shards))}.json').exists():
            parsed = self.parse_record(record, record.read_bytes())
            if not parsed or parsed[0].find_damage(lambda file: (self.folder / file).read_bytes()):
                break
            shard, _ = parsed  # a record that was copied from a bucket contains etags, which do not matter here
            shards.append(shard)
        for stale_record in sorted(self.folder.glob(f'{self.side}-{self.number:03}-*.json')):
            if stale_record.stem >= self.format_shard_name(len(shards)):
                stale_record.unlink()
        return shards

    def parse_record(self, file: Path, content: bytes) -> tuple[Shard, dict | None] | None:
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

    def skip_finished(self, entry: DocumentEntry) -> bool:
        """Return whether a finished shard contains the document, and verify the documents of each such shard.

        Raises:
            UserError: The documents of the source differ from those of a finished shard.
        """
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
        """End a document, and finish the shard if it has `shard_tokens` tokens or more."""
        if self.shard_writer.tokens >= self.shard_tokens:
            self.finish()

    def finish(self) -> None:
        if self.shard_writer:
            shard, shard_etags = self.shard_writer.finish(self.side, self.domain)
            self.shards.append(shard)
            self.etags |= shard_etags
            self.shard_writer = None
