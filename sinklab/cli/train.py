"""a language model, its sinks measured on the way; goes on by itself in a folder that holds its run

example:
  sinklab train --config=configs/quickstart.py:softmax --workdir=runs/softmax --config.optimizer.steps=500
"""

import argparse
from typing import Any

from sinklab.cli import hardware, processes, programs
from sinklab.cli.command import again
from sinklab.group import Alone, Group, same, together
from sinklab.processes import link


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
    processes.arguments(verb)
    verb.usage = '%(prog)s --config FILE[:ROW] [--size SIZE] --workdir DIR [--config.PATH=VALUE ...] [options]'


def size_argument(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        '--size',
        metavar='SIZE',
        help='paper, quickstart or smoke: model, lengths and step counts of configs/sizes.py; else what FILE says',
    )


def run(given: argparse.Namespace, rest: list[str]) -> int:
    if link.supervised():
        child(given, rest)
    seat, patience = processes.seat(given), processes.patience(given)
    if seat.count > 1 or given.supervise or given.restarts:
        return processes.supervise(given, rest, seat, patience)
    from sinklab.train.outcome import Diverged, Stopped, ending

    try:
        print_last(train(given, rest, Alone()))
    except (Diverged, Stopped) as error:
        ...
