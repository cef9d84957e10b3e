"""Preparation of a token store from documents: parallel, resumable and in constant memory.

recipe.json               the settings, which all attempts share
SIDE-DOMAIN-NUMBER.json   record of a finished shard, until meta.json contains it
"""

import array
import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sinklab.config.spec import DataConfig
from sinklab.data import sources, tokenizer
from sinklab.data.documents import DamagedDocument, Document, Source, require_intact
from sinklab.data.held_out_split import hash_document_name, split_single_text, survey_corpus
from sinklab.data.prefetch import prefetch
from sinklab.data.store import (
    DOCUMENT_DTYPE,
    DOCUMENTS_SUFFIX,
    FORMAT_VERSION,
    IDS_SUFFIX,
    META_FILE,
    PREDICTED_SUFFIX,
    PROBE_FILE,
    PROGRESS_SECONDS,
    RECIPE_FILE,
    SPLITS,
    TOKENIZER_FILE,
    Shard,
    Store,
    find_damaged_files,
    read_meta,
)
from sinklab.data.tokenizer import (
    choose_ids_dtype,
    compute_tokenizer_digest,
    get_vocabulary_size,
    read_tokenizer_json,
)
from sinklab.errors import UserError, format_unknown_name
from sinklab.storage.cache_dir import get_cache_dir
from sinklab.storage.files import (
    TEMPORARY_SUFFIX,
    DamagedFileError,
    atomic_write,
    hash_file,
    open_writable_folder,
    read_json,
    write_text,
)
from sinklab.storage.folder_lock import lock_file
from sinklab.storage.paths import is_remote, parse_path

TASK_CHARS = 1 << 21  # characters that are tokenized at once, in parallel
MAX_DOMAINS = 200  # each domain keeps shard files open
MAX_DAMAGED_SHOWN = 10  # dropped damaged documents that are named; further ones are only counted
PROBE_SEQUENCES, PROBE_LENGTH = 128, 2048  # size of the random and repeated probe sequences
LOCK_FILE = '.lock'
SHARED_SETTINGS = ('bos', 'end_token', 'fixed_token', 'held_out')  # must be equal in a store and a run's config.data
Plan = dict[str, Any]  # contents of recipe.json


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


@dataclasses.dataclass
class Progress:
    """Progress of a preparation: source bytes read and tokens written."""

    total_bytes: int
    bytes_read: float = 0
    tokens: int = 0
    start_time: float = dataclasses.field(default_factory=time.monotonic)

    def __str__(self) -> str:
        seconds = time.monotonic() - self.start_time
        seconds_left = seconds * (self.total_bytes / self.bytes_read - 1) if self.bytes_read else float('inf')
        return (
            f'{self.bytes_read / 1e6:,.0f} of {self.total_bytes / 1e6:,.0f} MB, '
            f'{self.bytes_read / seconds / 1e6:.1f} MB/s, {self.tokens / 1e6:,.1f}M tokens, '
            f'{max(seconds_left, 0):,.0f} s left'
        )


PrepareProgressFn = Callable[[Progress], None]


def print_status(message: object) -> None:
    with contextlib.suppress(OSError):  # a log that cannot be written ends no run
        print(message, file=sys.stderr, flush=True)


class ProgressPrinter:
    """Progress callback that prints a line at most every PROGRESS_SECONDS seconds."""

    def __init__(self):
        self.print_time = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        if time.monotonic() - self.print_time > PROGRESS_SECONDS:
            self.print_time = time.monotonic()
            print_status(progress)


def prepare_store(recipe: Recipe, folder: Path, on_progress: PrepareProgressFn = lambda _: None) -> None:
    """Prepare the token store of a recipe in `folder`, resuming an earlier attempt.

    Shards that an earlier attempt finished are verified and kept.

    Args:
        recipe: The source, the tokenizer and the settings of the store.
        folder: A local folder.
        on_progress: Callback that receives the progress.

    Raises:
        UserError: The source or tokenizer cannot be used, the folder belongs to another recipe or is in a bucket, or
            a file cannot be written.
    """
    if is_remote(folder):
        raise UserError(f'{folder} is in a bucket; prepare the store on a disk, and copy it: gcloud storage cp -r')
    source = split_single_text(sources.open_source(recipe.source), recipe.held_out)
    # Make the plan before the folder, so that a source that is refused leaves no files.
    new_plan = None if read_plan(folder, recipe, source) else make_plan(recipe, source)
    message = f'another process prepares {folder}; waiting for it'
    with open_writable_folder(folder), lock_file(folder / LOCK_FILE, -1, lambda: print_status(message)):
        plan = ensure_plan(folder, recipe, source, new_plan)
        if reopen_if_damaged(folder):
            return
        if source.limit is not None:
            print_status(f'{recipe.source} is one text; {recipe.held_out:.3g} of it is held out, split between words')
        try:
            StoreBuilder(recipe, source, folder, plan['limit'], on_progress).run()
        finally:
            for unfinished in folder.glob(f'*{TEMPORARY_SUFFIX}'):
                unfinished.unlink()


