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
import time
from typing import Any, get_type_hints

from sinklab.config import spec
from sinklab.config.validate import MAX_TRAINED_VOCABULARY, MIN_TRAINED_VOCABULARY
from sinklab.configs.sizes import SIZES
from sinklab.errors import UserError
from sinklab.schema import PositiveInt, check_value
from sinklab.storage.paths import parse_path

PREPARE_FLAGS = (
    'source',
    'out',
    'held_out',
    'bos',
    'end_token',
    'fixed_token',
    'lenient',
    'shard_tokens',
    'processes',
)
CHECK_FLAGS = ('length', 'batch_size', 'hosts')
SMALLEST_SIZE = 'smoke'
MAX_VOCABULARY_RATIO = 4  # a vocabulary below a fourth of that of a size belongs to a smaller model
STORE_FIELDS = (
    'tokenizer',
    'held_out',
    'bos',
    'end_token',
    'fixed_token',
)  # fields of config.data that a store has as well


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_argument = parser.add_argument
    add_argument('--source', metavar='SOURCE', help='documents, in one of the forms above')
    add_argument(
        '--out',
        metavar='DIR',
        help='folder of the store, local or in a bucket: a new one, or one to resume, such as stores/pile',
    )
    add_argument('--check', metavar='DIR', help='verify an existing store, and print its contents')
    add_argument(
        '--tokenizer',
        metavar='FILE',
        help='tokenizer.json; or train: train one on a sample (default: train)',
    )
    add_argument(
        '--vocabulary',
        type=int,
        metavar='N',
        help='size of a tokenizer that is trained; with --check: the largest size allowed',
    )
    add_argument(
        '--held_out', type=float, metavar='SHARE', help='share of documents for validation and probes (default: 0.15)'
    )
    add_argument('--bos', choices=('none', 'documents'), help='documents: begin each document with BOS; none: do not')
    add_argument(
        '--end_token', type=int, metavar='ID', help='token that ends a document (default: 0, as in GPT-NeoX)'
    )
    add_argument('--fixed_token', type=int, metavar='ID', help='token for BOS and for fixed positions (default: 1)')
    add_argument(
        '--lenient',
        action='store_true',
        help='drop damaged documents, and report them (default: stop at the first)',
    )
    add_argument('--shard_tokens', type=int, metavar='N', help='approximate tokens of a shard (default: 16777216)')
    add_argument('--processes', type=int, metavar='N', help='processes that tokenize (default: one for each core)')
    add_argument(
        '--length',
        type=int,
        metavar='T',
        help='with --check: tokens of a window (default: of the largest size that fits)',
    )
    add_argument(
        '--batch_size',
        type=int,
        metavar='B',
        help='with --check: windows of a step, over all hosts (default: of the largest size that fits)',
    )
    add_argument('--hosts', type=int, metavar='N', help='with --check: hosts that share a batch (default: 1)')
    add_argument('--json', action='store_true', help='print the result as JSON')
    parser.usage = '%(prog)s --source SOURCE --out DIR [options]\n       %(prog)s --check DIR [options]'


def run(args: argparse.Namespace, extra_args: list[str]) -> int:
    is_check = args.check is not None
    if extra_args:
        raise UserError(f'{extra_args[0]} is unknown (a pattern must be quoted); see sinklab prepare --help')
    if not is_check and not (args.source and args.out):
        raise UserError('give --source and --out to prepare a store, or --check to verify one')
    for name in PREPARE_FLAGS if is_check else CHECK_FLAGS:
        if (value := getattr(args, name)) is not None and value is not False:
            raise UserError(f'--{name} has no effect {"with" if is_check else "without"} --check; remove it')
    if args.vocabulary is not None and args.tokenizer not in (None, 'train') and not is_check:
        raise UserError(f'--vocabulary={args.vocabulary} applies only to a tokenizer that is trained here; remove it')
    fields = parse_settings(args)
    trains_tokenizer, vocabulary_size = fields['tokenizer'] == 'train' and not is_check, fields['vocabulary']
    if trains_tokenizer and not MIN_TRAINED_VOCABULARY <= vocabulary_size <= MAX_TRAINED_VOCABULARY:
        raise UserError(
            f'--vocabulary={vocabulary_size}: a tokenizer trained here '
            f'has {MIN_TRAINED_VOCABULARY} to {MAX_TRAINED_VOCABULARY} ids'
        )
    return check_store(args, fields) if is_check else build_store(args, fields)


