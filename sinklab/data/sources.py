"""Data sources that `--source` and `config.data.source` can name; the table `SOURCES` lists them."""

import bisect
import contextlib
import dataclasses
import difflib
import functools
import itertools
import math
import os
import re
import sys
import sysconfig
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from sinklab.data import source_files, source_formats
from sinklab.data.documents import (
    DamagedDocument,
    Document,
    Source,
    SourcePiece,
    require_intact,
)
from sinklab.data.source_files import translate_read_errors
from sinklab.data.source_formats import (
    ContentReader,
    FieldNames,
    RecordError,
    import_library,
    parse_json_object,
)
from sinklab.errors import UserError, format_error, format_unknown_name, shorten_text
from sinklab.storage.paths import is_remote, parse_path

EXAMPLES_PER_READ = 32  # examples read at once
ARRAY_RECORD_FLAG = '--file_format=array_record'
SPLIT_PART_PATTERN = r'[\w-]+(\[[^\]]*\](\([^)]*\))?)?'
SPLIT_NAME_PATTERN = re.compile(
    rf'(?P<name>.+?(:[\d*]+\.[\d*]+\.[\d*]+)?)(:(?P<split>{SPLIT_PART_PATTERN}(\+{SPLIT_PART_PATTERN})*))?'
)


@dataclasses.dataclass(frozen=True)
class SplitFile:
    path: str
    skip: int  # examples at its head that are not of the split
    start: int  # place of its first example in the split
    size: int  # bytes of its examples, about
    mtime_ns: int


@dataclasses.dataclass(frozen=True)
class TFDSSplit:
    source_name: str
    full_name: str  # lm1b/1.1.0
    split: str
    string_features: Mapping[str, bool]  # paths of features that are strings, and whether they are for texts
    examples: Sequence[Any]
    shards: tuple[SplitFile, ...]

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def identity(self) -> tuple[Any, ...]:
        shards = [(os.path.basename(shard.path), shard.skip, shard.size, shard.mtime_ns) for shard in self.shards]
        return self.full_name, self.split, len(self), *shards

    @functools.cached_property
    def size(self) -> int:
        return sum(shard.size for shard in self.shards)

    def estimate_bytes(self, count: int) -> int:
        """Estimate the bytes of the first examples."""
        return self.size * count // len(self)

    def find_text_feature(self) -> str:
        texts = [path for path, is_text in self.string_features.items() if is_text]
        if len(texts) != 1:
            raise UserError(
                f'{self.source_name} needs #field=NAME after it '
                f'(strings: {", ".join(self.string_features) or "none"})'
            )
        return texts[0]

    def check_features(self, *paths: str) -> None:
        for path in paths:
            if path and path not in self.string_features:
                raise UserError(
                    format_unknown_name(
                        f'{self.source_name}: the field {path}', path, self.string_features, 'strings'
                    )
                )

    def read_records(self, start: int, stop: int) -> Iterator[tuple[str, str, Any, int]]:
        """Yield (name, location, example, size in bytes) of the examples from `start` to `stop`."""
        starts = [shard.start for shard in self.shards]
        for first in range(start, stop, EXAMPLES_PER_READ):
            indices = range(first, min(first + EXAMPLES_PER_READ, stop))
            for index, example in zip(indices, self.read_examples(indices), strict=True):
                shard = self.shards[bisect.bisect_right(starts, index) - 1]
                number = shard.skip + index - shard.start + 1
                name, location = f'{os.path.basename(shard.path)}:{number}', f'{shard.path}, example {number}'
                yield name, location, example, self.estimate_bytes(index + 1) - self.estimate_bytes(index)

    def read_examples(self, indices: range) -> Sequence[Any]:
        try:
            examples: Sequence[Any] = self.examples.__getitems__(list(indices))  # type: ignore[attr-defined]
            return examples
        except Exception as error:  # of a C++ reader, or of a decoder
            raise UserError(
                f'{self.source_name} is truncated or damaged ({format_error(error)}); prepare it again'
            ) from error


