"""Benchmark of the token store: batches against NumPy, and `sinklab prepare` against `tokenizers`.

    python benchmarks/data.py [--read_tokens=100000000] [--text_mb=24] [--rounds=3] [--seconds=2] [--vocabulary=8192]

Batches of 16 x 2048 are read on one core, from a store in the page cache, in alternation with the same number of rows
that NumPy reads from one memory map. `sinklab prepare` runs as a user runs it, from a .jsonl to a finished store,
with a given tokenizer, in alternation with `Tokenizer.encode_batch_fast` over the same texts in memory on the same
cores.
"""

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from argument_types import parse_count, parse_positive_number
from timing import format_spread, time_call
from tokenizers import Tokenizer

from sinklab.config.validate import parse_config
from sinklab.configs import default
from sinklab.data.batches import Windows, make_shuffled_batches
from sinklab.data.prepare import Recipe, prepare_store
from sinklab.data.sources import read_texts
from sinklab.data.store import Store
from sinklab.data.tokenizer import train_tokenizer
from sinklab.environment import get_package_versions
from sinklab.machine import describe_machine

BATCH, LENGTH = 16, 2048


def write_corpus(folder: Path, num_bytes: int) -> Path:
    """Write a .jsonl of the standard library, repeated until it has `num_bytes` bytes of text."""
    path, num_written = folder / f'{num_bytes}.jsonl', 0
    with path.open('w') as file:
        for text in itertools.cycle(read_texts('stdlib')):
            if num_written >= num_bytes:
                return path
            file.write(json.dumps({'text': text}) + '\n')
            num_written += len(text.encode())
    return path


def make_readers(store: Store, vocabulary: int) -> dict[str, Callable[[int], object]]:
    """Return functions of a batch number: one reads a batch of ours, one reads as much with NumPy."""
    data = dataclasses.replace(parse_config(default.get_config().to_dict()).data, length=LENGTH)
    windows = Windows([store.get_tokens('train', '')], data, vocabulary, 'training')
    batches = make_shuffled_batches([windows], 0, BATCH)
    largest_shard = max((shard for shard in store.shards if shard.split == 'train'), key=lambda shard: shard.tokens)
    ids = np.memmap(store.path / f'{largest_shard.name}.ids', store.dtype, 'r')
    rows = np.random.default_rng(0).integers(len(ids) // (LENGTH + 1), size=(1000, BATCH))

    def read_with_numpy(index: int) -> np.ndarray:
        starts = rows[index % len(rows)] * (LENGTH + 1)
        return np.stack([ids[start : start + LENGTH + 1] for start in starts]).astype(np.int32)

    return {'batches': lambda index: batches.read_rows(index, range(BATCH)), 'NumPy': read_with_numpy}


def measure_throughput(read: Callable[[int], object], seconds: float) -> float:
    """Return million tokens per second."""
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        read(count)
        count += 1
    return count * BATCH * LENGTH / (time.perf_counter() - start) / 1e6


def measure_reading(args: argparse.Namespace, folder: Path) -> None:
    source = write_corpus(folder, 3 * args.read_tokens)
    prepare_store(Recipe(f'text:{source}', f'{folder}/tokenizer.json', None, 0.01, 'none', 0, 1), folder / 'read')
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    readers = make_readers(Store(folder / 'read'), args.vocabulary)  # opening the store reads every byte once
    rounds = [
        {name: measure_throughput(read, args.seconds) for name, read in readers.items()} for _ in range(args.rounds)
    ]
    os.sched_setaffinity(0, cores)
    for name in readers:
        print(f'{name}, million tokens/s: {format_spread([rates[name] for rates in rounds])}')


def measure_preparing(args: argparse.Namespace, folder: Path) -> None:
    num_bytes = int(args.text_mb * 1e6)
    source, loaded_tokenizer = write_corpus(folder, num_bytes), Tokenizer.from_file(f'{folder}/tokenizer.json')
    texts = [json.loads(line)['text'] for line in source.open()]

    def tokenize() -> None:
        for start in range(0, len(texts), 1000):
            loaded_tokenizer.encode_batch_fast(texts[start : start + 1000], add_special_tokens=False)

    def prepare(round_index: int) -> None:
        command = [sys.executable, '-m', 'sinklab', 'prepare', f'--source=text:{source}', '--held_out=0.01', '--json']
        command += [f'--tokenizer={folder}/tokenizer.json', f'--out={folder}/store-{round_index}']
        subprocess.run(command, check=True, capture_output=True)

    rounds = [(time_call(tokenize), time_call(lambda i=i: prepare(i))) for i in range(args.rounds)]
    for name, seconds in zip(('tokenizers', 'prepare'), zip(*rounds, strict=True), strict=True):
        print(f'{name}, MB/s: {format_spread([args.text_mb / value for value in seconds])}')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--read_tokens', type=parse_count, default=100_000_000)
    parser.add_argument('--text_mb', type=parse_positive_number, default=24)
    parser.add_argument('--rounds', type=parse_count, default=3)
    parser.add_argument('--seconds', type=parse_positive_number, default=2, help='of one measurement of reading')
    parser.add_argument('--vocabulary', type=parse_count, default=8192)
    args = parser.parse_args()
    print(describe_machine())
    print(json.dumps(get_package_versions(('numpy', 'grain', 'tokenizers'))))
    with tempfile.TemporaryDirectory() as folder:
        tokenizer_json = train_tokenizer(read_texts('stdlib'), args.vocabulary)
        Path(folder, 'tokenizer.json').write_text(tokenizer_json)
        measure_preparing(args, Path(folder))
        measure_reading(args, Path(folder))


if __name__ == '__main__':
    main()
