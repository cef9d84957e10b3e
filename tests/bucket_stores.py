"""Stores on a disk and in a bucket, and counts of the bytes that are read from them."""

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
    """Load the data of a run, and start to prefetch at its first step."""
    data = load_run_data(spec, *share)
    data.start_prefetch(0)
    return data


def make_long_texts(count, words, seed=0):
    rng = random.Random(seed)
    return [f'{number} ' + ''.join(rng.choices('abcdefghij ', k=words)) for number in range(count)]


def large(folder, count=60, held_out=0.2, **changes):
    """Make a store of one domain whose shards hold several windows each."""
    source = written(folder / 'texts.jsonl', make_long_texts(count, 40_000))
    return made(folder / 'store', source, shard_tokens=300_000, held_out=held_out, **changes)


def uploaded(store: Store, bucket, name='store') -> str:
    """Upload a store to a bucket, clear the recorded requests, and return the URL of the store."""
    url = f'{bucket.url}/{name}'
    file_system = get_file_system(parse_path(url))
    for path in Path(store.path).iterdir():
        file_system.pipe_file(f'{url}/{path.name}', path.read_bytes())
    bucket.proxy.requests.clear()
    return url


def spec_on(path: str | os.PathLike, **changes):
    defaults = dict(data__source=f'store:{path}', data__held_out=0.2, data__length=LENGTH, valid__windows=16)
    return tiny(**defaults | changes)


def received(bucket, path='') -> int:
    """Return the number of bytes of all answers, including listings."""
    return sum(request.received for request in bucket.proxy.found(path))


@dataclasses.dataclass
class Reader:
    """Reader of the rows that belong to one process, from training batches and held-out windows."""

    data: RunData
    number: int
    count: int

    def rows(self, size: int) -> range:
        rows_per_process = size // self.count
        return range(self.number * rows_per_process, (self.number + 1) * rows_per_process)

    def batches(self, spec, steps: int) -> list:
        return [self.data.batches.read_rows(step, self.rows(spec.optimizer.batch_size)) for step in range(steps)]

    def held_out(self):
        own_rows = self.rows(len(self.data.valid_NT))
        return self.data.valid_NT[own_rows.start : own_rows.stop]


def reader(spec, number: int, count: int) -> Reader:
    return Reader(expecting(spec, 1 / count), number, count)


def exactly_equal(actual, expected):
    np.testing.assert_array_equal(actual, expected)
    assert actual.dtype == expected.dtype


def fetched(spec, steps):
    data = expecting(spec)
    for step in range(steps):
        data.batches.read_rows(step, range(spec.optimizer.batch_size))
    return data
