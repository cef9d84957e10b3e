"""Train a language model, and measure its attention sinks on the way.

DIR gets config.json, metrics.jsonl, probes and checkpoints. The same command, given again, goes on from the newest
checkpoint; a run that is done is left as it is. Ctrl-C and SIGTERM save a checkpoint first. --config.PATH=VALUE sets
a field of the config, such as --config.optimizer.steps=500; configs/default.py lists all fields.

example:
  sinklab train --config=configs/quickstart.py:softmax --workdir=runs/softmax --config.optimizer.steps=500
  sinklab train --from=runs/softmax@500 --config.optimizer.steps=900 --workdir=runs/longer
  sinklab train --from=params:runs/softmax --config.optimizer.peak_learning_rate=1e-4 --workdir=runs/anew
  sinklab train --from=hf:models/llama --config.data.source=store:stores/text --workdir=runs/llama
"""

import argparse
import contextlib
import dataclasses
import functools
import platform
import sys
from typing import Any

from sinklab.checkpoint import digests
from sinklab.cli import config, fork, hardware, malloc, processes, programs
from sinklab.cli.command import program
from sinklab.escape import escape_control, join_shell
from sinklab.files.place import absolute
from sinklab.folder import Folder, flat
from sinklab.group import Alone, Group, same, unanimous
from sinklab.processes import link
from sinklab.processes.ending import End
from sinklab.record import Refusal
from sinklab.spec import Hardware, Spec


def arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        '--config',
        metavar='FILE[:ROW]',
        help='config file, and a row of it, such as configs/quickstart.py:softmax; configs/default.py has all fields',
    )
    verb.add_argument(
        '--from',
        dest='origin',
        metavar='[params:]RUN[@STEP]',
        help='start from a checkpoint of another run, the newest if no step is given, such as runs/softmax@500; with '
        'params: take its parameters alone and count steps anew; hf:PATH: start from a model of transformers. '
        'Without --config the config of that run is used',
    )
    size_argument(verb)
    verb.add_argument(
        '--workdir',
        required=True,
        metavar='DIR',
        help='run folder: a new one, or one to go on with, such as runs/softmax',
    )
    hardware.arguments(verb)
    programs.argument(verb)
    verb.add_argument('--tensorboard', action='store_true', help='also write TensorBoard events into DIR/tensorboard')
    verb.add_argument('--wandb', action='store_true', help='also write an offline run of Weights & Biases into DIR')
    verb.add_argument(
        '--profile',
        metavar='STEP:COUNT',
        help='trace COUNT steps after STEP into DIR/profile, for XProf, such as 100:5; the trace may contain one '
        'step more at each end, and compilation if it contains one of the first two steps',
    )
    processes.arguments(verb)
    verb.usage = (
        '%(prog)s (--config FILE[:ROW] [--size SIZE] | --from [params:]RUN[@STEP]) --workdir DIR '
        '[--config.PATH=VALUE ...] [options]'
    )


def size_argument(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        '--size',
        metavar='SIZE',
        help='paper, quickstart (minutes on two cores) or smoke (seconds; learns nothing): model and step counts of '
        'configs/sizes.py; without it the size that FILE has',
    )


def run(given: argparse.Namespace, rest: list[str]) -> int:
    malloc.ask_for_large_pages()
    if link.supervised():
        processes.child(functools.partial(train, given, rest))
    seat = processes.seat(given)
    if seat.count > 1 or given.supervise or given.restarts:
        command = [*program(), *sys.argv[1:]]
        ours = functools.partial(holds_it, given, rest)
        return processes.supervise(
            command, seat, processes.patience(given), Folder(given.workdir), ours, given.restarts
        )
    return train(given, rest, Alone()).code


def holds_it(given: argparse.Namespace, rest: list[str]) -> bool:
    """Whether the folder holds the run that is asked for."""
    folder = Folder(given.workdir)
    if not folder.is_claimed():
        return False
    try:
        parent = fork.parent(given.origin, folder, Alone())
        folder.check(asked(given, rest, folder, parent)[0])
    except (OSError, ValueError):
        return False
    return True


def train(given: argparse.Namespace, rest: list[str], group: Group) -> End:
    """Trains as one of a group, as the only one or one that a supervisor speaks for."""
    from sinklab import devices

    folder = unanimous(group, 'folder', lambda: Folder(given.workdir))
    parent = fork.parent(given.origin, folder, group)
    spec, row, comes_to, expected = unanimous(group, 'config', lambda: asked(given, rest, folder, parent))
    layout = unanimous(group, 'layout', lambda: hardware.hardware(given))
    devices.divide_cpu(layout, group.count)
    programs.hasten(row['size'])
    same(group, 'run', likeness(spec, layout))
    compiled = unanimous(group, 'programs', lambda: programs.Programs(given.compiled))
    steps = unanimous(group, 'profile', lambda: traced(given, folder, spec))
    link.join(group)
    origin = unanimous(group, 'origin', lambda: fork.origin(parent)) if parent else None
    with contextlib.ExitStack() as stack:
        progress = shown(row, spec, compiled, comes_to, stack) if group.index == 0 else None
        others = beside(given, folder, steps, progress.note, stack) if progress else []
        listeners = [*([progress] if progress else []), *others]
        end, records = trained(spec, layout, folder, row, *listeners, group=group, origin=origin, grace=given.grace)
        if progress and (end.code == 0 or isinstance(group, Alone)):
            progress.end(end, f'sinklab train: {processes.line(end)}', lambda: show(folder, row, records, expected))
    return end


