"""a language model, its sinks measured on the way; goes on by itself in a folder that holds its run

example:
  sinklab train --config=configs/quickstart.py:softmax --workdir=runs/softmax --config.optimizer.steps=500
  sinklab train --from=runs/softmax@500 --config.optimizer.steps=900 --workdir=runs/longer
"""

import argparse
from typing import Any

from sinklab.cli import config, fork, hardware, programs
from sinklab.cli.command import again
from sinklab.folder import Folder
from sinklab.record import Refusal
from sinklab.spec import Spec


def arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        '--config',
        metavar='FILE[:ROW]',
        help='a config file and one of its rows; configs/default.py has every field',
    )
    verb.add_argument(
        '--from',
        dest='origin',
        metavar='RUN[@STEP]',
        help="a new run from a checkpoint of another, the newest if no step is given; without --config by that run's",
    )
    size_argument(verb)
    verb.add_argument('--workdir', required=True, metavar='DIR', help='the run folder, new or to be gone on with')
    hardware.arguments(verb)
    programs.argument(verb)
    verb.add_argument('--tensorboard', action='store_true', help='write TensorBoard events beside metrics.jsonl')
    verb.usage = (
        '%(prog)s (--config FILE[:ROW] [--size SIZE] | --from RUN[@STEP]) --workdir DIR [--config.PATH=VALUE ...] '
        '[options]'
    )


def size_argument(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        '--size',
        metavar='SIZE',
        help='paper, quickstart or smoke: model, lengths and step counts of configs/sizes.py; else what FILE says',
    )


def run(given: argparse.Namespace, rest: list[str]) -> int:
    folder = Folder(given.workdir)
    parent = fork.parent(given.origin, folder) if given.origin else None
    spec, row = asked(given, rest, parent, folder)
    layout = hardware.hardware(given)
    programs.hasten(row['size'])
    from sinklab.cli.progress import Progress
    from sinklab.train import loop, tensorboard
    from sinklab.train.outcome import Diverged, Stopped, ending

    origin = fork.origin(parent) if parent else None
    mirror = [tensorboard.Mirror(folder)] if given.tensorboard else []
    compiled = programs.Programs(given.compiled)
    with Progress(row['row'] or row['config'], spec, compiled) as progress:
        try:
            last = loop.train(spec, layout, folder, row, progress, *mirror, origin=origin)[-1]
        except Diverged as error:
            progress.say(f'sinklab train: {error}: the run has diverged; {last_good(folder)}')
            return ending(error)[1]
        except Stopped as stop:
            progress.say(f'{stop}; go on with: {again()}')
            return ending(stop)[1]
        progress.say(f'{folder}: {closing(last)}')
    return 0


def asked(
    given: argparse.Namespace, rest: list[str], parent: fork.Parent | None, folder: Folder
) -> tuple[Spec, dict]:
    """The spec that is asked for, and its row: of a config file, or of the run that it comes from."""
    if given.config:
        return config.load(given.config, rest, given.size)
    if not parent:
        raise Refusal(
            'neither --config nor --from is given; give --config=FILE[:ROW], such as configs/quickstart.py:softmax'
        )
    if given.size:
        raise Refusal(
            f'--size={given.size} is for a row of --config; leave it out, the size of a run is carried over'
        )
    known = parent.folder if parent.folder.is_claimed() else folder
    return config.of_run(known, folder.path.absolute().name, rest)


def closing(record: dict) -> str:
    """The last record of a run, as a person reads it."""
    from sinklab.measure.table import NUMBERS

    shown = [number for number in NUMBERS if number.table and number.name in record]
    measured = ', '.join(f'{number.label} {number.text(record[number.name])}' for number in shown)
    return f'step {record["step"]}, valid loss {record["valid/loss"]:.3f}, {measured}, {record["seconds"]:.0f} s'


def last_good(folder: Any) -> str:
    saved = folder.checkpoint_steps()
    return (
        f'the last good checkpoint is {folder.checkpoints / str(saved[-1])}' if saved else 'no checkpoint was saved'
    )
