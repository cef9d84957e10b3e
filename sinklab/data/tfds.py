"""Data sets of TensorFlow Datasets in ArrayRecord format, read without TensorFlow."""

import bisect
import contextlib
import itertools
import os
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

from sinklab.data.documents import (
    Document,
    FieldNames,
    OnDamaged,
    Source,
    SourcePiece,
    convert_records,
    import_library,
    parse_field_options,
    read_text,
)
from sinklab.errors import UserError, format_error, format_unknown_name

EXAMPLES_PER_READ = 32  # examples read at once
MAX_PIECES = 64  # pieces of a split
ARRAY_RECORD_FLAG = '--file_format=array_record'
SPLIT_PART = r'[\w-]+(\[[^\]]*\](\([^)]*\))?)?'
NAME_AND_SPLIT = re.compile(rf'(?P<name>.+?(:[\d*]+\.[\d*]+\.[\d*]+)?)(:(?P<split>{SPLIT_PART}(\+{SPLIT_PART})*))?')


def open_tfds(source_name: str, argument: str) -> Source:
    """Open a split of a data set of TensorFlow Datasets, one document per example.

    Raises:
        UserError: The data set, its split or a field does not exist, or it needs TensorFlow.
    """
    tfds = import_library('tensorflow_datasets', source_name)
    name_and_split, fields = parse_field_options(source_name, argument, '')
    if not (match := NAME_AND_SPLIT.fullmatch(name_and_split)):
        raise UserError(f'{source_name} names no data set; give tfds:NAME, tfds:NAME:SPLIT or tfds:FOLDER:SPLIT')
    split = match['split'] or 'train'
    builder = load_builder(tfds, source_name, match['name'])
    try:
        files = builder.info.splits[split].file_instructions
    except (ValueError, KeyError) as error:
        message = f'{source_name}: the split {split}'
        raise UserError(format_unknown_name(message, split, builder.info.splits, 'splits')) from error
    spans = sorted((file.filename, file.skip, file.skip + file.take) for file in files)
    if not spans or any(left[0] == right[0] and right[1] < left[2] for left, right in itertools.pairwise(spans)):
        raise UserError(f'{source_name} has no example, or one twice; give each part of a split once')
    try:
        examples = builder.as_data_source(split)
        infos = [os.stat(file.filename) for file in files]
    except NotImplementedError as error:
        raise UserError(
            f'{source_name} is in {builder.info.file_format.value} format, which needs TensorFlow; convert it with '
            f'tfds build {builder.info.full_name} {ARRAY_RECORD_FLAG}'
        ) from error
    except Exception as error:  # of a C++ reader
        raise UserError(f'{source_name} cannot be read ({format_error(error)}); prepare it again') from error
    fields = choose_fields(source_name, fields, dict(list_string_features(tfds, builder.info.features)))
    sizes = [info.st_size * file.take // file.examples_in_shard for file, info in zip(files, infos, strict=True)]
    starts = [0, *itertools.accumulate(file.take for file in files)]
    count, size = len(examples), sum(sizes)

    def read_records(first: int, last: int) -> Iterator[tuple[str, str, Any]]:
        for start in range(first, last, EXAMPLES_PER_READ):
            indices = range(start, min(start + EXAMPLES_PER_READ, last))
            try:
                values = examples.__getitems__(list(indices))
            except Exception as error:  # of a C++ reader, or of a decoder
                problem = f'{source_name} is truncated or damaged ({format_error(error)})'
                raise UserError(f'{problem}; prepare it again') from error
            for index, value in zip(indices, values, strict=True):
                part = bisect.bisect_right(starts, index) - 1
                path, number = files[part].filename, files[part].skip + index - starts[part] + 1
                yield f'{os.path.basename(path)}:{number}', f'{path}, example {number}', value

    def make_piece(first: int, last: int) -> SourcePiece:
        def read(on_damaged: OnDamaged) -> Iterator[Document]:
            return convert_records(read_records(first, last), dict, fields, read_text, on_damaged)

        return SourcePiece(f'{name_and_split}:{first}-{last}', size * last // count - size * first // count, read)

    num_pieces = min(MAX_PIECES, count)
    bounds = [count * number // num_pieces for number in range(num_pieces + 1)]
    versions = [
        (os.path.basename(file.filename), file.skip, size, info.st_mtime_ns)
        for file, size, info in zip(files, sizes, infos, strict=True)
    ]
    identity = ('tfds', fields.content, fields.domain, builder.info.full_name, split, count, *versions)
    return Source(tuple(itertools.starmap(make_piece, itertools.pairwise(bounds))), identity)


def load_builder(tfds: ModuleType, source_name: str, name: str) -> Any:
    """Load the builder of a folder or of a name; download and prepare the data set if that was not done yet."""
    if os.path.isdir(name) or name.startswith(('/', '.')):
        try:
            return tfds.builder_from_directory(name)
        except Exception as error:
            problem = f'{source_name}: the folder {name} contains no data set ({format_error(error)})'
            raise UserError(f'{problem}; give the folder that contains dataset_info.json') from error
    import_library('tensorflow_datasets.text', source_name)  # registers c4, wikipedia and others
    try:
        builder = tfds.builder(name)
        if not builder.is_prepared():
            builder = tfds.builder(name, file_format='array_record')
            with contextlib.redirect_stdout(sys.stderr):  # it prints
                builder.download_and_prepare()
    except tfds.core.DatasetNotFoundError as error:
        raise UserError(
            f'{source_name}: {name} is neither a folder nor in the catalogue of TensorFlow Datasets; check the name'
        ) from error
    except Exception as error:
        raise UserError(
            f'{source_name} is not on this machine and cannot be built here ({format_error(error, with_type=True)}); '
            f'run tfds build {name} {ARRAY_RECORD_FLAG} on another machine, and give its folder'
        ) from error
    return builder


def choose_fields(source_name: str, fields: FieldNames, string_features: dict[str, bool]) -> FieldNames:
    """Return the fields to read: those that are named, or the only feature for text."""
    texts = [path for path, is_text in string_features.items() if is_text]
    if not fields.content and len(texts) != 1:
        raise UserError(f'{source_name} needs #field=NAME after it (strings: {", ".join(string_features) or "none"})')
    for path in fields.content, fields.domain:
        if path and path not in string_features:
            message = f'{source_name}: the field {path}'
            raise UserError(format_unknown_name(message, path, string_features, 'strings'))
    return FieldNames(fields.content or texts[0], fields.domain)


def list_string_features(tfds: ModuleType, features: Any, prefix: str = '') -> Iterator[tuple[str, bool]]:
    """Yield the path of each feature that is a string, and whether it is for text."""
    for name, feature in features.items():
        if isinstance(feature, tfds.features.FeaturesDict):
            yield from list_string_features(tfds, feature, f'{prefix}{name}.')
        elif feature.shape == () and np.issubdtype(feature.np_dtype, np.object_):
            yield f'{prefix}{name}', isinstance(feature, tfds.features.Text)
