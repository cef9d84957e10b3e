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

from sinklab.data.tokens.tokenizer import split_text, load_tokenizer, get_vocabulary_size
from sinklab.record import UserError

TASKS_PER_PROCESS = 3  # tasks under way for each process


def choose_ids_dtype(tokenizer: Tokenizer) -> np.dtype:
    """The smallest that holds every id."""
    return np.dtype('<u2' if get_vocabulary_size(tokenizer) <= 2**16 else '<u4')


def encode_texts(tokenizer: Tokenizer, ids_dtype: np.dtype, texts: list[str]) -> list[np.ndarray]:
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array(encoding.ids, ids_dtype) for encoding in encodings]


def encode_long_text(tokenizer: Tokenizer, text: str, name: str) -> np.ndarray:
    """The ids of one text of any length."""
    return np.concatenate(encode_texts(tokenizer, np.dtype(np.int32), [*split_text(text, tokenizer, name)]))


def encode_tasks(tokenizer_path: Path, tasks: Iterable[list[str]], processes: int) -> Iterator[list[np.ndarray]]:
    """The ids of each task, in order; few tasks are under way at once."""
    if processes == 1:
        tokenizer = load_tokenizer(tokenizer_path)
        yield from map(functools.partial(encode_texts, tokenizer, choose_ids_dtype(tokenizer)), tasks)
        return
    workers = EncoderProcesses(tokenizer_path)
    with ThreadPoolExecutor(processes, initializer=workers.start) as pool:
        try:
            yield from map_in_order(pool, workers.encode, tasks, processes * TASKS_PER_PROCESS)
        finally:
            workers.stop()
            pool.shutdown(wait=True, cancel_futures=True)


def map_in_order(pool: ThreadPoolExecutor, function: Callable, tasks: Iterable, max_pending: int) -> Iterator:
    pending = collections.deque()
    for task in tasks:
        pending.append(pool.submit(function, task))
        if len(pending) >= max_pending:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


class EncoderProcesses:
    """A process for each thread that starts one."""

    def __init__(self, tokenizer_path: Path):
        self.command = [sys.executable, '-m', 'sinklab.data.tokens.encode', str(tokenizer_path)]
        self.thread_local, self.processes = threading.local(), []

    def start(self) -> None:
        # In a session of its own, Ctrl-C reaches the parent alone; the end of stdin then ends this one.
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), os.environ.get('PYTHONPATH')]))
        environment = {**os.environ, 'PYTHONPATH': path, 'TOKENIZERS_PARALLELISM': 'false'}
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True)
        self.thread_local.process = subprocess.Popen(self.command, **pipes)
        self.processes.append(self.thread_local.process)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        process = self.thread_local.process
        try:
            pickle.dump(texts, process.stdin)
            process.stdin.flush()
            return pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise UserError(
                f'a tokenizing process has died (exit code {get_exit_code(process)}); what is done is kept, and the same '
                'command goes on: with fewer --processes, if memory was short'
            ) from error

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def get_exit_code(process: subprocess.Popen) -> int | str:
    try:
        return process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        return 'none: it does not answer'


def serve_encoder(tokenizer_path: str) -> None:
    tokenizer = load_tokenizer(tokenizer_path)
    ids_dtype = choose_ids_dtype(tokenizer)
    while True:
        try:
            texts = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            pickle.dump(encode_texts(tokenizer, ids_dtype, texts), sys.stdout.buffer)
            sys.stdout.buffer.flush()
        except BrokenPipeError:  # whoever asked is dead
            os._exit(1)


if __name__ == '__main__':
    serve_encoder(sys.argv[1])
