"""Splits of data sets of TensorFlow Datasets that lie in ArrayRecord, read without TensorFlow."""

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

from sinklab.data.documents.formats import library, line
from sinklab.record import Refusal, unknown

HELD = 32  # examples read at once
BUILD = '--file_format=array_record'
PART = r'[\w-]+(\[[^\]]*\](\([^)]*\))?)?'
FORM = re.compile(rf'(?P<name>.+?(:[\d*]+\.[\d*]+\.[\d*]+)?)(:(?P<split>{PART}(\+{PART})*))?')


@dataclasses.dataclass(frozen=True)
class File:
    path: str
    skip: int  # examples at its head that are not of the split
    start: int  # place of its first example in the split
    size: int  # bytes of its examples, about
    written: int


@dataclasses.dataclass(frozen=True)
class Split:
    given: str
    full_name: str  # lm1b/1.1.0
    split: str
    texts: Mapping[str, bool]  # paths of features that are strings, and whether they are for texts
    examples: Sequence[Any]
    shards: tuple[File, ...]

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def identity(self) -> tuple:
        shards = [(os.path.basename(shard.path), shard.skip, shard.size, shard.written) for shard in self.shards]
        return self.full_name, self.split, len(self), *shards

    @functools.cached_property
    def size(self) -> int:
        return sum(shard.size for shard in self.shards)

    def behind(self, count: int) -> int:
        """Bytes of the first examples."""
        return self.size * count // len(self)

    def only_text(self) -> str:
        texts = [path for path, meant in self.texts.items() if meant]
        if len(texts) != 1:
            raise Refusal(f'{self.given} needs #field=NAME behind it (strings: {", ".join(self.texts) or "none"})')
        return texts[0]

    def check(self, *paths: str) -> None:
        for path in paths:
            if path and path not in self.texts:
                raise Refusal(unknown(f'{self.given}: the field {path}', path, self.texts, 'strings'))

    def records(self, start: int, stop: int) -> Iterator[tuple[str, str, Any, int]]:
        """(name, where, example, bytes)"""
        starts = [shard.start for shard in self.shards]
        for first in range(start, stop, HELD):
            places = range(first, min(first + HELD, stop))
            for place, example in zip(places, self.read(places), strict=True):
                shard = self.shards[bisect.bisect_right(starts, place) - 1]
                number = shard.skip + place - shard.start + 1
                name, where = f'{os.path.basename(shard.path)}:{number}', f'{shard.path}, example {number}'
                yield name, where, example, self.behind(place + 1) - self.behind(place)

    def read(self, places: range) -> Sequence[Any]:
        try:
            return self.examples.__getitems__(list(places))
        except Exception as error:  # of a C++ reader, or of a decoder
            raise Refusal(f'{self.given} is cut off or damaged ({line(error)}); prepare it again') from error


def split(given: str, rest: str) -> Split:
    tfds = library('tensorflow_datasets', given)
    if not (form := FORM.fullmatch(rest)):
        raise Refusal(f'{given} names no data set; give tfds:NAME, tfds:NAME:SPLIT or tfds:FOLDER:SPLIT')
    name, part = form['name'], form['split'] or 'train'
    path_like = os.path.isdir(name) or name.startswith(('/', '.'))
    builder = builder_in(tfds, given, name) if path_like else builder_of(tfds, given, name)
    try:
        instructions = builder.info.splits[part].file_instructions
    except (ValueError, KeyError) as error:
        raise Refusal(unknown(f'{given}: the split {part}', part, builder.info.splits, 'splits')) from error
    if overlap(instructions):
        raise Refusal(f'{given} has examples of {part} twice; name each part of a split once')
    if not instructions:
        raise Refusal(f'{given} has no example in its split {part}; name another')
    try:
        examples = builder.as_data_source(part)
    except NotImplementedError as error:
        raise Refusal(
            f'{given} lies in {builder.info.file_format.value}, which needs TensorFlow; '
            f'tfds build {builder.info.full_name} {BUILD} makes one that does not'
        ) from error
    except Exception as error:
        raise Refusal(f'{given} cannot be read ({line(error)}); prepare it again') from error
    texts = dict(strings(tfds, builder.info.features))
    return Split(given, builder.info.full_name, part, texts, examples, tuple(shards(given, instructions)))


def builder_in(tfds: ModuleType, given: str, path: str) -> Any:
    try:
        return tfds.builder_from_directory(path)
    except Exception as error:
        words = f'{given}: the folder {path} holds no data set ({line(error)})'
        raise Refusal(f'{words}; name the one with its dataset_info.json') from error


def builder_of(tfds: ModuleType, given: str, name: str) -> Any:
    """The data set of this name, downloaded and prepared where it is not yet."""
    library('tensorflow_datasets.text', given)  # registers c4, wikipedia and others
    try:
        builder = tfds.builder(name)
        if not builder.is_prepared():
            builder = tfds.builder(name, file_format='array_record')
            with contextlib.redirect_stdout(sys.stderr):  # it prints
                builder.download_and_prepare()
    except tfds.core.DatasetNotFoundError as error:
        names = tfds.list_builders(with_community_datasets=False)
        near = ', '.join(difflib.get_close_matches(re.split('[/:]', name)[0], names, 3))
        raise Refusal(
            f'{given}: {name} is neither a folder nor in the catalogue of TensorFlow Datasets'
            f'{f"; near it are {near}" if near else ""}; sinklab also reads text:GLOB'
        ) from error
    except Exception as error:
        raise Refusal(
            f'{given} is not on this machine and cannot be made here ({type(error).__name__}: {line(error)}); '
            f'run tfds build {name} {BUILD} where it can, and give its folder'
        ) from error
    return builder


def strings(tfds: ModuleType, features: Any, at: str = '') -> Iterator[tuple[str, bool]]:
    for name, feature in features.items():
        if isinstance(feature, tfds.features.FeaturesDict):
            yield from strings(tfds, feature, f'{at}{name}.')
        elif feature.shape == () and np.issubdtype(feature.np_dtype, np.object_):
            yield f'{at}{name}', isinstance(feature, tfds.features.Text)


def overlap(instructions: Sequence[Any]) -> bool:
    spans = sorted((part.filename, part.skip, part.skip + part.take) for part in instructions)
    return any(one[0] == two[0] and two[1] < one[2] for one, two in itertools.pairwise(spans))


def shards(given: str, instructions: Sequence[Any]) -> Iterator[File]:
    start = 0
    for part in instructions:
        try:
            status = os.stat(part.filename)
        except OSError as error:
            raise Refusal(f'{given} lacks {part.filename} ({error.strerror}); prepare it again') from error
        size = status.st_size * part.take // part.examples_in_shard
        yield File(part.filename, part.skip, start, size, status.st_mtime_ns)
        start += part.take
