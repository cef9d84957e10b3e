"""Files of a token store: shards with their records, recipe.json, meta.json and probe.npz.

SIDE-DOMAIN-NUMBER.ids        token ids, little-endian, one document after another
SIDE-DOMAIN-NUMBER.documents  start and key of each document, two uint64 per document
SIDE-DOMAIN-NUMBER.predicted  loss mask, one byte per token; only for sources with a loss mask
SIDE-DOMAIN-NUMBER.json       record of the shard, until meta.json contains it
marks.json                    only in a bucket: sizes and etags of these files
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import numpy as np
from etils import epath

from sinklab.data import remote_store, tokenizer
from sinklab.data.documents import Source
from sinklab.data.held_out_split import survey_corpus
from sinklab.data.tokenizer import choose_ids_dtype, get_vocabulary_size, load_tokenizer
from sinklab.errors import UserError
from sinklab.storage import directories
from sinklab.storage.files import (
    TEMPORARY_SUFFIX,
    atomic_write,
    check_relative_name,
    is_permanent_read_error,
    read_json,
)
from sinklab.storage.paths import is_remote

FORMAT_VERSION = 3  # of all files of a store
SPLITS = ('train', 'held_out')
RECIPE_FILE, TOKENIZER_FILE, PROBE_FILE, META_FILE = 'recipe.json', 'tokenizer.json', 'probe.npz', 'meta.json'
IDS_SUFFIX, DOCUMENTS_SUFFIX, PREDICTED_SUFFIX = 'ids', 'documents', 'predicted'
DOCUMENT_DTYPE = np.dtype([('start', '<u8'), ('key', '<u8')])
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Sha256 = Annotated[str, msgspec.Meta(pattern=r'\A[0-9a-f]{64}\Z')]


class Shard(msgspec.Struct, frozen=True, eq=False):
    """The record of a finished shard."""

    name: str
    split: Literal['train', 'held_out'] = msgspec.field(name='side')
    domain: str
    tokens: Count
    documents: Count
    bytes: Count  # bytes of the documents in UTF-8
    largest_id: Count = msgspec.field(name='largest')
    documents_sha256: Sha256 = msgspec.field(name='said')  # digest of the digests of the documents
    sha256: dict[Literal['ids', 'documents', 'predicted'], Sha256]  # by suffix

    def find_damage(self, read: Callable[[str], bytes]) -> str | None:
        """Verify the digests of the files and return a message for the first damaged file, or None.

        Args:
            read: Function that returns the content of a file by its name.

        Raises:
            OSError: A disk or bucket does not respond, which says nothing about the file.
        """
        for suffix, digest in self.sha256.items():
            file = f'{self.name}.{suffix}'
            try:
                content = read(file)
            except OSError as error:
                # A disk or bucket that does not respond is no damage of the file.
                if not is_permanent_read_error(error):
                    raise
                return f'{file} cannot be read ({error.strerror or error})'
            if hashlib.sha256(content).hexdigest() != digest:
                return f'the sha256 of {file} differs from that of the store'
        return None

    @property
    def file_names(self) -> list[str]:
        return [f'{self.name}.{suffix}' for suffix in self.sha256]

    def write_record(self, folder: Path, etags: Mapping[str, str] | None = None) -> None:
        """Write the record that marks the shard as finished; in a bucket it includes the etags of the files."""
        record = msgspec.to_builtins(self) | (dict(marks=etags) if etags else {})
        with atomic_write(folder / f'{self.name}.json') as unfinished:
            unfinished.write_text(json.dumps(record), encoding='utf-8')


def parse_shard(record: Any, file: Path) -> Shard:
    """Return the shard of a record that was read from a file.

    Raises:
        UserError: A field is missing, unknown or of another type, or the name leads out of the folder of the store.
    """
    fields = {field.encode_name for field in msgspec.structs.fields(Shard)}
    try:
        if isinstance(record, dict) and (unknown := record.keys() - fields):
            raise msgspec.ValidationError(f'unknown field {min(unknown)!a}')
        shard = msgspec.convert(record, Shard)
    except msgspec.ValidationError as error:
        raise UserError(f'{file} has a damaged record of a shard ({error}); copy the store again') from error
    check_relative_name(shard.name, file)
    if '/' in shard.name or IDS_SUFFIX not in shard.sha256 or DOCUMENTS_SUFFIX not in shard.sha256:
        raise UserError(f'{file} has a damaged record of the shard {shard.name!a}; copy the store again')
    return shard


def digest_file(file: Path) -> str:
    """Return the sha256 of a file; the sha256 of empty content if there is no file."""
    return hashlib.sha256(file.read_bytes() if file.exists() else b'').hexdigest()


SETUP_FILES = (TOKENIZER_FILE, TEMPORARY_SUFFIX, '.lock', 'lease.json')  # endings of files that precede recipe.json
SHARED_SETTINGS = ('bos', 'end_token', 'fixed_token', 'held_out')  # must be equal in a store and a run's config.data
Plan = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The source, the tokenizer and the settings that a store is prepared with."""

    source: str
    tokenizer: str  # 'train', or the path of a tokenizer.json
    vocabulary: int | None  # vocabulary of a trained tokenizer; None for a given tokenizer.json
    held_out: float
    bos: str
    end_token: int
    fixed_token: int
    lenient: bool = False  # damaged documents are dropped and counted, not refused
    shard_tokens: int = 1 << 24


