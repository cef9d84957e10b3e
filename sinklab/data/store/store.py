"""The token store: shards of ids, and what they were made of. Read in place; from a bucket, by ranges or ahead."""

import bisect
import errno
import functools
import hashlib
import itertools
import os
import resource
from collections.abc import Callable, Iterable

import numpy as np

from sinklab.data.store import meta
from sinklab.data.store.far import Far, Kept, Ranged
from sinklab.data.store.shard import (
    DOCUMENT,
    DOCUMENTS,
    IDS,
    META,
    PREDICTED,
    PROBE,
    SIDES,
    TOKENIZER,
    Shard,
    digest,
    parse_shard,
)
from sinklab.data.store.shelf import shelf, worthwhile
from sinklab.data.store.threads import readers
from sinklab.data.tokens.tokenizer import Tokenizer, parse
from sinklab.files.place import is_remote, place
from sinklab.files.regular import is_lasting
from sinklab.files.validation import leads_out, load_npz
from sinklab.record import Refusal, unknown

VERIFIED = 1 << 30  # bytes of ids that are verified whenever they are opened; `prepare --check` verifies more
OPEN = 1 << 14  # files that are mapped at once, where the system allows it


class Row:
    """The tokens of one side of one domain, as if they lay in one array."""

    def __init__(self, store: 'Store', shards: list[Shard]):
        self.store, self.shards = store, shards
        self.starts = [0, *itertools.accumulate(shard.tokens for shard in shards)]

    def __len__(self) -> int:
        return self.starts[-1]

    def ids(self, start: int, end: int) -> np.ndarray:
        return self.read(IDS, start, end)

    def loss_mask(self, start: int, end: int) -> np.ndarray:
        return self.read(PREDICTED, start, end)

    def read(self, suffix: str, start: int, end: int) -> np.ndarray:
        number, parts = bisect.bisect_right(self.starts, start) - 1, []
        while start < end:
            first = self.starts[number]
            parts.append(self.store.mapped(self.shards[number], suffix)[start - first : end - first])
            start, number = self.starts[number + 1], number + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def documents(self) -> tuple[np.ndarray, np.ndarray]:
        """(start, key) of each document."""
        parts = self.store.each(lambda shard: self.store.mapped(shard, DOCUMENTS)[:], self.shards)
        starts = [part['start'].astype(np.int64) + first for part, first in zip(parts, self.starts[:-1], strict=True)]
        keys = [part['key'] for part in parts]
        return np.concatenate([np.zeros(0, np.int64), *starts]), np.concatenate([np.zeros(0, np.uint64), *keys])


