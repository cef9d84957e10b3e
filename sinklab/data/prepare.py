"""Preparation of a token store from documents: resumable, with one shard of each domain in memory.

recipe.json               the settings, which all attempts share
SPLIT-DOMAIN-NUMBER.json  record of a finished shard, until meta.json contains it
"""

import array
import collections
import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sinklab.data import tokenizer
from sinklab.data.documents import Document, Source
from sinklab.data.held_out_split import hash_document_name, split_single_text, survey_corpus
from sinklab.data.prefetch import prefetch
from sinklab.data.sources import open_source
from sinklab.data.store import (
    DOCUMENT_DTYPE,
    DOCUMENTS_SUFFIX,
    FORMAT_VERSION,
    IDS_SUFFIX,
    LOCK_FILE,
    META_FILE,
    PREDICTED_SUFFIX,
    PROBE_FILE,
    RECIPE_FILE,
    SPLITS,
    TOKENIZER_FILE,
    Shard,
    lock_folder,
)
from sinklab.errors import UserError, print_status
from sinklab.storage.files import (
    TEMPORARY_SUFFIX,
    atomic_write,
    hash_file,
    read_json,
    write_text,
)
from sinklab.storage.paths import is_remote

TASK_CHARS = 1 << 21  # characters that are tokenized at once, in parallel
MAX_OPEN_BYTES = 1 << 33  # ids and masks of the open shards of one split, which are in memory
PROGRESS_SECONDS = 10.0  # seconds between two progress lines
PROBE_SEQUENCES, PROBE_LENGTH = 128, 2048  # size of the random and repeated probe sequences
EncodedParts = list[tuple[np.ndarray, bool]]  # ids, and whether they are in the loss
SHARED_SETTINGS = ('bos', 'end_token', 'fixed_token', 'held_out')  # must be equal in a store and a run's config.data


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
    shard_tokens: int = 1 << 24


def prepare_store(recipe: Recipe, folder: Path) -> None:
    """Prepare the token store of a recipe in `folder`, after the shards that an earlier attempt finished.

    Args:
        recipe: The source, the tokenizer and the settings of the store.
        folder: A local folder.

    Raises:
        UserError: The source or tokenizer cannot be used, the folder belongs to another recipe or is in a bucket, or
            a file cannot be written.
    """
    if is_remote(folder):
        raise UserError(f'{folder} is in a bucket; prepare the store on a disk, and copy it: gcloud storage cp -r')
    source = split_single_text(open_source(recipe.source), recipe.held_out)
    with lock_folder(folder):
        plan = read_plan(folder, recipe, source) or write_plan(folder, recipe, source)
        if (folder / META_FILE).exists():
            return
        if source.limit is not None:
            print_status(f'{recipe.source} is one text; {recipe.held_out:.3g} of it is held out, split between words')
        try:
            StoreBuilder(recipe, source, folder, plan['limit']).run()
        finally:
            for unfinished in folder.glob(f'*{TEMPORARY_SUFFIX}'):
                unfinished.unlink()


