"""Benchmark of batches from a token store in a bucket: seconds that a step waits for its batch.

    python benchmarks/remote_store.py [--steps=100] [--step_seconds=0.2] [--latency_seconds=0.03]
        [--rows=8] [--length=2048] [--rounds=3]

A simulated bucket in this process answers each range request after a latency, with any number of concurrent requests.
Batches of this process's rows are prefetched as by `sinklab train`. A stall is the time that a step waits for its
batch. The same rows are also read with one request after another, and from a disk.
"""

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
from argument_types import parse_count, parse_count_from_2, parse_positive_number
from timing import format_spread

from sinklab.config.spec import Spec
from sinklab.config.validate import parse_config
from sinklab.configs import default
from sinklab.data import remote_store, store
from sinklab.data.prepare import prepare_store
from sinklab.data.run_data import load_run_data
from sinklab.data.store_files import Recipe
from sinklab.environment import get_package_versions
from sinklab.machine import describe_machine
from sinklab.storage import paths
from sinklab.thread_pools import prefetch
from sinklab.train.loop import PREFETCH_DEPTH

LETTERS_PER_DOCUMENT, MIN_LETTERS = 2_000, 1_000_000  # letters per document, and of the whole corpus at least
patch_object = mock.patch.object


class SlowBucket:
    """A folder served as a bucket with latency, which counts requests and bytes."""

    def __init__(self, folder: Path, latency: float):
        self.folder, self.latency, self.lock = folder, latency, threading.Lock()
        self.num_bytes = self.num_requests = 0

    def find(self, *_, **__) -> dict[str, dict]:
        return {
            f'b/s/{path.name}': dict(size=path.stat().st_size, md5Hash='1', generation='1')
            for path in self.folder.iterdir()
        }

    def read_range(self, path: str, start: int, end: int, _: str) -> bytes:
        time.sleep(self.latency)
        with (self.folder / path.rpartition('/')[2]).open('rb') as file:
            file.seek(start)
            content = file.read(end - start)
        with self.lock:
            self.num_bytes, self.num_requests = self.num_bytes + len(content), self.num_requests + 1
        return content


def make_store(folder: Path, num_tokens: int) -> Path:
    """Prepare a token store of random letters."""
    rng = np.random.default_rng(0)
    with (folder / 'texts.jsonl').open('w') as file:
        for _ in range(-(-num_tokens // LETTERS_PER_DOCUMENT)):
            file.write(
                json.dumps({'text': ''.join(rng.choice(list('abcdefghijklmnop'), LETTERS_PER_DOCUMENT))}) + '\n'
            )
    prepare_store(Recipe(f'text:{folder}/texts.jsonl', 'train', 300, 0.1, 'none', 0, 1), folder / 'store')
    return folder / 'store'


@contextlib.contextmanager
def mount_bucket(folder: Path, latency: float) -> Iterator[SlowBucket]:
    """Serve the store in a folder as gs://b/s within the context."""
    slow_bucket, meta = SlowBucket(folder, latency), json.loads((folder / 'meta.json').read_text())
    storage_patches = (
        patch_object(module, 'get_file_system', return_value=slow_bucket) for module in (remote_store, paths)
    )
    with contextlib.ExitStack() as patches:
        for patch in (*storage_patches, patch_object(store.store_files, 'read_meta', return_value=meta)):
            patches.enter_context(patch)
        yield slow_bucket


def make_spec(path: str, args: argparse.Namespace) -> Spec:
    config = default.get_config()
    changes = {'data.source': f'store:{path}', 'data.held_out': 0.1, 'data.length': args.length}
    changes |= {'model.vocabulary': 300, 'valid.windows': 4, 'optimizer.batch_size': 8 * args.rows}
    config.update_from_flattened_dict(changes | {'optimizer.steps': args.steps, 'optimizer.warmup_steps': 1})
    return parse_config(config.to_dict())


def measure_stalls(get_batch: Callable[[int], object], args: argparse.Namespace) -> list[float]:
    """Return the seconds that each step waits for its batch."""
    stall_seconds = []
    for step in range(args.steps):
        start = time.perf_counter()
        get_batch(step)
        stall_seconds.append(time.perf_counter() - start)
        time.sleep(args.step_seconds)
    return stall_seconds


def run_steps(path: str, args: argparse.Namespace, concurrent: bool = True) -> list[float]:
    """Return the stalls of one of eight processes; without `concurrent`, with one request at a time."""
    data = load_run_data(make_spec(path, args), 1 / 8)
    data.start_prefetch(0)
    if not concurrent and data.batches.map_reads:
        data.batches.map_reads = lambda function, items: [function(item) for item in items]
    with contextlib.closing(
        prefetch(lambda step: data.batches.read_rows(step, range(args.rows)), range(args.steps), PREFETCH_DEPTH)
    ) as batches:
        return measure_stalls(lambda _: next(batches), args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--steps', type=parse_count_from_2, default=100, metavar='N', help='from 2 on')
    parser.add_argument(
        '--step_seconds',
        type=parse_positive_number,
        default=0.2,
        metavar='S',
        help='seconds of a step without its wait',
    )
    parser.add_argument(
        '--latency_seconds',
        type=parse_positive_number,
        default=0.03,
        metavar='S',
        help='seconds until a request is answered',
    )
    parser.add_argument('--rows', type=parse_count, default=8, help='sequences of a batch that this process reads')
    parser.add_argument('--length', type=parse_count, default=2048)
    parser.add_argument('--rounds', type=parse_count, default=3)
    args = parser.parse_args()
    stall_rounds = {'at once': [], 'one after another': [], 'from a disk': []}
    with tempfile.TemporaryDirectory() as name:
        store_path = make_store(
            Path(name), max(MIN_LETTERS, 2 * args.rows * args.steps * args.length)
        )  # 4 epochs, so that the store is read by ranges
        os.environ['SINKLAB_CACHE'] = name
        with mount_bucket(store_path, args.latency_seconds) as slow_bucket:
            for _ in range(args.rounds):
                stall_rounds['at once'].append(run_steps('gs://b/s', args))
                stall_rounds['one after another'].append(run_steps('gs://b/s', args, concurrent=False))
        for _ in range(args.rounds):
            stall_rounds['from a disk'].append(run_steps(str(store_path), args))
    print(describe_machine())
    print(json.dumps(get_package_versions(('numpy', 'grain'))))
    print(f'{args.rows} rows a step of {args.step_seconds} s, {1000 * args.latency_seconds:.0f} ms a request')
    print(f'{slow_bucket.num_bytes / slow_bucket.num_requests:.0f} bytes a request')
    for name, rounds in stall_rounds.items():
        first_ms = [1000 * stall_seconds[0] for stall_seconds in rounds]
        later_ms = [1000 * statistics.mean(stall_seconds[1:]) for stall_seconds in rounds]
        print(f'{name}: first batch {format_spread(first_ms)} ms, then {format_spread(later_ms)} ms a step')


if __name__ == '__main__':
    main()
