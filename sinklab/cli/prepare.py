"""Turn documents into a token store, which any number of runs can read.

The same command, given again, goes on where it was stopped.

SOURCE is one of
  stdlib                     the sources of this Python's standard library
  text:GLOB                  .txt, .jsonl, .parquet, also .gz and .zst; as in 'text:corpus/*.{txt,jsonl}', also in a
                             bucket: 'text:gs://bucket/pile/*.jsonl.zst'
  chat:GLOB                  .jsonl of {"messages": [{"role", "content"}, ...]}; the assistant's words are marked
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
import sys
import time
from typing import Any, get_type_hints

from sinklab import spec
from sinklab.escape import escape_control, join_shell
from sinklab.files.place import place
from sinklab.parse import LARGEST_TRAINED, SMALLEST_TRAINED
from sinklab.record import Count, Refusal, field

MAKING = ('source', 'out', 'held_out', 'bos', 'end_token', 'fixed_token', 'lenient', 'shard_tokens', 'processes')
CHECKING = ('length', 'batch_size', 'hosts')
SMALL = 4  # a vocabulary of less than a fourth of a size's is of a smaller model
RECIPE = ('tokenizer', 'held_out', 'bos', 'end_token', 'fixed_token')  # fields of config.data that a store has, too


def arguments(verb: argparse.ArgumentParser) -> None:
    add = verb.add_argument
    add('--source', metavar='SOURCE', help='documents, as the forms above say')
    add(
        '--out',
        metavar='DIR',
        help='folder of the store, local or in a bucket: a new one, or one to go on with, such as stores/pile',
    )
    add('--check', metavar='DIR', help='verify an existing store, and say what it holds')
    add(
        '--tokenizer',
        metavar='FILE',
        help='tokenizer.json; or train: train one on a sample (default: train)',
    )
    add(
        '--vocabulary',
        type=int,
        metavar='N',
        help='size of a tokenizer that is trained; with --check: the largest size allowed',
    )
    add(
        '--held_out', type=float, metavar='SHARE', help='share of documents for validation and probes (default: 0.15)'
    )
    add('--bos', choices=('none', 'documents'), help='documents: begin each document with BOS; none: do not')
    add('--end_token', type=int, metavar='ID', help='token that ends a document (default: 0, as in GPT-NeoX)')
    add('--fixed_token', type=int, metavar='ID', help='token for BOS and for fixed positions (default: 1)')
    add(
        '--lenient',
        action='store_true',
        help='leave out damaged documents, name and count them (default: stop at the first)',
    )
    add('--shard_tokens', type=int, metavar='N', help='tokens of a shard, about (default: 16777216)')
    add('--processes', type=int, metavar='N', help='processes that tokenize (default: one for each core)')
    add(
        '--length',
        type=int,
        metavar='T',
        help='with --check: tokens of a window (default: of the largest size that fits)',
    )
    add(
        '--batch_size',
        type=int,
        metavar='B',
        help='with --check: windows of a step, over all hosts (default: of the largest size that fits)',
    )
    add('--hosts', type=int, metavar='N', help='with --check: hosts that share a batch (default: 1)')
    add('--json', action='store_true', help='print the result as JSON')
    verb.usage = '%(prog)s --source SOURCE --out DIR [options]\n       %(prog)s --check DIR [options]'


def run(given: argparse.Namespace, rest: list[str]) -> int:
    checking = given.check is not None
    if rest:
        raise Refusal(f'{rest[0]} is unknown (a pattern must be quoted); see sinklab prepare --help')
    if not checking and not (given.source and given.out):
        raise Refusal('give --source and --out to prepare a store, or --check to verify one')
    for name in MAKING if checking else CHECKING:
        if getattr(given, name) not in (None, False):
            raise Refusal(f'--{name} has no use {"with" if checking else "without"} --check; leave it out')
    if given.vocabulary is not None and given.tokenizer not in (None, 'train') and not checking:
        raise Refusal(f'--vocabulary={given.vocabulary} is for a tokenizer trained here; leave it out')
    fields = settings(given)
    trained, ids = fields['tokenizer'] == 'train' and not checking, fields['vocabulary']
    if trained and not SMALLEST_TRAINED <= ids <= LARGEST_TRAINED:
        raise Refusal(f'--vocabulary={ids}: a tokenizer trained here has {SMALLEST_TRAINED} to {LARGEST_TRAINED} ids')
    return check(given, fields) if checking else make(given, fields)


def settings(given: argparse.Namespace) -> dict[str, Any]:
    """What is given, each in the domain of its field; and the values of configs/default.py for what is not."""
    from sinklab.cli.config import load

    plain, _ = load('configs/default.py', [])
    usual = vars(plain.data) | dict(vocabulary=plain.model.vocabulary, batch_size=plain.optimizer.batch_size)
    usual |= dict(hosts=1, shard_tokens=1 << 24, processes=None)
    hints = get_type_hints(spec.Model, include_extras=True) | get_type_hints(spec.Data, include_extras=True)
    hints |= dict(batch_size=Count, hosts=Count, shard_tokens=Count, processes=Count | None)
    asked = {name: value for name, value in vars(given).items() if name in usual and value is not None}
    return usual | {name: field(hints[name], value, f'--{name}') for name, value in asked.items()}


def make(given: argparse.Namespace, fields: dict[str, Any]) -> int:
    from sinklab.data.prepare import prepare
    from sinklab.data.store.recipe import Recipe
    from sinklab.data.store.store import Store

    recipe = Recipe(
        source=fields['source'],
        vocabulary=fields['vocabulary'] if fields['tokenizer'] == 'train' else None,
        **{name: fields[name] for name in RECIPE},
        lenient=given.lenient,
        shard_tokens=fields['shard_tokens'],
    )
    with Bar() as bar:
        prepare(recipe, place(given.out), fields['processes'], bar)
    store = Store(given.out)
    size, trained = fitting_size(store)
    fields |= dict(length=trained.data.length, batch_size=trained.optimizer.batch_size)
    tell(given, fields, store, found=[], why=f'of --size={size}')
    if not given.json:
        print(f'train on it by: {train(given.out, fields, store, size, trained)}')
    return 0


def fitting_size(store: Any) -> tuple[str, Any]:
    """Return the largest size that fits a store, and its spec.

    A size fits if the store has windows for a batch and for validation, and if the vocabulary is not small for it: a
    tokenizer of 512 ids was not trained for a model that has 50,432.
    """
    from sinklab.cli.config import load

    for size in ('paper', 'quickstart', 'smoke'):
        spec, _ = load('configs/default.py', [], size)
        if fits(store, spec) and store.meta['vocabulary'] >= spec.model.vocabulary // SMALL:
            break
    return size, spec


def train(folder: str, fields: dict[str, Any], store: Any, size: str, spec: Any) -> str:
    """Return a command that trains on the store at a size."""
    names = [name for name in RECIPE if name != 'tokenizer' and fields[name] != getattr(spec.data, name)]
    changed = [f'--config.data.{name}={fields[name]}' for name in names]
    if spec.model.vocabulary != store.meta['vocabulary'] and (size != 'paper' or fields['tokenizer'] == 'train'):
        changed.append(f'--config.model.vocabulary={max(store.meta["vocabulary"], SMALLEST_TRAINED)}')
    words = ['sinklab', 'train', '--config=configs/default.py', *([] if size == 'paper' else [f'--size={size}'])]
    return join_shell([*words, f'--config.data.source=store:{folder}', *changed, '--workdir=runs/new'])


def fits(store: Any, spec: Any) -> bool:
    def windows(side: str) -> int:
        return sum(len(store.row(side, name)) // (spec.data.length + 1) for name in store.domains)

    return windows('train') >= spec.optimizer.batch_size and windows('held_out') >= spec.valid.windows


def check(given: argparse.Namespace, fields: dict[str, Any]) -> int:
    from sinklab.data.store.check import problems, summary
    from sinklab.data.store.store import Store
    from sinklab.data.tokens.tokenizer import digest

    store = Store(given.check)
    found = list(problems(store, given.vocabulary or store.meta['vocabulary']))
    if fields['tokenizer'] != 'train' and digest(given.tokenizer) != store.meta['tokenizer']:
        found.append(f'it was made by another tokenizer than {given.tokenizer}')
    why = ''
    size, trained = fitting_size(store)
    if given.length is None:
        fields['length'], why = trained.data.length, f'of --size={size}; --length=N counts others'
    if given.batch_size is None:
        fields['batch_size'] = trained.optimizer.batch_size
    length, batch, hosts = fields['length'], fields['batch_size'], fields['hosts']
    windows = summary(store, length, batch, hosts)['windows']
    found += [
        f'its {side} side has no window of {length} + 1 tokens' for side in windows if not any(windows[side].values())
    ]
    if batch % hosts:
        found.append(f'a batch of {batch} windows cannot be divided over {hosts} hosts; use a multiple')
    tell(given, fields, store, found, why)
    for problem in found:
        print(f'sinklab prepare: {escape_control(store)}: {escape_control(problem)}', file=sys.stderr)
    return 1 if found else 0


def tell(given: argparse.Namespace, fields: dict[str, Any], store: Any, found: list[str], why: str) -> None:
    from sinklab.data.store.check import samples, summary

    about = summary(store, fields['length'], fields['batch_size'], fields['hosts'])
    if given.json:
        print(json.dumps(about | dict(problems=found), indent=2))
    else:
        show(store, about, samples(store, 2), why)


def show(store: Any, about: dict, texts: list[str], why: str) -> None:
    from sinklab.cli import terminal

    headings, rows = ('domain', 'side', 'documents', 'tokens', 'MB of text', 'bytes a token', 'windows'), []
    for domain in about['domains']:
        for side, windows in about['windows'].items():
            counts = domain[side]
            cells = [f'{counts["documents"]:,}', f'{counts["tokens"]:,}', f'{counts["bytes"] / 1e6:,.3f}']
            cells.append(f'{counts["bytes"] / max(1, counts["tokens"]):.2f}')
            rows.append([domain['name'] or '-', side, *cells, f'{windows[domain["name"]]:,}'])
    console = terminal.console(width=120)
    terminal.print_table(console, headings, rows, left=['side'])
    dropped = ', '.join(f'{count:,} {why}' for why, count in about['dropped'].items())
    made = f'{store}: digest {about["digest"]}, {about["shards"]} shards, dropped: {dropped or "nothing"}'
    windows = f'windows of {about["length"]} + 1 tokens{f" ({why})" if why else ""}; {batches(about)}'
    for line in (made, windows, *texts):
        console.print(escape_control(line, keep='\n\t'), soft_wrap=True)


def batches(about: dict) -> str:
    """How the windows make batches, and what a host reads of them."""
    size, hosts, windows = about['batch_size'], about['hosts'], sum(about['windows']['train'].values())
    said = f'batches of {size}: {about["batches"]:,} an epoch'
    if not about['batches']:
        said += f' (windows to train on: {windows:,}; a smaller batch would not read one twice)'
    if about['rows_per_host']:
        said += f', {about["rows_per_host"]} windows of each for every one of {hosts} hosts'
    return said


class Bar:
    """A listener to a preparation: a live line on a terminal, a line now and then in a log."""

    def __init__(self):
        from rich.progress import BarColumn, Progress

        from sinklab.cli import terminal

        self.console = terminal.console(stderr=True)
        self.live = terminal.is_live(self.console)
        text, bar = terminal.column('{task.description}'), BarColumn(bar_width=20)
        self.bar = Progress(bar, text, console=self.console, transient=True, disable=not self.live)
        self.task, self.spoke = self.bar.add_task('reading a sample', total=None), 0.0

    def __enter__(self) -> Any:
        from sinklab.data.prepare import Lines

        self.bar.start()
        return self if self.live else Lines()

    def __exit__(self, *_) -> None:
        self.bar.stop()

    def __call__(self, progress: Any) -> None:
        if time.monotonic() - self.spoke < 0.1:
            return
        self.spoke = time.monotonic()
        self.bar.update(self.task, completed=progress.read, total=progress.size, description=escape_control(progress))