class Store:
    """A finished store. Its digest is of its tokens and of what tells how to read them, wherever it lies."""

    def __init__(self, path: str | os.PathLike):
        self.path, self.remote = place(path), is_remote(path)
        self.far = Far(self.path) if self.remote else None  # first: what is changed after it is found out
        self.meta = meta.read(self.path)
        self.shards = [parse_shard(record, self.path / META) for record in self.meta['shards']]
        self.dtype = np.dtype(self.meta['dtype'])
        self.mapped, self.shelf = functools.lru_cache(mappable())(self.map), None
        self.verify(digests=not self.remote and self.size((IDS,)) <= VERIFIED)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def digest(self) -> str:
        return self.meta['digest']

    @property
    def has_bos(self) -> bool:
        """Whether each document begins with BOS."""
        return self.meta['bos'] == 'documents'

    @property
    def domains(self) -> list[str]:
        return [domain['name'] for domain in self.meta['domains']]

    def named(self, domain: str | None, field: str) -> list[str]:
        """The one domain that a field of a config names, or all."""
        names = [name for name in self.domains if domain in (None, name)]
        if not names:
            raise Refusal(unknown(f'{field} = {domain!r}', str(domain), self.domains, 'domains'))
        return names

    def row(self, side: str, domain: str) -> Row:
        return Row(self, [shard for shard in self.shards if (shard.side, shard.domain) == (side, domain)])

    @property
    def mark(self) -> str | None:
        """Of the files in a bucket as they are now, whatever they are called by; None on a disk."""
        files = [file for shard in self.shards for file in shard.files]
        return self.far and self.far.mark([*files, META, TOKENIZER, PROBE])

    def size(self, suffixes: Iterable[str], *sides: str) -> int:
        """Bytes of the files of its shards, of all sides if none is named."""
        shards = [shard for shard in self.shards if shard.side in (sides or SIDES)]
        return sum(self.sizes(shard)[suffix] for shard in shards for suffix in suffixes)

    def tokenizer_json(self) -> str:
        return self.read_as(TOKENIZER, self.meta['tokenizer']).decode()

    def tokenizer(self) -> Tokenizer:
        return parse(self.tokenizer_json(), str(self.path / TOKENIZER))

    def probes(self) -> dict[str, np.ndarray]:
        return load_npz(self.read_as(PROBE, self.meta['probe']), self.path / PROBE, 'bring the store anew')

    def read(self, file: str) -> bytes:
        return self.far.read(file) if self.remote else (self.path / file).read_bytes()

    def read_as(self, file: str, wanted: str) -> bytes:
        """A file that was verified when the store was opened; one in a bucket is so now."""
        content = self.read(file)
        if self.remote and hashlib.sha256(content).hexdigest() != wanted:
            self.refuse(f'{file} is not the one that it was made with')
        return content

    def each(self, function: Callable, items: Iterable) -> list:
        """What a function that reads makes of each; at once, where reading is waiting."""
        return readers().map(function, items) if self.remote else [function(item) for item in items]

    def expect(self, coverage: float, suffixes: Iterable[str]) -> None:
        """Has the training files of a store in a bucket be fetched whole, if as much of them is read and they fit."""
        if self.remote and worthwhile(coverage):
            self.shelf = shelf(self.digest, self.size(suffixes, 'train'))
            self.mapped.cache_clear()

    def kind(self, suffix: str) -> np.dtype:
        return {IDS: self.dtype, DOCUMENTS: DOCUMENT, PREDICTED: np.dtype(np.uint8)}[suffix]

    def map(self, shard: Shard, suffix: str) -> np.ndarray | Ranged:
        file, kind = f'{shard.name}.{suffix}', self.kind(suffix)
        if not self.remote:
            return np.memmap(self.path / file, kind, 'r').view(np.ndarray)
        what = self.far, file, kind, shard.sha256[suffix]
        kept = self.shelf and shard.side == 'train' and suffix != DOCUMENTS
        return Kept(*what, self.shelf.folder) if kept else Ranged(*what)

    def sizes(self, shard: Shard) -> dict[str, int]:
        """Bytes that its files must have, by suffix."""
        counts = {IDS: shard.tokens, PREDICTED: shard.tokens, DOCUMENTS: shard.documents}
        return {suffix: counts[suffix] * self.kind(suffix).itemsize for suffix in shard.sha256}

    def verify(self, digests: bool) -> None:
        """Refuses a store with a file that is missing or damaged: by its size, or by its digest, too."""
        for shard in self.shards:
            for suffix, size in self.sizes(shard).items():
                self.check_links(f'{shard.name}.{suffix}')
                self.check_size(f'{shard.name}.{suffix}', size)
            if digests and (damage := shard.damage(self.read)):
                self.refuse(damage)
        for file, wanted in ((TOKENIZER, self.meta['tokenizer']), (PROBE, self.meta['probe'])):
            if self.remote and file not in self.far.known:
                self.refuse(f'{file} is not there')
            if not self.remote and digest(self.path / file) != wanted:
                self.refuse(f'{file} is not the one that it was made with')

    def check_links(self, file: str) -> None:
        path = self.path / file
        # A name of a shard has no folder in it, so that only a link leads anywhere else.
        if not self.remote and os.path.islink(path) and leads_out(path, self.path):
            raise Refusal(f'{path} is a link that leads out of the store, to {path.resolve()}; put a copy there')

    def check_size(self, file: str, size: int) -> None:
        try:
            found = self.length(file)
        except OSError as error:
            if not is_lasting(error):
                raise
            self.refuse(f'{file} cannot be read ({error.strerror or error})')
        if found != size:
            self.refuse(f'{file} has {found:,} bytes of {size:,}')

    def length(self, file: str) -> int:
        if not self.remote:
            return (self.path / file).stat().st_size
        if file not in self.far.known:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return self.far.known[file].size

    def refuse(self, damage: str) -> None:
        raise Refusal(
            f'{self} is damaged: {damage}; bring the file anew, or give its prepare command again, which mends it (a '
            'store in the cache may be deleted)'
        )


def mappable() -> int:
    """How many files may be mapped at once: half of those that may be open, which are made as many as can be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * OPEN if hard == resource.RLIM_INFINITY else min(2 * OPEN, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return OPEN if soft == resource.RLIM_INFINITY else min(OPEN, max(soft, wanted) // 2)
