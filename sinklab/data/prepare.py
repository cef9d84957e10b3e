"""Preparation of a token store from documents: parallel, resumable and in constant memory."""

import collections
import contextlib
import dataclasses
import errno
import hashlib
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from sinklab.config import spec
from sinklab.data import sources, store_files, tokenizer
from sinklab.data.documents import (
    DamagedDocument,
    Document,
    Source,
    require_intact,
)
from sinklab.data.held_out_split import hash_document_name, split_single_text
from sinklab.data.store import DocumentEntry, ShardedWriter, Store
from sinklab.data.store_files import (
    FORMAT_VERSION,
    META_FILE,
    SHARED_SETTINGS,
    SPLITS,
    TOKENIZER_FILE,
    Recipe,
    ensure_plan,
    make_plan,
    read_plan,
)
from sinklab.data.tokenizer import (
    choose_ids_dtype,
    compute_tokenizer_digest,
    encode_tasks,
    read_tokenizer_json,
)
from sinklab.errors import UserError
from sinklab.machine import count_cores
from sinklab.schema import format_unknown_name
from sinklab.storage.atomic_write import TEMPORARY_SUFFIX, open_writable_folder
from sinklab.storage.cache_dir import get_cache_dir
from sinklab.storage.compare_and_swap import hold_lock
from sinklab.storage.lease import hold_lease
from sinklab.storage.paths import is_remote, parse_path

TASK_CHARS = 1 << 20  # characters that one process tokenizes per task
BYTES_PER_PROCESS = 1 << 22  # source bytes that justify one more process
PROGRESS_SECONDS = 10.0  # seconds between two progress lines
MAX_DOMAINS = 200  # each domain keeps shard files open
MAX_DAMAGED_SHOWN = 10  # dropped damaged documents that are named; further ones are only counted


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


