"""Benchmark of the token store: batches against NumPy, and `sinklab prepare` against `tokenizers`.

    python benchmarks/data.py [--read_tokens=100000000] [--text_mb=24] [--rounds=3] [--seconds=2] [--vocabulary=8192]

Batches of 16 x 2048 are read on one core, from a store in the page cache, in alternation with the same number of rows
that NumPy reads from one memory map. `sinklab prepare` runs as a user runs it, from a .jsonl to a finished store,
with a given tokenizer, in alternation with `Tokenizer.encode_batch_fast` over the same texts in memory on the same
cores. It also runs once on ten times the text, to show whether the resident memory of all its processes together
grows.
"""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from argument_types import parse_count, parse_positive_number
from tokenizers import Tokenizer

from sinklab.config.validate import parse_config
from sinklab.configs import default
from sinklab.data import sources, tokenizer
from sinklab.data.prepare import Recipe, prepare_store
from sinklab.data.store import Store
from sinklab.data.windows import ShuffledBatches, Windows
from sinklab.environment import get_package_versions
from sinklab.machine import get_processor_name

BATCH, LENGTH = 16, 2048


def iterate_library_texts(num_bytes: int) -> Iterator[str]:
    """Yield texts of the standard library until they have `num_bytes` bytes or there are no more."""
    for document in sources.open_source('stdlib').read_documents():
        if num_bytes <= 0:
            return
        yield document.text
        num_bytes -= len(document.text.encode())


def write_corpus(folder: Path, num_bytes: int) -> Path:
    """Write a .jsonl of the standard library, repeated until it has `num_bytes` bytes of text."""
    texts = list(iterate_library_texts(num_bytes))
    path, num_written, index = folder / f'{num_bytes}.jsonl', 0, 0
    with path.open('w') as file:
        while num_written < num_bytes:
            text = texts[index % len(texts)]
            file.write(json.dumps({'text': text}) + '\n')
            num_written, index = num_written + len(text.encode()), index + 1
    return path


