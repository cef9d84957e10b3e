"""List, verify, export or import checkpoints.

example:
  sinklab checkpoint ls runs/softmax
  sinklab checkpoint verify runs/softmax@500
  sinklab checkpoint export runs/softmax@500 --out=softmax-hf
  sinklab checkpoint import hf:softmax-hf --out=runs/imported
  sinklab checkpoint import gguf:SmolLM2.gguf --out=runs/smollm
"""

import argparse
import json

from sinklab.checkpoint import digests
from sinklab.cli import hf, terminal
from sinklab.cli.flag_types import add_options, positive_int
from sinklab.run_dir import parse_run_ref, select_steps
from sinklab.storage.files import list_file_infos


def add_arguments(parser: argparse.ArgumentParser) -> None:
    subparsers = parser.add_subparsers(dest='action', metavar='ACTION', required=True)
    actions = {}
    for name, (_, summary) in ACTIONS.items():
        examples = [line for line in __doc__.splitlines() if f'sinklab checkpoint {name} ' in line]
        epilog = '\n'.join(['example:', *examples])
        actions[name] = subparsers.add_parser(name, help=summary, description=summary, epilog=epilog)
    for name in ('ls', 'verify', 'export'):
        actions[name].add_argument(
            'run', metavar='RUN[@STEP]', help='run folder, and one of its steps, such as runs/softmax@500'
        )
    for name in ('ls', 'verify'):
        actions[name].add_argument('--json', action='store_true', help='print JSON')
    actions['export'].add_argument('--out', required=True, metavar='DIR', help='new folder to write to')
    add_options(actions['export'], EXPORT_OPTIONS)
    actions['export'].set_defaults(dtype='float32')
    actions['import'].add_argument(
        'source', metavar='hf:PATH_OR_ID | gguf:PATH', help='folder of a model, its name on the hub, or a GGUF file'
    )
    actions['import'].add_argument('--out', required=True, metavar='DIR', help='new run folder')


def run(args: argparse.Namespace, extra_args: list[str]) -> int:
    function, _ = ACTIONS[args.action]
    return function(args)


def list_checkpoints(args: argparse.Namespace) -> int:
    run_dir, chosen_step = parse_run_ref(args.run)
    rows = []
    for step in select_steps(run_dir, chosen_step):
        path = run_dir.checkpoint_dir / str(step)
        is_complete = digests.read_digests(path) is not None
        size = sum(info['size'] for info in list_file_infos(path).values())
        rows.append(dict(step=step, bytes=size, is_complete=is_complete))
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        cells = [[row['step'], f'{row["bytes"]:,}', 'yes' if row['is_complete'] else 'no'] for row in rows]
        terminal.print_table(terminal.make_console(width=120), ['step', 'bytes', 'complete'], cells)
    return 0


def verify_checkpoints(args: argparse.Namespace) -> int:
    run_dir, chosen_step = parse_run_ref(args.run)
    paths = {step: run_dir.checkpoint_dir / str(step) for step in select_steps(run_dir, chosen_step)}
    rows = [dict(step=step, path=str(path), fault=digests.find_damage(path)) for step, path in paths.items()]
    lines = [f'{row["path"]}: {row["fault"] or "sound"}\n' for row in rows]
    print(json.dumps(rows, indent=2) + '\n' if args.json else ''.join(lines), end='')
    return int(any(row['fault'] for row in rows))


ACTIONS = {
    'ls': (list_checkpoints, 'list the checkpoints of a run; arrays are not read'),
    'verify': (verify_checkpoints, 'compare checkpoints with their digests; the exit code is 1 if one is damaged'),
    'export': (hf.export_model, 'write a folder that transformers can load; its outputs are compared first'),
    'import': (hf.import_model, 'make a run from a Hugging Face model, such as LLaMA or Gemma 3, for train --from'),
}
EXPORT_OPTIONS = {
    'dtype': (('float32', 'bfloat16', 'float16'), 'DTYPE', 'of the parameters (default: float32)'),
    'length': (positive_int, 'N', 'maximum number of tokens (default: a training window)'),
}
