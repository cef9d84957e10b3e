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
from sinklab.data.store.recipe import SHARED_SETTINGS, Recipe, digest_json
from sinklab.data.store.shard import (
    FORMAT_VERSION,
    META_FILE,
    PROBE_FILE,
    RECIPE_FILE,
    SIDES,
    TOKENIZER_FILE,
    Count,
    Sha256,
    Shard,
    digest_file,
    parse_shard,
)
from sinklab.data.tokens.encode import choose_ids_dtype
from sinklab.data.tokens.tokenizer import load_tokenizer, get_vocabulary_size
from sinklab.files import tree
from sinklab.files.place import is_remote
from sinklab.files.validation import read_json
from sinklab.files.whole import atomic_write
from sinklab.record import UserError

PROBE_SEQUENCES, PROBE_LENGTH = 128, 2048  # of the probe sequences that are no text
COPY_AGAIN_REMEDY = 'bring the store anew'


class DomainCounts(TypedDict):
    """Count the documents, tokens and bytes of a domain on each side."""

    name: str
    train: dict[str, Count]
    held_out: dict[str, Count]


class StoreMeta(TypedDict):
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
    domains: list[DomainCounts]
    dropped: dict[str, Count]
    probe: Sha256
    shards: list[dict]


def write_probe_file(path: Path, vocabulary: int) -> None:
    """Draws the sequences that are no text, once for all runs: ids uniform over the vocabulary."""
    rng = np.random.default_rng(0)
    with path.open('wb') as file:
        np.savez(
            file,
            random_PT=rng.integers(vocabulary, size=(PROBE_SEQUENCES, PROBE_LENGTH), dtype=np.int32),
            repeated_P=rng.integers(vocabulary, size=PROBE_SEQUENCES, dtype=np.int32),
        )


def write_meta(
    folder: Path,
    recipe: Recipe,
    source: Source,
    shards: list[Shard],
    dropped: Mapping[str, int],
    etags: Mapping[str, str],
) -> None:
    """The files whose presence says that a store is whole; they take over the records of its shards, and marks."""
    if is_remote(folder):
        marks.write_etags(folder, etags)
    store_tokenizer = load_tokenizer(folder / TOKENIZER_FILE)
    with atomic_write(folder / PROBE_FILE) as unfinished:
        write_probe_file(unfinished, get_vocabulary_size(store_tokenizer))
    header = dict(
        format=FORMAT_VERSION,
        tokenizer=digest_file(folder / TOKENIZER_FILE),
        vocabulary=get_vocabulary_size(store_tokenizer),
        dtype=choose_ids_dtype(store_tokenizer).str,
        **{name: getattr(recipe, name) for name in SHARED_SETTINGS},
        masked=source.masked,
        weights=dict(source.weights or ()),
    )
    meta = dict(
        digest=digest_json([header, [(shard.side, shard.domain, shard.sha256) for shard in shards]])[:16],
        source=recipe.source,
        **header,
        domains=[count_domain(domain, shards) for domain in dict.fromkeys(shard.domain for shard in shards)],
        dropped=dict(dropped),
        probe=digest_file(folder / PROBE_FILE),
        shards=[dataclasses.asdict(shard) for shard in shards],
    )
    with atomic_write(folder / META_FILE) as unfinished:
        unfinished.write_text(json.dumps(meta, indent=1) + '\n', encoding='utf-8')
    tree.remove_files(folder, [f'{shard.name}.json' for shard in shards])


def read_meta(folder: epath.Path) -> dict:
    """meta.json of a store that may lie anywhere."""
    file = folder / META_FILE
    try:
        meta = read_json(file, remedy=COPY_AGAIN_REMEDY)
    except FileNotFoundError as error:
        is_unfinished = (folder / RECIPE_FILE).exists()
        remedy = 'give its prepare command again, and it goes on' if is_unfinished else 'make one by sinklab prepare'
        raise UserError(f'{folder} holds no finished token store; {remedy}') from error
    except ImportError as error:
        raise UserError(f'{file} cannot be read ({error}); {COPY_AGAIN_REMEDY}') from error
    if meta.get('format') != FORMAT_VERSION:
        raise UserError(f'{file} has format {str(meta.get("format"))[:20]}, and {FORMAT_VERSION} is read here; prepare it anew')
    check_meta(meta, file, COPY_AGAIN_REMEDY)
    return meta


def check_meta(meta: dict, file: Path, remedy: str) -> None:
    """Raise Refusal where a field of meta.json is missing or of another type."""
    try:
        msgspec.convert(meta, StoreMeta)
    except msgspec.ValidationError as error:
        raise UserError(f'{file} is damaged ({error}); {remedy}') from error


def count_domain(domain: str, shards: list[Shard]) -> dict:
    """Documents, tokens and bytes of a domain, by side."""
    sums = {}
    for side in SIDES:
        side_shards = [shard for shard in shards if (shard.domain, shard.side) == (domain, side)]
        sums[side] = {name: sum(getattr(shard, name) for shard in side_shards) for name in ('documents', 'tokens', 'bytes')}
    return dict(name=domain, **sums)


def is_store_complete(folder: Path) -> bool:
    """Whether a folder holds a store without damage; a damaged one becomes unfinished, its good shards kept."""
    file = folder / META_FILE
    if not file.exists():
        return False
    remedy = f'delete {folder}, or give another folder'
    meta = read_json(file, remedy=remedy)
    check_meta(meta, file, remedy)
    shards, probe = [parse_shard(record, file) for record in meta['shards']], meta['probe']
    good_shards = dict(find_good_remote_shards(folder, shards) if is_remote(folder) else find_good_local_shards(folder, shards))
    if len(good_shards) == len(shards) and digest_file(folder / PROBE_FILE) == probe:
        return True
    for shard, etags in good_shards.items():
        shard.write_record(folder, etags)
    file.unlink()
    return False


def find_good_local_shards(folder: Path, shards: list[Shard]) -> Iterator[tuple[Shard, dict[str, str]]]:
    for shard in shards:
        if not shard.find_damage(lambda name: (folder / name).read_bytes()):
            yield shard, {}


def find_good_remote_shards(folder: Path, shards: list[Shard]) -> Iterator[tuple[Shard, dict[str, str]]]:
    """Those whose files are the ones that were written, by their marks, or, without these, when they are read."""
    recorded_etags, current_etags = marks.read_etags(folder), marks.list_etags(folder)
    for shard in shards:
        current = {file: current_etags.get(file) for file in shard.file_names}
        recorded = {file: recorded_etags.get(file) for file in shard.file_names}
        if all(current.values()) and (current == recorded or not shard.find_damage(lambda name: (folder / name).read_bytes())):
            yield shard, current
