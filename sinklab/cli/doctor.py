"""Show the versions, devices and missing extras of this installation, and check attention kernels.

The exit code is 1 if jax finds no device, or if a kernel is wrong.

example:
  sinklab doctor --json
  sinklab doctor --kernels
"""

import argparse
import json
import sys

from sinklab.errors import UserError, format_error, format_extra_command

EXTRA_OF_PACKAGE = {
    'matplotlib': 'report',
    'tensorboardX': 'tensorboard',
    'wandb': 'wandb',
    'transformers': 'hf',
    'torch': 'hf',
    'pandas': 'notebook',
    'lm-eval': 'evaluate',
    'libtpu': 'tpu',
    'jax-cuda13-plugin': 'gpu',
    'pyarrow': 'data',
    'tensorflow-datasets': 'data',
    'gcsfs': 'gcs',
    'safetensors': 'hf',
}
CHECKED_LENGTH, CHECKED_HEADS, CHECKED_HEAD_WIDTH = 256, 2, 64
CHECKED_MASKS = 'causal', 'prefix', 'window', 'document', 'alibi'  # some specs of example_specs.py


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--json', action='store_true', help='print the result as JSON')
    parser.add_argument(
        '--kernels',
        action='store_true',
        help='compare each attention backend with the definition, on the devices of this machine',
    )


def run(args: argparse.Namespace, extra_args: list[str]) -> int:
    if args.kernels:
        return check_backends(args.json)
    from sinklab.environment import describe_code, get_package_versions
    from sinklab.parallel.device_mesh import get_devices

    report = dict(versions=describe_code(), extras=get_package_versions(EXTRA_OF_PACKAGE), devices=[])
    problem = None
    try:
        report['devices'] = [device.device_kind for device in get_devices()]
    except UserError as error:
        problem = error
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print_installation(report)
    if problem:
        print(f'sinklab doctor: {problem}', file=sys.stderr)
    return 1 if problem else 0


def print_installation(report: dict) -> None:
    from sinklab.cli import terminal

    extras = [
        (name, version or f'absent; install it: {format_extra_command(EXTRA_OF_PACKAGE[name])}')
        for name, version in report['extras'].items()
    ]
    rows = [*report['versions'].items(), *extras, ('devices', ', '.join(report['devices']) or 'none')]
    headings = 'name', 'value'
    terminal.print_table(terminal.make_console(width=120), headings, rows, wrap_columns=headings, show_header=False)


def check_backends(as_json: bool) -> int:
    """Compare each attention backend with the definition, and print the results.

    Returns:
        The exit code: 1 if a backend that `auto` may choose here is wrong or fails, otherwise 0.
    """
    import jax

    from sinklab.attn import example_specs
    from sinklab.attn.backends import BACKENDS
    from sinklab.attn.spec import AttentionProblem

    platform, operations, cells = jax.default_backend(), example_specs.make_operations(), []
    for backend in [backend for backend in BACKENDS if backend != 'dense']:
        for (similarity, normalizer), operation in operations.items():
            specs = example_specs.make_specs(operation, CHECKED_HEADS, CHECKED_LENGTH)
            for mask in CHECKED_MASKS:
                problem = AttentionProblem(
                    specs[mask], CHECKED_HEADS, CHECKED_HEAD_WIDTH, CHECKED_HEAD_WIDTH, 'bfloat16'
                )
                cell = dict(backend=backend, similarity=similarity, normalizer=normalizer, mask=mask)
                cells.append(cell | check_backend(backend, platform, problem))
            if cells[-1]['outcome'] != 'lacks':
                print(f'{backend} {similarity}/{normalizer}', file=sys.stderr)
    if as_json:
        print(json.dumps(dict(platform=platform, kernels=cells), indent=2))
    else:
        print_backend_table(platform, cells)
    return int(any(cell['outcome'] == 'wrong' for cell in cells))


def check_backend(backend: str, platform: str, problem: object) -> dict:
    """Compare an attention backend with the definition, for one attention problem.

    Returns:
        `outcome`: ok, wrong, or lacks (not supported); with the largest relative `error`, or the `reason` why there
        is none.
    """
    from sinklab.attn.backends import MAX_RELATIVE_ERROR, explain_unsupported, measure_error

    if reason := explain_unsupported(backend, platform, problem):
        return dict(outcome='lacks', reason=reason)
    try:
        error = measure_error(backend, problem)
    except Exception as failure:  # any exception is a result of the check
        return dict(outcome='wrong', reason=format_error(failure, with_type=True))
    return dict(outcome='ok' if error <= MAX_RELATIVE_ERROR else 'wrong', error=error)


def print_backend_table(platform: str, cells: list[dict]) -> None:
    from rich.text import Text

    from sinklab.attn.backends import MAX_RELATIVE_ERROR
    from sinklab.cli import terminal

    rows, reasons = {}, {}
    for cell in cells:
        row = rows.setdefault(f'{cell["backend"]} {cell["similarity"]}/{cell["normalizer"]}', [])
        if cell['outcome'] == 'lacks':
            row.append('-')
            reasons[cell['backend'], cell['reason']] = reasons.get((cell['backend'], cell['reason']), 0) + 1
        else:
            text = f'{cell["error"]:.0e}' if 'error' in cell else 'fails'
            row.append(Text(text, 'red' if cell['outcome'] == 'wrong' else ''))
    title = (
        f'largest error on {platform}, forward and backward, relative to the largest entry in float32; '
        f'bfloat16, T={CHECKED_LENGTH}, {CHECKED_HEADS} heads of {CHECKED_HEAD_WIDTH}; ok up to '
        f'{MAX_RELATIVE_ERROR:.0e}'
    )
    console, headings = terminal.make_console(), ['backend and operation', *CHECKED_MASKS]
    supported_rows = [[name, *row] for name, row in rows.items() if {*map(str, row)} != {'-'}]
    terminal.print_table(console, headings, supported_rows, title=title, title_justify='left')
    for (backend, reason), count in reasons.items():
        console.print(f'{backend} lacks {count} cells: {reason}')
    for cell in cells:
        if cell['outcome'] == 'wrong' and 'reason' in cell:
            operation = f'{cell["similarity"]}/{cell["normalizer"]}'
            console.print(f'{cell["backend"]} {operation} {cell["mask"]}: {cell["reason"]}', style='red')
