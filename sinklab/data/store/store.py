"""The token store: shards of ids, and what they were made of. Read in place, or from a cache where it is remote."""

import bisect
import functools
import hashlib
import io
import itertools
import os
import resource
from pathlib import Path

import numpy as np
from etils import epath

from sinklab.cache import cache
from sinklab.data.store import meta
from sinklab.data.store.shard import DOCUMENT, DOCUMENTS, IDS, PREDICTED, PROBE, TOKENIZER, Shard, digest
from sinklab.data.tokens.tokenizer import Tokenizer, parse
from sinklab.files.whole import whole, writable
from sinklab.record import Refusal

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
        parts = [self.store.mapped(shard, DOCUMENTS) for shard in self.shards]
        starts = [part['start'].astype(np.int64) + first for part, first in zip(parts, self.starts[:-1], strict=True)]
        keys = [part['key'] for part in parts]
        return np.concatenate([np.zeros(0, np.int64), *starts]), np.concatenate([np.zeros(0, np.uint64), *keys])


class Store:
    """A finished store. Its digest is of its tokens and of what tells how to read them, wherever it lies."""

    def __init__(self, path: str | os.PathLike):
        self.path = epath.Path(path)
        self.remote = '://' in str(path)
        self.meta = meta.read(self.path)
        self.shards = [Shard(**record) for record in self.meta['shards']]
        self.dtype = np.dtype(self.meta['dtype'])
        self.mapped = functools.lru_cache(mappable())(self.map)
        if not self.remote:
            self.verify(digests=sum(shard.tokens for shard in self.shards) * self.dtype.itemsize <= VERIFIED)

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

    def row(self, side: str, domain: str) -> Row:
        return Row(self, [shard for shard in self.shards if (shard.side, shard.domain) == (side, domain)])

    def tokenizer(self) -> Tokenizer:
        return parse(self.read(TOKENIZER).decode(), str(self.path / TOKENIZER))

    def probes(self) -> dict[str, np.ndarray]:
        return dict(np.load(io.BytesIO(self.read(PROBE))))

    def read(self, file: str) -> bytes:
        return (self.path / file).read_bytes()

    def map(self, shard: Shard, suffix: str) -> np.ndarray:
        file = f'{shard.name}.{suffix}'
        path = self.local_copy(file, shard.sha256[suffix]) if self.remote else self.path / file
        kind = {IDS: self.dtype, DOCUMENTS: DOCUMENT, PREDICTED: np.dtype(np.uint8)}[suffix]
        return np.memmap(path, kind, 'r').view(np.ndarray)

    def local_copy(self, file: str, sha256: str) -> Path:
        """A copy on this machine of a remote file."""
        path = cache() / 'remote' / self.digest / file
        if path.exists():  # whole, for it got its name when it was
            return path
        try:
            content = self.read(file)
        except OSError as error:
            self.refuse(f'{file} cannot be read ({error.strerror or error})')
        if hashlib.sha256(content).hexdigest() != sha256:
            self.refuse(f'{file} is not as it was written (its sha256 differs)')
        with writable(path.parent), whole(path) as unfinished:
            unfinished.write_bytes(content)
        return path

    def verify(self, digests: bool) -> None:
        """Refuses a store with a file that is missing or damaged: by its size, or by its digest, too."""
        for shard in self.shards:
            sizes = {IDS: shard.tokens * self.dtype.itemsize, PREDICTED: shard.tokens}
            sizes[DOCUMENTS] = shard.documents * DOCUMENT.itemsize
            for suffix in shard.sha256:
                self.check_size(f'{shard.name}.{suffix}', sizes[suffix])
            if digests and (damage := shard.damage(self.read)):
                self.refuse(damage)
        for file, wanted in ((TOKENIZER, self.meta['tokenizer']), (PROBE, self.meta['probe'])):
            if digest(self.path / file) != wanted:
                self.refuse(f'{file} is not the one that it was made with')

    def check_size(self, file: str, size: int) -> None:
        try:
            found = (self.path / file).stat().length
        except OSError as error:
            self.refuse(f'{file} cannot be read ({error.strerror or error})')
        if found != size:
            self.refuse(f'{file} has {found:,} bytes of {size:,}')

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
