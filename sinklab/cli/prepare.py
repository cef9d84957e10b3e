"""Prepare a token store from documents, which any number of runs can read.

If the command was stopped, run it again to resume.

SOURCE is one of
  stdlib                     the sources of this Python's standard library
  text:GLOB                  .txt, .jsonl, .parquet, also .gz and .zst; as in 'text:corpus/*.{txt,jsonl}', also in a
                             bucket: 'text:gs://bucket/pile/*.jsonl.zst'
  chat:GLOB                  .jsonl of {"messages": [{"role", "content"}, ...]}; the assistant's messages are marked
  tfds:NAME[:SPLIT]          a data set of TensorFlow Datasets in ArrayRecord, by name or folder
  mixture:FILE               a JSON file {"domain": {"source": SOURCE, "weight": 0.3}, ...}, weights for all or none
#field=NAME,domain=NAME after it names the fields that hold the text (default: text, or messages) and the domain

example:
  sinklab prepare --source='text:pile/*.jsonl.zst#domain=meta.pile_set_name' --tokenizer=neox/tokenizer.json \\
    --held_out=0.001 --out=stores/pile
  sinklab prepare --check stores/pile --batch_size=512 --hosts=64
  sinklab train --config=configs/default.py --config.data.source=store:stores/pile --config.data.held_out=0.001 \\
    --workdir=runs/pile
"""

import argparse
import json
import shlex
import sys
from typing import Any

from sinklab.config.spec import DataConfig, ModelConfig, OptimizerConfig, PositiveInt, Spec, get_field_types
from sinklab.config.validate import MAX_TRAINED_VOCABULARY, MIN_TRAINED_VOCABULARY, parse_value
from sinklab.configs.sizes import SIZES
from sinklab.errors import UserError
from sinklab.storage.paths import parse_path

STORE_FIELDS = 'tokenizer', 'held_out', 'bos', 'end_token', 'fixed_token'  # fields of config.data that a store has
CHECK_OPTIONS = 'length', 'batch_size', 'hosts'  # with --check only
BUILD_OPTIONS = ('source', 'out', *STORE_FIELDS[1:], 'lenient', 'shard_tokens')  # without --check only
# {option: (type, metavar, help)}, of options with a value.
OPTIONS = {
    'source': (str, 'SOURCE', 'documents, in one of the forms above'),
    'out': (str, 'DIR', 'local folder of the store: new, or one to resume, such as stores/pile'),
    'check': (str, 'DIR', 'verify an existing store, and print its contents'),
    'tokenizer': (str, 'FILE', 'tokenizer.json; or train: train one on a sample (default: train)'),
    'vocabulary': (int, 'N', 'size of a tokenizer that is trained; with --check: the largest size allowed'),
    'held_out': (float, 'SHARE', 'share of documents for validation and probes (default: 0.15)'),
    'bos': (str, 'WHERE', 'documents: begin each document with BOS; none: do not (default: none)'),
    'end_token': (int, 'ID', 'token that ends a document (default: 0, as in GPT-NeoX)'),
    'fixed_token': (int, 'ID', 'token for BOS and for fixed positions (default: 1)'),
    'shard_tokens': (int, 'N', 'approximate tokens of a shard (default: 16777216)'),
    'length': (int, 'T', 'with --check: tokens of a window (default: of the largest size that fits)'),
    'batch_size': (
        int,
        'B',
        'with --check: windows of a step over all hosts (default: of the largest size that fits)',
    ),
    'hosts': (int, 'N', 'with --check: hosts that share a batch (default: 1)'),
}
SMALLEST_SIZE = 'smoke'
MAX_VOCABULARY_RATIO = 4  # a vocabulary below a fourth of that of a size belongs to a smaller model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, (value_type, metavar, text) in OPTIONS.items():
        parser.add_argument(f'--{name}', type=value_type, metavar=metavar, help=text)
    parser.add_argument(
        '--lenient',
        action='store_true',
        default=None,
        help='drop damaged documents, and report them (default: stop at the first)',
    )
    parser.add_argument('--json', action='store_true', help='print the result as JSON')
    parser.usage = '%(prog)s --source SOURCE --out DIR [options]\n       %(prog)s --check DIR [options]'


