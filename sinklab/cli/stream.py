"""Measure the perplexity of a long text with a KV cache of x first and y recent tokens (StreamingLLM, Table 3).

example:
  sinklab stream runs/softmax --text=book.txt
  sinklab stream runs/softmax@20000 --text=book.txt --cache=0+1024,4+1020 --json
  sinklab stream gguf:SmolLM2.gguf --text=book.txt
"""

import argparse
import json
import math

from sinklab.cli import checkpoint_flags
from sinklab.errors import UserError, format_error
from sinklab.storage.paths import parse_path

FIRST_TOKEN_COUNTS = 0, 1, 2, 4  # numbers of first tokens in the default caches (Table 3)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    checkpoint_flags.add_arguments(parser)
    parser.add_argument('--text', required=True, metavar='FILE', help='a text in UTF-8, such as book.txt')
    parser.add_argument(
        '--cache',
        metavar='x+y,...',
        help='such as 0+1024,4+1020 (default: half a training window, x of 0, 1, 2 and 4)',
    )
    parser.add_argument('--json', action='store_true', help='print the result as JSON')


def run(args: argparse.Namespace, extra_args: list[str]) -> int:
    from sinklab.train.generate import measure_perplexity

    model = checkpoint_flags.load_checkpoint(args.run)
    cache_texts = list_default_caches(model.spec.data.length) if args.cache is None else args.cache.split(',')
    caches = [checkpoint_flags.parse_cache(cache_text, model.spec) for cache_text in cache_texts]
    try:
        text = parse_path(args.text).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'--text={args.text} cannot be read as UTF-8 ({format_error(error)}); give a text') from error
    ids_T = checkpoint_flags.encode_text(model, text, args.bare)
    published = model.run_dir.read_json('row').get('published', {})
    rows: list[dict] = []
    for cache in caches:
        result = measure_perplexity(model.spec, cache, model.params, ids_T)
        row = dict(cache=str(cache), perplexity=result.perplexity, loss=result.loss, predicted=result.num_predicted)
        row |= dict(published=published.get(f'perplexity/{cache}'), dtype=model.dtype)
        row |= dict(tokens_per_second=(len(ids_T) - 1) / result.seconds)
        if not args.json:
            print_row(row, f'{model.name}, {result.num_predicted:,} predicted tokens of {args.text}', not rows)
        rows.append(
            {
                name: None if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in row.items()
            }
        )
    if args.json:
        print(json.dumps(rows, indent=2, allow_nan=False))
    return 0


def list_default_caches(length: int) -> list[str]:
    """List the default caches, as in Table 3: half a training window each.

    Table 3 has windows of 2048 tokens and caches of 1024.
    """
    half = max(length // 2, 1)
    return [f'{first}+{half - first}' for first in FIRST_TOKEN_COUNTS if first < half]


def print_row(row: dict, title: str, is_first: bool) -> None:
    if is_first:
        print(f'{title}, computed in {row["dtype"]}')
        print(f'{"cache":>12} {"perplexity":>12} {"published":>10} {"tokens/s":>10}')
    published = '-' if row['published'] is None else f'{row["published"]:,.2f}'
    cells = f'{row["cache"]:>12} {row["perplexity"]:>12,.2f} {published:>10} {row["tokens_per_second"]:>10,.0f}'
    print(cells, flush=True)
