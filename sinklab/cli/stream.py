"""Measure the perplexity of a long text with a KV cache of x first and y recent tokens (StreamingLLM, Table 3).

example:
  sinklab stream runs/softmax --text=book.txt
  sinklab stream runs/softmax@20000 --text=book.txt --cache=0+1024,4+1020 --json
"""

import argparse
import json
import math
import sys

from sinklab.cli import reader
from sinklab.files.place import place
from sinklab.record import Refusal

FIRST = 0, 1, 2, 4  # tokens that the caches of the table keep of the beginning


def arguments(verb: argparse.ArgumentParser) -> None:
    reader.arguments(verb)
    verb.add_argument('--text', required=True, metavar='FILE', help='a text in UTF-8, such as book.txt')
    verb.add_argument(
        '--cache',
        metavar='x+y,...',
        help='caches of x first and y recent tokens, such as 0+1024,4+1020 (default: x of 0, 1, 2 and 4, and x + y '
        'of half a training window)',
    )
    verb.add_argument('--json', action='store_true', help='print the result as JSON')


def run(given: argparse.Namespace, rest: list[str]) -> int:
    if rest:
        raise Refusal(f'{rest[0]} is unknown; see sinklab stream --help')
    from sinklab.train.streaming import read_text

    model = reader.reader(given.run)
    words = usual(model.spec.data.length) if given.cache is None else given.cache.split(',')
    caches = [reader.cache(one, model.spec) for one in words]
    ids_T = model.ids(content(given.text), given.text, given.bare, model.tokenizer(given.tokenizer))
    params, published, rows = model.parameters(), model.folder.read('row').get('published', {}), []
    for cache in caches:
        found = read_text(model.spec, cache, params, ids_T)
        row = dict(cache=str(cache), perplexity=found.perplexity, loss=found.loss, predicted=found.predicted)
        row |= dict(published=published.get(f'perplexity/{cache}'))
        rows.append(row | dict(tokens_per_second=(len(ids_T) - 1) / found.seconds))
        if not given.json:
            show(rows[-1], f'{model}, {found.predicted:,} tokens of {given.text}' if len(rows) == 1 else None)
    if given.json:
        print(json.dumps([finite(row) for row in rows], indent=2, allow_nan=False))
    return 0


def usual(length: int) -> list[str]:
    """Table 3's, which has windows of 2048 tokens and 1024 in a cache."""
    half = max(length // 2, 1)
    return [f'{first}+{half - first}' for first in FIRST if first < half]


def content(file: str) -> str:
    try:
        return place(file).read_bytes().decode()
    except OSError as error:
        raise Refusal(f'--text={file} cannot be read ({error.strerror or error}); give a file') from error
    except UnicodeDecodeError as error:
        raise Refusal(f'--text={file} is not UTF-8 (byte {error.start}); give a text in UTF-8') from error


def show(row: dict, heading: str | None) -> None:
    if heading:
        print(f'{heading}\n{"cache":>12} {"perplexity":>12} {"published":>10} {"tokens/s":>10}')
    published = '-' if row['published'] is None else f'{row["published"]:,.2f}'
    print(f'{row["cache"]:>12} {row["perplexity"]:>12,.2f} {published:>10} {row["tokens_per_second"]:>10,.0f}')
    sys.stdout.flush()


def finite(row: dict) -> dict:
    return {name: None if isinstance(one, float) and not math.isfinite(one) else one for name, one in row.items()}
