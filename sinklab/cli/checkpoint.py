"""List, verify, export or import checkpoints.

example:
  sinklab checkpoint ls runs/softmax
  sinklab checkpoint verify runs/softmax@500
  sinklab checkpoint restore-params runs/softmax@500 --out=softmax-500 --dtype=bfloat16
  sinklab checkpoint export runs/softmax@500 --out=softmax-hf
  sinklab checkpoint import hf:softmax-hf --out=runs/imported

and in Python, as nested dicts of arrays:
  from orbax.checkpoint import v1; params = v1.load(os.path.abspath('softmax-500'))
"""

import argparse
import json
import sys
from collections.abc import Callable

from sinklab.cli import llama
from sinklab.files.place import place
from sinklab.folder import Folder
from sinklab.named import run_and_step, wanted
from sinklab.record import Refusal


def arguments(verb: argparse.ArgumentParser) -> None:
    actions = verb.add_subparsers(dest='action', metavar='ACTION', required=True)
    for name, (words, add, _) in ACTIONS.items():
        examples = [line for line in __doc__.splitlines() if f'sinklab checkpoint {name} ' in line]
        action = actions.add_parser(
            name,
            help=words,
            description=words,
            epilog='\n'.join(['example:', *examples]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        add(action)


def of_run(action: argparse.ArgumentParser) -> None:
    action.add_argument(
        'run', metavar='RUN[@STEP]', help='run folder, and one of its steps, such as runs/softmax@500'
    )


def of_data(action: argparse.ArgumentParser) -> None:
    of_run(action)
    action.add_argument('--json', action='store_true', help='print JSON')


def of_parameters(action: argparse.ArgumentParser) -> None:
    of_run(action)
    action.add_argument('--out', required=True, metavar='DIR', help='new folder to write to')
    action.add_argument(
        '--dtype', choices=('float32', 'bfloat16', 'float16'), help='type of the numbers (default: as they are)'
    )


def of_export(action: argparse.ArgumentParser) -> None:
    of_parameters(action)
    action.add_argument(
        '--length',
        type=int,
        metavar='N',
        help='largest number of tokens that the model takes (default: that of a training window)',
    )
    action.add_argument('--tokenizer', metavar='FILE', help='tokenizer.json of the run, if it has moved')


def of_import(action: argparse.ArgumentParser) -> None:
    action.add_argument(
        'source', metavar='hf:PATH', help='folder of a model of Hugging Face, or hf:ORG/NAME of the hub'
    )
    action.add_argument('--out', required=True, metavar='DIR', help='new run folder, with the model at step 0')


def run(given: argparse.Namespace, rest: list[str]) -> int:
    if rest:
        raise Refusal(f'{rest[0]} is unknown; see sinklab checkpoint {given.action} --help')
    return ACTIONS[given.action][2](given)


def meant(given: argparse.Namespace) -> tuple[Folder, list[int]]:
    folder, step = run_and_step(given.run)
    return folder, wanted(folder, step)


def ls(given: argparse.Namespace) -> int:
    from sinklab.checkpoint import digests
    from sinklab.files import tree

    folder, steps = meant(given)
    rows, run_id = [], digests.id_finder(folder)
    for step in steps:
        known = digests.read(folder, step, run_id)
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


def verify(given: argparse.Namespace) -> int:
    from sinklab.checkpoint import digests

    folder, steps = meant(given)
    run_id = digests.id_finder(folder)
    faults = {step: digests.fault(folder, step, run_id=run_id) for step in steps}
    rows = [
        dict(step=step, path=str(folder.checkpoints / str(step)), fault=fault.why if fault else None)
        for step, fault in faults.items()
        if step in folder.checkpoint_steps()  # a run that goes on may have taken it away meanwhile
    ]
    show(given.json, rows, lambda row: f'{row["path"]}: {row["fault"] or "sound"}')
    return int(any(row['fault'] for row in rows))


def restore_parameters(given: argparse.Namespace) -> int:
    import jax

    from sinklab import program_cache

    program_cache.install()
    jax.config.update('jax_platforms', 'cpu')  # a run may hold the others
    from sinklab.checkpoint import log_filters, restore

    folder, steps = meant(given)
    out = place(given.out)
    if out.exists():
        raise Refusal(f'--out={given.out} is there already; give a new folder')
    log_filters.install()
    count = restore.write_parameters(folder, steps[-1], out, given.dtype)
    print(f'{given.out}: {count:,} parameters of {folder.checkpoints / str(steps[-1])}')
    return 0


def show(as_json: bool, rows: list[dict], line: Callable[[dict], str]) -> None:
    sys.stdout.write(json.dumps(rows, indent=2) + '\n' if as_json else ''.join(f'{line(row)}\n' for row in rows))


ACTIONS = {
    'ls': ('list the checkpoints of a run; arrays are not read', of_data, ls),
    'verify': ('compare checkpoints with their digests; the exit code is 1 if one is damaged', of_data, verify),
    'restore-params': (
        'write the parameters of a checkpoint alone (default: of the newest one)',
        of_parameters,
        restore_parameters,
    ),
    'export': ('write a folder that transformers can load; its outputs are compared first', of_export, llama.export),
    'import': ('make a run of a LLaMA, Mistral or Qwen model, for train --from', of_import, llama.bring),
}
