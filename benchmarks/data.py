"""What the token store costs: batches against plain NumPy, `sinklab prepare` against bare `tokenizers`.

    python benchmarks/data.py [--read_tokens=100000000] [--text_mb=24] [--rounds=3] [--seconds=2] [--vocabulary=8192]

Batches of 16 x 2048 are read on one core, from a store in page cache, in alternation with as many rows that NumPy
alone takes from one memory map. `sinklab prepare` runs as a user runs it, from a .jsonl to a finished store, with a
given tokenizer, in alternation with `Tokenizer.encode_batch_fast` over the same texts in memory on the same cores;
and once on ten times the text, to see whether the resident memory of all its processes together grows.
"""

import argparse
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
from tokenizers import Tokenizer

from configs import default
from sinklab.data.documents import sources
from sinklab.data.prepare import prepare
from sinklab.data.sequences.interventions import Intervened
from sinklab.data.sequences.shuffled import Shuffled
from sinklab.data.sequences.windows import Windows
from sinklab.data.store.recipe import Recipe
from sinklab.data.store.store import Store
from sinklab.data.tokens import tokenizer
from sinklab.parse import parse
from sinklab.train.environment import versions

BATCH, LENGTH = 16, 2048


def library(size: int) -> Iterator[str]:
    """Texts of the standard library until there are `size` bytes or no more."""
    for document in sources.source('stdlib').documents():
        if size <= 0:
            return
        yield document.text
        size -= len(document.text.encode())


def corpus(folder: Path, size: int) -> Path:
    """A .jsonl of the standard library, over and over until it has `size` bytes of text."""
    texts = list(library(size))
    path, written, number = folder / f'{size}.jsonl', 0, 0
    with path.open('w') as file:
        while written < size:
            text = texts[number % len(texts)]
            file.write(json.dumps({'text': text}) + '\n')
            written, number = written + len(text.encode()), number + 1
    return path


def reading(store: Store, vocabulary: int) -> tuple[Callable[[int], object], Callable[[int], object]]:
    """(our batch of a number, the same amount of rows by NumPy from one memory map)."""
    windows = Windows([store.row('train', '')], LENGTH, 'training')
    data = parse(default.get_config().to_dict()).data
    batches = Shuffled([Intervened(windows, data, vocabulary, fix=True)], 0, BATCH)
    largest = max((shard for shard in store.shards if shard.side == 'train'), key=lambda shard: shard.tokens)
    ids = np.memmap(store.path / f'{largest.name}.ids', store.dtype, 'r')
    rows = np.random.default_rng(0).integers(len(ids) // (LENGTH + 1), size=(1000, BATCH))

    def bare(number: int) -> np.ndarray:
        places = rows[number % len(rows)] * (LENGTH + 1)
        return np.stack([ids[place : place + LENGTH + 1] for place in places]).astype(np.int32)

    return lambda number: batches.rows(number, range(BATCH)), bare


def pace(read: Callable[[int], object], seconds: float) -> float:
    """Million tokens a second."""
    number, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        read(number)
        number += 1
    return number * BATCH * LENGTH / (time.perf_counter() - start) / 1e6


def family(process: int) -> Iterator[int]:
    """A process and all that descend from it."""
    yield process
    for task in Path(f'/proc/{process}/task').glob('*/children'):
        for child in task.read_text().split():
            yield from family(int(child))


def resident(process: int) -> float:
    """MB of a process and all that descend from it; pages that they share count for each."""
    pages = 0
    for member in family(process):
        try:
            pages += int(Path(f'/proc/{member}/statm').read_text().split()[1])
        except (OSError, IndexError):  # it has just ended
            continue
    return pages * os.sysconf('SC_PAGE_SIZE') / 1e6


def prepared(source: Path, given: Path, folder: Path) -> tuple[float, float]:
    """(seconds, most MB resident) of `sinklab prepare`."""
    command = [sys.executable, '-m', 'sinklab', 'prepare', f'--source=text:{source}', f'--out={folder}', '--json']
    command += [f'--tokenizer={given}', '--held_out=0.01']
    start, most = time.perf_counter(), 0.0
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ended = threading.Event()
    threading.Thread(target=lambda: (running.wait(), ended.set())).start()
    while not ended.wait(0.05):
        try:
            most = max(most, resident(running.pid))
        except OSError:
            continue
    if running.returncode:
        raise RuntimeError(f'{command} has failed')
    return time.perf_counter() - start, most


def bare(given: Path, texts: list[str]) -> float:
    """Seconds of `tokenizers` alone, in a process of its own, all cores, texts and tokenizer at hand."""
    found, start = Tokenizer.from_file(str(given)), time.perf_counter()
    for first in range(0, len(texts), 1000):
        found.encode_batch_fast(texts[first : first + 1000], add_special_tokens=False)
    return time.perf_counter() - start


def spread(values: list[float]) -> dict[str, float]:
    return dict(median=statistics.median(values), least=min(values), most=max(values))


def read_rounds(folder: Path, options: argparse.Namespace) -> dict:
    source, given = corpus(folder, 3 * options.read_tokens), folder / 'tokenizer.json'
    prepare(Recipe(f'text:{source}', str(given), None, 0.01, 'none', 0, 1), folder / 'read')
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    store = Store(folder / 'read')  # which reads every byte once
    ours, plain = reading(store, options.vocabulary)
    found = [(pace(ours, options.seconds), pace(plain, options.seconds)) for _ in range(options.rounds)]
    os.sched_setaffinity(0, cores)
    return dict(
        tokens=sum(shard.tokens for shard in store.shards),
        million_tokens_a_second=spread([one for one, _ in found]),
        numpy_alone=spread([other for _, other in found]),
    )


def prepare_rounds(folder: Path, size: int, rounds: int) -> dict:
    source, given = corpus(folder, size), folder / 'tokenizer.json'
    texts = [json.loads(line)['text'] for line in source.open()]
    ratios, memory = [], []
    for number in range(rounds):
        alone = bare(given, texts)
        seconds, most = prepared(source, given, folder / f'store-{number}')
        ratios.append(alone / seconds)
        memory.append(most)
        print(f'bare {size / 1e6 / alone:.2f} MB/s, prepare {size / 1e6 / seconds:.2f} MB/s', file=sys.stderr)
    del texts
    seconds, most = prepared(corpus(folder, 10 * size), given, folder / 'large')
    return dict(
        text_mb=size / 1e6,
        pace_over_bare=spread(ratios),
        resident_mb=max(memory),
        ten_times=dict(resident_mb=most, mb_a_second=10 * size / 1e6 / seconds),
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument('--read_tokens', type=int, default=100_000_000)
    options.add_argument('--text_mb', type=float, default=24)
    options.add_argument('--rounds', type=int, default=3)
    options.add_argument('--seconds', type=float, default=2, help='of one measurement of reading')
    options.add_argument('--vocabulary', type=int, default=8192)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = int(given.text_mb * 1e6)
        (folder / 'tokenizer.json').write_text(tokenizer.train(list(library(size)), given.vocabulary))
        found = dict(
            machine=platform.processor() or platform.machine(),
            cores=len(os.sched_getaffinity(0)),
            python=platform.python_version(),
            versions=versions(('numpy', 'grain', 'tokenizers')),
            prepare=prepare_rounds(folder, size, given.rounds),
            read=read_rounds(folder, given),
        )
    print(json.dumps(found, indent=2))


if __name__ == '__main__':
    main()
