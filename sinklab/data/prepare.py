"""Documents -> a token store: in parallel, in constant memory, resumed where an earlier attempt was stopped."""

import collections
import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from sinklab.data.documents import sources
from sinklab.data.documents.document import Damaged, Document, Source, intact
from sinklab.data.documents.split import key, two_sided
from sinklab.data.store import meta
from sinklab.data.store.recipe import Recipe, new_plan, plan_in, plan_with_tokenizer
from sinklab.data.store.shard import SIDES, TOKENIZER
from sinklab.data.store.writer import Entry, Stream
from sinklab.data.tokens import tokenizer
from sinklab.data.tokens.encode import dtype, ids_of
from sinklab.escape import escape_control
from sinklab.files.place import is_remote
from sinklab.files.whole import writable
from sinklab.lease import lease
from sinklab.record import Refusal

TASK = 1 << 20  # characters tokenized by one process at once
SMALL = 1 << 22  # bytes of source that are not worth another process
QUIET = 10.0  # seconds between two lines
DOMAINS = 200  # at most, as each has shards open
NAMED = 10  # damaged documents, at most, that are named when they are dropped


@dataclasses.dataclass
class Progress:
    """Bytes of the source that have been read, and tokens that have been written."""

    size: int
    read: float = 0
    tokens: int = 0
    started: float = dataclasses.field(default_factory=time.monotonic)

    def __str__(self) -> str:
        seconds = time.monotonic() - self.started
        left = seconds * (self.size / self.read - 1) if self.read else float('inf')
        return (
            f'{self.read / 1e6:,.0f} of {self.size / 1e6:,.0f} MB, {self.read / seconds / 1e6:.1f} MB/s, '
            f'{self.tokens / 1e6:,.1f}M tokens, {max(left, 0):,.0f} s left'
        )


Listener = Callable[[Progress], None]


def say(words: object) -> None:
    print(escape_control(words), file=sys.stderr, flush=True)


class Lines:
    """A listener that prints a line of progress every QUIET seconds."""

    def __init__(self):
        self.spoke = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        if time.monotonic() - self.spoke > QUIET:
            self.spoke = time.monotonic()
            say(progress)


def prepare(recipe: Recipe, folder: Path, processes: int | None = None, listen: Listener = lambda _: None) -> None:
    """Makes `folder` the store of a recipe; what an earlier attempt has finished is verified and kept."""
    source = two_sided(sources.source(recipe.source), recipe.held_out)
    with writable(folder) if is_remote(folder) else contextlib.nullcontext():
        begun = plan_in(folder, recipe, source)
    fresh = None if begun or is_remote(folder) else new_plan(recipe, source)  # of a bucket it is first seen who may
    with writable(folder), lock(folder) as check, scratch_for(folder) as scratch:
        plan = plan_with_tokenizer(folder, recipe, source, fresh)
        if meta.is_whole(folder):
            return
        if source.limit is not None:
            say(f'{recipe.source} is one text; {recipe.held_out:.3g} of it, cut off between words, are held out')
        processes = processes or min(cores(), 1 + source.size // SMALL)
        try:
            Work(recipe, source, (folder, scratch), plan['limit'], listen, check).run(processes)
        finally:
            for unfinished in scratch.glob('*.unfinished'):
                unfinished.unlink()


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


@contextlib.contextmanager
def scratch_for(folder: Path) -> Iterator[Path]:
    """Where shards grow: in their folder, or on a disk of this machine until they go to their bucket."""
    if not is_remote(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix='sinklab-prepare-') as scratch:
        try:
            yield Path(scratch)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise Refusal(
                f'{scratch} is full ({error.strerror}): a shard of each side and domain must find room there; let '
                'TMPDIR name another disk, or lower --shard_tokens, and give the same command again'
            ) from error


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[Callable[[], None]]:
    """One process at a time; gives what is to be asked before something is written."""
    if is_remote(folder):
        with lease(folder) as held:
            yield held.check
    else:
        with locked(folder):
            yield lambda: None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """On a disk the others wait, and find the work done."""
    with (folder / '.lock').open('w') as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f'another process prepares {folder}; waiting for it')
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise Refusal(f'{folder} cannot be locked ({error.strerror}); prepare elsewhere, and copy it') from error
        yield


@dataclasses.dataclass(frozen=True)
class Text:
    """Where the ids of a text go."""

    stream: Stream
    predicted: bool
    opens: Entry | None  # its first text
    closes: bool  # its last
    size: float  # bytes of the source that it stands for


def entry_of(document: Document) -> Entry:
    content = document.text.encode()
    return Entry(key(document.name), hashlib.sha256(document.name.encode() + b'\n' + content).digest(), len(content))


