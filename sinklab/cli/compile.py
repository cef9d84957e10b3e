"""Compile a run for TPUs or GPUs that are not here, and say how much of their memory it would take.

Nothing is trained.

example:
  sinklab compile --config=configs/scale.py:softmax_1b --topology=v5e:16x16 --remat=auto
"""

import argparse
import dataclasses
import functools
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from sinklab.cli import config, hardware
from sinklab.cli.train import size_argument
from sinklab.escape import escape_control
from sinklab.record import Refusal
from sinklab.spec import Hardware, Spec

GIB = 2**30
BEST = 3  # layouts that --fit compiles


def arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        '--config',
        metavar='FILE[:ROW]',
        required=True,
        help='config file, and a row of it, such as configs/scale.py:softmax_1b',
    )
    size_argument(verb)
    verb.add_argument(
        '--topology',
        metavar='CHIP:SHAPE',
        required=True,
        help='kind and number of chips: v5e:16x16, v5p:4x4x4, 2xv5e:8x8 (two slices), h100:8 and others',
    )
    hardware.arguments(verb)
    verb.add_argument(
        '--programs',
        metavar='NAMES',
        help='only some programs of state, validation, probe, step (default: all of them)',
    )
    verb.add_argument(
        '--fit',
        action='store_true',
        help='rank layouts (--data, --fsdp, --tensor, --micro_batch) by formula, and compile the best three',
    )
    verb.add_argument('--json', action='store_true', help='print the result as JSON')


def run(given: argparse.Namespace, rest: list[str]) -> int:
    from sinklab.chips import CHIPS
    from sinklab.topology import described

    spec, row = config.load(given.config, rest, given.size)
    name, chips = described(given.topology)
    where = chips, CHIPS[name]
    title = row['row'] or row['config']
    if given.fit and given.programs:
        raise Refusal('--fit compiles the step alone; leave --programs out')
    if given.fit:
        return fitted(spec, hardware.hardware(given), where, dict(row=title, topology=given.topology), given.json)
    found = compiled(spec, hardware.hardware(given), where, given.programs.split(',') if given.programs else ())
    if given.json:
        print(json.dumps(dict(row=title, topology=given.topology, **found), indent=2))
    else:
        show(f'{title} on {given.topology}', found)
    return 0 if found['fits'] else 1


def compiled(spec: Spec, asked: Hardware, where: tuple, names: Sequence[str] = ()) -> dict:
    from sinklab.train.preview import document, preview

    return document(
        spec, preview(spec, asked, *where, names, say=functools.partial(print, file=sys.stderr, flush=True))
    )


def fitted(spec: Spec, asked: Hardware, where: tuple, of: dict, as_json: bool) -> int:
    """The best three of all layouts, compiled."""
    from sinklab.train import ranking
    from sinklab.train.preview import platform
    from sinklab.train.step import choice_for

    best, refused = ranking.candidates(spec, asked, *where, choice_for(spec, asked, platform(where[0])).backend)
    if not best:
        raise Refusal(f'none of {len(refused)} layouts has room for this run: {nearest(refused)}; give more chips')
    found = []
    for one in best:
        try:
            found.append(of_candidate(one) | compiled(spec, one.hardware, where, ['step']))
        except Refusal as refusal:  # the formula was too small
            refused.append(dataclasses.replace(one, refused=str(refusal)))
        if len(found) == BEST:
            break
    if as_json:
        print(json.dumps(of | dict(best=found, refused=[of_candidate(one) for one in refused]), indent=2))
        return 0 if found else 1
    for one in found:
        show(' '.join(one['options']), one)
    said = f'; {nearest(refused)}' if refused else ''
    print(f'{of["row"]} on {of["topology"]}: {len(best)} layouts fit by formula, {len(refused)} are refused{said}')
    return 0 if found else 1


def nearest(refused: list) -> str:
    """Of what is refused, that which would need least, and why."""
    one = min(refused, key=lambda one: one.bytes or math.inf)
    return f'{" ".join(hardware.options(one.hardware))} is refused ({one.refused})'


def of_candidate(one: Any) -> dict:
    said = dict(options=hardware.options(one.hardware), formula_bytes=one.bytes, formula_seconds=one.seconds)
    return said | (dict(refused=one.refused) if one.refused else {})


def show(title: str, found: dict) -> None:
    from sinklab.cli import terminal

    console = terminal.console(width=140)
    crosses = {axis: f' across {what}' for axis, what in found['crosses'].items()}
    sizes = ' x '.join(f'{axis} {size}{crosses.get(axis, "")}' for axis, size in found['mesh'].items())
    console.print(f'{escape_control(title)}: {sizes}, attention {found["attention"]}, remat {found["remat"]}')
    rows = []
    for name, one in found['programs'].items():
        peak, sent = one['bytes']['peak'], sum(each['sent'] for each in one['collectives'])
        share = f'{peak / found["memory_bytes_per_chip"]:.0%} of {found["memory_bytes_per_chip"] / GIB:.2f}'
        rows.append([name, f'{peak / GIB:.2f}', share, f'{sent / 1e6:.0f}', f'{one["seconds"]:.0f} s'])
    headings = 'program', 'GiB a chip', 'of', 'sent, MB', 'compiled in'
    terminal.print_table(console, headings, rows, left=headings)
    if bound := found['estimate']:
        console.print(
            f'estimated, not measured: a step takes at least {1e3 * bound["seconds"]:.0f} ms, MFU at most '
            f'{bound["mfu"]:.0%}; most of the rest: {bound["limit"]}'
        )
    if step := found['programs'].get('step'):
        lists(console, step)


def lists(console: Any, step: dict) -> None:
    from sinklab.cli import terminal

    rows = []
    for one in sorted(step['collectives'], key=lambda each: -each['sent'])[:16]:
        beside = 'yes' if one['asynchronous'] else 'no'
        types = ' '.join(one['types'][:3]) + (' ...' if len(one['types']) > 3 else '')
        rows.append([one['kind'], one['axis'], str(one['times']), f'{one["sent"] / 1e6:.0f}', beside, types])
    headings = 'collectives of the step', 'axis', 'times', 'MB sent', 'beside computing', 'of'
    terminal.print_table(console, headings, rows, left=headings, words=['of'])
    rows = [[one['type'], f'{one["bytes"] / 1e6:.0f}', one['origin'][-60:]] for one in step['buffers']]
    headings = 'largest arrays of the step', 'MB', 'of'
    terminal.print_table(console, headings, rows, left=headings, words=['of'])
