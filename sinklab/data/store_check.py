"""Integrity check, summary and decoded samples of a token store."""

import functools
from collections.abc import Callable, Iterator

import numpy as np

from sinklab.data.store import Store
from sinklab.data.store_files import (
    DOCUMENTS_SUFFIX,
    IDS_SUFFIX,
    SIDES,
    Shard,
)

CHECKED_SUFFIXES = IDS_SUFFIX, DOCUMENTS_SUFFIX  # files of a shard whose contents are checked
MAX_SAMPLE_CHARS = 160


def find_problems(store: Store, vocabulary: int) -> Iterator[str]:
    """Check the digests, counts and ids of all files of a store, and yield a message for each problem.

    Each file is read once, and one shard is in memory at a time.

    Args:
        store: The token store.
        vocabulary: Every id must be below this number.
    """
    for shard in store.shards:
        contents: dict[str, bytes] = {}
        if damage := shard.find_damage(functools.partial(read_and_store, contents, store.read_file)):
            yield damage
        else:
            arrays = {
                suffix: np.frombuffer(contents[f'{shard.name}.{suffix}'], store.get_dtype(suffix))
                for suffix in CHECKED_SUFFIXES
            }
            yield from (
                f'{shard.name}: {problem}' for problem in find_shard_problems(store, shard, arrays, vocabulary)
            )
    probe = store.load_probe_arrays()
    if max(int(ids.max()) for ids in probe.values()) >= store.meta['vocabulary']:
        yield 'probe.npz has ids beyond the tokenizer'


def read_and_store(contents: dict[str, bytes], read: Callable[[str], bytes], file: str) -> bytes:
    contents[file] = read(file)
    return contents[file]


def find_shard_problems(store: Store, shard: Shard, arrays: dict[str, np.ndarray], vocabulary: int) -> Iterator[str]:
    ids, starts = arrays[IDS_SUFFIX], arrays[DOCUMENTS_SUFFIX]['start'].astype(np.int64)
    if len(ids) != shard.tokens or len(starts) != shard.documents:
        yield f'{len(ids)} tokens of {len(starts)} documents, recorded are {shard.tokens} of {shard.documents}'
        return
    ends = np.append(starts[1:], len(ids)) - 1
    if starts[0] != 0 or not (ends >= starts).all():
        yield 'its documents do not follow each other'
    elif not np.array_equal(np.flatnonzero(ids == store.meta['end_token']), ends):
        yield f'its documents do not end with token {store.meta["end_token"]}, each and nowhere else'
    if store.has_bos and not (ids[starts] == store.meta['fixed_token']).all():
        yield f'not all of its documents begin with token {store.meta["fixed_token"]}'
    if (largest := int(ids.max())) != shard.largest or largest >= vocabulary:
        yield f'its largest id is {largest}; recorded is {shard.largest}, and below {vocabulary} is allowed'


def summarize_store(store: Store, length: int, batch_size: int, hosts: int) -> dict:
    """Summarize a store: its settings, counts, windows and batches.

    Args:
        store: The token store.
        length: Tokens per sequence; a window has one token more.
        batch_size: Sequences per batch.
        hosts: Number of hosts. `rows_per_host` is None if the hosts do not divide the batch evenly.
    """
    windows = {
        side: {name: len(store.get_tokens(side, name)) // (length + 1) for name in store.domains} for side in SIDES
    }
    names = ('source', 'digest', 'vocabulary', 'bos', 'end_token', 'fixed_token', 'held_out', 'masked', 'weights')
    return dict(
        **{name: store.meta[name] for name in names},
        domains=store.meta['domains'],
        dropped=store.meta['dropped'],
        shards=len(store.shards),
        length=length,
        windows=windows,
        batch_size=batch_size,
        batches=sum(windows['train'].values()) // batch_size,
        hosts=hosts,
        rows_per_host=None if batch_size % hosts else batch_size // hosts,
    )


def decode_samples(store: Store, count: int) -> list[str]:
    """Decode the beginnings of the first `count` documents of each side."""
    tokenizer, texts = store.load_tokenizer(), []
    for side in SIDES:
        tokens = next(tokens for tokens in (store.get_tokens(side, name) for name in store.domains) if len(tokens))
        starts, _ = tokens.read_documents()
        for start, end in zip(starts[:count], [*starts[1:], len(tokens)], strict=False):
            ids = tokens.read_ids(int(start), min(int(end), int(start) + MAX_SAMPLE_CHARS)).tolist()
            text = tokenizer.decode(ids, skip_special_tokens=False)
            texts.append(f'{side}: {" ".join(text.split())[:MAX_SAMPLE_CHARS]}')
    return texts
