"""a language model, its sinks measured on the way; goes on by itself in a folder that holds its run

example:
  sinklab train --config=configs/quickstart.py:softmax --workdir=runs/softmax --config.optimizer.steps=500
"""

import argparse
from typing import Any

from sinklab.cli import hardware, programs
from sinklab.cli.command import again


def arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        '--config',
        required=True,
        metavar='FILE[:ROW]',
        help='a config file and one of its rows; configs/default.py has every field',
    )
    size_argument(verb)
    verb.add_argument('--workdir', required=True, metavar='DIR', help='the run folder, new or to be gone on with')
    hardware.arguments(verb)
    programs.argument(verb)
    verb.add_argument('--tensorboard', action='store_true', help='write TensorBoard events beside metrics.jsonl')
    verb.usage = '%(prog)s --config FILE[:ROW] [--size SIZE] --workdir DIR [--config.PATH=VALUE ...] [options]'


def size_argument(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        '--size',
        metavar='SIZE',
        help='paper, quickstart or smoke: model, lengths and step counts of configs/sizes.py; else what FILE says',
    )


def run(given: argparse.Namespace, rest: list[str]) -> int:
    from sinklab.cli.config import load

    spec, row = load(given.config, rest, given.size)
    layout = hardware.hardware(given)
    programs.hasten(row['size'])
    from sinklab.cli.progress import Progress
    from sinklab.folder import Folder
    from sinklab.train import loop, tensorboard
    from sinklab.train.outcome import Diverged, Stopped, ending

    folder = Folder(given.workdir)
    mirror = [tensorboard.Mirror(folder)] if given.tensorboard else []
    compiled = programs.Programs(given.compiled)
    with Progress(row['row'] or row['config'], spec, compiled) as progress:
        try:
            last = loop.train(spec, layout, folder, row, progress, *mirror)[-1]
        except Diverged as error:
            progress.say(f'sinklab train: {error}: the run has diverged; {last_good(folder)}')
            return ending(error)[1]
        except Stopped as stop:
            progress.say(f'{stop}; go on with: {again()}')
            return ending(stop)[1]
        progress.say(f'{folder}: {closing(last)}')
    return 0


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
