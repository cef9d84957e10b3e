"""what a run would take of chips that are not here: every program compiled for them, nothing run

example:
  sinklab compile --config=configs/scale.py:softmax_1b --topology=v5e:16x16 --remat=auto
"""

import argparse
import contextlib
import dataclasses
import json
import sys
from typing import Any

from sinklab.cli import config, hardware
from sinklab.cli.train import size_argument
from sinklab.record import Refusal

MIB, GIB = 2**20, 2**30


def arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument('--config', metavar='FILE[:ROW]', required=True, help='as for train')
    size_argument(verb)
    verb.add_argument(
        '--topology', metavar='CHIP:SHAPE', required=True, help='v5e:16x16, v5p:4x4x4, 2xv5e:8x8 for two slices, ...'
    )
    hardware.arguments(verb)
    verb.add_argument('--programs', metavar='NAMES', help='state, validation, probe, step; else all of them')
    verb.add_argument(
        '--fit', action='store_true', help='rank layouts by formula, and compile the step of the best three'
    )
    verb.add_argument('--json', action='store_true', help='print one JSON document')


def run(given: argparse.Namespace, rest: list[str]) -> int:
    spec, row = config.load(given.config, rest, given.size)
    if given.fit:
        return fitted(spec, hardware.hardware(given), given)
    found = compiled(spec, hardware.hardware(given), given.topology, given.programs)
    if given.json:
        print(json.dumps(dict(row=row['row'] or row['config'], **found), indent=2))
    else:
        show(row['row'] or row['config'], found)
    return 0 if found['fits'] else 1


def compiled(spec: Any, given: Any, topology: str, names: str | None) -> dict:
    """What is printed."""
    import jax

    from sinklab import devices
    from sinklab.chips import CHIPS
    from sinklab.topology import described
    from sinklab.train import fit, layout, programs
    from sinklab.train.estimate import compiled, estimate
    from sinklab.train.step import choice_for

    name, chips = described(topology)
    chip = CHIPS[name]
    mesh = devices.mesh(given, chips)
    layout.check(spec, given, mesh)
    backend = choice_for(spec, given, 'tpu').backend
    memory = chip.memory / chip.devices
    given = dataclasses.replace(given, remat=fit.chosen(spec, given, mesh, backend, memory))
    with jax.set_mesh(mesh):
        lowers = programs.programs(spec, given, mesh, backend)
        done = {}
        for each in chosen(names, list(lowers)):
            with fit.fitting(f'the program {each}', (spec, given, mesh, backend)):
                done[each] = compiled(lowers[each])
    found = {each: told(one, mesh, memory) for each, one in done.items()}
    bound = estimate(spec, done['step'], mesh, chip) if 'step' in done else None
    return dict(
        topology=topology,
        devices=mesh.size,
        mesh=dict(mesh.shape),
        crosses=devices.crossings(mesh),
        attention=backend,
        remat=given.remat,
        peak_bytes_per_chip=max(one.bytes['peak'] for one in done.values()),
        memory_bytes_per_chip=memory,
        fits=all(one.bytes['peak'] <= memory for one in done.values()),
        programs=found,
        estimate=bound and dataclasses.asdict(bound) | dict(seconds=bound.seconds, mfu=bound.mfu, limit=bound.limit),
    )


def fitted(spec: Any, asked: Any, given: argparse.Namespace) -> int:
    """The best three of all layouts, compiled."""
    from sinklab.chips import CHIPS
    from sinklab.topology import described
    from sinklab.train import ranking
    from sinklab.train.step import choice_for

    name, chips = described(given.topology)
    best = ranking.candidates(spec, asked, chips, CHIPS[name], choice_for(spec, asked, 'tpu').backend)
    if not best:
        raise Refusal(f'no layout of {given.topology} has room for this run; give a larger one, or a smaller batch')
    found = [
        dict(options=hardware.options(one.hardware), formula_bytes=one.bytes, formula_seconds=one.seconds)
        | compiled(spec, one.hardware, given.topology, 'step')
        for one in best[:3]
    ]
    if given.json:
        print(json.dumps(found, indent=2))
    for one in () if given.json else found:
        show(' '.join(one['options']), one)
    return 0 if any(one['fits'] for one in found) else 1


def chosen(names: str | None, known: list[str]) -> list[str]:
    wanted = names.split(',') if names else known
    if unknown := [name for name in wanted if name not in known]:
        raise Refusal(f'--programs={names}: {unknown[0]} is unknown; give some of {", ".join(known)}')
    return wanted


def told(one: Any, mesh: Any, memory: float) -> dict:
    from sinklab.train.estimate import crossed

    collectives = [
        dict(
            kind=each.kind,
            types=list(each.types),
            axis=crossed(each, mesh),
            bytes=each.bytes,
            times=each.times,
            sent=round(each.sent),
            asynchronous=each.asynchronous,
            origin=each.origin,
        )
        for each in one.program.collectives()
    ]
    buffers = [dict(bytes=size, type=type, origin=origin) for size, type, origin in one.program.buffers()]
    return dict(seconds=round(one.seconds, 1), bytes=one.bytes, collectives=collectives, buffers=buffers)


def show(row: str, found: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    sizes = ' x '.join(f'{axis} {size}' for axis, size in found['mesh'].items())
    console.print(f'{row} on {found["topology"]}: {sizes}, attention {found["attention"]}, remat {found["remat"]}')
    table = Table('program', 'GiB a chip', 'of', 'sent, MB', 'compiled in', box=None)
    for name, one in found['programs'].items():
        peak, sent = one['bytes']['peak'], sum(each['sent'] for each in one['collectives'])
        share = f'{peak / found["memory_bytes_per_chip"]:.0%} of {found["memory_bytes_per_chip"] / GIB:.2f}'
        table.add_row(name, f'{peak / GIB:.2f}', share, f'{sent / 1e6:.0f}', f'{one["seconds"]:.0f} s')
    console.print(table)
    if bound := found['estimate']:
        console.print(
            f'estimated, not measured: a step takes at least {1e3 * bound["seconds"]:.0f} ms, MFU at most '
            f'{bound["mfu"]:.0%}; most of the rest: {bound["limit"]}'
        )
    with contextlib.suppress(KeyError):
        step = found['programs']['step']
        lists(console, step)


def lists(console: Any, step: dict) -> None:
    from rich.table import Table

    table = Table('collectives of the step', 'axis', 'times', 'MB sent', 'beside computing', 'of', box=None)
    for one in sorted(step['collectives'], key=lambda each: -each['sent'])[:16]:
        beside = 'yes' if one['asynchronous'] else 'no'
        types = ' '.join(one['types'][:3]) + (' ...' if len(one['types']) > 3 else '')
        table.add_row(one['kind'], one['axis'], str(one['times']), f'{one["sent"] / 1e6:.0f}', beside, types)
    console.print(table)
    table = Table('largest arrays of the step', 'MB', 'of', box=None)
    for one in step['buffers']:
        table.add_row(one['type'], f'{one["bytes"] / 1e6:.0f}', one['origin'][-60:])
    console.print(table)
