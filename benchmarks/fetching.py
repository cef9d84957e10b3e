"""What a run on a bucket waits for its batches, at steps that do nothing but take their time.

    python benchmarks/fetching.py [--steps=100] [--step=0.2] [--latency=0.03] [--rows=8] [--length=2048] [--rounds=3]

A bucket in this process answers each range after a latency, as many at once as are asked for. Batches of this
process's rows are read as by `sinklab train`, ahead of the steps; a stall is what a step waits for its batch. Beside
it one range after another, and the same rows from a disk.
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np

from configs import default
from sinklab.data.batches import sequences
from sinklab.data.prepare import prepare
from sinklab.data.store import far, store
from sinklab.data.store.recipe import Recipe
from sinklab.files import known
from sinklab.parse import parse
from sinklab.spec import Spec
from sinklab.train.ahead import Ahead
from sinklab.train.loop import AHEAD

WORDS, LEAST = 2_000, 1_000_000  # letters of a document, of all
patched = mock.patch.object


class Slow:
    """A folder as a bucket that takes its time, and counts."""

    def __init__(self, folder: Path, latency: float):
        self.folder, self.latency, self.lock = folder, latency, threading.Lock()
        self.bytes = self.requests = 0

    def find(self, *_, **__) -> dict[str, dict]:
        return {f'b/s/{path.name}': dict(size=path.stat().st_size, ETag='1') for path in self.folder.iterdir()}

    def read_range(self, path: str, start: int, end: int, _: str) -> bytes:
        time.sleep(self.latency)
        with (self.folder / path.rpartition('/')[2]).open('rb') as file:
            file.seek(start)
            content = file.read(end - start)
        with self.lock:
            self.bytes, self.requests = self.bytes + len(content), self.requests + 1
        return content


def made(folder: Path, tokens: int) -> Path:
    """A store of random letters."""
    rng = np.random.default_rng(0)
    with (folder / 'texts.jsonl').open('w') as file:
        for _ in range(-(-tokens // WORDS)):
            file.write(json.dumps({'text': ''.join(rng.choice(list('abcdefghijklmnop'), WORDS))}) + '\n')
    prepare(Recipe(f'text:{folder}/texts.jsonl', 'train', 300, 0.1, 'none', 0, 1), folder / 'store')
    return folder / 'store'


@contextlib.contextmanager
def bucket(folder: Path, latency: float) -> Iterator[Slow]:
    """s3://b/s in the place of a folder."""
    slow, meta = Slow(folder, latency), json.loads((folder / 'meta.json').read_text())
    of_bucket = (patched(module, 'storage', return_value=slow) for module in (far, known))
    with contextlib.ExitStack() as patches:
        for patch in (*of_bucket, patched(store.meta, 'read', return_value=meta)):
            patches.enter_context(patch)
        yield slow


def spec_on(path: str, given: argparse.Namespace) -> Spec:
    config = default.get_config()
    changes = {'data.source': f'store:{path}', 'data.held_out': 0.1, 'data.length': given.length}
    changes |= {'model.vocabulary': 300, 'valid.windows': 4, 'optimizer.batch_size': 8 * given.rows}
    config.update_from_flattened_dict(changes | {'optimizer.steps': given.steps, 'optimizer.warmup_steps': 1})
    return parse(config.to_dict())


def stalls(take: Callable[[int], object], given: argparse.Namespace) -> list[float]:
    """Seconds that each step waits for its batch."""
    waited = []
    for number in range(given.steps):
        start = time.perf_counter()
        take(number)
        waited.append(time.perf_counter() - start)
        time.sleep(given.step)
    return waited


def walk(path: str, given: argparse.Namespace, at_once: bool = True) -> list[float]:
    """Of one of eight processes."""
    data = sequences(spec_on(path, given), 1 / 8)
    data.expect(0)
    if not at_once and data.batches.each:
        data.batches.each = lambda function, items: [function(item) for item in items]
    with contextlib.closing(
        Ahead(lambda number: data.batches.rows(number, range(given.rows)), range(given.steps), AHEAD)
    ) as batches:
        return stalls(lambda _: batches.take(), given)


def spread(values: list[float]) -> str:
    return f'{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})'


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    plain = dict(steps=100, step=0.2, latency=0.03, rows=8, length=2048, rounds=3)
    for name, value in plain.items():
        arguments.add_argument(f'--{name}', type=type(value), default=value)
    given = arguments.parse_args()
    found = {'at once': [], 'one after another': [], 'from a disk': []}
    with tempfile.TemporaryDirectory() as name:
        folder = made(Path(name), max(LEAST, 2 * given.rows * given.steps * given.length))  # 4 epochs: by ranges
        os.environ['SINKLAB_CACHE'] = name
        with bucket(folder, given.latency) as slow:
            for _ in range(given.rounds):
                found['at once'].append(walk('s3://b/s', given))
                found['one after another'].append(walk('s3://b/s', given, at_once=False))
        for _ in range(given.rounds):
            found['from a disk'].append(walk(str(folder), given))
    print(f'{platform.processor() or platform.machine()}, {os.cpu_count()} cores, python {platform.python_version()}')
    print(f'{given.rows} rows a step of {given.step} s, {1000 * given.latency:.0f} ms a request')
    print(f'{slow.bytes / slow.requests:.0f} bytes a request')
    for name, rounds in found.items():
        first = [1000 * waited[0] for waited in rounds]
        later = [1000 * statistics.mean(waited[1:]) for waited in rounds]
        print(f'{name}: first batch {spread(first)} ms, then {spread(later)} ms a step')


if __name__ == '__main__':
    main()
