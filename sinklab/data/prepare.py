"""Documents -> a token store: in parallel, in constant memory, and again from where it stopped."""

import collections
import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from sinklab.data import probes, sources, tokenizer
from sinklab.data.documents import Damaged, Document, Source
from sinklab.data.encode import dtype, encoded
from sinklab.data.shards import FORMAT, Entry, Shard, Stream
from sinklab.data.survey import Recipe, intact, key, survey
from sinklab.folder import whole, writable
from sinklab.record import Refusal

SIDES = ('train', 'held_out')
TASK = 1 << 20  # characters tokenized by one process at once
SMALL = 1 << 22  # bytes of source that are not worth another process


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


def prepare(
    recipe: Recipe, folder: Path, processes: int | None = None, listen: Listener = lambda progress: None
) -> None:
    """Makes `folder` the store of a recipe; what an earlier attempt has finished is verified and kept."""
    source = sources.source(recipe.source)
    with writable(folder), locked(folder):
        begun = begin(recipe, source, folder)
        if whole_already(folder):
            return
        processes = processes or min(len(os.sched_getaffinity(0)), 1 + source.size // SMALL)
        try:
            Work(recipe, source, folder, begun).run(processes, listen)
        finally:
            for unfinished in folder.glob('*.unfinished'):
                unfinished.unlink()


def whole_already(folder: Path) -> bool:
    """Whether a store is finished; where a shard of one is damaged, it is no longer."""
    file = folder / 'meta.json'
    if not file.exists():
        return False
    shards = [Shard(**record) for record in json.loads(file.read_text(encoding='utf-8'))['shards']]
    if not any(shard.damage(lambda name: (folder / name).read_bytes()) for shard in shards):
        return True
    for shard in shards:
        shard.write(folder)
    file.unlink()
    return False


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time; the others wait, and find the work done."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def begin(recipe: Recipe, source: Source, folder: Path) -> dict:
    """What recipe.json holds: the recipe, and what follows from it and the source; made once."""
    asked = {**dataclasses.asdict(recipe), 'format': FORMAT, 'identity': hashed(source.identity)}
    if recipe.tokenizer != 'train':
        asked['tokenizer'] = hashed(tokenizer.given(recipe.tokenizer))
    file = folder / 'recipe.json'
    if file.exists():
        begun = json.loads(file.read_text(encoding='utf-8'))
        if differ := [
            f'{name} {begun.get(name)} -> {value}' for name, value in asked.items() if begun.get(name) != value
        ]:
            raise Refusal(
                f'{folder} was begun from something else ({"; ".join(differ)}); give another folder, or delete it'
            )
        return begun
    ours = ('tokenizer.json', 'recipe.json.unfinished')
    if others := sorted(path.name for path in folder.iterdir() if path.name not in ours):
        raise Refusal(f'{folder} holds files and no token store ({others[0]}); give a new folder')
    limit, texts = survey(recipe, source)
    text = (
        tokenizer.learned(texts, recipe.vocabulary)
        if recipe.tokenizer == 'train'
        else tokenizer.given(recipe.tokenizer)
    )
    name = 'the tokenizer trained here' if recipe.tokenizer == 'train' else recipe.tokenizer
    tokenizer.check(tokenizer.loaded(text, name), recipe.end_token, recipe.fixed_token, name)
    (folder / 'tokenizer.json').write_text(text, encoding='utf-8')
    begun = {**asked, 'limit': limit}
    with whole(file) as unfinished:
        unfinished.write_text(json.dumps(begun, indent=2) + '\n', encoding='utf-8')
    return begun


def hashed(content) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


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

    def __init__(self, recipe: Recipe, source: Source, folder: Path, begun: dict):
        self.recipe, self.source, self.folder, self.limit = recipe, source, folder, begun['limit']
        self.tokenizer = tokenizer.loaded(tokenizer.given(folder / 'tokenizer.json'), str(folder / 'tokenizer.json'))
        self.dtype = dtype(self.tokenizer)
        self.streams: dict[tuple[str, str], Stream] = {}
        self.dropped: collections.Counter[str] = collections.Counter()
        self.waiting: collections.deque[Text] = collections.deque()
        self.progress = Progress(source.size)

    def run(self, processes: int, listen: Listener) -> None:
        for task in encoded(self.folder / 'tokenizer.json', self.tasks(), processes):
            for ids in task:
                self.write(self.waiting.popleft(), ids)
            listen(self.progress)
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

    def kept(self, document: Document | Damaged) -> bool:
        if isinstance(document, Damaged) and self.recipe.lenient:
            self.dropped['damaged'] += 1
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
            if len(domains) > 1000:
                raise Refusal(
                    f'{self.recipe.source} has over 1000 domains, such as {domains[:3]}; name another field'
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
        for stream in self.streams.values():
            stream.finish()
        shards = [shard for stream in self.streams.values() for shard in stream.shards]
        for side in SIDES:
            if not any(shard.side == side for shard in shards):
                raise Refusal(
                    f'{self.recipe.source} has no document on the {side} side, with held_out {self.recipe.held_out}; '
                    'give more documents, or another share'
                )
        meta = self.meta(shards)
        probes.write(self.folder / 'probe.npz', self.tokenizer.get_vocab_size())
        with whole(self.folder / 'meta.json') as unfinished:
            unfinished.write_text(json.dumps(meta, indent=1) + '\n', encoding='utf-8')
        for shard in shards:
            (self.folder / f'{shard.name}.json').unlink()

    def meta(self, shards: list[Shard]) -> dict:
        recipe = self.recipe
        what = dict(
            format=FORMAT,
            tokenizer=hashlib.sha256((self.folder / 'tokenizer.json').read_bytes()).hexdigest(),
            vocabulary=self.tokenizer.get_vocab_size(),
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
