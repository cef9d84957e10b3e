"""Show the versions, devices and missing extras of this installation.

The exit code is 1 if jax finds no device.

example:
  sinklab doctor --json
"""

import argparse
import json
import sys

from sinklab.errors import UserError, format_extra_command

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--json', action='store_true', help='print the result as JSON')


def run(args: argparse.Namespace, extra_args: list[str]) -> int:
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
