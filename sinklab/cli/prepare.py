"""Prepare a token store from documents, which any number of runs can read.

If the command was stopped, run it again to resume.

SOURCE is one of
  stdlib                     the sources of this Python's standard library; stdlib:functions cuts them before
                             each function, method and class
  text:GLOB                  .txt, .jsonl, .parquet, also .gz and .zst; as in 'text:corpus/*.jsonl', also in a
                             bucket: 'text:gs://bucket/pile/*.jsonl.zst'
  chat:GLOB                  .jsonl of {"messages": [{"role", "content"}, ...]}; the assistant's messages are marked
  tfds:NAME[:SPLIT]          a data set of TensorFlow Datasets in ArrayRecord, by name or folder
  mixture:FILE               a JSON file {"domain": {"source": SOURCE, "weight": 0.3}, ...}, weights for all or none
#field=NAME,domain=NAME after it names the fields that hold the text (default: text, or messages) and the domain

example:
  sinklab prepare --source='text:pile/*.jsonl.zst#domain=meta.pile_set_name' --tokenizer=neox/tokenizer.json \\
    --held_out=0.001 --out=stores/pile
  sinklab prepare --check stores/pile --length=2048 --batch_size=512
  sinklab train --config=configs/default.py --config.data.source=store:stores/pile --config.data.held_out=0.001 \\
    --workdir=runs/pile
"""

import argparse
import dataclasses
import json
import shlex
from typing import Any

from sinklab.cli import terminal
from sinklab.cli.flag_types import add_options, format_options
from sinklab.config.differences import flatten_dict
from sinklab.config.spec import DataConfig, ModelConfig, OptimizerConfig, PositiveInt, Spec, get_field_types
from sinklab.config.validate import MAX_TRAINED_VOCABULARY, MIN_TRAINED_VOCABULARY, parse_value
from sinklab.data.store import Store
from sinklab.errors import UserError
from sinklab.storage.paths import parse_path

STORE_FIELDS = 'tokenizer', 'held_out', 'bos', 'end_token', 'fixed_token'  # fields of config.data that a store has
BUILD_OPTIONS = ('source', 'out', *STORE_FIELDS, 'vocabulary', 'shard_tokens')  # without --check only
# {option: (type, metavar, help)}, of options with a value.
OPTIONS = {
    'source': (str, 'SOURCE', 'documents, in one of the forms below'),
    'out': (str, 'DIR', 'local folder of the store: new, or one to resume, such as stores/pile'),
    'check': (str, 'DIR', 'verify an existing store, and print its contents'),
    'tokenizer': (str, 'FILE', 'tokenizer.json; or train: train one on a sample (default: train)'),
    'vocabulary': (int, 'N', 'size of a tokenizer that is trained'),
    'held_out': (float, 'SHARE', 'share of documents for validation and probes (default: 0.15)'),
    'bos': (str, 'WHERE', 'documents: begin each document with BOS; none: do not (default: none)'),
    'end_token': (int, 'ID', 'token that ends a document (default: 0, as in GPT-NeoX)'),
    'fixed_token': (int, 'ID', 'token for BOS and for fixed positions (default: 1)'),
    'shard_tokens': (int, 'N', 'approximate tokens of a shard (default: 16777216)'),
    'length': (int, 'T', 'tokens of a window, to count windows (default: 2048)'),
    'batch_size': (int, 'B', 'windows of a step, to count steps (default: 512)'),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, OPTIONS)
    parser.add_argument('--json', action='store_true', help='print the result as JSON')
    parser.usage = '%(prog)s --source SOURCE --out DIR [options]\n       %(prog)s --check DIR [options]'


def run(args: argparse.Namespace, extra_args: list[str]) -> int:
    fields = parse_settings(args)
    if args.check is not None:
        if unused := format_options(args, BUILD_OPTIONS):
            raise UserError(f'{" ".join(unused)} has no effect with --check; remove it')
        print_store(args, Store(args.check, verify=True), fields['length'], fields['batch_size'])
        return 0
    if not (args.source and args.out):
        raise UserError('give --source and --out to prepare a store, or --check to verify one')
    build_store(args, fields)
    store = Store(args.out)
    print_store(args, store, fields['length'], fields['batch_size'])
    if not args.json:
        print(f'train on it with: {format_train_flags(args.out, fields, store)}')
    return 0