def make_readers(store: Store, vocabulary: int) -> tuple[Callable[[int], object], Callable[[int], object]]:
    """Return two functions of a batch number: one reads a batch of ours, one reads as much with NumPy."""
    data = dataclasses.replace(parse_config(default.get_config().to_dict()).data, length=LENGTH)
    batches = ShuffledBatches([Windows([store.get_tokens('train', '')], data, vocabulary, 'training')], 0, BATCH)
    largest_shard = max((shard for shard in store.shards if shard.split == 'train'), key=lambda shard: shard.tokens)
    ids = np.memmap(store.path / f'{largest_shard.name}.ids', store.dtype, 'r')
    rows = np.random.default_rng(0).integers(len(ids) // (LENGTH + 1), size=(1000, BATCH))

    def read_with_numpy(index: int) -> np.ndarray:
        starts = rows[index % len(rows)] * (LENGTH + 1)
        return np.stack([ids[start : start + LENGTH + 1] for start in starts]).astype(np.int32)

    return lambda index: batches.read_rows(index, range(BATCH)), read_with_numpy


def measure_throughput(read: Callable[[int], object], seconds: float) -> float:
    """Return million tokens per second."""
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        read(count)
        count += 1
    return count * BATCH * LENGTH / (time.perf_counter() - start) / 1e6


def iterate_process_tree(pid: int) -> Iterator[int]:
    """Yield the ids of a process and of all its descendants."""
    yield pid
    for task_dir in Path(f'/proc/{pid}/task').glob('*/children'):
        for child_pid in task_dir.read_text().split():
            yield from iterate_process_tree(int(child_pid))


def measure_resident_mb(pid: int) -> float:
    """Return the resident MB of a process and its descendants; shared pages count once per process."""
    pages = 0
    for member_pid in iterate_process_tree(pid):
        try:
            pages += int(Path(f'/proc/{member_pid}/statm').read_text().split()[1])
        except (OSError, IndexError):  # the process has just ended
            continue
    return pages * os.sysconf('SC_PAGE_SIZE') / 1e6


def time_prepare(source: Path, tokenizer_path: Path, folder: Path) -> tuple[float, float]:
    """Return the seconds and the peak resident MB of `sinklab prepare`."""
    command = [sys.executable, '-m', 'sinklab', 'prepare', f'--source=text:{source}', f'--out={folder}', '--json']
    command += [f'--tokenizer={tokenizer_path}', '--held_out=0.01']
    start, peak_mb = time.perf_counter(), 0.0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    has_ended = threading.Event()

    def wait_for_process() -> None:
        process.wait()
        has_ended.set()

    threading.Thread(target=wait_for_process).start()
    while not has_ended.wait(0.05):
        try:
            peak_mb = max(peak_mb, measure_resident_mb(process.pid))
        except OSError:
            continue
    if process.returncode:
        raise RuntimeError(f'{command} has failed')
    return time.perf_counter() - start, peak_mb


def time_tokenizers(tokenizer_path: Path, texts: list[str]) -> float:
    """Return the seconds of `tokenizers` alone on all cores; loading the tokenizer is not included."""
    loaded_tokenizer, start = Tokenizer.from_file(str(tokenizer_path)), time.perf_counter()
    for offset in range(0, len(texts), 1000):
        loaded_tokenizer.encode_batch_fast(texts[offset : offset + 1000], add_special_tokens=False)
    return time.perf_counter() - start


def summarize_spread(values: list[float]) -> dict[str, float]:
    return dict(median=statistics.median(values), least=min(values), most=max(values))


def run_read_rounds(folder: Path, args: argparse.Namespace) -> dict:
    source, tokenizer_path = write_corpus(folder, 3 * args.read_tokens), folder / 'tokenizer.json'
    prepare_store(Recipe(f'text:{source}', str(tokenizer_path), None, 0.01, 'none', 0, 1), folder / 'read')
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    store = Store(folder / 'read')  # opening the store reads every byte once
    read_batch, read_numpy = make_readers(store, args.vocabulary)
    rates = [
        (measure_throughput(read_batch, args.seconds), measure_throughput(read_numpy, args.seconds))
        for _ in range(args.rounds)
    ]
    os.sched_setaffinity(0, cores)
    return dict(
        tokens=sum(shard.tokens for shard in store.shards),
        million_tokens_per_second=summarize_spread([store_rate for store_rate, _ in rates]),
        numpy_million_tokens_per_second=summarize_spread([numpy_rate for _, numpy_rate in rates]),
    )


def run_prepare_rounds(folder: Path, num_bytes: int, rounds: int) -> dict:
    source, tokenizer_path = write_corpus(folder, num_bytes), folder / 'tokenizer.json'
    texts = [json.loads(line)['text'] for line in source.open()]
    ratios, memory = [], []
    for round_index in range(rounds):
        tokenizer_seconds = time_tokenizers(tokenizer_path, texts)
        seconds, peak_mb = time_prepare(source, tokenizer_path, folder / f'store-{round_index}')
        ratios.append(tokenizer_seconds / seconds)
        memory.append(peak_mb)
        print(
            f'tokenizers {num_bytes / 1e6 / tokenizer_seconds:.2f} MB/s, '
            f'prepare {num_bytes / 1e6 / seconds:.2f} MB/s',
            file=sys.stderr,
        )
    del texts
    seconds, peak_mb = time_prepare(write_corpus(folder, 10 * num_bytes), tokenizer_path, folder / 'large')
    return dict(
        text_mb=num_bytes / 1e6,
        speed_over_tokenizers=summarize_spread(ratios),
        resident_mb=max(memory),
        ten_times=dict(resident_mb=peak_mb, mb_per_second=10 * num_bytes / 1e6 / seconds),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--read_tokens', type=parse_count, default=100_000_000)
    parser.add_argument('--text_mb', type=parse_positive_number, default=24)
    parser.add_argument('--rounds', type=parse_count, default=3)
    parser.add_argument('--seconds', type=parse_positive_number, default=2, help='of one measurement of reading')
    parser.add_argument('--vocabulary', type=parse_count, default=8192)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temp_dir:
        folder = Path(temp_dir)
        num_bytes = int(args.text_mb * 1e6)
        (folder / 'tokenizer.json').write_text(
            tokenizer.train_tokenizer(list(iterate_library_texts(num_bytes)), args.vocabulary)
        )
        results = dict(
            machine=get_processor_name(),
            cores=len(os.sched_getaffinity(0)),
            python=platform.python_version(),
            versions=get_package_versions(('numpy', 'grain', 'tokenizers')),
            prepare=run_prepare_rounds(folder, num_bytes, args.rounds),
            read=run_read_rounds(folder, args),
        )
    print(json.dumps(results, indent=2))


if __name__ == '__main__':
    main()