def parse_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Parse the settings of a store: the given options, and defaults for the others.

    Options with the name of a config field are validated as that field, and have the default of configs/default.py.

    Raises:
        UserError: A given option is invalid.
    """
    from sinklab.cli.config_flags import load_spec

    default_spec, _ = load_spec('configs/default.py', [])
    defaults = vars(default_spec.data) | dict(
        vocabulary=default_spec.model.vocabulary, batch_size=default_spec.optimizer.batch_size
    )
    defaults |= dict(hosts=1, shard_tokens=1 << 24, processes=None)
    hints = get_type_hints(spec.ModelConfig, include_extras=True) | get_type_hints(
        spec.DataConfig, include_extras=True
    )
    hints |= dict(batch_size=PositiveInt, hosts=PositiveInt, shard_tokens=PositiveInt, processes=PositiveInt | None)
    user_values = {name: value for name, value in vars(args).items() if name in defaults and value is not None}
    return defaults | {name: check_value(hints[name], value, f'--{name}') for name, value in user_values.items()}


def build_store(args: argparse.Namespace, fields: dict[str, Any]) -> int:
    from sinklab.data.prepare import prepare_store
    from sinklab.data.store import Store
    from sinklab.data.store_files import Recipe

    recipe = Recipe(
        source=fields['source'],
        vocabulary=fields['vocabulary'] if fields['tokenizer'] == 'train' else None,
        **{name: fields[name] for name in STORE_FIELDS},
        lenient=args.lenient,
        shard_tokens=fields['shard_tokens'],
    )
    with PrepareProgressBar() as on_progress:
        prepare_store(recipe, parse_path(args.out), fields['processes'], on_progress)
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
    vocabulary = store.meta['vocabulary']
    specs = {size: load_size(size) for size in SIZES}
    for size, size_spec in sorted(specs.items(), key=lambda item: item[1].data.length, reverse=True):
        min_vocabulary = size_spec.model.vocabulary // MAX_VOCABULARY_RATIO
        if has_enough_windows(store, size_spec) and vocabulary >= min_vocabulary:
            return size
    return None


def load_size(size: str) -> spec.Spec:
    """Load the default config at a size."""
    from sinklab.cli.config_flags import load_spec

    return load_spec('configs/default.py', [], size)[0]


def format_train_command(store_path: str, fields: dict[str, Any], store: Any, size: str, spec: Any) -> str:
    """Format a command that trains on the store at a size."""
    changed_names = [
        name for name in STORE_FIELDS if name != 'tokenizer' and fields[name] != getattr(spec.data, name)
    ]
    overrides = [f'--config.data.{name}={fields[name]}' for name in changed_names]
    if spec.model.vocabulary != store.meta['vocabulary'] and (size != 'paper' or fields['tokenizer'] == 'train'):
        overrides.append(f'--config.model.vocabulary={max(store.meta["vocabulary"], MIN_TRAINED_VOCABULARY)}')
    argv = ['sinklab', 'train', '--config=configs/default.py', *([] if size == 'paper' else [f'--size={size}'])]
    return shlex.join([*argv, f'--config.data.source=store:{store_path}', *overrides, '--workdir=runs/new'])


def has_enough_windows(store: Any, spec: Any) -> bool:
    def count_windows(side: str) -> int:
        return sum(len(store.get_tokens(side, name)) // (spec.data.length + 1) for name in store.domains)

    return count_windows('train') >= spec.optimizer.batch_size and count_windows('held_out') >= spec.valid.windows


def check_store(args: argparse.Namespace, fields: dict[str, Any]) -> int:
    from sinklab.data.store import Store, find_problems, summarize_store
    from sinklab.data.tokenizer import compute_tokenizer_digest

    store = Store(args.check)
    issues = list(find_problems(store, args.vocabulary or store.meta['vocabulary']))
    if fields['tokenizer'] != 'train' and compute_tokenizer_digest(args.tokenizer) != store.meta['tokenizer']:
        issues.append(f'it was prepared with another tokenizer than {args.tokenizer}')
    size_note = ''
    size = choose_size(store) or SMALLEST_SIZE
    size_spec = load_size(size)
    if args.length is None:
        fields['length'], size_note = size_spec.data.length, f'of --size={size}; --length=N sets another length'
    if args.batch_size is None:
        fields['batch_size'] = size_spec.optimizer.batch_size
    length, batch, hosts = fields['length'], fields['batch_size'], fields['hosts']
    windows = summarize_store(store, length, batch, hosts)['windows']
    issues += [
        f'its {side} side has no window of {length} + 1 tokens' for side in windows if not any(windows[side].values())
    ]
    if batch % hosts:
        issues.append(f'a batch of {batch} windows cannot be divided over {hosts} hosts; use a multiple')
    print_store(args, fields, store, issues, size_note)
    for issue in issues:
        print(f'sinklab prepare: {store}: {issue}', file=sys.stderr)
    return 1 if issues else 0


def print_store(
    args: argparse.Namespace, fields: dict[str, Any], store: Any, issues: list[str], size_note: str
) -> None:
    from sinklab.data.store import decode_samples, summarize_store

    store_summary = summarize_store(store, fields['length'], fields['batch_size'], fields['hosts'])
    if args.json:
        print(json.dumps(store_summary | dict(problems=issues), indent=2))
    else:
        print_store_table(store, store_summary, decode_samples(store, 2), size_note)


def print_store_table(store: Any, store_summary: dict, texts: list[str], size_note: str) -> None:
    from sinklab.cli import terminal

    headings, rows = ('domain', 'side', 'documents', 'tokens', 'MB of text', 'bytes per token', 'windows'), []
    for domain in store_summary['domains']:
        for side, windows in store_summary['windows'].items():
            counts = domain[side]
            cells = [f'{counts["documents"]:,}', f'{counts["tokens"]:,}', f'{counts["bytes"] / 1e6:,.3f}']
            cells.append(f'{counts["bytes"] / max(1, counts["tokens"]):.2f}')
            rows.append([domain['name'] or '-', side, *cells, f'{windows[domain["name"]]:,}'])
    console = terminal.make_console(width=120)
    terminal.print_table(console, headings, rows, left_columns=['side'])
    dropped = ', '.join(f'{count:,} {reason}' for reason, count in store_summary['dropped'].items())
    store_line = (
        f'{store}: digest {store_summary["digest"]}, '
        f'{store_summary["shards"]} shards, dropped: {dropped or "nothing"}'
    )
    windows = (
        f'windows of {store_summary["length"]} + 1 '
        f'tokens{f" ({size_note})" if size_note else ""}; {format_batches(store_summary)}'
    )
    for line in (store_line, windows, *texts):
        console.print(line, soft_wrap=True)


def format_batches(store_summary: dict) -> str:
    """Format the number of batches in an epoch, and how many windows each host reads."""
    batch_size, hosts, num_windows = (
        store_summary['batch_size'],
        store_summary['hosts'],
        sum(store_summary['windows']['train'].values()),
    )
    text = f'batches of {batch_size}: {store_summary["batches"]:,} per epoch'
    if not store_summary['batches']:
        text += f' (training windows: {num_windows:,}, fewer than a batch; use a smaller batch)'
    if store_summary['rows_per_host']:
        text += f', {store_summary["rows_per_host"]} windows of each batch per host, with {hosts} hosts'
    return text


class PrepareProgressBar:
    """Progress callback of prepare: a progress bar on a terminal, otherwise occasional lines in a log."""

    def __init__(self):
        from rich.progress import BarColumn, Progress

        from sinklab.cli import terminal

        self.console = terminal.make_console(stderr=True)
        self.is_live = terminal.is_live(self.console)
        text_column, bar_column = terminal.make_progress_column('{task.description}'), BarColumn(bar_width=20)
        self.progress = Progress(
            bar_column, text_column, console=self.console, transient=True, disable=not self.is_live
        )
        self.task_id, self.last_update_time = self.progress.add_task('reading a sample', total=None), 0.0

    def __enter__(self) -> Any:
        from sinklab.data.prepare import ProgressPrinter

        self.progress.start()
        return self if self.is_live else ProgressPrinter()

    def __exit__(self, *_) -> None:
        self.progress.stop()

    def __call__(self, progress: Any) -> None:
        if time.monotonic() - self.last_update_time < 0.1:
            return
        self.last_update_time = time.monotonic()
        self.progress.update(
            self.task_id,
            completed=progress.bytes_read,
            total=progress.total_bytes,
            description=progress,
        )