class Work:
    """A preparation: documents are read and routed to streams at one end, and their ids written at the other."""

    def __init__(
        self,
        recipe: Recipe,
        source: Source,
        where: tuple[Path, Path],
        limit: int,
        listen: Listener,
        check: Callable[[], None],
    ):
        self.recipe, self.source, self.where, self.limit, self.listen = recipe, source, where, limit, listen
        self.folder, scratch = where
        self.file, self.check = scratch / TOKENIZER, check
        if is_remote(self.folder):
            self.file.write_bytes((self.folder / TOKENIZER).read_bytes())
        self.tokenizer = tokenizer.load(self.file)
        self.dtype = dtype(self.tokenizer)
        self.streams: dict[tuple[str, str], Stream] = {}
        self.dropped: collections.Counter[str] = collections.Counter()
        self.waiting: collections.deque[Text] = collections.deque()
        self.progress = Progress(source.size)

    def run(self, processes: int) -> None:
        for task in ids_of(self.file, self.tasks(), processes):
            self.check()
            for ids in task:
                self.write(self.waiting.popleft(), ids)
            self.listen(self.progress)
        self.finish()

    def tasks(self) -> Iterator[list[str]]:
        """Texts of about TASK characters; `waiting` keeps where the ids of each go."""
        texts, size = [], 0
        for text, where in self.texts():
            texts.append(text)
            self.waiting.append(where)
            size += len(text)
            if size >= TASK:
                yield texts
                texts, size = [], 0
        if texts:
            yield texts

    def texts(self) -> Iterator[tuple[str, Text]]:
        for document in self.source.documents():
            if self.is_usable(document):
                entry = entry_of(document)
                stream = self.stream(document.domain, 'held_out' if entry.key < self.limit else 'train')
                if not stream.passes(entry):
                    yield from self.cut(document, stream, entry)
                    continue
            self.progress.read += document.size
            self.listen(self.progress)

    def is_usable(self, document: Document | Damaged) -> bool:
        if isinstance(document, Damaged) and self.recipe.lenient:
            self.dropped['damaged'] += 1
            if self.dropped['damaged'] <= NAMED:
                say(f'dropped: {document.where} {document.why}')
            return False
        if intact(document).blank:
            self.dropped['empty'] += 1
            return False
        return True

    def cut(self, document: Document, stream: Stream, entry: Entry) -> Iterator[tuple[str, Text]]:
        pieces = (
            (piece, predicted)
            for text, predicted in document.parts
            for piece in tokenizer.cut(text, self.tokenizer, document.name)
        )
        opens, share = entry, document.size / len(document.text)
        for (piece, predicted), later in itertools.pairwise(itertools.chain(pieces, [None])):
            yield piece, Text(stream, predicted, opens, closes=later is None, size=share * len(piece))
            opens = None

    def stream(self, domain: str, side: str) -> Stream:
        if (side, domain) not in self.streams:
            domains = list(dict.fromkeys([*(name for _, name in self.streams), domain]))
            if len(domains) > DOMAINS:
                raise Refusal(
                    f'{self.recipe.source} has over {DOMAINS} domains ({", ".join(domains[:3])}, ...), each of which '
                    'gets shards of its own; name another field'
                )
            arguments = domains.index(domain), self.recipe.shard_tokens, self.source.masked
            self.streams[side, domain] = Stream(self.where, side, domain, *arguments)
        return self.streams[side, domain]

    def write(self, text: Text, ids: np.ndarray) -> None:
        if text.opens:
            text.stream.begin(text.opens)
            if self.recipe.bos == 'documents':
                text.stream.add(np.array([self.recipe.fixed_token], self.dtype), False)
        text.stream.add(ids, text.predicted)
        self.progress.tokens += len(ids)
        self.progress.read += text.size
        if text.closes:
            text.stream.add(np.array([self.recipe.end_token], self.dtype), text.predicted)
            text.stream.end()

    def finish(self) -> None:
        """Ends the last shards, and makes a store of all."""
        if (more := self.dropped['damaged'] - NAMED) > 0:
            say(f'dropped: {more:,} more that are damaged')
        for stream in self.streams.values():
            self.check()
            stream.finish()
        shards = [shard for stream in self.streams.values() for shard in stream.shards]
        for side in SIDES:
            if not any(shard.side == side for shard in shards):
                raise Refusal(
                    f'{self.recipe.source} has no document on the {side} side, with held_out {self.recipe.held_out}; '
                    'give more documents, or another share in another folder'
                )
        self.check()
        seen = {file: mark for stream in self.streams.values() for file, mark in stream.marks.items()}
        meta.write(self.folder, self.recipe, self.source, shards, self.dropped, seen)
