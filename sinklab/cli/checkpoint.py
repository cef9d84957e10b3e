"""List, verify, export or import checkpoints.

example:
  sinklab checkpoint ls runs/softmax
  sinklab checkpoint verify runs/softmax@500
  sinklab checkpoint restore-params runs/softmax@500 --out=softmax-500 --dtype=bfloat16
  sinklab checkpoint export runs/softmax@500 --out=softmax-hf
  sinklab checkpoint import hf:softmax-hf --out=runs/imported
  sinklab checkpoint import gguf:SmolLM2.gguf --out=runs/smollm

Load parameters in Python, as nested dicts of arrays:
  from orbax.checkpoint import v1; params = v1.load(os.path.abspath('softmax-500'))
"""

import argparse
import json

from sinklab.cli import hf
from sinklab.errors import UserError
from sinklab.run_dir import RunDir
from sinklab.run_ref import parse_run_ref, select_steps
from sinklab.storage.paths import parse_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest='action', metavar='ACTION', required=True)
    for name, (summary, add_action_arguments, _) in ACTIONS.items():
        examples = [line for line in __doc__.splitlines() if f'sinklab checkpoint {name} ' in line]
        action = actions.add_parser(
            name,
            help=summary,
            description=summary,
            epilog='\n'.join(['example:', *examples]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        add_action_arguments(action)


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'run', metavar='RUN[@STEP]', help='run folder, and one of its steps, such as runs/softmax@500'
    )


def add_listing_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument('--json', action='store_true', help='print JSON')


def add_restore_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument('--out', required=True, metavar='DIR', help='new folder to write to')
    parser.add_argument(
        '--dtype', choices=('float32', 'bfloat16', 'float16'), help='data type of the parameters (default: as saved)'
    )


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    add_restore_arguments(parser)
    parser.add_argument(
        '--length',
        type=int,
        metavar='N',
        help='maximum number of tokens of the model (default: length of a training window)',
    )
    parser.add_argument('--tokenizer', metavar='FILE', help='tokenizer.json of the run, if it has moved')


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'source',
        metavar='hf:PATH_OR_ID | gguf:PATH',
        help='folder of a Hugging Face model, its name on the hub, or a GGUF file',
    )
    parser.add_argument('--out', required=True, metavar='DIR', help='new run folder, with the model at step 0')


def run(args: argparse.Namespace, extra_args: list[str]) -> int:
    return ACTIONS[args.action][2](args)


def resolve_steps(args: argparse.Namespace) -> tuple[RunDir, list[int]]:
    run_dir, step = parse_run_ref(args.run)
    return run_dir, select_steps(run_dir, step)


def list_checkpoints(args: argparse.Namespace) -> int:
    from sinklab.checkpoint import digests
    from sinklab.cli import terminal
    from sinklab.storage import directories

    run_dir, steps = resolve_steps(args)
    run_id, rows = digests.find_run_id(run_dir), []
    for step in steps:
        digest_record = digests.read_digests(run_dir, step, run_id)
        is_missing = isinstance(digest_record, digests.CorruptionReport)
        rows.append(
            dict(
                step=step,
                saved=None if is_missing else digest_record.written,
                seconds=None if is_missing else digest_record.seconds,
                bytes=directories.compute_size(run_dir.checkpoint_dir / str(step)),
                digests=digest_record.reason if is_missing else 'complete',
            )
        )
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        headings = ['step', 'saved', 'seconds', 'bytes', 'digests']
        cells = [
            [
                row['step'],
                row['saved'] or '-',
                '-' if row['seconds'] is None else f'{row["seconds"]:.3f}',
                f'{row["bytes"]:,}',
                row['digests'],
            ]
            for row in rows
        ]
        terminal.print_table(
            terminal.make_console(width=120), headings, cells, left_columns=['saved'], wrap_columns=['digests']
        )
    return 0


def verify_checkpoints(args: argparse.Namespace) -> int:
    from sinklab.checkpoint import digests

    run_dir, steps = resolve_steps(args)
    run_id = digests.find_run_id(run_dir)
    corruption_reports = {step: digests.find_corruption(run_dir, step, run_id=run_id) for step in steps}
    rows = [
        dict(step=step, path=str(run_dir.checkpoint_dir / str(step)), fault=corruption.reason if corruption else None)
        for step, corruption in corruption_reports.items()
        if step in run_dir.list_checkpoint_steps()  # a run that is still training may have deleted it meanwhile
    ]
    lines = [f'{row["path"]}: {row["fault"] or "sound"}\n' for row in rows]
    print(json.dumps(rows, indent=2) + '\n' if args.json else ''.join(lines), end='')
    return int(any(row['fault'] for row in rows))


def restore_parameters(args: argparse.Namespace) -> int:
    import jax

    jax.config.update('jax_platforms', 'cpu')  # a training run may occupy the accelerators
    from sinklab.checkpoint import checkpointer, digests

    run_dir, step = parse_run_ref(args.run)
    step = digests.select_checkpoint(run_dir, step)
    out = parse_path(args.out)
    if out.exists():
        raise UserError(f'--out={args.out} already exists; give a new folder')
    num_parameters = checkpointer.save_parameters(run_dir, step, out, args.dtype)
    print(f'{args.out}: {num_parameters:,} parameters of {run_dir.checkpoint_dir / str(step)}')
    return 0


ACTIONS = {
    'ls': ('list the checkpoints of a run; arrays are not read', add_listing_arguments, list_checkpoints),
    'verify': (
        'compare checkpoints with their digests; the exit code is 1 if one is damaged',
        add_listing_arguments,
        verify_checkpoints,
    ),
    'restore-params': (
        'write only the parameters of a checkpoint (default: the newest complete one)',
        add_restore_arguments,
        restore_parameters,
    ),
    'export': (
        'write a folder that transformers can load; its outputs are compared first',
        add_export_arguments,
        hf.export_model,
    ),
    'import': (
        'make a run from a Hugging Face model, such as LLaMA or Gemma 3, for train --from',
        add_import_arguments,
        hf.import_model,
    ),
}