def open_split(source_name: str, argument: str) -> TFDSSplit:
    tfds = import_library('tensorflow_datasets', source_name)
    if not (match := SPLIT_NAME_PATTERN.fullmatch(argument)):
        raise UserError(f'{source_name} names no data set; give tfds:NAME, tfds:NAME:SPLIT or tfds:FOLDER:SPLIT')
    name, split_name = match['name'], match['split'] or 'train'
    path_like = os.path.isdir(name) or name.startswith(('/', '.'))
    builder = (
        load_builder_from_directory(tfds, source_name, name) if path_like else load_builder(tfds, source_name, name)
    )
    try:
        instructions = builder.info.splits[split_name].file_instructions
    except (ValueError, KeyError) as error:
        raise UserError(
            format_unknown_name(f'{source_name}: the split {split_name}', split_name, builder.info.splits, 'splits')
        ) from error
    if have_overlapping_ranges(instructions):
        raise UserError(f'{source_name} has examples of {split_name} twice; give each part of a split once')
    if not instructions:
        raise UserError(f'{source_name} has no example in its split {split_name}; give another split')
    try:
        examples = builder.as_data_source(split_name)
    except NotImplementedError as error:
        raise UserError(
            f'{source_name} is in {builder.info.file_format.value} format, which needs TensorFlow; convert it with '
            f'tfds build {builder.info.full_name} {ARRAY_RECORD_FLAG}'
        ) from error
    except Exception as error:
        raise UserError(f'{source_name} cannot be read ({format_error(error)}); prepare it again') from error
    texts = dict(list_string_features(tfds, builder.info.features))
    return TFDSSplit(
        source_name,
        builder.info.full_name,
        split_name,
        texts,
        examples,
        tuple(list_split_files(source_name, instructions)),
    )


def load_builder_from_directory(tfds: ModuleType, source_name: str, path: str) -> Any:
    try:
        return tfds.builder_from_directory(path)
    except Exception as error:
        problem = f'{source_name}: the folder {path} contains no data set ({format_error(error)})'
        raise UserError(f'{problem}; give the folder that contains dataset_info.json') from error


def load_builder(tfds: ModuleType, source_name: str, name: str) -> Any:
    """Load the builder of a data set; download and prepare the data set if that was not done yet."""
    import_library('tensorflow_datasets.text', source_name)  # registers c4, wikipedia and others
    try:
        builder = tfds.builder(name)
        if not builder.is_prepared():
            builder = tfds.builder(name, file_format='array_record')
            with contextlib.redirect_stdout(sys.stderr):  # it prints
                builder.download_and_prepare()
    except tfds.core.DatasetNotFoundError as error:
        names = tfds.list_builders(with_community_datasets=False)
        suggestions = ', '.join(difflib.get_close_matches(re.split('[/:]', name)[0], names, 3))
        raise UserError(
            f'{source_name}: {name} is neither a folder nor in the catalogue of TensorFlow Datasets'
            f'{f"; similar names: {suggestions}" if suggestions else ""}; sinklab also reads text:GLOB'
        ) from error
    except Exception as error:
        raise UserError(
            f'{source_name} is not on this machine and cannot be built here '
            f'({format_error(error, with_type=True)}); '
            f'run tfds build {name} {ARRAY_RECORD_FLAG} on another machine, and give its folder'
        ) from error
    return builder


def list_string_features(tfds: ModuleType, features: Any, prefix: str = '') -> Iterator[tuple[str, bool]]:
    for name, feature in features.items():
        if isinstance(feature, tfds.features.FeaturesDict):
            yield from list_string_features(tfds, feature, f'{prefix}{name}.')
        elif feature.shape == () and np.issubdtype(feature.np_dtype, np.object_):
            yield f'{prefix}{name}', isinstance(feature, tfds.features.Text)


def have_overlapping_ranges(instructions: Sequence[Any]) -> bool:
    spans = sorted((part.filename, part.skip, part.skip + part.take) for part in instructions)
    return any(left[0] == right[0] and right[1] < left[2] for left, right in itertools.pairwise(spans))


