"""a language model, its sinks measured on the way; goes on by itself in a folder that holds its run

example:
  sinklab train --config=configs/quickstart.py:softmax --workdir=runs/softmax --config.optimizer.steps=500
"""

import argparse
import shlex
import signal
import sys
from pathlib import Path
from typing import Any, get_args

from sinklab.cli import programs
from sinklab.record import Refusal
from sinklab.spec import Backend, Hardware


def arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        '--config',
        required=True,
        metavar='FILE[:ROW]',
        help='a config file and one of its rows; configs/default.py has every field',
    )
    size_argument(verb)
    verb.add_argument('--workdir', required=True, metavar='DIR', help='the run folder, new or to be gone on with')
    hardware_arguments(verb)
    programs.argument(verb)
    verb.add_argument('--tensorboard', action='store_true', help='write TensorBoard events beside metrics.jsonl')
    verb.usage = '%(prog)s --config FILE[:ROW] [--size SIZE] --workdir DIR [--config.PATH=VALUE ...] [options]'


def size_argument(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        '--size',
        metavar='SIZE',
        help='paper, quickstart or smoke: model, lengths and step counts of configs/sizes.py; else what FILE says',
    )


def hardware_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument('--data', type=int, default=1, metavar='N', help='devices that split the batch')
    verb.add_argument('--fsdp', type=int, default=1, metavar='N', help='... and the parameters too')
    verb.add_argument(
        '--tensor', type=int, default=1, metavar='N', help='devices that split heads, FFN and vocabulary'
    )
    verb.add_argument('--micro_batch', type=int, metavar='N', help='sequences at once; gradients are accumulated')
    verb.add_argument('--remat', action='store_true', help='recompute activations in the backward pass')
    verb.add_argument(
        '--attention',
        default='auto',
        metavar='BACKEND',
        help='auto, dense, chunked, tpu, gpu or cudnn; sinklab doctor --kernels shows what each does here',
    )


def run(given: argparse.Namespace, rest: list[str]) -> int:
    from sinklab.cli.config import load

    spec, row = load(given.config, rest, given.size)
    hardware = layout(given)
    programs.hasten(row['size'])
    from sinklab.cli.progress import Progress
    from sinklab.folder import Folder
    from sinklab.train import loop, tensorboard

    folder = Folder(given.workdir)
    mirror = tensorboard.mirror(folder) if given.tensorboard else loop.ignore
    compiled = programs.Programs(given.compiled)
    with Progress(row['row'] or row['config'], spec, compiled) as progress:
        try:
            last = loop.train(spec, hardware, folder, row, progress, mirror)[-1]
        except loop.Diverged as error:
            progress.say(f'sinklab train: {error}: the run has diverged; {last_good(folder)}')
            return 3
        except loop.Stopped as stop:
            progress.say(f'{stop}; go on with: {again()}')
            return 42 if stop.signal == signal.SIGTERM else 128 + stop.signal
        progress.say(f'{folder}: {closing(last)}')
    return 0


def closing(record: dict) -> str:
    """The last record of a run, as a person reads it."""
    from sinklab.measure.table import NUMBERS

    shown = [number for number in NUMBERS if number.table and number.name in record]
    measured = ', '.join(f'{number.label} {number.text(record[number.name])}' for number in shown)
    return f'step {record["step"]}, valid loss {record["valid/loss"]:.3f}, {measured}, {record["seconds"]:.0f} s'


def last_good(folder: Any) -> str:
    saved = folder.saved()
    return (
        f'the last good checkpoint is {folder.checkpoints / str(saved[-1])}' if saved else 'no checkpoint was saved'
    )


def again() -> str:
    """The command line that was given, to be given again."""
    return shlex.join([*program(), *sys.argv[1:]])


def program() -> list[str]:
    return [sys.argv[0]] if Path(sys.argv[0]).name == 'sinklab' else [sys.executable, '-m', 'sinklab']


def layout(given: argparse.Namespace) -> Hardware:
    for name in ('data', 'fsdp', 'tensor', 'micro_batch'):
        size = getattr(given, name)
        if size is not None and size < 1:
            raise Refusal(f'--{name}={size} must be a whole number of at least 1')
    if given.attention not in get_args(Backend):
        raise Refusal(f'--attention={given.attention} is unknown; it is one of {", ".join(get_args(Backend))}')
    return Hardware(given.data, given.fsdp, given.tensor, given.micro_batch, given.remat, given.attention)
