"""Stores that lie in a bucket as well as on a disk, and what reading them fetches."""

import dataclasses
import os
import random
from pathlib import Path

import numpy as np
from conftest import tiny
from stores import made, written

from sinklab.data.batches import RunData, load_run_data
from sinklab.data.store import Store
from sinklab.storage.paths import get_file_system, parse_path

LENGTH = 2047  # windows of 4 KB


def expecting(spec, *share):
    """What a run reads that begins at its first step."""
    data = load_run_data(spec, *share)
    data.start_prefetch(0)
    return data


def long_texts(count, words, seed=0):
    rng = random.Random(seed)
    return [f'{number} ' + ''.join(rng.choices('abcdefghij ', k=words)) for number in range(count)]


def large(folder, count=60, held_out=0.2, **changes):
    """A store of one domain, in shards of some windows."""
    source = written(folder / 'texts.jsonl', long_texts(count, 40_000))
    return made(folder / 'store', source, shard_tokens=300_000, held_out=held_out, **changes)


def uploaded(store: Store, bucket, name='store') -> str:
    """The store in a bucket; requests count from then on."""
    url = f'{bucket.url}/{name}'
    at = get_file_system(parse_path(url))
    for path in Path(store.path).iterdir():
        at.pipe_file(f'{url}/{path.name}', path.read_bytes())
    bucket.proxy.requests.clear()
    return url


def spec_on(path: str | os.PathLike, **changes):
    plain = dict(data__source=f'store:{path}', data__held_out=0.2, data__length=LENGTH, valid__windows=16)
    return tiny(**plain | changes)


def received(bucket, path='') -> int:
    """Bytes of all answers, listings and what else is said included."""
    return sum(request.received for request in bucket.proxy.found(path))


@dataclasses.dataclass
class Reader:
    """A process that reads its rows of some steps, and of the held-out windows."""

    data: RunData
    number: int
    count: int

    def rows(self, size: int) -> range:
        each = size // self.count
        return range(self.number * each, (self.number + 1) * each)

    def batches(self, spec, steps: int) -> list:
        return [self.data.batches.read_rows(step, self.rows(spec.optimizer.batch_size)) for step in range(steps)]

    def held_out(self):
        mine = self.rows(len(self.data.valid_NT))
        return self.data.valid_NT[mine.start : mine.stop]


def reader(spec, number: int, count: int) -> Reader:
    return Reader(expecting(spec, 1 / count), number, count)


def exactly_equal(one, other):
    np.testing.assert_array_equal(one, other)
    assert one.dtype == other.dtype


def fetched(spec, steps):
    data = expecting(spec)
    for step in range(steps):
        data.batches.read_rows(step, range(spec.optimizer.batch_size))
    return data