def digest_json(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def build_request(recipe: Recipe, source: Source) -> Plan:
    """Build the settings that all attempts must share; `lenient` is not among them and may change."""
    fields = dataclasses.asdict(recipe)
    del fields['lenient']
    if recipe.tokenizer != 'train':
        fields['tokenizer'] = digest_json(read_tokenizer_json(recipe.tokenizer))
    return {**fields, 'format': FORMAT_VERSION, 'identity': digest_json(source.identity)}


def make_plan(recipe: Recipe, source: Source) -> tuple[Plan, str]:
    """Make the plan of a new store, the request with `limit` and `tokenizer_sha256`, and its tokenizer.json.

    Raises:
        UserError: The source cannot be split, or the tokenizer is invalid.
    """
    train = recipe.tokenizer == 'train'
    limit, texts = survey_corpus(source, recipe.held_out, recipe.lenient, with_texts=train)
    text = tokenizer.train_tokenizer(texts, recipe.vocabulary) if train else read_tokenizer_json(recipe.tokenizer)
    name = 'the tokenizer trained here' if train else recipe.tokenizer
    tokenizer.check_special_tokens(tokenizer.parse_tokenizer(text, name), recipe.end_token, recipe.fixed_token, name)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {**build_request(recipe, source), 'limit': limit, 'tokenizer_sha256': digest}, text


def read_plan(folder: Path, recipe: Recipe, source: Source) -> Plan | None:
    """Read the plan of an earlier attempt in a folder.

    Returns:
        None if the folder does not exist, or has none but files that precede the plan.

    Raises:
        UserError: The earlier attempt had other settings or another source, or the folder has unrelated files.
    """
    file = folder / RECIPE_FILE
    if not file.exists():
        paths = folder.iterdir() if folder.is_dir() else ()
        earlier = (TOKENIZER_FILE, LOCK_FILE, TEMPORARY_SUFFIX)
        if unexpected := sorted(path.name for path in paths if not path.name.endswith(earlier)):
            raise UserError(f'{folder} contains files but no token store ({unexpected[0]}); give a new folder')
        return None
    remedy = f'delete {folder}, or give another folder'
    plan = read_json(file, dict, remedy)
    if not {'limit', 'tokenizer_sha256'} <= plan.keys():
        raise DamagedFileError(f'{file} is damaged (it has no limit or no tokenizer_sha256); {remedy}')
    request = build_request(recipe, source)
    changes = [f'{name} {plan.get(name)} -> {value}' for name, value in request.items() if plan.get(name) != value]
    if changes and plan.get('identity') != request['identity']:
        changes = changes[:-1] or ['the files of the source have changed since']
    if changes:
        raise UserError(f'{folder} was started from other inputs ({"; ".join(changes)}); {remedy}')
    return plan


def ensure_plan(folder: Path, recipe: Recipe, source: Source, new_plan: tuple[Plan, str] | None) -> Plan:
    """Return the plan of a folder, after writing recipe.json and tokenizer.json if needed.

    Raises:
        UserError: The folder does not match the recipe, or a damaged tokenizer.json cannot be reproduced.
    """
    plan = read_plan(folder, recipe, source)
    tokenizer_file = folder / TOKENIZER_FILE
    if plan and tokenizer_file.exists() and hash_file(tokenizer_file) == plan['tokenizer_sha256']:
        return plan
    made_plan, text = new_plan or make_plan(recipe, source)
    if plan and made_plan != plan:
        raise UserError(f'{tokenizer_file} is damaged and cannot be rebuilt; copy it again, or delete {folder}')
    write_text(tokenizer_file, text)
    write_text(folder / RECIPE_FILE, json.dumps(made_plan, indent=2) + '\n')
    return made_plan


def reopen_if_damaged(folder: Path) -> bool:
    """Return whether a folder has a complete store without damage.

    A damaged store is marked as unfinished: the records of its good shards are written and meta.json is deleted.
    """
    if not (folder / META_FILE).exists():
        return False
    meta, shards = read_meta(folder, remedy=f'delete {folder}, or give another folder')
    good_shards = [shard for shard in shards if not any(find_damaged_files(folder, shard.digests))]
    if len(good_shards) == len(shards) and not any(find_damaged_files(folder, {PROBE_FILE: meta['probe']})):
        return True
    for shard in good_shards:
        write_record(folder, shard)
    (folder / META_FILE).unlink()
    return False


def write_record(folder: Path, shard: Shard) -> None:
    """Write the record that marks a shard as finished."""
    write_text(folder / f'{shard.name}.json', json.dumps(msgspec.to_builtins(shard)))


def write_meta(folder: Path, recipe: Recipe, source: Source, shards: list[Shard], dropped: Mapping[str, int]) -> None:
    """Write probe.npz and then meta.json, which marks a store as complete; delete the records of the shards."""
    store_tokenizer = tokenizer.load_tokenizer(folder / TOKENIZER_FILE)
    vocabulary, rng = get_vocabulary_size(store_tokenizer), np.random.default_rng(0)
    with atomic_write(folder / PROBE_FILE) as temporary_path, temporary_path.open('wb') as file:
        np.savez(  # uniform over the vocabulary, and the same for all runs
            file,
            random_PT=rng.integers(vocabulary, size=(PROBE_SEQUENCES, PROBE_LENGTH), dtype=np.int32),
            repeated_P=rng.integers(vocabulary, size=PROBE_SEQUENCES, dtype=np.int32),
        )
    header = dict(
        format=FORMAT_VERSION,
        tokenizer=hash_file(folder / TOKENIZER_FILE),
        vocabulary=vocabulary,
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
        probe=hash_file(folder / PROBE_FILE),
        shards=msgspec.to_builtins(shards),
    )
    write_text(folder / META_FILE, json.dumps(meta, indent=1) + '\n')
    for shard in shards:
        (folder / f'{shard.name}.json').unlink()


def count_domain(domain: str, shards: list[Shard]) -> dict:
    """Sum the documents, tokens and bytes of the shards of a domain, by split."""
    sums = {}
    for split in SPLITS:
        split_shards = [shard for shard in shards if (shard.domain, shard.split) == (domain, split)]
        sums[split] = {
            name: sum(getattr(shard, name) for shard in split_shards) for name in ('documents', 'tokens', 'bytes')
        }
    return dict(name=domain, **sums)


@dataclasses.dataclass(frozen=True)
class DocumentEntry:
    """Key, digest and size of a document, which a shard records besides the tokens."""

    key: int
    digest: bytes
    bytes: int


def make_entry(document: Document) -> DocumentEntry:
    content = document.text.encode()
    digest = hashlib.sha256(document.name.encode() + b'\n' + content).digest()
    return DocumentEntry(hash_document_name(document.name), digest, len(content))


class ShardWriter:
    """Writer of one unfinished shard."""

    def __init__(self, folder: Path, name: str, masked: bool):
        self.folder, self.name = folder, name
        suffixes = (IDS_SUFFIX, PREDICTED_SUFFIX) if masked else (IDS_SUFFIX,)
        self.files = {suffix: self.get_path(suffix).open('wb') for suffix in suffixes}
        self.keys, self.starts, self.hasher = array.array('Q'), array.array('Q'), hashlib.sha256()
        self.tokens = self.bytes = self.largest_id = 0

    def get_path(self, suffix: str) -> Path:
        return self.folder / f'{self.name}.{suffix}{TEMPORARY_SUFFIX}'

    def begin_document(self, entry: DocumentEntry) -> None:
        self.keys.append(entry.key)
        self.starts.append(self.tokens)
        self.hasher.update(entry.digest)
        self.bytes += entry.bytes

    def add(self, ids: np.ndarray, predicted: bool) -> None:
        self.files[IDS_SUFFIX].write(ids.tobytes())
        if PREDICTED_SUFFIX in self.files:
            self.files[PREDICTED_SUFFIX].write(bytes([predicted]) * len(ids))
        self.tokens += len(ids)
        self.largest_id = max(self.largest_id, int(ids.max(initial=0)))

    def finish(self, split: str, domain: str) -> Shard:
        """Finish the files and then the record, and return it."""
        self.files[DOCUMENTS_SUFFIX] = self.get_path(DOCUMENTS_SUFFIX).open('wb')
        columns = [np.frombuffer(column, np.uint64) for column in (self.starts, self.keys)]
        self.files[DOCUMENTS_SUFFIX].write(np.rec.fromarrays(columns, dtype=DOCUMENT_DTYPE).tobytes())
        digests = {}
        for suffix, file in self.files.items():
            file.flush()
            os.fsync(file.fileno())
            file.close()
            digests[suffix] = hash_file(self.get_path(suffix))
            self.get_path(suffix).replace(self.folder / f'{self.name}.{suffix}')
        shard = Shard(
            name=self.name,
            split=split,
            domain=domain,
            tokens=self.tokens,
            documents=len(self.keys),
            bytes=self.bytes,
            largest_id=self.largest_id,
            documents_sha256=self.hasher.hexdigest(),
            sha256=digests,
        )
        write_record(self.folder, shard)
        return shard


class ShardedWriter:
    """Stream of documents of one split of one domain, written to shards; shards finished earlier are kept.

    The reader of the pipeline calls `advance_past_finished` for each document. The writer adds the documents for
    which it returned False.
    """

    def __init__(self, folder: Path, split: str, domain: str, number: int):
        self.folder, self.split, self.domain, self.prefix = folder, split, domain, f'{split}-{number:03}'
        self.shards = find_finished_shards(folder, self.prefix)
        self.pending_shards = list(self.shards)  # finished shards whose documents the source has not yielded yet
        self.num_skipped, self.hasher = 0, hashlib.sha256()
        self.writer: ShardWriter | None = None

    def advance_past_finished(self, entry: DocumentEntry) -> bool:
        """Return whether a finished shard contains the document, and verify the documents of each such shard.

        Raises:
            UserError: The documents of the source differ from those of a finished shard.
        """
        if not self.pending_shards:
            return False
        self.num_skipped += 1
        self.hasher.update(entry.digest)
        if self.num_skipped == self.pending_shards[0].documents:
            if self.hasher.hexdigest() != self.pending_shards[0].documents_sha256:
                raise UserError(f'the source has changed since {self.folder} was begun; delete that, or give another')
            self.pending_shards.pop(0)
            self.num_skipped, self.hasher = 0, hashlib.sha256()
        return True

    def get_writer(self, masked: bool) -> ShardWriter:
        self.writer = self.writer or ShardWriter(self.folder, f'{self.prefix}-{len(self.shards):05}', masked)
        return self.writer

    def finish_shard(self, min_tokens: int = 0) -> None:
        """Finish the shard that is being written, if it has enough tokens."""
        if self.writer and self.writer.tokens >= min_tokens:
            self.shards.append(self.writer.finish(self.split, self.domain))
            self.writer = None


def find_finished_shards(folder: Path, prefix: str) -> list[Shard]:
    """Return the finished shards of a stream before the first one that is missing or damaged.

    The records of all later shards are deleted, so that these shards count as unfinished.
    """
    shards: list[Shard] = []
    records = sorted(folder.glob(f'{prefix}-*.json'))
    for number, record in enumerate(records):
        try:
            shard = msgspec.convert(read_json(record, Shard), Shard)
        except DamagedFileError:
            break
        is_next = shard.name == record.stem == f'{prefix}-{number:05}'
        if not is_next or any(find_damaged_files(folder, shard.digests)):
            break
        shards.append(shard)
    for record in records[len(shards) :]:
        record.unlink()
    return shards


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a document that is tokenized at once, and the stream for its ids."""

    text: str
    stream: ShardedWriter
    predicted: bool  # whether the piece is in the loss
    first_entry: DocumentEntry | None  # entry of the document for its first piece, None for later pieces
    is_last: bool  # whether the piece is the last one of the document
    size: float  # source bytes that the piece accounts for


class StoreBuilder:
    """Pipeline that reads documents, tokenizes them in a thread and writes their ids to shard streams."""

    def __init__(self, recipe: Recipe, source: Source, folder: Path, limit: int, on_progress: PrepareProgressFn):
        self.recipe, self.source, self.folder = recipe, source, folder
        self.limit, self.on_progress = limit, on_progress
        self.tokenizer = tokenizer.load_tokenizer(folder / TOKENIZER_FILE)
        self.dtype = choose_ids_dtype(self.tokenizer)
        self.streams: dict[tuple[str, str], ShardedWriter] = {}
        self.dropped: collections.Counter[str] = collections.Counter()
        self.progress = Progress(source.size)

    def run(self) -> None:
        with contextlib.closing(prefetch(self.encode, self.iter_tasks(), 1)) as tasks:
            for pieces, ids in tasks:
                for piece, piece_ids in zip(pieces, ids, strict=True):
                    self.write_piece(piece, piece_ids)
                self.on_progress(self.progress)
        self.finish()

    def encode(self, pieces: list[Piece]) -> tuple[list[Piece], list[np.ndarray]]:
        return pieces, tokenizer.encode_texts(self.tokenizer, self.dtype, [piece.text for piece in pieces])

    def iter_tasks(self) -> Iterator[list[Piece]]:
        """Yield lists of pieces with about TASK_CHARS characters."""
        pieces: list[Piece] = []
        num_chars = 0
        for piece in self.iter_pieces():
            pieces.append(piece)
            num_chars += len(piece.text)
            if num_chars >= TASK_CHARS:
                yield pieces
                pieces, num_chars = [], 0
        if pieces:
            yield pieces

    def iter_pieces(self) -> Iterator[Piece]:
        for document in self.source.read_documents():
            if self.keep_or_count_dropped(document):
                entry = make_entry(document)
                stream = self.get_stream(document.domain, 'held_out' if entry.key < self.limit else 'train')
                if not stream.advance_past_finished(entry):
                    yield from self.split_document(document, stream, entry)
                    continue
            self.progress.bytes_read += document.size
            self.on_progress(self.progress)

    def keep_or_count_dropped(self, document: Document | DamagedDocument) -> bool:
        if isinstance(document, DamagedDocument) and self.recipe.lenient:
            self.dropped['damaged'] += 1
            if self.dropped['damaged'] <= MAX_DAMAGED_SHOWN:
                print_status(f'dropped: {document.location} {document.reason}')
            return False
        if require_intact(document).is_blank:
            self.dropped['empty'] += 1
            return False
        return True

    def split_document(self, document: Document, stream: ShardedWriter, entry: DocumentEntry) -> Iterator[Piece]:
        texts = (
            (text, predicted)
            for part, predicted in document.parts
            for text in tokenizer.split_text(part, self.tokenizer)
        )
        first_entry, bytes_per_char = entry, document.size / len(document.text)
        for (text, predicted), next_text in itertools.pairwise(itertools.chain(texts, [None])):
            yield Piece(text, stream, predicted, first_entry, next_text is None, bytes_per_char * len(text))
            first_entry = None

    def get_stream(self, domain: str, split: str) -> ShardedWriter:
        if (split, domain) not in self.streams:
            domains = list(dict.fromkeys([*(name for _, name in self.streams), domain]))
            if len(domains) > MAX_DOMAINS:
                raise UserError(
                    f'{self.recipe.source} has over {MAX_DOMAINS} domains ({", ".join(domains[:3])}, ...), '
                    'each of which gets its own shards; name another field'
                )
            self.streams[split, domain] = ShardedWriter(self.folder, split, domain, domains.index(domain))
        return self.streams[split, domain]

    def write_piece(self, piece: Piece, ids: np.ndarray) -> None:
        writer = piece.stream.get_writer(self.source.masked)
        if piece.first_entry:
            writer.begin_document(piece.first_entry)
            if self.recipe.bos == 'documents':
                writer.add(np.array([self.recipe.fixed_token], self.dtype), False)
        writer.add(ids, piece.predicted)
        self.progress.tokens += len(ids)
        self.progress.bytes_read += piece.size
        if piece.is_last:
            writer.add(np.array([self.recipe.end_token], self.dtype), piece.predicted)
            piece.stream.finish_shard(self.recipe.shard_tokens)

    def finish(self) -> None:
        """Finish the last shards and write meta.json, which completes the store."""
        if (num_unnamed := self.dropped['damaged'] - MAX_DAMAGED_SHOWN) > 0:
            print_status(f'dropped: {num_unnamed:,} more damaged documents')
        for stream in self.streams.values():
            stream.finish_shard()
        shards = [shard for stream in self.streams.values() for shard in stream.shards]
        for split in SPLITS:
            if not any(shard.split == split for shard in shards):
                raise UserError(
                    f'{self.recipe.source} has no {split} document, with held_out {self.recipe.held_out}; '
                    'give more documents, or another share and another folder'
                )
        write_meta(self.folder, self.recipe, self.source, shards, self.dropped)


def open_corpus(data: DataConfig, vocabulary: int) -> Store:
    """Open the token store of `data.source`, preparing it in the cache if it is not a `store:` already.

    Raises:
        UserError: The kind of the source is unknown, or the store does not match the configuration.
    """
    kind, _, store_path = data.source.partition(':')
    kinds = [*sources.SOURCES, 'store:DIR']
    if kind not in [form.partition(':')[0] for form in kinds]:
        raise UserError(format_unknown_name(f'config.data.source = {data.source!r}', kind, kinds, 'sources'))
    store = Store(store_path) if kind == 'store' else open_cached_store(data, vocabulary)
    check_store(store, data, vocabulary)
    return store


def open_cached_store(data: DataConfig, vocabulary: int) -> Store:
    """Open the cached store of a source, preparing it if needed; a hash of its inputs names the folder."""
    is_trained = data.tokenizer == 'train'
    settings = {name: getattr(data, name) for name in SHARED_SETTINGS}
    recipe = Recipe(data.source, data.tokenizer, vocabulary if is_trained else None, **settings)
    identity = sources.open_source(data.source).identity
    cache_key = [
        *(FORMAT_VERSION, identity, vocabulary if is_trained else read_tokenizer_json(data.tokenizer)),
        *(data.held_out, data.bos, data.source, data.end_token, data.fixed_token),
    ]
    folder = get_cache_dir() / 'stores' / digest_json(cache_key)[:16]
    if not (folder / META_FILE).exists():
        print_status(f'preparing {data.source} in {folder}')
        prepare_store(recipe, folder, on_progress=ProgressPrinter())
    return Store(folder)


def check_store(store: Store, data: DataConfig, vocabulary: int) -> None:
    """Raise UserError if a store was prepared with settings other than those of the configuration."""
    for name in SHARED_SETTINGS:
        store_value, config_value = store.meta[name], getattr(data, name)
        if store_value != config_value:
            raise UserError(
                f'{store} was prepared with {name} {store_value}, and config.data.{name} is {config_value}; '
                f'set it to {store_value}, or prepare another store with --{name}={config_value}'
            )
    if data.tokenizer != 'train' and compute_tokenizer_digest(data.tokenizer) != store.meta['tokenizer']:
        raise UserError(
            f'{store} was prepared with another tokenizer than config.data.tokenizer={data.tokenizer}; set it to '
            'train to use the tokenizer of the store, or prepare another store'
        )
    if (size := store.meta['vocabulary']) > vocabulary:
        raise UserError(
            f'config.model.vocabulary is {vocabulary}, but the tokenizer gives ids up to {size - 1}; set it to {size}'
        )
    if data.loss == 'assistant' and not store.meta['masked']:
        raise UserError(f'config.data.loss is assistant, but {store} has no roles; set it to all, or prepare a chat:')


def find_tokenizer_file(run_dir: Path, data: DataConfig, vocabulary: int, override: str | None = None) -> Path:
    """Find the tokenizer.json of a run folder.

    The first of these that applies: `override`; the file that the configuration names, if it exists and the copy in
    the run folder does not differ from it; the copy in the run folder; the file that the configuration names, even if
    it is missing; the file of the store.
    """
    if override:
        return parse_path(override)
    run_file = run_dir / TOKENIZER_FILE
    config_file = None if data.tokenizer == 'train' else parse_path(data.tokenizer)
    if run_file.exists():
        is_same = config_file and config_file.exists() and run_file.read_bytes() == config_file.read_bytes()
        return config_file if is_same else run_file
    return config_file or open_corpus(data, vocabulary).path / TOKENIZER_FILE
