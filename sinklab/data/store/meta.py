"""meta.json and probe.npz, which make a store of finished shards."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal, TypedDict

import msgspec
import numpy as np
from etils import epath

from sinklab.data.documents.document import Source
from sinklab.data.store import marks
from sinklab.data.store.recipe import SETTINGS, Recipe, hash_of
from sinklab.data.store.shard import (
    FORMAT,
    META,
    PROBE,
    RECIPE,
    SIDES,
    TOKENIZER,
    Count,
    Sha256,
    Shard,
    digest,
    parse_shard,
)
from sinklab.data.tokens.encode import dtype
from sinklab.data.tokens.tokenizer import load, size
from sinklab.files import tree
from sinklab.files.place import is_remote
from sinklab.files.validation import read_json
from sinklab.files.whole import whole
from sinklab.record import Refusal

SEQUENCES, LENGTH = 128, 2048  # of the probe sequences that are no text
ANEW = 'bring the store anew'


class Domain(TypedDict):
    """Count the documents, tokens and bytes of a domain on each side."""

    name: str
    train: dict[str, Count]
    held_out: dict[str, Count]


class Meta(TypedDict):
    """The fields of meta.json; the shards are read by `parse_shard`."""

    format: int
    digest: Annotated[str, msgspec.Meta(pattern=r'\A[0-9a-f]{16}\Z')]  # the name of a folder in the cache
    source: str
    tokenizer: Sha256
    vocabulary: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    dtype: Literal['<u2', '<u4']
    bos: str
    end_token: Count
    fixed_token: Count
    held_out: float
    masked: bool
    weights: dict[str, float]
    domains: list[Domain]
    dropped: dict[str, Count]
    probe: Sha256
    shards: list[dict]


def write_probe(path: Path, vocabulary: int) -> None:
    """Draws the sequences that are no text, once for all runs: ids uniform over the vocabulary."""
    rng = np.random.default_rng(0)
    with path.open('wb') as file:
        np.savez(
            file,
            random_PT=rng.integers(vocabulary, size=(SEQUENCES, LENGTH), dtype=np.int32),
            repeated_P=rng.integers(vocabulary, size=SEQUENCES, dtype=np.int32),
        )


def write(
    folder: Path,
    recipe: Recipe,
    source: Source,
    shards: list[Shard],
    dropped: Mapping[str, int],
    seen: Mapping[str, str],
) -> None:
    """The files whose presence says that a store is whole; they take over the records of its shards, and marks."""
    if is_remote(folder):
        marks.keep(folder, seen)
    tokenizer = load(folder / TOKENIZER)
    with whole(folder / PROBE) as unfinished:
        write_probe(unfinished, size(tokenizer))
    what = dict(
        format=FORMAT,
        tokenizer=digest(folder / TOKENIZER),
        vocabulary=size(tokenizer),
        dtype=dtype(tokenizer).str,
        **{name: getattr(recipe, name) for name in SETTINGS},
        masked=source.masked,
        weights=dict(source.weights or ()),
    )
    meta = dict(
        digest=hash_of([what, [(shard.side, shard.domain, shard.sha256) for shard in shards]])[:16],
        source=recipe.source,
        **what,
        domains=[counts(domain, shards) for domain in dict.fromkeys(shard.domain for shard in shards)],
        dropped=dict(dropped),
        probe=digest(folder / PROBE),
        shards=[dataclasses.asdict(shard) for shard in shards],
    )
    with whole(folder / META) as unfinished:
        unfinished.write_text(json.dumps(meta, indent=1) + '\n', encoding='utf-8')
    tree.discard(folder, [f'{shard.name}.json' for shard in shards])


def read(folder: epath.Path) -> dict:
    """meta.json of a store that may lie anywhere."""
    file = folder / META
    try:
        meta = read_json(file, remedy=ANEW)
    except FileNotFoundError as error:
        begun = (folder / RECIPE).exists()
        remedy = 'give its prepare command again, and it goes on' if begun else 'make one by sinklab prepare'
        raise Refusal(f'{folder} holds no finished token store; {remedy}') from error
    except ImportError as error:
        raise Refusal(f'{file} cannot be read ({error}); {ANEW}') from error
    if meta.get('format') != FORMAT:
        raise Refusal(f'{file} has format {str(meta.get("format"))[:20]}, and {FORMAT} is read here; prepare it anew')
    check(meta, file, ANEW)
    return meta


def check(meta: dict, file: Path, remedy: str) -> None:
    """Raise Refusal where a field of meta.json is missing or of another type."""
    try:
        msgspec.convert(meta, Meta)
    except msgspec.ValidationError as error:
        raise Refusal(f'{file} is damaged ({error}); {remedy}') from error


def counts(domain: str, shards: list[Shard]) -> dict:
    """Documents, tokens and bytes of a domain, by side."""
    sums = {}
    for side in SIDES:
        mine = [shard for shard in shards if (shard.domain, shard.side) == (domain, side)]
        sums[side] = {name: sum(getattr(shard, name) for shard in mine) for name in ('documents', 'tokens', 'bytes')}
    return dict(name=domain, **sums)


def is_whole(folder: Path) -> bool:
    """Whether a folder holds a store without damage; a damaged one becomes unfinished, its good shards kept."""
    file = folder / META
    if not file.exists():
        return False
    remedy = f'delete {folder}, or give another folder'
    meta = read_json(file, remedy=remedy)
    check(meta, file, remedy)
    shards, probe = [parse_shard(record, file) for record in meta['shards']], meta['probe']
    good = dict(good_in_bucket(folder, shards) if is_remote(folder) else good_on_disk(folder, shards))
    if len(good) == len(shards) and digest(folder / PROBE) == probe:
        return True
    for shard, seen in good.items():
        shard.write(folder, seen)
    file.unlink()
    return False


def good_on_disk(folder: Path, shards: list[Shard]) -> Iterator[tuple[Shard, dict[str, str]]]:
    for shard in shards:
        if not shard.damage(lambda name: (folder / name).read_bytes()):
            yield shard, {}


def good_in_bucket(folder: Path, shards: list[Shard]) -> Iterator[tuple[Shard, dict[str, str]]]:
    """Those whose files are the ones that were written, by their marks, or, without these, when they are read."""
    kept, seen = marks.kept(folder), marks.seen(folder)
    for shard in shards:
        found = {file: seen.get(file) for file in shard.files}
        known = {file: kept.get(file) for file in shard.files}
        if all(found.values()) and (found == known or not shard.damage(lambda name: (folder / name).read_bytes())):
            yield shard, found
