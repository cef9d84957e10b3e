"""Check this installation: versions, devices, and whether what sinklab needs works.

The exit code is 1 if something that is needed does not work.

example:
  sinklab doctor --json
  sinklab doctor --kernels
"""

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Callable

from sinklab.cli import kernels
from sinklab.escape import escape_control
from sinklab.install import format_extra_command
from sinklab.record import UserError

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
    'zstandard': 'data',
    'tensorflow-datasets': 'data',
    'gcsfs': 'gcs',
    's3fs': 's3',
    'safetensors': 'hf',
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--json', action='store_true', help='print the result as JSON')
    parser.add_argument(
        '--kernels',
        action='store_true',
        help='compare each attention backend with the definition, on the devices of this machine',
    )


def run(args: argparse.Namespace, extra_args: list[str]) -> int:
    if extra_args:
        raise UserError(f'{extra_args[0]} is unknown; see sinklab doctor --help')
    if args.kernels:
        return kernels.check_backends(args.json)
    checks = {name: run_check(check) for name, check in CHECKS.items()}
    device_kinds = list_devices() if checks['devices'] == 'ok' else []
    report = dict(python=platform.python_version(), **list_package_versions(), devices=device_kinds, checks=checks)
    failed_checks = [name for name, outcome in checks.items() if outcome != 'ok']
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print_installation(report)
    for name in failed_checks:
        print(f'sinklab doctor: {name} does not work here: {escape_control(checks[name])}', file=sys.stderr)
    return 1 if failed_checks else 0


def run_check(check: Callable[[], object]) -> str:
    """ok, or why not."""
    try:
        check()
    except Exception as error:  # whatever is broken here is what was asked for
        return f'{type(error).__name__}: {error}'.splitlines()[0]
    return 'ok'


def list_package_versions() -> dict:
    from sinklab.train.environment import PACKAGES, get_package_versions

    return dict(versions=get_package_versions(PACKAGES), extras=get_package_versions(EXTRA_OF_PACKAGE))


def list_devices() -> list[str]:
    from sinklab.devices import get_devices

    return [device.device_kind for device in get_devices()]


def check_attention() -> None:
    """Every similarity and normalizer that go together: finite, forward and backward."""
    import jax
    import jax.numpy as jnp

    from sinklab import program_cache
    from sinklab.attend import dense, examples
    from sinklab.attend.mask import make_causal_mask
    from sinklab.attend.rule import AttentionSpec

    program_cache.install_verified_cache()
    x = jax.random.uniform(jax.random.key(0), (1, 8, 2, 4))  # scores above 0, as identity with sum needs them
    for operation in examples.make_operations().values():
        spec = AttentionSpec(operation, make_causal_mask(8))
        gradient = jax.grad(lambda x, spec=spec: dense.attend(x, x, x, spec).output_BTHK.sum())(x)
        if not jnp.isfinite(gradient).all():
            raise FloatingPointError(f'{operation.name} has a gradient that is not finite')


def check_documents() -> None:
    from sinklab.data.documents.sources import read_texts

    read_texts('stdlib')


def check_cache_dir() -> None:
    from sinklab.cache import get_cache_dir

    get_cache_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=get_cache_dir()):
        pass


def check_checkpoint() -> None:
    import jax.numpy as jnp
    from orbax.checkpoint import v1 as ocp

    with tempfile.TemporaryDirectory() as temp_dir:
        ocp.save(f'{temp_dir}/state', {'x': jnp.arange(3)})
        if ocp.load(f'{temp_dir}/state', {'x': jnp.zeros(3, int)})['x'][2] != 2:
            raise ValueError('a checkpoint came back with other numbers')


CHECKS = {
    'devices': list_devices,
    'attention, forward and backward': check_attention,
    'standard library as a corpus': check_documents,
    'token cache': check_cache_dir,
    'checkpoints': check_checkpoint,
}


def print_installation(report: dict) -> None:
    from rich.table import Table
    from rich.text import Text

    from sinklab.cli import terminal

    console, table = terminal.make_console(), Table(box=None, show_header=False)
    table.add_row('python', report['python'])
    for name, version in report['versions'].items():
        table.add_row(name, version)
    for name, version in report['extras'].items():
        table.add_row(name, version or f'absent (extra {EXTRA_OF_PACKAGE[name]})')
    table.add_row('devices', terminal.make_cell(', '.join(report['devices'])))
    for name, outcome in report['checks'].items():
        table.add_row(name, Text('ok', 'green') if outcome == 'ok' else Text('broken', 'red'))
    console.print(table)
    missing_extras = sorted({EXTRA_OF_PACKAGE[name] for name, version in report['extras'].items() if not version})
    if missing_extras:
        print('To install an extra:')
    for extra in missing_extras:
        print(f'  {escape_control(format_extra_command(extra))}')