def list_split_files(source_name: str, instructions: Sequence[Any]) -> Iterator[SplitFile]:
    start = 0
    for part in instructions:
        try:
            status = os.stat(part.filename)
        except OSError as error:
            raise UserError(f'{source_name} lacks {part.filename} ({error.strerror}); prepare it again') from error
        size = status.st_size * part.take // part.examples_in_shard
        yield SplitFile(part.filename, part.skip, start, size, status.st_mtime_ns)
        start += part.take


MAX_WEIGHT = 1e100  # limit that keeps the sum of weights finite
MIXTURE_FORM = '{"domain": {"source": "text:GLOB", "weight": 0.3}, ...}'


def open_mixture(source_name: str, argument: str, open_part: Callable[[str], Source]) -> Source:
    """Open a mixture of sources, each of which is one domain.

    Args:
        source_name: The whole source, for messages.
        argument: Path of a JSON file of the form MIXTURE_FORM. All components have a weight, or none has one.
        open_part: Function that opens the source of a component.

    Raises:
        UserError: The file or a component is invalid, or only some components have a weight or a loss mask.
    """
    components = read_components(source_name, parse_path(argument))
    sources = {
        name: open_component(f'{source_name}, {shorten_text(repr(name))[1:-1]},', name, value, open_part)
        for name, value in components.items()
    }
    weights = {name: value['weight'] for name, value in components.items() if 'weight' in value}
    if unweighted := weights and [name for name in components if name not in weights]:
        raise UserError(f'{source_name} has no weight for {", ".join(unweighted)}; give a weight to all, or to none')
    if len({part.masked for part in sources.values()}) > 1:
        raise UserError(f'{source_name} mixes chat: with sources that have no roles; make separate mixtures')
    total = math.fsum(weights.values())
    return Source(
        pieces=tuple(set_domain(piece, name) for name, part in sources.items() for piece in part.pieces),
        identity=('mixture', *((name, weights.get(name), part.identity) for name, part in sources.items())),
        weights=tuple((name, weight / total) for name, weight in weights.items()) or None,
        masked=all(part.masked for part in sources.values()),
    )


def read_components(source_name: str, path: Path) -> dict[str, Any]:
    try:
        with translate_read_errors(path):
            components = parse_json_object(path.read_bytes(), build_unique_dict)
    except RecordError as fault:
        raise UserError(f'{source_name} {fault}; write {MIXTURE_FORM}') from fault
    if not components:
        raise UserError(f'{source_name} has no component; write {MIXTURE_FORM}')
    return components