def asked(
    given: argparse.Namespace, rest: list[str], folder: Folder, parent: fork.Parent | None
) -> tuple[Spec, dict, str | None, config.Expected | None]:
    """Return what is to be trained, of a config file or of the run that it comes from.

    Returns:
        The spec, the row, the fields that it changes in words, and what is expected of the rows of its config file.
    """
    if given.config:
        return config.load_and_describe(given.config, rest, given.size)
    if not parent:
        raise Refusal(
            'neither --config nor --from is given; give --config=FILE[:ROW], such as configs/quickstart.py:softmax'
        )
    if given.size:
        raise Refusal(
            f'--size={given.size} is for a row of --config; leave it out, the size of a run is carried over'
        )
    known = parent.folder if parent.folder.is_claimed() else folder
    spec, row = config.of_run(known, absolute(folder.path).name, rest)
    comes_to = config.describe_origin(row, spec) if parent.takes == 'params' else None
    expected = config.expected(row['config'], row['size'], row['overrides']) if row['config'] else None
    return spec, row, comes_to, expected


def trained(
    spec: Spec, layout: Hardware, folder: Folder, row: dict, *listeners: Any, group: Group, origin: Any, grace: float
) -> tuple[End, list[dict]]:
    """Train, and return the end that all processes agree on, and the records of a run that is done."""
    from sinklab.train import loop
    from sinklab.train.outcome import Disagreement, Diverged, Stopped, of_error

    try:
        records = loop.train(spec, layout, folder, row, *listeners, group=group, origin=origin, grace=grace)
    except Diverged as error:
        return of_error(error).with_words(f'{error}: the run has diverged; {last_good(folder)}'), []
    except (Disagreement, Stopped) as error:
        return of_error(error), []
    return End('done', f'{folder}: {closing(records[-1])}' if records else ''), records


def shown(row: dict, spec: Any, compiled: Any, comes_to: str | None, stack: contextlib.ExitStack) -> Any:
    """The line that goes on as the run does."""
    from sinklab.cli.progress import Progress

    return stack.enter_context(Progress(row['row'] or row['config'], spec, compiled, row=comes_to))


def traced(given: argparse.Namespace, folder: Folder, spec: Spec) -> range | None:
    """The steps of which a trace is asked for."""
    from sinklab.train import profile

    return None if given.profile is None else profile.asked(given.profile, folder, spec.optimizer.steps)


def beside(
    given: argparse.Namespace, folder: Folder, steps: range | None, say: Any, stack: contextlib.ExitStack
) -> list:
    """Whoever else listens to the run, as asked for."""
    from sinklab.train import profile, tensorboard, wandb
    from sinklab.train.listener import BestEffort

    mirrors = [BestEffort(tensorboard.Mirror(folder), 'TensorBoard', say)] if given.tensorboard else []
    if given.wandb:
        mirrors.append(BestEffort(stack.enter_context(wandb.Mirror(folder)), 'Weights & Biases', say))
    return mirrors + ([stack.enter_context(profile.Profile(folder, steps, say))] if steps else [])


def likeness(spec: Any, layout: Any) -> dict[str, Any]:
    """What must be alike on all processes. A store may lie elsewhere on each: its digest is compared."""
    import sinklab
    from sinklab.train.environment import commit, versions

    config = flat(dataclasses.asdict(spec), 'config')
    if str(config['config.data.source']).startswith('store:'):
        del config['config.data.source']
    code = dict(sinklab=sinklab.__version__, commit=commit(), python=platform.python_version())
    return code | versions() | flat(dataclasses.asdict(layout), 'layout') | config


def closing(record: dict) -> str:
    """Return the last record of a run in one line."""
    from sinklab.measure.table import NUMBERS

    shown = [number for number in NUMBERS if number.table and number.name in record]
    measured = ', '.join(f'{number.label} {number.text(record[number.name])}' for number in shown)
    return f'step {record["step"]}, valid loss {record["valid/loss"]:.3f}, {measured}, {record["seconds"]:.0f} s'


def show(folder: Folder, row: dict, records: list[dict], expected: config.Expected | None) -> None:
    """Print the results of a run that is done: a table with a line for each number, and what to do next."""
    from sinklab.cli import terminal
    from sinklab.report import closing

    if not records:
        return
    name, out = row['row'] or row['config'], terminal.console(width=100)
    headings, rows = closing.of_one(records, row.get('published') or {})
    out.print(escape_control(f'{name}: done, {closing.duration(records[-1])}'), soft_wrap=True)
    terminal.print_table(out, headings, rows, left=['what it is'], words=['what it is'])
    if published := closing.describe_published(row, headings):
        out.print(escape_control(published), soft_wrap=not out.is_terminal)
    words = closing.sentence({name: closing.seen(records)}, *(expected or closing.published({name: row})))
    out.print(escape_control(f'{words}; run: {folder}'), soft_wrap=not out.is_terminal)
    print(f'For a page with pictures: {join_shell(["sinklab", "report", folder])}')


def last_good(folder: Folder) -> str:
    step = digests.newest(folder)
    return (
        'no checkpoint was saved' if step is None else f'the last good checkpoint is {folder.checkpoints / str(step)}'
    )
