"""what a run has saved, which is only read: listed, verified, or the parameters of a step written alone

example:
  sinklab checkpoint ls runs/softmax
  sinklab checkpoint verify runs/softmax@500
  sinklab checkpoint restore-params runs/softmax@500 --out=softmax-500 --dtype=bfloat16

and in Python, as nested dicts of arrays:
  from orbax.checkpoint import v1; params = v1.load(os.path.abspath('softmax-500'))
"""

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from sinklab.files.place import place
from sinklab.named import run_and_step, wanted
from sinklab.record import Refusal


def arguments(verb: argparse.ArgumentParser) -> None:
    actions = verb.add_subparsers(dest='action', metavar='ACTION', required=True)
    for name, (words, add, _) in ACTIONS.items():
        action = actions.add_parser(name, help=words, description=words, allow_abbrev=False)
        action.add_argument('run', metavar='RUN[@STEP]', help='a run folder, and which of its steps')
        add(action)


def of_data(action: argparse.ArgumentParser) -> None:
    action.add_argument('--json', action='store_true', help='print JSON')


def of_parameters(action: argparse.ArgumentParser) -> None:
    action.add_argument('--out', required=True, metavar='DIR', help='the new folder that they are written to')
    action.add_argument('--dtype', choices=('float32', 'bfloat16', 'float16'), help='else as they are')


def run(given: argparse.Namespace, rest: list[str]) -> int:
    if rest:
        raise Refusal(f'{rest[0]} is unknown; see sinklab checkpoint {given.action} --help')
    folder, step = run_and_step(given.run)
    return ACTIONS[given.action][2](given, folder, wanted(folder, step))


def ls(given: argparse.Namespace, folder: Any, steps: list[int]) -> int:
    from sinklab.checkpoint import digests
    from sinklab.files import tree

    rows = []
    for step in steps:
        known = digests.read(folder, step)
        missing = isinstance(known, digests.Fault)
        rows.append(
            dict(
                step=step,
                saved=None if missing else known.written,
                seconds=None if missing else known.seconds,
                bytes=tree.size(folder.checkpoints / str(step)),
                digests=known.why if missing else 'complete',
            )
        )
    show(
        given.json,
        rows,
        lambda row: '  '.join(f'{name} {"-" if value is None else value}' for name, value in row.items()),
    )
    return 0


def verify(given: argparse.Namespace, folder: Any, steps: list[int]) -> int:
    from sinklab.checkpoint import digests

    faults = {step: digests.fault(folder, step) for step in steps}
    rows = [
        dict(step=step, path=str(folder.checkpoints / str(step)), fault=fault.why if fault else None)
        for step, fault in faults.items()
        if step in folder.checkpoint_steps()  # a run that goes on may have taken it away meanwhile
    ]
    show(given.json, rows, lambda row: f'{row["path"]}: {row["fault"] or "sound"}')
    return int(any(row['fault'] for row in rows))


def restore_parameters(given: argparse.Namespace, folder: Any, steps: list[int]) -> int:
    import jax

    jax.config.update('jax_platforms', 'cpu')  # a run may hold the others
    from sinklab.checkpoint import restore

    out = place(given.out)
    if out.exists():
        raise Refusal(f'--out={given.out} is there already; give a new folder')
    count = restore.write_parameters(folder, steps[-1], out, given.dtype)
    print(f'{given.out}: {count:,} parameters of {folder.checkpoints / str(steps[-1])}')
    return 0


def show(as_json: bool, rows: list[dict], line: Callable[[dict], str]) -> None:
    sys.stdout.write(json.dumps(rows, indent=2) + '\n' if as_json else ''.join(f'{line(row)}\n' for row in rows))


ACTIONS = {
    'ls': ('the checkpoints of a run, by their digests; no array is read', of_data, ls),
    'verify': ('all checkpoints, or one, held to their digests; exits 1 where one is not sound', of_data, verify),
    'restore-params': ('the parameters of the newest, or of a step, verified', of_parameters, restore_parameters),
}
