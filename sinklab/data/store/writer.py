"""Documents, one at a time -> shards; those that an earlier attempt has finished are kept."""

import array
import dataclasses
import hashlib
import itertools
import os
from pathlib import Path

import numpy as np

from sinklab.data.store import marks
from sinklab.data.store.shard import DOCUMENT, DOCUMENTS, IDS, PREDICTED, Shard, parse_shard
from sinklab.files import tree
from sinklab.files.place import is_remote
from sinklab.files.validation import parse_json
from sinklab.files.whole import upload
from sinklab.record import Refusal


class Growing:
    """A file that is hashed as it grows, and gets its name, or goes to its bucket, when it is whole."""

    def __init__(self, path: Path, scratch: Path):
        self.path, self.unfinished = path, scratch / f'{path.name}.unfinished'
        self.file, self.sha = self.unfinished.open('wb'), hashlib.sha256()

    def write(self, content: bytes) -> None:
        self.file.write(content)
        self.sha.update(content)

    def finish(self) -> str:
        """Its digest, when it lies on the disk, or in the bucket."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        if is_remote(self.path):
            upload(self.unfinished, self.path)
            self.unfinished.unlink()
        else:
            self.unfinished.replace(self.path)
        return self.sha.hexdigest()


@dataclasses.dataclass(frozen=True)
class Entry:
    """What a shard notes of a document, beside its tokens."""

    key: int
    digest: bytes
    bytes: int


class Open:
    """A shard that documents are added to."""

    def __init__(self, folder: Path, scratch: Path, name: str, masked: bool):
        self.folder, self.scratch, self.name = folder, scratch, name
        suffixes = (IDS, PREDICTED) if masked else (IDS,)
        self.files = {suffix: Growing(folder / f'{name}.{suffix}', scratch) for suffix in suffixes}
        self.keys, self.starts, self.said = array.array('Q'), array.array('Q'), hashlib.sha256()
        self.tokens = self.bytes = self.largest = 0

    def begin(self, entry: Entry) -> None:
        self.keys.append(entry.key)
        self.starts.append(self.tokens)
        self.said.update(entry.digest)
        self.bytes += entry.bytes

    def add(self, ids: np.ndarray, predicted: bool) -> None:
        self.files[IDS].write(ids.tobytes())
        if PREDICTED in self.files:
            self.files[PREDICTED].write(bytes([predicted]) * len(ids))
        self.tokens += len(ids)
        self.largest = max(self.largest, int(ids.max(initial=0)))

    def finish(self, side: str, domain: str) -> tuple[Shard, dict[str, str]]:
        """The record of what is written now, and in a bucket the marks of its files."""
        self.files[DOCUMENTS] = Growing(self.folder / f'{self.name}.{DOCUMENTS}', self.scratch)
        columns = [np.frombuffer(column, np.uint64) for column in (self.starts, self.keys)]
        self.files[DOCUMENTS].write(np.rec.fromarrays(columns, dtype=DOCUMENT).tobytes())
        shard = Shard(
            name=self.name,
            side=side,
            domain=domain,
            tokens=self.tokens,
            documents=len(self.keys),
            bytes=self.bytes,
            largest=self.largest,
            said=self.said.hexdigest(),
            sha256={suffix: file.finish() for suffix, file in self.files.items()},
        )
        seen = marks.seen(self.folder, f'{self.name}.') if is_remote(self.folder) else {}
        found = {file: seen[file] for file in shard.files if seen}
        shard.write(self.folder, found)
        return shard, found


class Stream:
    """The documents of one side of one domain, in shards; those that were finished before are kept.

    One end of a pipeline asks `passes` of each document, and the other adds those that did not pass.
    """

    def __init__(self, where: tuple[Path, Path], side: str, domain: str, number: int, size: int, masked: bool):
        (self.folder, self.scratch), self.side, self.domain, self.number = where, side, domain, number
        self.size, self.masked, self.open = size, masked, None
        self.marks: dict[str, str] = {}  # of the files of its shards, in a bucket
        self.shards = self.uploaded_shards() if is_remote(self.folder) else self.whole_shards()
        self.before = list(self.shards)  # finished shards whose documents are still to come by
        self.coming, self.said = 0, hashlib.sha256()

    def name(self, number: int) -> str:
        return f'{self.side}-{self.number:03}-{number:05}'

    def whole_shards(self) -> list[Shard]:
        """The finished shards up to the first that is missing or damaged; no later one counts as finished."""
        shards = []
        while (record := self.folder / f'{self.name(len(shards))}.json').exists():
            said = self.parse_record(record, record.read_bytes())
            if not said or said[0].damage(lambda file: (self.folder / file).read_bytes()):
                break
            shard, _ = said  # it has marks where it is a copy from a bucket
            shards.append(shard)
        for late in sorted(self.folder.glob(f'{self.side}-{self.number:03}-*.json')):
            if late.stem >= self.name(len(shards)):
                late.unlink()
        return shards

    def parse_record(self, file: Path, content: bytes) -> tuple[Shard, dict | None] | None:
        """Return the shard of a record and its marks; None where that is damaged, so that the shard is made anew."""
        try:
            fields = parse_json(content, file)
            found = fields.pop('marks', None)
            shard = parse_shard(fields, file)
        except Refusal:
            return None
        return (shard, found) if shard.name == file.name.removesuffix('.json') else None

    def uploaded_shards(self) -> list[Shard]:
        """The same of a bucket, where no file is read for that: its size and its mark say what it is."""
        seen, shards = marks.seen(self.folder, self.name(0)[:-5]), []
        there = list(itertools.takewhile(seen.__contains__, (f'{self.name(n)}.json' for n in range(len(seen)))))
        for file, content in zip(there, marks.contents(self.folder, there), strict=True):
            said = self.parse_record(self.folder / file, content)
            if not said:
                break
            shard, found = said  # no marks where it is a copy from a disk
            if found != {file: seen.get(file) for file in shard.files}:
                break
            shards.append(shard)
            self.marks |= found
        late = [file for file in seen if file.endswith('.json') and file >= f'{self.name(len(shards))}.json']
        tree.discard(self.folder, late)
        return shards

    def passes(self, entry: Entry) -> bool:
        """Whether a finished shard has the document."""
        if not self.before:
            return False
        self.coming += 1
        self.said.update(entry.digest)
        if self.coming == self.before[0].documents:
            if self.said.hexdigest() != self.before[0].said:
                raise Refusal(f'the source has changed since {self.folder} was begun; delete that, or give another')
            self.before.pop(0)
            self.coming, self.said = 0, hashlib.sha256()
        return True

    def begin(self, entry: Entry) -> None:
        if self.open is None:
            self.open = Open(self.folder, self.scratch, self.name(len(self.shards)), self.masked)
        self.open.begin(entry)

    def add(self, ids: np.ndarray, predicted: bool) -> None:
        self.open.add(ids, predicted)

    def end(self) -> None:
        """A document is complete, and with it perhaps a shard."""
        if self.open.tokens >= self.size:
            self.finish()

    def finish(self) -> None:
        if self.open:
            shard, found = self.open.finish(self.side, self.domain)
            self.shards.append(shard)
            self.marks |= found
            self.open = None
