"""Tokenizers (Hugging Face tokenizer.json or a trained byte-level BPE) and parallel encoding.

`python -m sinklab.data.tokenizer TOKENIZER.JSON` serves one of those: pickled lists of texts come in by stdin,
and pickled lists of ids go out. It ends when its stdin does, so that none outlives whoever started it.
"""

import collections
import functools
import hashlib
import itertools
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sinklab.schema import UserError
from sinklab.storage.paths import parse_path
from sinklab.storage.untrusted_files import MAX_JSON_BYTES, read_bounded

SPECIAL_TOKENS = ['<|endoftext|>', '<|padding|>']  # ids 0 and 1, as in GPT-NeoX's
MAX_ENCODED_CHARS = 1 << 20  # characters tokenized at once
CUT_CONTEXT_CHARS, MAX_CUT_TRIES = (
    256,
    200,
)  # characters on each side of a cut that are compared, and places that are tried


def parse_tokenizer(text: str, name: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json, in which no text spells a special token, and nothing is cut or padded."""
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f'{name} is no tokenizer ({error}); give a tokenizer.json of Hugging Face') from error
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_tokenizer_json(file: str | Path) -> str:
    """The text of a tokenizer.json."""
    try:
        return read_bounded(parse_path(file), MAX_JSON_BYTES).decode('utf-8')
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError) as error:
        raise UserError(f'the tokenizer {file} cannot be read ({error}); give a tokenizer.json, or train') from error


def load_tokenizer(file: str | Path) -> Tokenizer:
    return parse_tokenizer(read_tokenizer_json(file), str(file))


def get_vocabulary_size(tokenizer: Tokenizer) -> int:
    """One more than its largest id, which may be more than it has tokens."""
    return 1 + max(tokenizer.get_vocab().values())


def compute_tokenizer_digest(file: str) -> str:
    return hashlib.sha256(read_tokenizer_json(file).encode()).hexdigest()


def check_special_tokens(tokenizer: Tokenizer, end_token: int, fixed_token: int, name: str) -> None:
    """Refuses ids that cannot end documents, or stand at fixed places and as BOS."""
    added = tokenizer.get_added_tokens_decoder().items()
    special = {number: token.content for number, token in added if token.special}
    if end_token not in special:
        examples = ', '.join(f'{number} {content}' for number, content in sorted(special.items())[:8])
        remedy = f'set end_token to one of: {examples}' if examples else 'it has none: add one, by add_special_tokens'
        raise UserError(
            f'{name} has {tokenizer.id_to_token(end_token)!r} as its token {end_token}, which is to end documents '
            f'and must be a special one; {remedy}'
        )
    if tokenizer.id_to_token(fixed_token) is None or fixed_token == end_token:
        raise UserError(
            f'{name} has no token {fixed_token} beside its end {end_token}, to be fixed and BOS; set fixed_token'
        )


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> str:
    """The tokenizer.json of a byte-level BPE of at most `vocabulary` ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=True)


def split_text(text: str, tokenizer: Tokenizer, name: str) -> Iterator[str]:
    """A long text in pieces, to be tokenized one at a time; their ids are those of the whole text."""
    start = 0
    while len(text) - start > MAX_ENCODED_CHARS:
        end = next(
            (
                position
                for position in find_word_ends(text, start + MAX_ENCODED_CHARS)
                if is_safe_cut(tokenizer, text, position)
            ),
            None,
        )
        if end is None:
            raise UserError(
                f'{name} has {len(text):,} characters, too many at once, and its tokenizer lets it be cut nowhere '
                f'near character {start + MAX_ENCODED_CHARS:,}; split the document'
            )
        yield text[start:end]
        start = end
    yield text[start:]


def find_word_ends(text: str, end: int) -> Iterator[int]:
    """Ends of words before a place, the nearest first."""
    positions = range(end, end - MAX_ENCODED_CHARS // 2, -1)
    ends = (position for position in positions if text[position - 1].isalnum() and not text[position].isalnum())
    return itertools.islice(ends, MAX_CUT_TRIES)


def is_safe_cut(tokenizer: Tokenizer, text: str, position: int) -> bool:
    """Return whether the text around a position has the same ids if its two sides are tokenized separately."""
    contexts = (
        text[position - CUT_CONTEXT_CHARS : position + CUT_CONTEXT_CHARS],
        text[position - CUT_CONTEXT_CHARS : position],
        text[position : position + CUT_CONTEXT_CHARS],
    )
    joined, left, right = (tokenizer.encode(context, add_special_tokens=False).ids for context in contexts)
    return joined == left + right


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
        self.command = [sys.executable, '-m', 'sinklab.data.tokenizer', str(tokenizer_path)]
        self.thread_local, self.processes = threading.local(), []

    def start(self) -> None:
        # In a session of its own, Ctrl-C reaches the parent alone; the end of stdin then ends this one.
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get('PYTHONPATH')]))
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
                f'a tokenizing process has died (exit code {get_exit_code(process)}); what is done is kept, '
                'and the same command goes on: with fewer --processes, if memory was short'
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