def parse_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given options, checked as config fields of the same name, and defaults for the others."""
    defaults = dict.fromkeys(OPTIONS) | {name: getattr(Spec().data, name) for name in STORE_FIELDS}
    defaults |= dict(vocabulary=Spec().model.vocabulary, shard_tokens=1 << 24)
    defaults |= dict(length=Spec().data.length, batch_size=Spec().optimizer.batch_size)
    types = get_field_types(ModelConfig) | get_field_types(OptimizerConfig) | get_field_types(DataConfig)
    types |= dict(out=str, check=str, shard_tokens=PositiveInt)
    given = {name: value for name, value in vars(args).items() if name in OPTIONS and value is not None}
    return defaults | {name: parse_value(f'--{name}', value, types[name]) for name, value in given.items()}


def build_store(args: argparse.Namespace, fields: dict[str, Any]) -> None:
    from sinklab.data.prepare import Recipe, prepare_store

    vocabulary = fields['vocabulary']
    if fields['tokenizer'] != 'train':
        if args.vocabulary is not None:
            raise UserError(f'--vocabulary={vocabulary} applies only to a tokenizer that is trained here; remove it')
        vocabulary = None
    elif not MIN_TRAINED_VOCABULARY <= vocabulary <= MAX_TRAINED_VOCABULARY:
        raise UserError(
            f'--vocabulary={vocabulary}: a tokenizer trained here has {MIN_TRAINED_VOCABULARY} to '
            f'{MAX_TRAINED_VOCABULARY} ids'
        )
    names = ('source', 'shard_tokens', *STORE_FIELDS)
    recipe = Recipe(vocabulary=vocabulary, **{name: fields[name] for name in names})
    prepare_store(recipe, parse_path(args.out))


def format_train_flags(store_path: str, fields: dict[str, Any], store: Any) -> str:
    """Format the overrides with which a run reads the store."""
    overrides = {'data.source': f'store:{store_path}', 'model.vocabulary': store.meta['vocabulary']}
    overrides |= {f'data.{name}': fields[name] for name in STORE_FIELDS[1:]}
    defaults = flatten_dict(dataclasses.asdict(Spec()))
    changes = {path: value for path, value in overrides.items() if value != defaults[path]}
    return shlex.join([f'--config.{path}={value}' for path, value in changes.items()])


def print_store(args: argparse.Namespace, store: Any, length: int, batch_size: int) -> None:
    """Print what a store contains, with its number of windows of `length` and of batches of `batch_size`."""
    windows = {split: store.count_windows(split, length) for split in ('train', 'held_out')}
    num_batches = sum(windows['train'].values()) // batch_size
    if args.json:
        summary = {name: value for name, value in store.meta.items() if name != 'shards'}
        summary |= dict(length=length, windows=windows, batch_size=batch_size, batches=num_batches)
        print(json.dumps(summary, indent=2))
        return
    headings = ('domain', 'split', 'documents', 'tokens', 'MB of text', 'bytes per token', 'windows')
    rows = []
    for domain in store.meta['domains']:
        for split, split_windows in windows.items():
            counts = domain[split]
            cells = [f'{counts["documents"]:,}', f'{counts["tokens"]:,}', f'{counts["bytes"] / 1e6:,.3f}']
            cells.append(f'{counts["bytes"] / max(1, counts["tokens"]):.2f}')
            rows.append([domain['name'] or '-', split, *cells, f'{split_windows[domain["name"]]:,}'])
    console = terminal.make_console(width=120)
    terminal.print_table(console, headings, rows, left_columns=['split'])
    dropped = ', '.join(f'{count:,} {reason}' for reason, count in store.meta['dropped'].items()) or 'nothing'
    for line in (
        f'{store}: digest {store.digest}, {len(store.shards)} shards, dropped: {dropped}',
        f'windows of {length} + 1 tokens; batches of {batch_size}: {num_batches:,} per epoch',
        *store.decode_beginnings(2),
    ):
        console.print(line, soft_wrap=True)
