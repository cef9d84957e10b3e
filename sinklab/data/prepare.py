"""Documents -> a token store: in parallel, in constant memory, and again from where it stopped."""

import collections
import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from sinklab.data import probes, sources, tokenizer
from sinklab.data.documents import Damaged, Document, Source
from sinklab.data.encode import dtype, encoded
from sinklab.data.plan import Recipe, agreed, hashed, made, settled
from sinklab.data.shards import FORMAT, PROBE, SIDES, TOKENIZER, Entry, Shard, Stream, content
from sinklab.data.survey import intact, key, two_sided
from sinklab.files import whole, writable
from sinklab.record import Refusal

TASK = 1 << 20  # characters tokenized by one process at once
SMALL = 1 << 22  # bytes of source that are not worth another process
QUIET = 10.0  # seconds between two lines
DOMAINS = 200  # of which shards are open at once
NAMED = 10  # of the damaged documents that are dropped


@dataclasses.dataclass
class Progress:
    """Bytes of the source, and tokens, that are behind."""

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


def said(words: object) -> None:
    print(words, file=sys.stderr, flush=True)


class Lines:
    """A listener that says now and then how far a preparation is."""

    def __init__(self):
        self.spoke = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        if time.monotonic() - self.spoke > QUIET:
            self.spoke = time.monotonic()
            said(progress)


