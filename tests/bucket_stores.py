"""Stores on a disk and in a bucket, and counts of the bytes that are read from them."""

import dataclasses
import os
import random
from pathlib import Path

import numpy as np
from conftest import make_tiny_spec
from stores import make_store, write_source

from sinklab.data.run_data import RunData, load_run_data
from sinklab.data.store import Store
from sinklab.storage.paths import get_file_system, parse_path

LENGTH = 2047  # windows of 4 KB


def load_prefetched_data(spec, *share):
    """Load the data of a run, and start to prefetch at its first step."""
    data = load_run_data(spec, *share)
    data.start_prefetch(0)
    return data


def make_long_texts(count, length, seed=0):
    rng = random.Random(seed)
    return [f'{number} ' + ''.join(rng.choices('abcdefghij ', k=length)) for number in range(count)]


def make_large_store(folder, count=60, held_out=0.2, **changes):
    """Make a store of one domain whose shards hold several windows each."""
    source = write_source(folder / 'texts.jsonl', make_long_texts(count, 40_000))
    return make_store(folder / 'store', source, shard_tokens=300_000, held_out=held_out, **changes)


def upload_store(store: Store, bucket, name='store') -> str:
    """Upload a store to a bucket, clear the recorded requests, and return the URL of the store."""
    url = f'{bucket.url}/{name}'
    file_system = get_file_system(parse_path(url))
    for path in Path(store.path).iterdir():
        file_system.pipe_file(f'{url}/{path.name}', path.read_bytes())
    bucket.proxy.requests.clear()
    return url


def make_store_spec(path: str | os.PathLike, **changes):
    defaults = dict(data__source=f'store:{path}', data__held_out=0.2, data__length=LENGTH, valid__windows=16)
    return make_tiny_spec(**defaults | changes)


def count_received_bytes(bucket, path='') -> int:
    """Return the number of bytes of all answers, including listings."""
    return sum(request.response_bytes for request in bucket.proxy.find_requests(path))


@dataclasses.dataclass
class Reader:
    """Reader of the rows that belong to one process, from training batches and held-out windows."""

    data: RunData
    process_index: int
    process_count: int

    def get_rows(self, size: int) -> range:
        rows_per_process = size // self.process_count
        return range(self.process_index * rows_per_process, (self.process_index + 1) * rows_per_process)

    def read_training_batches(self, spec, steps: int) -> list:
        return [self.data.batches.read_rows(step, self.get_rows(spec.optimizer.batch_size)) for step in range(steps)]

    def read_held_out(self):
        rows = self.get_rows(len(self.data.valid_NT))
        return self.data.valid_NT[rows.start : rows.stop]


def make_reader(spec, process_index: int, process_count: int) -> Reader:
    return Reader(load_prefetched_data(spec, 1 / process_count), process_index, process_count)


def assert_exactly_equal(actual, expected):
    np.testing.assert_array_equal(actual, expected)
    assert actual.dtype == expected.dtype


def read_batches(spec, steps):
    data = load_prefetched_data(spec)
    for step in range(steps):
        data.batches.read_rows(step, range(spec.optimizer.batch_size))
    return data