def digest_json(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def build_request(recipe: Recipe, source: Source) -> dict[str, Any]:
    """Build the settings that all attempts must share."""
    fields = dataclasses.asdict(recipe)
    if recipe.tokenizer != 'train':
        fields['tokenizer'] = digest_json(tokenizer.read_tokenizer_json(recipe.tokenizer))
    return {**fields, 'format': FORMAT_VERSION, 'identity': digest_json(source.identity)}


def write_plan(folder: Path, recipe: Recipe, source: Source) -> dict[str, Any]:
    """Write tokenizer.json, and then recipe.json: the request with `limit` and `tokenizer_sha256`.

    Raises:
        UserError: The source cannot be split, or the tokenizer is invalid.
    """
    train = recipe.tokenizer == 'train'
    limit, texts = survey_corpus(source, recipe.held_out, train)
    if train:
        text = tokenizer.train_tokenizer(texts, recipe.vocabulary)
        name = 'the tokenizer trained here'
    else:
        text = tokenizer.read_tokenizer_json(recipe.tokenizer)
        name = recipe.tokenizer
    tokenizer.check_special_tokens(tokenizer.parse_tokenizer(text, name), recipe.end_token, recipe.fixed_token, name)
    digest = hashlib.sha256(text.encode()).hexdigest()
    plan = {**build_request(recipe, source), 'limit': limit, 'tokenizer_sha256': digest}
    write_text(folder / TOKENIZER_FILE, text)
    write_text(folder / RECIPE_FILE, json.dumps(plan, indent=2) + '\n')
    return plan


def read_plan(folder: Path, recipe: Recipe, source: Source) -> dict[str, Any] | None:
    """Read recipe.json of an earlier attempt; None if there was none.

    Raises:
        UserError: The earlier attempt had other settings or another source, or the folder has unrelated files.
    """
    file = folder / RECIPE_FILE
    remedy = f'delete {folder}, or give another folder'
    if not file.exists():
        earlier = (TOKENIZER_FILE, LOCK_FILE, TEMPORARY_SUFFIX)
        if unexpected := sorted(path.name for path in folder.iterdir() if not path.name.endswith(earlier)):
            raise UserError(f'{folder} contains files but no token store ({unexpected[0]}); give a new folder')
        return None
    plan = read_json(file, remedy=remedy)
    request = build_request(recipe, source)
    request['tokenizer_sha256'] = hash_file(folder / TOKENIZER_FILE)
    if changes := [name for name, value in request.items() if plan.get(name) != value]:
        names = ', '.join(changes).replace('identity', 'files of the source')
        raise UserError(f'{folder} was started from other inputs ({names} changed); {remedy}')
    return plan


class ShardWriter:
    """Shards of one split of one domain: the finished ones, and one in memory.

    A shard is finished when its record exists, which is written after its files. The source has not changed since an
    earlier attempt, so the documents of the shards that it finished are skipped by their number.
    """

    def __init__(self, folder: Path, split: str, domain: str, number: int, masked: bool):
        self.folder = folder
        self.split = split
        self.domain = domain
        self.prefix = f'{split}-{number:03}'
        self.masked = masked
        self.shards: list[Shard] = []
        while (record := self.get_path('json')).exists():
            self.shards.append(msgspec.convert(read_json(record, Shard), Shard))
        self.num_to_skip = sum(shard.documents for shard in self.shards)
        self.begin_shard()

    def get_path(self, suffix: str) -> Path:
        """Return the path of a file of the first shard that is not finished."""
        return self.folder / f'{self.prefix}-{len(self.shards):05}.{suffix}'

    def skip_document(self) -> bool:
        """Return whether a finished shard contains the next document of the source."""
        is_finished = self.num_to_skip > 0
        self.num_to_skip -= is_finished
        return is_finished

    def begin_shard(self) -> None:
        self.documents = array.array('Q')  # start and key of each
        self.ids = bytearray()
        self.predicted = bytearray()  # empty unless the text is masked
        self.tokens = self.bytes = self.largest_id = 0
        self.hasher = hashlib.sha256()

    def begin_document(self, document: Document) -> None:
        content = document.text.encode()
        self.documents.extend((self.tokens, hash_document_name(document.name)))
        self.hasher.update(hashlib.sha256(document.name.encode() + b'\n' + content).digest())
        self.bytes += len(content)

    def add(self, ids: np.ndarray, predicted: bool) -> None:
        self.ids += ids.tobytes()
        if self.masked:
            self.predicted += bytes([predicted]) * len(ids)
        self.tokens += len(ids)
        self.largest_id = max(self.largest_id, int(ids.max(initial=0)))

    def finish_shard(self) -> None:
        """Write the files and then the record of the shard in memory, if it has documents."""
        if not self.documents:
            return
        documents = np.array(self.documents, '<u8').view(DOCUMENT_DTYPE)
        contents: dict[str, bytes | bytearray] = {IDS_SUFFIX: self.ids}
        if self.masked:
            contents[PREDICTED_SUFFIX] = self.predicted
        contents[DOCUMENTS_SUFFIX] = documents.tobytes()
        for suffix, content in contents.items():
            with atomic_write(self.get_path(suffix)) as temporary_path:
                temporary_path.write_bytes(content)
        shard = Shard(
            name=self.get_path(IDS_SUFFIX).stem,
            split=self.split,
            domain=self.domain,
            tokens=self.tokens,
            documents=len(documents),
            bytes=self.bytes,
            largest_id=self.largest_id,
            documents_sha256=self.hasher.hexdigest(),
            sha256={suffix: hash_file(self.get_path(suffix)) for suffix in contents},
        )
        write_text(self.get_path('json'), json.dumps(msgspec.to_builtins(shard)))
        self.shards.append(shard)
        self.begin_shard()


class StoreBuilder:
    """Pipeline that reads documents, tokenizes them in a thread and writes their ids to shards."""

    def __init__(self, recipe: Recipe, source: Source, folder: Path, limit: int):
        self.recipe, self.source, self.folder, self.limit = recipe, source, folder, limit
        self.tokenizer = tokenizer.load_tokenizer(folder / TOKENIZER_FILE)
        self.vocabulary = tokenizer.get_vocabulary_size(self.tokenizer)
        self.dtype = tokenizer.choose_ids_dtype(self.vocabulary)
        shard_bytes = recipe.shard_tokens * (self.dtype.itemsize + source.masked)
        self.max_domains = max(1, MAX_OPEN_BYTES // shard_bytes)
        self.writers: dict[tuple[str, str], ShardWriter] = {}
        self.dropped: collections.Counter[str] = collections.Counter()
        self.num_read = self.num_tokens = 0  # pieces of the source, and their ids
        self.print_time = time.monotonic()

    def run(self) -> None:
        with contextlib.closing(prefetch(self.encode, self.iter_tasks(), 1)) as tasks:
            for encoded_documents in tasks:
                for writer, document, parts in encoded_documents:
                    self.write_document(writer, document, parts)
        for writer in self.writers.values():
            writer.finish_shard()
        shards = [shard for writer in self.writers.values() for shard in writer.shards]
        for split in SPLITS:
            if not any(shard.split == split for shard in shards):
                raise UserError(
                    f'{self.recipe.source} has no {split} document, with held_out {self.recipe.held_out}; '
                    'give more documents, or another share and another folder'
                )
        self.write_probe()
        self.write_meta(shards)
        for shard in shards:
            (self.folder / f'{shard.name}.json').unlink(missing_ok=True)

    def print_progress(self) -> None:
        """Print a line at most every PROGRESS_SECONDS seconds."""
        now = time.monotonic()
        if now - self.print_time > PROGRESS_SECONDS:
            self.print_time = now
            print_status(
                f'{self.num_read:,} of {len(self.source.pieces):,} files read, {self.num_tokens / 1e6:,.1f}M tokens'
            )

    def iter_tasks(self) -> Iterator[list[tuple[ShardWriter, Document]]]:
        """Yield lists of documents with about TASK_CHARS characters, each with its writer."""
        task: list[tuple[ShardWriter, Document]] = []
        num_chars = 0
        for document in self.iter_documents():
            writer = self.get_writer(document)
            if not writer.skip_document():
                task.append((writer, document))
                num_chars += len(document.text)
            if num_chars >= TASK_CHARS:
                yield task
                task = []
                num_chars = 0
        yield task

    def iter_documents(self) -> Iterator[Document]:
        for source_piece in self.source.pieces:
            for document in source_piece.read():
                self.print_progress()
                if document.is_blank:
                    self.dropped['empty'] += 1
                else:
                    yield document
            self.num_read += 1

    def get_writer(self, document: Document) -> ShardWriter:
        domain = document.domain
        split = 'held_out' if hash_document_name(document.name) < self.limit else 'train'
        if (split, domain) not in self.writers:
            domains = list(dict.fromkeys([*(name for _, name in self.writers), domain]))
            if len(domains) > self.max_domains:
                raise UserError(
                    f'{self.recipe.source} has over {self.max_domains} domains ({", ".join(domains[:3])}, ...), '
                    f'whose shards of {self.recipe.shard_tokens} tokens may not fit into memory; '
                    'name another field, or prepare the store with a smaller --shard_tokens'
                )
            number = domains.index(domain)
            self.writers[split, domain] = ShardWriter(self.folder, split, domain, number, self.source.masked)
        return self.writers[split, domain]

    def encode(self, task: list[tuple[ShardWriter, Document]]) -> list[tuple[ShardWriter, Document, EncodedParts]]:
        """Tokenize the documents of a task together."""
        pieces = [
            (number, text, predicted)
            for number, (_, document) in enumerate(task)
            for part, predicted in document.parts
            for text in tokenizer.split_text(part, self.tokenizer)
        ]
        ids = tokenizer.encode_texts(self.tokenizer, self.dtype, [text for _, text, _ in pieces])
        encoded_parts: list[EncodedParts] = [[] for _ in task]
        for (number, _, predicted), piece_ids in zip(pieces, ids, strict=True):
            encoded_parts[number].append((piece_ids, predicted))
        return [(writer, document, parts) for (writer, document), parts in zip(task, encoded_parts, strict=True)]

    def write_document(self, writer: ShardWriter, document: Document, parts: EncodedParts) -> None:
        writer.begin_document(document)
        if self.recipe.bos == 'documents':
            writer.add(np.array([self.recipe.fixed_token], self.dtype), False)
        for ids, predicted in parts:
            writer.add(ids, predicted)
            self.num_tokens += len(ids)
        writer.add(np.array([self.recipe.end_token], self.dtype), parts[-1][1])
        if writer.tokens >= self.recipe.shard_tokens:
            writer.finish_shard()

    def write_probe(self) -> None:
        """Write probe.npz: ids that are uniform over the vocabulary, and the same for all runs."""
        rng = np.random.default_rng(0)
        with atomic_write(self.folder / PROBE_FILE) as temporary_path, temporary_path.open('wb') as file:
            np.savez(
                file,
                random_PT=rng.integers(self.vocabulary, size=(PROBE_SEQUENCES, PROBE_LENGTH), dtype=np.int32),
                repeated_P=rng.integers(self.vocabulary, size=PROBE_SEQUENCES, dtype=np.int32),
            )

    def write_meta(self, shards: list[Shard]) -> None:
        """Write meta.json, which marks a store as complete."""
        header = dict(
            format=FORMAT_VERSION,
            tokenizer=hash_file(self.folder / TOKENIZER_FILE),
            vocabulary=self.vocabulary,
            dtype=self.dtype.str,
            **{name: getattr(self.recipe, name) for name in SHARED_SETTINGS},
            masked=self.source.masked,
            weights=dict(self.source.weights or ()),
        )
        meta = dict(
            digest=digest_json([header, [(shard.split, shard.domain, shard.sha256) for shard in shards]])[:16],
            source=self.recipe.source,
            **header,
            domains=[count_domain(domain, shards) for domain in dict.fromkeys(shard.domain for shard in shards)],
            dropped=dict(self.dropped),
            probe=hash_file(self.folder / PROBE_FILE),
            shards=msgspec.to_builtins(shards),
        )
        write_text(self.folder / META_FILE, json.dumps(meta, indent=1) + '\n')


def count_domain(domain: str, shards: list[Shard]) -> dict:
    """Sum the documents, tokens and bytes of the shards of a domain, by split."""
    sums = {}
    for split in SPLITS:
        split_shards = [shard for shard in shards if (shard.domain, shard.split) == (domain, split)]
        sums[split] = {
            name: sum(getattr(shard, name) for shard in split_shards) for name in ('documents', 'tokens', 'bytes')
        }
    return dict(name=domain, **sums)