def prepare(
    recipe: Recipe, folder: Path, processes: int | None = None, listen: Listener = lambda progress: None
) -> None:
    """Makes `folder` the store of a recipe; what an earlier attempt has finished is verified and kept."""
    if '://' in str(folder):
        raise Refusal(f'{folder} is no local folder, and only those can be written; prepare there and copy it')
    source = two_sided(sources.source(recipe.source), recipe.held_out)
    fresh = None if agreed(recipe, source, folder) else made(recipe, source)
    with writable(folder), locked(folder):
        plan = settled(recipe, source, folder, fresh)
        if finished(folder):
            return
        if source.limit is not None:
            said(f'{recipe.source} is one text; {recipe.held_out:.3g} of it, cut off between words, are held out')
        processes = processes or min(cores(), 1 + source.size // SMALL)
        try:
            Work(recipe, source, folder, plan['limit'], listen).run(processes)
        finally:
            for unfinished in folder.glob('*.unfinished'):
                unfinished.unlink()


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def finished(folder: Path) -> bool:
    """Whether a store is whole; where a file of one is damaged, it is no longer, and its other shards are kept."""
    file = folder / 'meta.json'
    if not file.exists():
        return False
    try:
        meta = json.loads(file.read_text(encoding='utf-8'))
        shards = [Shard(**record) for record in meta['shards']]
        probe = meta['probe']
    except (ValueError, KeyError, TypeError) as error:
        raise Refusal(f'{file} is damaged ({error}); delete {folder}, or give another folder') from error
    damaged = [shard for shard in shards if shard.damage(lambda name: (folder / name).read_bytes())]
    if not damaged and hashlib.sha256(content(folder / PROBE)).hexdigest() == probe:
        return True
    for shard in shards:
        shard.write(folder)
    file.unlink()
    return False


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time; the others wait, and find the work done."""
    with (folder / '.lock').open('w') as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            said(f'another process prepares {folder}; waiting for it')
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise Refusal(
                f'{folder} lies where no file can be locked ({error.strerror}); prepare on another disk, and copy'
            ) from error
        yield


@dataclasses.dataclass(frozen=True)
class Text:
    """What a task has of a document: where its ids go."""

    stream: Stream
    predicted: bool
    opens: Entry | None  # its first text
    closes: bool  # its last
    size: float  # bytes of the source that it stands for


def noted(document: Document) -> Entry:
    content = document.text.encode()
    sha = hashlib.sha256(document.name.encode() + b'\n')
    sha.update(content)
    return Entry(key(document.name), sha.digest(), len(content))


class Work:
    """A preparation: documents are read and routed to streams at one end, and their ids written at the other."""

    def __init__(self, recipe: Recipe, source: Source, folder: Path, limit: int, listen: Listener):
        self.recipe, self.source, self.folder, self.limit, self.listen = recipe, source, folder, limit, listen
        self.tokenizer = tokenizer.loaded(tokenizer.given(folder / TOKENIZER), str(folder / TOKENIZER))
        self.dtype = dtype(self.tokenizer)
        self.streams: dict[tuple[str, str], Stream] = {}
        self.dropped: collections.Counter[str] = collections.Counter()
        self.waiting: collections.deque[Text] = collections.deque()
        self.progress = Progress(source.size)

    def run(self, processes: int) -> None:
        for task in encoded(self.folder / TOKENIZER, self.tasks(), processes):
            for ids in task:
                self.write(self.waiting.popleft(), ids)
            self.listen(self.progress)
        self.finish()

    def tasks(self) -> Iterator[list[str]]:
        """Texts of about TASK characters, each noted in `waiting`."""
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
            if self.kept(document):
                entry = noted(document)
                stream = self.stream(document.domain, SIDES[entry.key < self.limit])
                if not stream.passes(entry):
                    yield from self.cut(document, stream, entry)
                    continue
            self.progress.read += document.size
            self.listen(self.progress)

    def kept(self, document: Document | Damaged) -> bool:
        if isinstance(document, Damaged) and self.recipe.lenient:
            self.dropped['damaged'] += 1
            if self.dropped['damaged'] <= NAMED:
                said(f'dropped: {document.where} {document.why}')
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
            self.streams[side, domain] = Stream(self.folder, side, domain, *arguments)
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
        """meta.json, whose presence says that the store is whole."""
        if (more := self.dropped['damaged'] - NAMED) > 0:
            said(f'dropped: {more:,} more that are damaged')
        for stream in self.streams.values():
            stream.finish()
        shards = [shard for stream in self.streams.values() for shard in stream.shards]
        for side in SIDES:
            if not any(shard.side == side for shard in shards):
                raise Refusal(
                    f'{self.recipe.source} has no document on the {side} side, with held_out {self.recipe.held_out}; '
                    'give more documents, or another share in another folder'
                )
        with whole(self.folder / PROBE) as unfinished:
            probes.write(unfinished, tokenizer.size(self.tokenizer))
        with whole(self.folder / 'meta.json') as unfinished:
            unfinished.write_text(json.dumps(self.meta(shards), indent=1) + '\n', encoding='utf-8')
        for shard in shards:
            (self.folder / f'{shard.name}.json').unlink()

    def meta(self, shards: list[Shard]) -> dict:
        recipe = self.recipe
        what = dict(
            format=FORMAT,
            tokenizer=hashlib.sha256(content(self.folder / TOKENIZER)).hexdigest(),
            vocabulary=tokenizer.size(self.tokenizer),
            dtype=self.dtype.str,
            bos=recipe.bos,
            end_token=recipe.end_token,
            fixed_token=recipe.fixed_token,
            held_out=recipe.held_out,
            masked=self.source.masked,
            weights=dict(self.source.weights or ()),
        )
        told = [(shard.side, shard.domain, shard.sha256) for shard in shards]
        return dict(
            digest=hashed([what, told])[:16],
            source=recipe.source,
            **what,
            domains=[self.counted(domain, shards) for domain in dict.fromkeys(shard.domain for shard in shards)],
            dropped=dict(self.dropped),
            probe=hashlib.sha256(content(self.folder / PROBE)).hexdigest(),
            shards=[dataclasses.asdict(shard) for shard in shards],
        )

    def counted(self, domain: str, shards: list[Shard]) -> dict:
        """Documents, tokens and bytes of a domain, by side."""
        sums = {}
        for side in SIDES:
            mine = [shard for shard in shards if (shard.domain, shard.side) == (domain, side)]
            sums[side] = {
                name: sum(getattr(shard, name) for shard in mine) for name in ('documents', 'tokens', 'bytes')
            }
        return dict(name=domain, **sums)