def digest_json(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def build_request(recipe: Recipe, source: Source) -> Plan:
    """Build the settings that all attempts must share; `lenient` is not among them and may change."""
    fields = dataclasses.asdict(recipe)
    del fields['lenient']
    if recipe.tokenizer != 'train':
        fields['tokenizer'] = digest_json(tokenizer.read_tokenizer_json(recipe.tokenizer))
    return {**fields, 'format': FORMAT_VERSION, 'identity': digest_json(source.identity)}


def make_plan(recipe: Recipe, source: Source) -> tuple[Plan, str]:
    """Make the plan of a new store: choose the key limit and train or read the tokenizer.

    Returns:
        (plan, contents of tokenizer.json). The plan has the request and the digest of the tokenizer.

    Raises:
        UserError: The source cannot be split, or the tokenizer is invalid.
    """
    train = recipe.tokenizer == 'train'
    requested = build_request(recipe, source)
    limit, texts = survey_corpus(source, recipe.held_out, recipe.lenient, with_texts=train)
    text = (
        tokenizer.train_tokenizer(texts, recipe.vocabulary)
        if train
        else tokenizer.read_tokenizer_json(recipe.tokenizer)
    )
    name = 'the tokenizer trained here' if train else recipe.tokenizer
    tokenizer.check_special_tokens(tokenizer.parse_tokenizer(text, name), recipe.end_token, recipe.fixed_token, name)
    return {**requested, 'limit': limit, 'tokenizer_sha256': hashlib.sha256(text.encode()).hexdigest()}, text


def read_plan(folder: Path, recipe: Recipe, source: Source) -> Plan | None:
    """Read the plan of an earlier attempt in a folder.

    Returns:
        None if the folder is empty or does not exist.

    Raises:
        UserError: The earlier attempt had other settings or another source, or the folder has unrelated files.
    """
    file = folder / RECIPE_FILE
    if not file.exists():
        paths = folder.iterdir() if folder.is_dir() else ()
        if unexpected := sorted(path.name for path in paths if not path.name.endswith(SETUP_FILES)):
            raise UserError(f'{folder} contains files but no token store ({unexpected[0]}); give a new folder')
        return None
    remedy = f'delete {folder}, or give another folder'
    plan = read_json(file, remedy=remedy)
    if not {'limit', 'tokenizer_sha256'} <= plan.keys():
        raise UserError(f'{file} is damaged (it has no limit or no tokenizer_sha256); {remedy}')
    requested = build_request(recipe, source)
    differences = {
        name: f'{name} {plan.get(name)} -> {value}' for name, value in requested.items() if plan.get(name) != value
    }
    if differences.pop('identity', None):
        differences = differences or {'source': 'the files have changed since'}
    if differences:
        changes = '; '.join(differences.values())
        raise UserError(f'{folder} was started from other inputs ({changes}); give another folder, or delete it')
    return plan


def ensure_plan(folder: Path, recipe: Recipe, source: Source, fresh_plan: tuple[Plan, str] | None) -> Plan:
    """Return the plan of a folder, after writing recipe.json and tokenizer.json if needed.

    Args:
        folder: The folder of the store.
        recipe: The recipe of the store.
        source: The opened source.
        fresh_plan: What `make_plan` returned for a new store; None: it is called if needed.

    Raises:
        UserError: The folder does not match the recipe, or a damaged tokenizer.json cannot be reproduced.
    """
    plan = read_plan(folder, recipe, source)
    if plan and digest_file(folder / TOKENIZER_FILE) == plan['tokenizer_sha256']:
        return plan
    planned, text = fresh_plan or make_plan(recipe, source)
    if plan and planned != plan:
        raise UserError(
            f'{folder / TOKENIZER_FILE} is damaged and cannot be rebuilt; copy it again, or delete {folder}'
        )
    for name, content in ((TOKENIZER_FILE, text), (RECIPE_FILE, json.dumps(planned, indent=2) + '\n')):
        with atomic_write(folder / name) as unfinished:
            unfinished.write_text(content, encoding='utf-8')
    return planned


PROBE_SEQUENCES, PROBE_LENGTH = 128, 2048  # size of the random and repeated probe sequences
COPY_AGAIN_REMEDY = 'copy the store again'


class DomainCounts(TypedDict):
    """Documents, tokens and bytes of a domain in each split."""

    name: str
    train: dict[str, Count]
    held_out: dict[str, Count]


class StoreMeta(TypedDict):
    """Fields of meta.json; `parse_shard` validates the shards."""

    format: int
    digest: Annotated[str, msgspec.Meta(pattern=r'\A[0-9a-f]{16}\Z')]  # names a folder in the disk cache
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
    """Draw the random and repeated probe sequences, uniform over the vocabulary and the same for all runs."""
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
    """Write meta.json, which marks a store as complete, then delete the records of the shards.

    probe.npz, and the etags of a remote store, are written before meta.json.
    """
    if is_remote(folder):
        remote_store.write_etags(folder, etags)
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
        digest=digest_json([header, [(shard.split, shard.domain, shard.sha256) for shard in shards]])[:16],
        source=recipe.source,
        **header,
        domains=[count_domain(domain, shards) for domain in dict.fromkeys(shard.domain for shard in shards)],
        dropped=dict(dropped),
        probe=digest_file(folder / PROBE_FILE),
        shards=msgspec.to_builtins(shards),
    )
    with atomic_write(folder / META_FILE) as unfinished:
        unfinished.write_text(json.dumps(meta, indent=1) + '\n', encoding='utf-8')
    directories.remove_files(folder, [f'{shard.name}.json' for shard in shards])


