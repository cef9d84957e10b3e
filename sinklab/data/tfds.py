"""Data sets of TensorFlow Datasets in ArrayRecord format, read without TensorFlow."""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
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
from sinklab.errors import UserError, format_error

EXAMPLES_PER_READ = 32  # examples read at once
NAME_AND_SPLIT = re.compile(r'(?P<name>.+?)(:(?P<split>[A-Za-z_].*))?')  # a name may end with :VERSION


def open_tfds(source_name: str, argument: str) -> Source:
    """Open a split of a data set of TensorFlow Datasets, one document per example.

    Raises:
        UserError: The data set or its split does not exist, or it needs TensorFlow.
    """
    name_and_split, fields = parse_field_options(source_name, argument, 'text')
    if not (match := NAME_AND_SPLIT.fullmatch(name_and_split)):
        raise UserError(f'{source_name} names no data set; give tfds:NAME, tfds:NAME:SPLIT or tfds:FOLDER:SPLIT')
    split = match['split'] or 'train'
    try:
        builder = load_builder(source_name, match['name'])
        info = builder.info.splits[split]
        examples = builder.as_data_source(split)
    except UserError:
        raise
    except Exception as error:  # of the catalogue, the network, or a C++ reader
        raise UserError(
            f'{source_name} cannot be read ({format_error(error, with_type=True)}); give the folder of a data set '
            f'that was made with tfds build {match["name"]} --file_format=array_record'
        ) from error

    def read() -> Iterator[Document]:
        records = (
            (f'{split}:{number}', f'{source_name}, example {number}', value)
            for number, value in enumerate(read_examples(source_name, examples), 1)
        )
        return convert_records(records, dict, fields, read_text)

    piece = SourcePiece(split, info.num_bytes, read)
    identity = ('tfds', fields.content, fields.domain, builder.info.full_name, split, len(examples), info.num_bytes)
    return Source((piece,), identity)


def read_examples(source_name: str, examples: Any) -> Iterator[dict[str, Any]]:
    """Yield the examples of a data source; raise UserError if one is damaged."""
    for first in range(0, len(examples), EXAMPLES_PER_READ):
        try:
            yield from examples.__getitems__(list(range(first, min(first + EXAMPLES_PER_READ, len(examples)))))
        except Exception as error:  # of a C++ reader, or of a decoder
            raise UserError(
                f'{source_name} is truncated or damaged ({format_error(error)}); prepare it again'
            ) from error


def load_builder(source_name: str, name: str) -> Any:
    """Load the builder of a folder or of a name; download and prepare the data set if that was not done yet."""
    tfds = import_library('tensorflow_datasets', source_name)
    if os.path.isdir(name) or name.startswith(('/', '.')):
        return tfds.builder_from_directory(name)
    import_library('tensorflow_datasets.text', source_name)  # registers c4, wikipedia and others
    builder = tfds.builder(name)
    if not builder.is_prepared():
        builder = tfds.builder(name, file_format='array_record')
        with contextlib.redirect_stdout(sys.stderr):  # it prints
            builder.download_and_prepare()
    return builder