def build_unique_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object and raise RecordError on duplicate keys, of which `json` would keep the last."""
    names = [name for name, _ in pairs]
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise RecordError(f'has {duplicates[0]!r} twice')
    return dict(pairs)


def open_component(label: str, name: str, value: Any, open_part: Callable[[str], Source]) -> Source:
    if not name.isprintable() or not name or '/' in name:
        raise UserError(f'{label} is not a name of a domain; use printable text without /')
    if not isinstance(value, dict) or not isinstance(value.get('source'), str):
        raise UserError(f'{label} has no source; give it {{"source": "text:GLOB"}}')
    for key in value:
        if key not in ('source', 'weight'):
            raise UserError(format_unknown_name(f'{label} {key!r}', key, ('source', 'weight')))
    weight = value.get('weight', 1)
    if type(weight) not in (int, float) or not 0 < weight <= MAX_WEIGHT:
        weight_text = shorten_text(repr(weight))
        raise UserError(
            f'{label} has the weight {weight_text}; it must be a number above 0 and at most {MAX_WEIGHT:g}'
        )
    if 'domain=' in value['source'].rpartition('#')[2]:
        raise UserError(f'{label} sets another domain after #, but its documents have this one; remove domain=')
    if value['source'].startswith('mixture:'):
        raise UserError(f'{label} is a mixture itself; give its components here')
    try:
        return open_part(value['source'])
    except UserError as error:
        raise UserError(f'{label} {error}') from error


def set_domain(piece: SourcePiece, name: str) -> SourcePiece:
    def read() -> Iterator[Document | DamagedDocument]:
        for document in piece.read():
            if isinstance(document, Document):
                document = dataclasses.replace(document, name=f'{name}/{document.name}', domain=name)
            yield document

    return dataclasses.replace(piece, name=f'{name}/{piece.name}', read=read)


SKIPPED_NAMES = {'site-packages', 'test', 'tests', 'idle_test'}
MAX_TFDS_PIECES = 64  # pieces of a split of TensorFlow Datasets


def open_source(source_name: str) -> Source:
    """Return the data source of a name, such as `text:corpus/*.txt`, without reading its documents.

    Args:
        source_name: The kind, a colon, and what the kind needs, as `SOURCES` lists them. To add a kind, write a
            function (name, what follows the colon) -> Source and add it there.

    Raises:
        UserError: The kind is unknown, or no file matches.
    """
    openers = {form.partition(':')[0]: kind for form, kind in SOURCES.items()}
    kind, _, argument = source_name.partition(':')
    if kind not in openers:
        hint = f'; for this file, give text:{source_name}' if os.path.exists(source_name) else ''
        raise UserError(format_unknown_name(source_name, kind, SOURCES, 'sources') + hint)
    return openers[kind](source_name, argument)


def read_texts(source_name: str) -> list[str]:
    """Read the texts of a small corpus into memory, without blank ones.

    Raises:
        UserError: The source cannot be opened, or a document is damaged.
    """
    documents = map(require_intact, open_source(source_name).read_documents())
    return [document.text for document in documents if not document.is_blank]


def open_stdlib(source_name: str, argument: str) -> Source:
    """Open the Python standard library of the running interpreter as a source, without its tests."""
    if argument:
        raise UserError(f'{source_name} has an argument, but stdlib is the whole library; remove :{argument}')
    root = Path(sysconfig.get_path('stdlib'))
    names = sorted(path.relative_to(root).as_posix() for path in find_python_files(root))
    return make_file_source('stdlib', [(name, root / name) for name in names], read_python_file)


def find_python_files(root: Path) -> Iterator[Path]:
    """Find the .py files below a folder without entering site-packages, which holds ten times as many."""
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - SKIPPED_NAMES
        yield from (Path(folder, name) for name in set(names) - SKIPPED_NAMES if name.endswith('.py'))


def read_python_file(name: str, path: Path) -> Iterator[Document | DamagedDocument]:
    size = path.stat().st_size
    try:
        with source_files.translate_read_errors(path), tokenize.open(path) as file:  # honours a coding cookie
            yield Document(name, ((file.read(), True),), '', size)
    except (UnicodeDecodeError, SyntaxError) as error:
        yield DamagedDocument(str(path), f'is not Python ({format_error(error)})', size)


def open_text_source(source_name: str, argument: str) -> Source:
    """Open text files: one document per .jsonl line, .parquet row, or file of plain text."""
    pattern, fields = source_formats.parse_field_options(source_name, argument, 'text')
    matched_files = match_files(source_name, pattern, source_formats.FORMATS, accepts_text=True)
    for _, path in matched_files:
        if source_formats.get_record_format(path) is source_formats.TEXT_FORMAT and fields != FieldNames('text', ''):
            raise UserError(f'{source_name} names fields, but {path} has none; remove them, or match other files')
    return make_record_source('text', matched_files, fields, source_formats.read_text)


def open_chat(source_name: str, argument: str) -> Source:
    """Open conversations, one per .jsonl line or .parquet row.

    Only the words of the assistant are in the loss.
    """
    pattern, fields = source_formats.parse_field_options(source_name, argument, 'messages')
    suffixes = [
        suffix
        for suffix, record_format in source_formats.FORMATS.items()
        if record_format is not source_formats.TEXT_FORMAT
    ]
    return make_record_source(
        'chat', match_files(source_name, pattern, suffixes), fields, source_formats.read_conversation, masked=True
    )


def open_tfds(source_name: str, argument: str) -> Source:
    """Open a split of a data set of TensorFlow Datasets, one document per example."""
    name, fields = source_formats.parse_field_options(source_name, argument, '')
    split = open_split(source_name, name)
    fields = FieldNames(fields.content or split.find_text_feature(), fields.domain)
    split.check_features(fields.content, fields.domain)
    count = min(MAX_TFDS_PIECES, len(split))
    bounds = [len(split) * number // count for number in range(count + 1)]

    def make_piece(start: int, stop: int) -> SourcePiece:
        def read() -> Iterator[Document | DamagedDocument]:
            return source_formats.convert_records(
                split.read_records(start, stop), dict, fields, source_formats.read_text
            )

        return SourcePiece(f'{name}:{start}-{stop}', split.estimate_bytes(stop) - split.estimate_bytes(start), read)

    pieces = tuple(itertools.starmap(make_piece, itertools.pairwise(bounds)))
    return Source(pieces, ('tfds', *dataclasses.astuple(fields), *split.identity))


def match_files(
    source_name: str, pattern: str, suffixes: Iterable[str], accepts_text: bool = False
) -> Sequence[tuple[str, Any]]:
    """Return (name, path) of the files that match a pattern.

    Raises:
        UserError: No file matches, or a file has none of the suffixes and is no text, or `accepts_text` is False.
    """
    matched_files: Sequence[tuple[str, Any]] = (
        source_files.glob_objects(pattern) if is_remote(pattern) else source_files.glob_files(pattern)
    )
    if not matched_files:
        if parse_path(pattern).is_dir() if is_remote(pattern) else os.path.isdir(pattern):
            raise UserError(
                f'{source_name} is a folder; give its files, such as {pattern}/*.txt, and quote the pattern'
            )
        raise UserError(f'{source_name} matches no file; quote the pattern and check the path')
    for _, path in matched_files:
        if str(path).endswith(tuple(suffixes)) or (accepts_text and source_files.is_text_file(path)):
            continue
        allowed = f'{", ".join(suffixes)}{", and other files of UTF-8 text" if accepts_text else ""}'
        raise UserError(f'{source_name} matches {path}, which cannot be read; allowed: {allowed}')
    return matched_files


def make_file_source(
    kind: str,
    matched_files: Sequence[tuple[str, Any]],
    read: Callable[[str, Path], Iterator[Document | DamagedDocument]],
    *identity_parts: str,
    masked: bool = False,
) -> Source:
    pieces: list[SourcePiece] = []
    identity: list[Any] = [kind, *identity_parts]
    for name, path in matched_files:
        size, version = get_file_version(path)
        identity.append((name, size, version))
        pieces.append(SourcePiece(name, size, functools.partial(read, name, path)))
    return Source(tuple(pieces), tuple(identity), masked=masked)


def get_file_version(path: Path | source_files.RemoteFile) -> tuple[int, int | str]:
    """Return (size in bytes, version) of a file: its mtime in ns, or the object version in a bucket."""
    if isinstance(path, source_files.RemoteFile):
        return path.size, path.version
    with source_files.translate_read_errors(path):
        status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def make_record_source(
    kind: str,
    matched_files: Sequence[tuple[str, Any]],
    fields: FieldNames,
    read_content: ContentReader,
    masked: bool = False,
) -> Source:
    def read(name: str, path: Path) -> Iterator[Document | DamagedDocument]:
        record_format = source_formats.get_record_format(path)
        numbered_records = (
            (f'{name}:{number}', f'{path}, {record_format.unit} {number}', record, size)
            if number
            else (name, str(path), record, size)
            for number, record, size in record_format.read_records(path, fields.columns)
        )
        return source_formats.convert_records(numbered_records, record_format.decode_record, fields, read_content)

    return make_file_source(kind, matched_files, read, fields.content, fields.domain, masked=masked)


SOURCES: dict[str, Callable[[str, str], Source]] = {
    'stdlib': open_stdlib,
    'text:GLOB': open_text_source,
    'chat:GLOB': open_chat,
    'tfds:NAME[:SPLIT]': open_tfds,
    'mixture:FILE': functools.partial(open_mixture, open_part=open_source),
}
