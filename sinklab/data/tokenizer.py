"""Tokenizers (Hugging Face tokenizer.json or a trained byte-level BPE) and parallel encoding.

`python -m sinklab.data.tokenizer TOKENIZER.JSON` encodes pickled lists of texts from standard input, and writes
pickled lists of ids to standard output. It exits as soon as its input ends, also while it encodes, so that it does
not outlive its parent.
"""

import functools
import hashlib
import itertools
import os
import pickle
import queue
import re
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from sinklab.errors import UserError
from sinklab.storage.files import MAX_JSON_BYTES, read_regular_file
from sinklab.storage.paths import parse_path
from sinklab.thread_pools import call_in_thread, map_ahead

SPECIAL_TOKENS = ['<|endoftext|>', '<|padding|>']  # ids 0 and 1, as in GPT-NeoX's
MAX_ENCODED_CHARS = 1 << 20  # characters tokenized at once
CUT_CONTEXT_CHARS, MAX_CUT_TRIES = (
    256,
    200,
)  # characters on each side of a cut that are compared, and places that are tried


def parse_tokenizer(text: str, name: str) -> Tokenizer:
    """Parse a tokenizer.json; its special tokens are not recognized in texts, and it neither truncates nor pads.

    Args:
        text: The content of the file.
        name: The name of the file, for the error message.

    Raises:
        UserError: The text is not a tokenizer.json.
    """
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f'{name} is not a tokenizer ({error}); give a tokenizer.json of Hugging Face') from error
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_tokenizer_json(file: str | Path) -> str:
    """Read a tokenizer.json; raise UserError if it is missing or not UTF-8."""
    try:
        return read_regular_file(parse_path(file), max_bytes=MAX_JSON_BYTES).decode('utf-8')
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError) as error:
        raise UserError(f'the tokenizer {file} cannot be read ({error}); give a tokenizer.json, or train') from error


def load_tokenizer(file: str | Path) -> Tokenizer:
    return parse_tokenizer(read_tokenizer_json(file), str(file))


def get_vocabulary_size(tokenizer: Tokenizer) -> int:
    """Return one more than the largest id, which may exceed the number of tokens."""
    return 1 + max(tokenizer.get_vocab().values())


def compute_tokenizer_digest(file: str) -> str:
    return hashlib.sha256(read_tokenizer_json(file).encode()).hexdigest()


def check_special_tokens(
    tokenizer: Tokenizer,
    end_token: int,
    fixed_token: int,
    name: str,
    fields: tuple[str, str] = ('end_token', 'fixed_token'),
) -> None:
    """Check that the ids can end documents and can be a BOS or a fixed token; `fields` are where a user sets them.

    Raises:
        UserError: `end_token` is not a special token, or `fixed_token` does not exist or is equal to it.
    """
    added = tokenizer.get_added_tokens_decoder().items()
    special = {number: token.content for number, token in added if token.special}
    if end_token not in special:
        examples = ', '.join(f'{number} {content}' for number, content in sorted(special.items())[:8])
        remedy = f'set {fields[0]} to one of: {examples}' if examples else 'add one with add_special_tokens'
        raise UserError(
            f'{name} has {tokenizer.id_to_token(end_token)!r} as its token {end_token}; the end of documents '
            f'must be a special token; {remedy}'
        )
    if tokenizer.id_to_token(fixed_token) is None or fixed_token == end_token:
        raise UserError(f'{name} has no token {fixed_token} other than its end {end_token}; set {fields[1]} (BOS)')


# The time to train BPE grows with the square of the length of a pre-token, so a longer one is cut. No word is that
# long: the longest pre-token of Python's standard library has 200 characters.
MAX_WORD_CHARS = 512
# A longer pre-token fills a whole block of half that length.
BLOCK_CHARS = MAX_WORD_CHARS // 2
UNIFORM_BLOCK = re.compile(r'[^\W_]{N}|(?:[^\w\s]|_){N}|\s{N}'.replace('N', str(BLOCK_CHARS)))
# The pattern of `pre_tokenizers.ByteLevel` with a largest length.
WORD = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+".replace(
    '+', f'{{1,{MAX_WORD_CHARS}}}'
)