def prepare_store(
    recipe: Recipe, folder: Path, processes: int | None = None, on_progress: PrepareProgressFn = lambda _: None
) -> None:
    """Prepare the token store of a recipe in `folder`, resuming an earlier attempt.

    Shards that an earlier attempt finished are verified and kept.

    Args:
        recipe: The source, the tokenizer and the settings of the store.
        folder: A local folder, or a folder of a bucket.
        processes: Tokenizing processes; None: one per core, fewer for a small source.
        on_progress: Callback that receives the progress.

    Raises:
        UserError: The source or tokenizer cannot be used, the folder belongs to another recipe, or a file cannot be
            written.
    """
    source = split_single_text(sources.open_source(recipe.source), recipe.held_out)
    with open_writable_folder(folder) if is_remote(folder) else contextlib.nullcontext():
        old_plan = read_plan(folder, recipe, source)
    # In a bucket the plan is made later, under the lease, so that only the owner of the lease makes it.
    fresh_plan = None if old_plan or is_remote(folder) else make_plan(recipe, source)
    with open_writable_folder(folder), lock_store(folder) as check_lease, open_local_build_dir(folder) as scratch:
        plan = ensure_plan(folder, recipe, source, fresh_plan)
        if store_files.reopen_if_damaged(folder):
            return
        if source.limit is not None:
            print_status(f'{recipe.source} is one text; {recipe.held_out:.3g} of it is held out, split between words')
        processes = processes or min(count_cores(), 1 + source.size // BYTES_PER_PROCESS)
        try:
            StoreBuilder(recipe, source, (folder, scratch), plan['limit'], on_progress, check_lease).run(processes)
        finally:
            for unfinished in scratch.glob(f'*{TEMPORARY_SUFFIX}'):
                unfinished.unlink()


@contextlib.contextmanager
def open_local_build_dir(folder: Path) -> Iterator[Path]:
    """Yield the folder for unfinished shards: `folder` itself, or a temporary local one if that is remote.

    Raises:
        UserError: The temporary disk is full.
    """
    if not is_remote(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix='sinklab-prepare-') as scratch:
        try:
            yield Path(scratch)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(
                f'{scratch} is full ({error.strerror}): it needs space for a shard of each split and domain; set '
                'TMPDIR to another disk, or lower --shard_tokens, and run the same command again'
            ) from error


@contextlib.contextmanager
def lock_store(folder: Path) -> Iterator[Callable[[], None]]:
    """Lock a store folder for one process; yields a function that raises if a remote lease was lost.

    The function must be called before each write.
    """
    if is_remote(folder):
        with hold_lease(folder) as store_lease:
            yield store_lease.check
    else:
        # Another process waits for the lock, and then finds the finished store.
        message = f'another process prepares {folder}; waiting for it'
        with hold_lock(folder / '.lock', timeout_seconds=-1, on_wait=lambda: print_status(message)):
            yield lambda: None


@dataclasses.dataclass(frozen=True)
class PieceDestination:
    """Destination of the token ids of one piece of a document."""

    stream: ShardedWriter
    predicted: bool  # whether the piece is in the loss
    first_entry: DocumentEntry | None  # entry of the document for its first piece, None for later pieces
    is_last: bool  # whether the piece is the last one of the document
    size: float  # source bytes that the piece accounts for


def make_entry(document: Document) -> DocumentEntry:
    content = document.text.encode()
    return DocumentEntry(
        hash_document_name(document.name),
        hashlib.sha256(document.name.encode() + b'\n' + content).digest(),
        len(content),
    )


class StoreBuilder:
    """Pipeline that reads documents, tokenizes them in parallel and writes their ids to shard streams."""

    def __init__(
        self,
        recipe: Recipe,
        source: Source,
        folders: tuple[Path, Path],
        limit: int,
        on_progress: PrepareProgressFn,
        check_lease: Callable[[], None],
    ):
        self.recipe, self.source, self.folders, self.limit, self.on_progress = (
            recipe,
            source,
            folders,
            limit,
            on_progress,
        )
        self.folder, scratch = folders
        self.tokenizer_path, self.check_lease = scratch / TOKENIZER_FILE, check_lease
        if is_remote(self.folder):
            self.tokenizer_path.write_bytes((self.folder / TOKENIZER_FILE).read_bytes())
        self.tokenizer = tokenizer.load_tokenizer(self.tokenizer_path)
        self.dtype = choose_ids_dtype(self.tokenizer)
        self.streams: dict[tuple[str, str], ShardedWriter] = {}
        self.dropped: collections.Counter[str] = collections.Counter()
        self.pending: collections.deque[PieceDestination] = collections.deque()
        self.progress = Progress(source.size)

    def run(self, processes: int) -> None:
        for task in encode_tasks(self.tokenizer_path, self.iter_tasks(), processes):
            self.check_lease()
            for ids in task:
                self.write_ids(self.pending.popleft(), ids)
            self.on_progress(self.progress)
        self.finish()

    def iter_tasks(self) -> Iterator[list[str]]:
        """Yield tasks of about TASK_CHARS characters, and append the target of each text to `pending`."""
        texts, size = [], 0
        for text, target in self.iter_texts():
            texts.append(text)
            self.pending.append(target)
            size += len(text)
            if size >= TASK_CHARS:
                yield texts
                texts, size = [], 0
        if texts:
            yield texts

    def iter_texts(self) -> Iterator[tuple[str, PieceDestination]]:
        for document in self.source.read_documents():
            if self.keep_or_count_dropped(document):
                entry = make_entry(document)
                stream = self.get_stream(document.domain, 'held_out' if entry.key < self.limit else 'train')
                if not stream.advance_past_finished(entry):
                    yield from self.iter_pieces(document, stream, entry)
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

    def iter_pieces(
        self, document: Document, stream: ShardedWriter, entry: DocumentEntry
    ) -> Iterator[tuple[str, PieceDestination]]:
        pieces = (
            (piece, predicted)
            for text, predicted in document.parts
            for piece in tokenizer.split_text(text, self.tokenizer)
        )
        first_entry, bytes_per_char = entry, document.size / len(document.text)
        for (piece, predicted), next_piece in itertools.pairwise(itertools.chain(pieces, [None])):
            yield (
                piece,
                PieceDestination(
                    stream, predicted, first_entry, is_last=next_piece is None, size=bytes_per_char * len(piece)
                ),
            )
            first_entry = None

    def get_stream(self, domain: str, split: str) -> ShardedWriter:
        if (split, domain) not in self.streams:
            domains = list(dict.fromkeys([*(name for _, name in self.streams), domain]))
            if len(domains) > MAX_DOMAINS:
                raise UserError(
                    f'{self.recipe.source} has over {MAX_DOMAINS} domains ({", ".join(domains[:3])}, ...), '
                    'each of which gets its own shards; name another field'
                )
            arguments = domains.index(domain), self.recipe.shard_tokens, self.source.masked
            self.streams[split, domain] = ShardedWriter(self.folders, split, domain, *arguments)
        return self.streams[split, domain]

    def write_ids(self, target: PieceDestination, ids: np.ndarray) -> None:
        if target.first_entry:
            target.stream.begin_document(target.first_entry)
            if self.recipe.bos == 'documents':
                target.stream.add(np.array([self.recipe.fixed_token], self.dtype), False)
        target.stream.add(ids, target.predicted)
        self.progress.tokens += len(ids)
        self.progress.bytes_read += target.size
        if target.is_last:
            target.stream.add(np.array([self.recipe.end_token], self.dtype), target.predicted)
            target.stream.end_document()

    def finish(self) -> None:
        """Finish the last shards and write meta.json, which completes the store."""
        if (num_unnamed := self.dropped['damaged'] - MAX_DAMAGED_SHOWN) > 0:
            print_status(f'dropped: {num_unnamed:,} more damaged documents')
        for stream in self.streams.values():
            self.check_lease()
            stream.finish()
        shards = [shard for stream in self.streams.values() for shard in stream.shards]
        for split in SPLITS:
            if not any(shard.split == split for shard in shards):
                raise UserError(
                    f'{self.recipe.source} has no {split} document, with held_out {self.recipe.held_out}; '
                    'give more documents, or another share and another folder'
                )
        self.check_lease()
        etags = {file: etag for stream in self.streams.values() for file, etag in stream.etags.items()}
        store_files.write_meta(self.folder, self.recipe, self.source, shards, self.dropped, etags)


def open_corpus(data: spec.DataConfig, vocabulary: int) -> Store:
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


def find_tokenizer_file(run_dir: Path, data: spec.DataConfig, vocabulary: int, override: str | None = None) -> Path:
    """Find the tokenizer.json of a run folder.

    The first of these that applies: `override`; the file that the configuration names, if it exists and the copy in
    the run folder does not differ from it; the copy in the run folder; the file that the configuration names, even if
    it is missing; the file of the store.
    """
    run_file, config_file = (
        run_dir / TOKENIZER_FILE,
        None if data.tokenizer == 'train' else parse_path(data.tokenizer),
    )
    if override:
        return parse_path(override)
    if (
        config_file
        and config_file.exists()
        and not (run_file.exists() and compute_tokenizer_digest(run_file) != compute_tokenizer_digest(config_file))
    ):
        return config_file
    if run_file.exists():
        return run_file
    return config_file or open_corpus(data, vocabulary).path / TOKENIZER_FILE


def check_store(store: Store, data: spec.DataConfig, vocabulary: int) -> None:
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


def open_cached_store(data: spec.DataConfig, vocabulary: int) -> Store:
    """Open the cached store of a source, preparing it if needed; a hash of its inputs names the folder."""
    is_trained = data.tokenizer == 'train'
    settings = {name: getattr(data, name) for name in SHARED_SETTINGS}
    recipe = Recipe(data.source, data.tokenizer, vocabulary if is_trained else None, **settings)
    identity = sources.open_source(data.source).identity
    cache_key = [
        FORMAT_VERSION,
        identity,
        vocabulary if is_trained else read_tokenizer_json(data.tokenizer),
        data.held_out,
        data.bos,
    ]
    cache_key += [data.source, data.end_token, data.fixed_token]
    folder = get_cache_dir() / 'stores' / hashlib.sha256(json.dumps(cache_key).encode()).hexdigest()[:16]
    if not (folder / META_FILE).exists():
        print_status(f'preparing {data.source} in {folder}')
        prepare_store(recipe, folder, on_progress=ProgressPrinter())
    return Store(folder)