def run(args: argparse.Namespace, extra_args: list[str]) -> int:
    is_check = args.check is not None
    if extra_args:
        raise UserError(f'{extra_args[0]} is unknown (a pattern must be quoted); see sinklab prepare --help')
    if not is_check and not (args.source and args.out):
        raise UserError('give --source and --out to prepare a store, or --check to verify one')
    for name in BUILD_OPTIONS if is_check else CHECK_OPTIONS:
        if getattr(args, name) is not None:
            raise UserError(f'--{name} has no effect {"with" if is_check else "without"} --check; remove it')
    trains_tokenizer = not is_check and args.tokenizer in (None, 'train')
    if args.vocabulary is not None and not is_check and not trains_tokenizer:
        raise UserError(f'--vocabulary={args.vocabulary} applies only to a tokenizer that is trained here; remove it')
    fields = parse_settings(args)
    if trains_tokenizer and not MIN_TRAINED_VOCABULARY <= fields['vocabulary'] <= MAX_TRAINED_VOCABULARY:
        raise UserError(
            f'--vocabulary={fields["vocabulary"]}: a tokenizer trained here has {MIN_TRAINED_VOCABULARY} to '
            f'{MAX_TRAINED_VOCABULARY} ids'
        )
    return check_store(args, fields) if is_check else build_store(args, fields)


