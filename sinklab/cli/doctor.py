"""Check this installation: versions, devices, and whether the features that sinklab needs work.

The exit code is 1 if a feature that is needed does not work.

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
from typing import Any

from sinklab.errors import UserError, format_error
from sinklab.escape import escape_control
from sinklab.install_commands import format_extra_command

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
    parser.add_argument(
        '--kernels',
        action='store_true',
        help='compare each attention backend with the definition, on the devices of this machine',
    )


def run(args: argparse.Namespace, extra_args: list[str]) -> int:
    if extra_args:
        raise UserError(f'{extra_args[0]} is unknown; see sinklab doctor --help')
    if args.kernels:
        return check_backends(args.json)
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
    """Run a check; return 'ok', or the type and message of the exception that it raised."""
    try:
        check()
    except Exception as error:  # any exception is a result of the check
        return format_error(error, with_type=True)
    return 'ok'


def list_package_versions() -> dict:
    from sinklab.environment import get_package_versions

    return dict(versions=get_package_versions(), extras=get_package_versions(EXTRA_OF_PACKAGE))


def list_devices() -> list[str]:
    from sinklab.parallel.device_mesh import get_devices

    return [device.device_kind for device in get_devices()]


def check_attention() -> None:
    """Check that the gradient of each valid pair of similarity and normalizer is finite."""
    import jax
    import jax.numpy as jnp

    from sinklab import compilation_cache
    from sinklab.attn import example_specs, reference
    from sinklab.attn.mask import make_causal_mask
    from sinklab.attn.spec import AttentionSpec

    compilation_cache.install_verified_cache()
    x = jax.random.uniform(jax.random.key(0), (1, 8, 2, 4))  # positive scores: identity with sum divides by their sum
    for operation in example_specs.make_operations().values():
        spec = AttentionSpec(operation, make_causal_mask(8))
        gradient = jax.grad(lambda x, spec=spec: reference.attend(x, x, x, spec).output_BTHK.sum())(x)
        if not jnp.isfinite(gradient).all():
            raise FloatingPointError(f'{operation.name} has a gradient that is not finite')


def check_documents() -> None:
    from sinklab.data.sources import read_texts

    read_texts('stdlib')


def check_cache_dir() -> None:
    from sinklab.storage.cache_dir import get_cache_dir

    get_cache_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=get_cache_dir()):
        pass


def check_checkpoint() -> None:
    import jax.numpy as jnp
    from orbax.checkpoint import v1 as ocp

    with tempfile.TemporaryDirectory() as temp_dir:
        ocp.save(f'{temp_dir}/state', {'x': jnp.arange(3)})
        if ocp.load(f'{temp_dir}/state', {'x': jnp.zeros(3, int)})['x'][2] != 2:
            raise ValueError('the restored checkpoint differs from the saved one')


CHECKS = {
    'devices': list_devices,
    'attention, forward and backward': check_attention,
    'standard library as a corpus': check_documents,
    'token cache': check_cache_dir,
    'checkpoints': check_checkpoint,
}


def print_installation(report: dict) -> None:
    from rich.text import Text

    from sinklab.cli import terminal

    rows = [('python', report['python']), *report['versions'].items()]
    rows += [
        (name, version or f'absent (extra {EXTRA_OF_PACKAGE[name]})') for name, version in report['extras'].items()
    ]
    rows.append(('devices', ', '.join(report['devices'])))
    for name, outcome in report['checks'].items():
        rows.append((name, Text('ok', 'green') if outcome == 'ok' else Text('broken', 'red')))
    headings = 'name', 'value'
    terminal.print_table(terminal.make_console(), headings, rows, wrap_columns=headings, show_header=False)
    missing_extras = sorted({EXTRA_OF_PACKAGE[name] for name, version in report['extras'].items() if not version})
    if missing_extras:
        print('To install an extra:')
    for extra in missing_extras:
        print(f'  {escape_control(format_extra_command(extra))}')


CASE_LENGTH, CASE_HEADS, CASE_HEAD_WIDTH = 256, 2, 64
SHOWN_MASKS = 'causal', 'prefix', 'window', 'document', 'alibi'  # the specs of example_specs.py that are shown


def check_backends(as_json: bool) -> int:
    """Compare each attention backend with the definition, and print the results.

    Returns:
        The exit code: 1 if a backend that `auto` may choose here is wrong or fails, otherwise 0.
    """
    import jax

    from sinklab import compilation_cache
    from sinklab.attn import example_specs
    from sinklab.attn.backends import BACKENDS
    from sinklab.attn.spec import AttentionProblem

    compilation_cache.install_verified_cache()
    platform, operations, cells = jax.default_backend(), example_specs.make_operations(), []
    for backend_name in (backend_name for backend_name in BACKENDS if backend_name != 'dense'):
        for index, ((similarity, normalizer), operation) in enumerate(operations.items(), 1):
            specs = example_specs.make_specs(operation, CASE_HEADS, CASE_LENGTH)
            for mask in SHOWN_MASKS:
                cell = dict(backend=backend_name, similarity=similarity, normalizer=normalizer, mask=mask)
                problem = AttentionProblem(specs[mask], CASE_HEADS, CASE_HEAD_WIDTH, CASE_HEAD_WIDTH, 'bfloat16')
                cells.append(cell | check_backend(backend_name, platform, problem))
            if cells[-1]['outcome'] != 'lacks':
                print(f'{backend_name} [{index}/{len(operations)}] {similarity}/{normalizer}', file=sys.stderr)
    print(json.dumps(dict(platform=platform, kernels=cells), indent=2)) if as_json else print_backend_table(
        platform, cells
    )
    return 1 if any(cell['outcome'] == 'wrong' for cell in cells) else 0


def check_backend(backend_name: str, platform: str, problem: Any) -> dict:
    """Compare an attention backend with the definition, for one attention problem.

    Returns:
        `outcome`: ok, wrong, or lacks (not supported); with the largest relative `error`, or the `reason` why there
        is none.
    """
    from sinklab.attn.backends import (
        MAX_RELATIVE_ERROR,
        UnsupportedBackendError,
        explain_unsupported,
        measure_error,
    )

    if reason := explain_unsupported(backend_name, platform, problem):
        return dict(outcome='lacks', reason=reason)
    try:
        relative_error = measure_error(backend_name, problem)
    except UnsupportedBackendError as failure:
        return dict(outcome='wrong', reason=str(failure))
    except Exception as failure:  # any exception is a result of the check
        return dict(outcome='wrong', reason=format_error(failure, with_type=True))
    return dict(outcome='ok' if relative_error <= MAX_RELATIVE_ERROR else 'wrong', error=relative_error)


def print_backend_table(platform: str, all_cells: list[dict]) -> None:
    from sinklab.attn.backends import MAX_RELATIVE_ERROR
    from sinklab.cli import terminal

    console = terminal.make_console()
    unsupported: dict[tuple[str, str], list[dict]] = {}
    cells_by_operation: dict[tuple[str, str], list[dict]] = {}
    for cell in all_cells:
        operation = f'{cell["similarity"]}/{cell["normalizer"]}'
        cells_by_operation.setdefault((cell['backend'], operation), []).append(cell)
        if cell['outcome'] == 'lacks':
            unsupported.setdefault((cell['backend'], cell['reason']), []).append(cell)
    headings = 'backend', 'operation', *SHOWN_MASKS
    rows = [
        [backend, operation, *map(format_backend_cell, cells)]
        for (backend, operation), cells in cells_by_operation.items()
        if any(cell['outcome'] != 'lacks' for cell in cells)
    ]
    title = (
        f'largest error on {platform}, forward and backward, relative to the largest entry in float32; '
        f'bfloat16, T={CASE_LENGTH}, {CASE_HEADS} heads of {CASE_HEAD_WIDTH}; ok up to {MAX_RELATIVE_ERROR:.0e}'
    )
    terminal.print_table(console, headings, rows, left_columns=headings, title=title, title_justify='left')
    for (backend, reason), cells in unsupported.items():
        is_every_cell = len(cells) == len(cells_by_operation) // len({name for name, _ in cells_by_operation}) * len(
            SHOWN_MASKS
        )
        console.print(f'{backend} lacks {"everything" if is_every_cell else f"{len(cells)} cells"}: {reason}')
    if unsupported:
        console.print('dense and chunked support what the other backends lack')
    for cell in all_cells:
        if 'error' not in cell and cell['outcome'] == 'wrong':
            operation = f'{cell["similarity"]}/{cell["normalizer"]}'
            console.print(
                terminal.make_cell(f'{cell["backend"]} {operation} {cell["mask"]}: {cell["reason"]}', 'red')
            )


def format_backend_cell(cell: dict) -> Any:
    from rich.text import Text

    if cell['outcome'] == 'lacks':
        return '-'
    if 'error' not in cell:
        return Text('fails', 'red')
    return Text(f'{cell["error"]:.0e}', '' if cell['outcome'] == 'ok' else 'red')
