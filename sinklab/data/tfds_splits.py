"""Splits of TensorFlow Datasets stored as ArrayRecord, read without TensorFlow."""

import bisect
import contextlib
import dataclasses
import difflib
import functools
import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from sinklab.data.record_formats import import_library, shorten_text
from sinklab.schema import UserError, format_unknown_name

EXAMPLES_PER_READ = 32  # examples read at once
ARRAY_RECORD_FLAG = '--file_format=array_record'
SPLIT_PART_PATTERN = r'[\w-]+(\[[^\]]*\](\([^)]*\))?)?'
SPLIT_NAME_PATTERN = re.compile(
    rf'(?P<name>.+?(:[\d*]+\.[\d*]+\.[\d*]+)?)(:(?P<split>{SPLIT_PART_PATTERN}(\+{SPLIT_PART_PATTERN})*))?'
)


@dataclasses.dataclass(frozen=True)
class ExampleFile:
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
    shards: tuple[ExampleFile, ...]

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def identity(self) -> tuple:
        shards = [(os.path.basename(shard.path), shard.skip, shard.size, shard.mtime_ns) for shard in self.shards]
        return self.full_name, self.split, len(self), *shards

    @functools.cached_property
    def size(self) -> int:
        return sum(shard.size for shard in self.shards)

    def estimate_bytes(self, count: int) -> int:
        """Bytes of the first examples."""
        return self.size * count // len(self)

    def find_text_feature(self) -> str:
        texts = [path for path, is_text in self.string_features.items() if is_text]
        if len(texts) != 1:
            raise UserError(
                f'{self.source_name} needs #field=NAME behind it '
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
        """(name, where, example, bytes)"""
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
            return self.examples.__getitems__(list(indices))
        except Exception as error:  # of a C++ reader, or of a decoder
            raise UserError(
                f'{self.source_name} is cut off or damaged ({shorten_text(error)}); prepare it again'
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
    if has_overlap(instructions):
        raise UserError(f'{source_name} has examples of {split_name} twice; name each part of a split once')
    if not instructions:
        raise UserError(f'{source_name} has no example in its split {split_name}; name another')
    try:
        examples = builder.as_data_source(split_name)
    except NotImplementedError as error:
        raise UserError(
            f'{source_name} lies in {builder.info.file_format.value}, which needs TensorFlow; '
            f'tfds build {builder.info.full_name} {ARRAY_RECORD_FLAG} makes one that does not'
        ) from error
    except Exception as error:
        raise UserError(f'{source_name} cannot be read ({shorten_text(error)}); prepare it again') from error
    texts = dict(list_string_features(tfds, builder.info.features))
    return TFDSSplit(
        source_name,
        builder.info.full_name,
        split_name,
        texts,
        examples,
        tuple(list_example_files(source_name, instructions)),
    )


def load_builder_from_directory(tfds: ModuleType, source_name: str, path: str) -> Any:
    try:
        return tfds.builder_from_directory(path)
    except Exception as error:
        problem = f'{source_name}: the folder {path} holds no data set ({shorten_text(error)})'
        raise UserError(f'{problem}; name the one with its dataset_info.json') from error


def load_builder(tfds: ModuleType, source_name: str, name: str) -> Any:
    """The data set of this name, downloaded and prepared where it is not yet."""
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
            f'{f"; near it are {suggestions}" if suggestions else ""}; sinklab also reads text:GLOB'
        ) from error
    except Exception as error:
        raise UserError(
            f'{source_name} is not on this machine and cannot be made here '
            f'({type(error).__name__}: {shorten_text(error)}); '
            f'run tfds build {name} {ARRAY_RECORD_FLAG} where it can, and give its folder'
        ) from error
    return builder


def list_string_features(tfds: ModuleType, features: Any, prefix: str = '') -> Iterator[tuple[str, bool]]:
    for name, feature in features.items():
        if isinstance(feature, tfds.features.FeaturesDict):
            yield from list_string_features(tfds, feature, f'{prefix}{name}.')
        elif feature.shape == () and np.issubdtype(feature.np_dtype, np.object_):
            yield f'{prefix}{name}', isinstance(feature, tfds.features.Text)


def has_overlap(instructions: Sequence[Any]) -> bool:
    spans = sorted((part.filename, part.skip, part.skip + part.take) for part in instructions)
    return any(left[0] == right[0] and right[1] < left[2] for left, right in itertools.pairwise(spans))


def list_example_files(source_name: str, instructions: Sequence[Any]) -> Iterator[ExampleFile]:
    start = 0
    for part in instructions:
        try:
            status = os.stat(part.filename)
        except OSError as error:
            raise UserError(f'{source_name} lacks {part.filename} ({error.strerror}); prepare it again') from error
        size = status.st_size * part.take // part.examples_in_shard
        yield ExampleFile(part.filename, part.skip, start, size, status.st_mtime_ns)
        start += part.take