def parse_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given options, checked as config fields of the same name, and defaults for the others."""
    defaults = dict.fromkeys(OPTIONS) | {name: getattr(Spec().data, name) for name in STORE_FIELDS}
    defaults |= dict(vocabulary=Spec().model.vocabulary, hosts=1, shard_tokens=1 << 24)
    types = get_field_types(ModelConfig) | get_field_types(OptimizerConfig) | get_field_types(DataConfig)
    types |= dict(out=str, check=str) | dict.fromkeys(('hosts', 'shard_tokens'), PositiveInt)
    given = {name: value for name, value in vars(args).items() if name in OPTIONS and value is not None}
    return defaults | {name: parse_value(f'--{name}', value, types[name]) for name, value in given.items()}


def build_store(args: argparse.Namespace, fields: dict[str, Any]) -> int:
    from sinklab.data.prepare import ProgressPrinter, Recipe, prepare_store
    from sinklab.data.store import Store

    recipe = Recipe(
        source=fields['source'],
        vocabulary=fields['vocabulary'] if fields['tokenizer'] == 'train' else None,
        **{name: fields[name] for name in STORE_FIELDS},
        lenient=bool(args.lenient),
        shard_tokens=fields['shard_tokens'],
    )
    prepare_store(recipe, parse_path(args.out), ProgressPrinter())
    store = Store(args.out)
    fitting_size = choose_size(store)
    size = fitting_size or SMALLEST_SIZE
    size_spec = load_size(size)
    fields |= dict(length=size_spec.data.length, batch_size=size_spec.optimizer.batch_size)
    print_store(args, fields, store, issues=[], size_note=f'of --size={size}')
    if not args.json and fitting_size:
        print(f'train on it with: {format_train_command(args.out, fields, store, size, size_spec)}')
    elif not args.json:
        print(
            f'no size fits: --size={size} needs {size_spec.optimizer.batch_size} windows for training and '
            f'{size_spec.valid.windows} held out; give more documents'
        )
    return 0


def choose_size(store: Any) -> str | None:
    """Choose the size with the longest windows that fits a store; None if none does.

    A size fits if the store has windows for a batch and for validation, and if the vocabulary is not small for it: a
    tokenizer of 512 ids was not trained for a model that has 50,432.
    """
    specs = {size: load_size(size) for size in SIZES}
    for size, size_spec in sorted(specs.items(), key=lambda item: item[1].data.length, reverse=True):
        min_vocabulary = size_spec.model.vocabulary // MAX_VOCABULARY_RATIO
        if has_enough_windows(store, size_spec) and store.meta['vocabulary'] >= min_vocabulary:
            return size
    return None


def load_size(size: str) -> Spec:
    """Load the default config at a size."""
    from sinklab.cli.config_flags import load_spec

    return load_spec('configs/default.py', [], size)[0]


def has_enough_windows(store: Any, spec: Spec) -> bool:
    def count_windows(split: str) -> int:
        return sum(len(store.get_tokens(split, name)) // (spec.data.length + 1) for name in store.domains)

    return count_windows('train') >= spec.optimizer.batch_size and count_windows('held_out') >= spec.valid.windows


def format_train_command(store_path: str, fields: dict[str, Any], store: Any, size: str, spec: Spec) -> str:
    """Format a command that trains on the store at a size."""
    changed_names = [name for name in STORE_FIELDS[1:] if fields[name] != getattr(spec.data, name)]
    overrides = [f'--config.data.{name}={fields[name]}' for name in changed_names]
    if spec.model.vocabulary != store.meta['vocabulary'] and (size != 'paper' or fields['tokenizer'] == 'train'):
        overrides.append(f'--config.model.vocabulary={max(store.meta["vocabulary"], MIN_TRAINED_VOCABULARY)}')
    argv = ['sinklab', 'train', '--config=configs/default.py', *([] if size == 'paper' else [f'--size={size}'])]
    return shlex.join([*argv, f'--config.data.source=store:{store_path}', *overrides, '--workdir=runs/new'])


def check_store(args: argparse.Namespace, fields: dict[str, Any]) -> int:
    from sinklab.data.store import Store, find_problems, summarize_store
    from sinklab.data.tokenizer import compute_tokenizer_digest

    store = Store(args.check)
    issues = list(find_problems(store, args.vocabulary or store.meta['vocabulary']))
    if fields['tokenizer'] != 'train' and compute_tokenizer_digest(args.tokenizer) != store.meta['tokenizer']:
        issues.append(f'it was prepared with another tokenizer than {args.tokenizer}')
    size = choose_size(store) or SMALLEST_SIZE
    size_spec, size_note = load_size(size), '' if args.length else f'of --size={size}; --length=N sets another length'
    length = fields['length'] = fields['length'] or size_spec.data.length
    batch_size = fields['batch_size'] = fields['batch_size'] or size_spec.optimizer.batch_size
    windows = summarize_store(store, length, batch_size, fields['hosts'])['windows']
    issues += [
        f'its {side} side has no window of {length} + 1 tokens' for side in windows if not any(windows[side].values())
    ]
    if batch_size % fields['hosts']:
        issues.append(
            f'a batch of {batch_size} windows cannot be divided over {fields["hosts"]} hosts; use a multiple'
        )
    print_store(args, fields, store, issues, size_note)
    for issue in issues:
        print(f'sinklab prepare: {store}: {issue}', file=sys.stderr)
    return 1 if issues else 0


def print_store(
    args: argparse.Namespace, fields: dict[str, Any], store: Any, issues: list[str], size_note: str
) -> None:
    from sinklab.cli import terminal
    from sinklab.data.store import decode_samples, summarize_store

    summary = summarize_store(store, fields['length'], fields['batch_size'], fields['hosts'])
    if args.json:
        print(json.dumps(summary | dict(problems=issues), indent=2))
        return
    headings, rows = ('domain', 'side', 'documents', 'tokens', 'MB of text', 'bytes per token', 'windows'), []
    for domain in summary['domains']:
        for side, windows in summary['windows'].items():
            counts = domain[side]
            cells = [f'{counts["documents"]:,}', f'{counts["tokens"]:,}', f'{counts["bytes"] / 1e6:,.3f}']
            cells.append(f'{counts["bytes"] / max(1, counts["tokens"]):.2f}')
            rows.append([domain['name'] or '-', side, *cells, f'{windows[domain["name"]]:,}'])
    console = terminal.make_console(width=120)
    terminal.print_table(console, headings, rows, left_columns=['side'])
    dropped = ', '.join(f'{count:,} {reason}' for reason, count in summary['dropped'].items()) or 'nothing'
    note = f' ({size_note})' if size_note else ''
    lines = [
        f'{store}: digest {summary["digest"]}, {summary["shards"]} shards, dropped: {dropped}',
        f'windows of {summary["length"]} + 1 tokens{note}; {format_batches(summary)}',
        *decode_samples(store, 2),
    ]
    for line in lines:
        console.print(line, soft_wrap=True)


def format_batches(summary: dict) -> str:
    """Format the number of batches in an epoch, and how many windows each host reads."""
    text = f'batches of {summary["batch_size"]}: {summary["batches"]:,} per epoch'
    if not summary['batches']:
        num_windows = sum(summary['windows']['train'].values())
        text += f' (training windows: {num_windows:,}, fewer than a batch; use a smaller batch)'
    if summary['rows_per_host']:
        text += f', {summary["rows_per_host"]} windows of each batch per host, with {summary["hosts"]} hosts'
    return text
