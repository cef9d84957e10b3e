"""Texts -> ids, in this process or in others beside it.

`python -m sinklab.data.tokens.encode TOKENIZER.JSON` serves one of those: pickled lists of texts come in by stdin,
and pickled lists of ids go out. It ends when its stdin does, so that none outlives whoever started it.
"""

import collections
import functools
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from sinklab.data.tokens.tokenizer import cut, load, size
from sinklab.record import Refusal

AHEAD = 3  # tasks under way for each process


def dtype(tokenizer: Tokenizer) -> np.dtype:
    """The smallest that holds every id."""
    return np.dtype('<u2' if size(tokenizer) <= 2**16 else '<u4')


def encode(tokenizer: Tokenizer, kind: np.dtype, texts: list[str]) -> list[np.ndarray]:
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array(encoding.ids, kind) for encoding in encodings]


def ids_of_text(tokenizer: Tokenizer, text: str, name: str) -> np.ndarray:
    """The ids of one text of any length."""
    return np.concatenate(encode(tokenizer, np.dtype(np.int32), [*cut(text, tokenizer, name)]))


def ids_of(file: Path, tasks: Iterable[list[str]], processes: int) -> Iterator[list[np.ndarray]]:
    """The ids of each task, in order; few tasks are under way at once."""
    if processes == 1:
        tokenizer = load(file)
        yield from map(functools.partial(encode, tokenizer, dtype(tokenizer)), tasks)
        return
    workers = Workers(file)
    with ThreadPoolExecutor(processes, initializer=workers.start) as pool:
        try:
            yield from in_order(pool, workers.encode, tasks, processes * AHEAD)
        finally:
            workers.stop()
            pool.shutdown(wait=True, cancel_futures=True)


def in_order(pool: ThreadPoolExecutor, work: Callable, tasks: Iterable, ahead: int) -> Iterator:
    waiting = collections.deque()
    for task in tasks:
        waiting.append(pool.submit(work, task))
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


class Workers:
    """A process for each thread that starts one."""

    def __init__(self, file: Path):
        self.command = [sys.executable, '-m', 'sinklab.data.tokens.encode', str(file)]
        self.mine, self.all = threading.local(), []

    def start(self) -> None:
        # In a session of its own, Ctrl-C reaches the parent alone; the end of stdin then ends this one.
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), os.environ.get('PYTHONPATH')]))
        environment = {**os.environ, 'PYTHONPATH': path, 'TOKENIZERS_PARALLELISM': 'false'}
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True)
        self.mine.process = subprocess.Popen(self.command, **pipes)
        self.all.append(self.mine.process)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        process = self.mine.process
        try:
            pickle.dump(texts, process.stdin)
            process.stdin.flush()
            return pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise Refusal(
                f'a tokenizing process has died (exit code {exit_code(process)}); what is done is kept, and the same '
                'command goes on: with fewer --processes, if memory was short'
            ) from error

    def stop(self) -> None:
        for process in self.all:
            process.kill()
            process.wait()


def exit_code(process: subprocess.Popen) -> int | str:
    try:
        return process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        return 'none: it does not answer'


def serve(file: str) -> None:
    tokenizer = load(file)
    kind = dtype(tokenizer)
    while True:
        try:
            texts = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            pickle.dump(encode(tokenizer, kind, texts), sys.stdout.buffer)
            sys.stdout.buffer.flush()
        except BrokenPipeError:  # whoever asked is dead
            os._exit(1)


if __name__ == '__main__':
    serve(sys.argv[1])