def read_meta(folder: epath.Path) -> dict:
    """Read and validate meta.json of a local or remote store.

    Raises:
        UserError: There is no finished store, the file is damaged, or its format version is not supported.
    """
    file = folder / META_FILE
    try:
        meta = read_json(file, remedy=COPY_AGAIN_REMEDY)
    except FileNotFoundError as error:
        is_unfinished = (folder / RECIPE_FILE).exists()
        remedy = 'run its prepare command again to resume' if is_unfinished else 'make one with sinklab prepare'
        raise UserError(f'{folder} contains no finished token store; {remedy}') from error
    except ImportError as error:
        raise UserError(f'{file} cannot be read ({error}); {COPY_AGAIN_REMEDY}') from error
    if meta.get('format') != FORMAT_VERSION:
        raise UserError(
            f'{file} has format {str(meta.get("format"))[:20]}, not the supported {FORMAT_VERSION}; prepare it again'
        )
    check_meta(meta, file, COPY_AGAIN_REMEDY)
    return meta


def check_meta(meta: dict, file: Path, remedy: str) -> None:
    """Raise UserError if a field of meta.json is missing or has a wrong type."""
    try:
        msgspec.convert(meta, StoreMeta)
    except msgspec.ValidationError as error:
        raise UserError(f'{file} is damaged ({error}); {remedy}') from error


def count_domain(domain: str, shards: list[Shard]) -> dict:
    """Sum the documents, tokens and bytes of the shards of a domain, by split."""
    sums = {}
    for split in SPLITS:
        split_shards = [shard for shard in shards if (shard.domain, shard.split) == (domain, split)]
        sums[split] = {
            name: sum(getattr(shard, name) for shard in split_shards) for name in ('documents', 'tokens', 'bytes')
        }
    return dict(name=domain, **sums)


def reopen_if_damaged(folder: Path) -> bool:
    """Return whether a folder has a complete store without damage.

    A damaged store is marked as unfinished: the records of its good shards are written and meta.json is deleted.
    """
    file = folder / META_FILE
    if not file.exists():
        return False
    remedy = f'delete {folder}, or give another folder'
    meta = read_json(file, remedy=remedy)
    check_meta(meta, file, remedy)
    shards, probe = [parse_shard(record, file) for record in meta['shards']], meta['probe']
    good_shards = dict(
        find_good_remote_shards(folder, shards) if is_remote(folder) else find_good_local_shards(folder, shards)
    )
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
    """Yield (shard, etags) of the intact shards in a bucket.

    A shard with unknown or changed etags is read and verified by digest.
    """
    recorded_etags, current_etags = remote_store.read_etags(folder), remote_store.list_object_digests(folder)
    for shard in shards:
        current = {file: current_etags.get(file) for file in shard.file_names}
        recorded = {file: recorded_etags.get(file) for file in shard.file_names}
        if all(current.values()) and (
            current == recorded or not shard.find_damage(lambda name: (folder / name).read_bytes())
        ):
            yield shard, current
