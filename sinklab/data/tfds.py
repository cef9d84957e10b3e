"""Data sets of TensorFlow Datasets in ArrayRecord format, read without TensorFlow."""

import contextlib
import itertools
import os
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from sinklab.data.documents import (
    Document,
    Source,
    SourcePiece,
    convert_records,
    import_library,
    parse_field_options,
    read_text,
)
from sinklab.errors import UserError, format_error, format_unknown_name

EXAMPLES_PER_READ = 32  # examples read at once
ARRAY_RECORD_FLAG = '--file_format=array_record'
NAME_AND_SPLIT = re.compile(r'(?P<name>.+?)(:(?P<split>[A-Za-z_].*))?')  # a name may end with :VERSION


def open_tfds(source_name: str, argument: str) -> Source:
    """Open a split of a data set of TensorFlow Datasets, one document per example.

    Raises:
        UserError: The data set or its split does not exist, or it needs TensorFlow.
    """
    tfds = import_library('tensorflow_datasets', source_name)
    name_and_split, fields = parse_field_options(source_name, argument, 'text')
    if not (match := NAME_AND_SPLIT.fullmatch(name_and_split)):
        raise UserError(f'{source_name} names no data set; give tfds:NAME, tfds:NAME:SPLIT or tfds:FOLDER:SPLIT')
    split = match['split'] or 'train'
    builder = load_builder(tfds, source_name, match['name'])
    try:
        files = builder.info.splits[split].file_instructions
    except (ValueError, KeyError) as error:
        message = f'{source_name}: the split {split}'
        raise UserError(format_unknown_name(message, split, builder.info.splits, 'splits')) from error
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

    def read_examples(start: int, end: int) -> Iterator[Any]:
        for first in range(start, end, EXAMPLES_PER_READ):
            try:
                yield from examples.__getitems__(list(range(first, min(first + EXAMPLES_PER_READ, end))))
            except Exception as error:  # of a C++ reader, or of a decoder
                problem = f'{source_name} is truncated or damaged ({format_error(error)})'
                raise UserError(f'{problem}; prepare it again') from error

    def make_piece(file: Any, size: int, start: int) -> SourcePiece:
        name = os.path.basename(file.filename)

        def read() -> Iterator[Document]:
            records = (
                (f'{name}:{number}', f'{file.filename}, example {number}', value)
                for number, value in enumerate(read_examples(start, start + file.take), file.skip + 1)
            )
            return convert_records(records, dict, fields, read_text)

        return SourcePiece(f'{name}:{file.skip}', size, read)

    sizes = [info.st_size * file.take // file.examples_in_shard for file, info in zip(files, infos, strict=True)]
    starts = itertools.accumulate((file.take for file in files), initial=0)
    pieces = tuple(map(make_piece, files, sizes, starts))
    versions = [
        (os.path.basename(file.filename), file.skip, size, info.st_mtime_ns)
        for file, size, info in zip(files, sizes, infos, strict=True)
    ]
    return Source(pieces, ('tfds', fields.content, fields.domain, builder.info.full_name, split, *versions))


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