def train_tokenizer(texts: Sequence[str], vocabulary: int) -> str:
    """Train a byte-level BPE with at most `vocabulary` ids, and return its tokenizer.json.

    If a text may have a pre-token of more than MAX_WORD_CHARS characters, the tokenizer cuts pre-tokens at that
    length. Texts with shorter ones have the same ids with and without the cut.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if any(UNIFORM_BLOCK.match(text, start) for text in texts for start in range(0, len(text), BLOCK_CHARS)):
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(WORD), 'isolated'),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    message = f'training a tokenizer of {vocabulary:,} ids on {sum(map(len, texts)):,} characters'
    on_wait = functools.partial(print, message, file=sys.stderr, flush=True)
    call_in_thread(tokenizer.train_from_iterator, texts, trainer, on_wait=on_wait)
    return tokenizer.to_str(pretty=True)


def split_text(text: str, tokenizer: Tokenizer) -> Iterator[str]:
    """Split a long text into pieces whose ids, one piece after another, are those of the whole text.

    Only pieces of a pre-token of more than MAX_ENCODED_CHARS characters may have other ids.
    """
    end = 0
    while True:
        start, end = end, find_piece_end(tokenizer, text, end)
        yield text[start:end]
        if end == len(text):
            return


def find_piece_end(tokenizer: Tokenizer, text: str, start: int) -> int:
    """Return the end of the piece of a text that begins at `start`."""
    end = start + MAX_ENCODED_CHARS
    if end >= len(text):
        return len(text)
    if next(find_word_ends(text, end), None):
        cuts = (cut for near in range(end, len(text), MAX_ENCODED_CHARS) for cut in find_word_ends(text, near))
        # A tokenizer that allows no cut (for example, one that adds a space to each text) needs all at once.
        return next((cut for cut in cuts if is_safe_cut(tokenizer, text, cut)), len(text))
    pre_tokens = tokenizer.pre_tokenizer.pre_tokenize_str(text[start:end]) if tokenizer.pre_tokenizer else []
    # The last pre-token may continue after `end`.
    return start + pre_tokens[-1][1][0] if len(pre_tokens) > 1 else end


def find_word_ends(text: str, end: int) -> Iterator[int]:
    """Yield the ends of words, numbers and runs of other marks before a position, the nearest first."""
    positions = range(end, end - MAX_ENCODED_CHARS // 8, -1)
    ends = (
        position
        for position in positions
        if not text[position - 1].isspace() and get_char_class(text[position - 1]) != get_char_class(text[position])
    )
    return itertools.islice(ends, MAX_CUT_TRIES)


def get_char_class(char: str) -> tuple[bool, bool, bool]:
    return char.isalpha(), char.isnumeric(), char.isspace()


def is_safe_cut(tokenizer: Tokenizer, text: str, position: int) -> bool:
    """Return whether the text around a position has the same ids if its two sides are tokenized separately."""
    contexts = (
        text[position - CUT_CONTEXT_CHARS : position + CUT_CONTEXT_CHARS],
        text[position - CUT_CONTEXT_CHARS : position],
        text[position : position + CUT_CONTEXT_CHARS],
    )
    joined, left, right = (tokenizer.encode(context, add_special_tokens=False).ids for context in contexts)
    return joined == left + right


TASKS_PER_PROCESS = 3  # submitted and unfinished tasks for each process


def choose_ids_dtype(tokenizer: Tokenizer) -> np.dtype:
    """Return the smallest unsigned dtype that can hold every id."""
    return np.dtype('<u2' if get_vocabulary_size(tokenizer) <= 2**16 else '<u4')


def encode_texts(tokenizer: Tokenizer, ids_dtype: np.dtype, texts: list[str]) -> list[np.ndarray]:
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array(encoding.ids, ids_dtype) for encoding in encodings]


def encode_long_text(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Encode one text of any length."""
    return np.concatenate(encode_texts(tokenizer, np.dtype(np.int32), [*split_text(text, tokenizer)]))


def encode_tasks(tokenizer_path: Path, tasks: Iterable[list[str]], processes: int) -> Iterator[list[np.ndarray]]:
    """Encode lists of texts in parallel; yield the ids of each list, in order, with few lists in memory at once."""
    if processes == 1:
        tokenizer = load_tokenizer(tokenizer_path)
        yield from map(functools.partial(call_in_thread, encode_texts, tokenizer, choose_ids_dtype(tokenizer)), tasks)
        return
    workers = EncoderProcesses(tokenizer_path)
    with ThreadPoolExecutor(processes, initializer=workers.start) as pool:
        try:
            yield from map_ahead(functools.partial(pool.submit, workers.encode), tasks, processes * TASKS_PER_PROCESS)
        finally:
            workers.stop()
            pool.shutdown(wait=True, cancel_futures=True)


class EncoderProcesses:
    """Tokenizer processes, one for each thread of a pool."""

    def __init__(self, tokenizer_path: Path):
        self.command = [sys.executable, '-m', 'sinklab.data.tokenizer', str(tokenizer_path)]
        self.thread_local, self.processes = threading.local(), []

    def start(self) -> None:
        # In its own session, Ctrl-C reaches only the parent; the worker exits when its standard input ends.
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
                f'a tokenizer process has exited (exit code {get_exit_code(process)}); finished shards are kept; run '
                'the same command again to resume, with fewer --processes if memory was exhausted'
            ) from error

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def get_exit_code(process: subprocess.Popen) -> int | str:
    try:
        return process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        return 'none: it does not respond'


def serve_encoder(tokenizer_path: str) -> None:
    tasks = queue.SimpleQueue()
    threading.Thread(target=read_tasks, args=[tasks], daemon=True).start()
    tokenizer = load_tokenizer(tokenizer_path)
    ids_dtype = choose_ids_dtype(tokenizer)
    while True:
        ids = encode_texts(tokenizer, ids_dtype, tasks.get())
        try:
            pickle.dump(ids, sys.stdout.buffer)
            sys.stdout.buffer.flush()
        except BrokenPipeError:  # the parent has exited
            os._exit(0)


def read_tasks(tasks: queue.SimpleQueue) -> None:
    """Read tasks from standard input; end the process when the input ends, whatever other threads compute."""
    # Python cannot exit after an error while another thread reads sys.stdin.
    with open(0, 'rb', closefd=False) as file:
        try:
            while True:
                tasks.put(pickle.load(file))
        except EOFError:
            os._exit(0)
        except Exception:
            traceback.print_exc()
            os._exit(1)


if __name__ == '__main__':
    serve_encoder(sys.argv[1])
