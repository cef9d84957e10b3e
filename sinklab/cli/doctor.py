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
from sinklab.record import Refusal

EXTRAS = {
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


def arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument('--json', action='store_true', help='print the result as JSON')
    verb.add_argument(
        '--kernels',
        action='store_true',
        help='compare each attention backend with the definition, on the devices of this machine',
    )


def run(given: argparse.Namespace, rest: list[str]) -> int:
    if rest:
        raise Refusal(f'{rest[0]} is unknown; see sinklab doctor --help')
    if given.kernels:
        return kernels.run(given.json)
    checks = {name: attempt(check) for name, check in CHECKS.items()}
    here = devices() if checks['devices'] == 'ok' else []
    found = dict(python=platform.python_version(), **packages(), devices=here, checks=checks)
    broken = [name for name, outcome in checks.items() if outcome != 'ok']
    if given.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)
    for name in broken:
        print(f'sinklab doctor: {name} does not work here: {escape_control(checks[name])}', file=sys.stderr)
    return 1 if broken else 0


def attempt(check: Callable[[], object]) -> str:
    """ok, or why not."""
    try:
        check()
    except Exception as error:  # whatever is broken here is what was asked for
        return f'{type(error).__name__}: {error}'.splitlines()[0]
    return 'ok'


def packages() -> dict:
    from sinklab.train.environment import PACKAGES, versions

    return dict(versions=versions(PACKAGES), extras=versions(EXTRAS))


def devices() -> list[str]:
    from sinklab.devices import found

    return [device.device_kind for device in found()]


def attention() -> None:
    """Every similarity and normalizer that go together: finite, forward and backward."""
    import jax
    import jax.numpy as jnp

    from sinklab import program_cache
    from sinklab.attend import dense, examples
    from sinklab.attend.mask import causal
    from sinklab.attend.rule import Rule

    program_cache.install()
    x = jax.random.uniform(jax.random.key(0), (1, 8, 2, 4))  # scores above 0, as identity with sum needs them
    for operation in examples.operations().values():
        rule = Rule(operation, causal(8))
        gradient = jax.grad(lambda x, rule=rule: dense.attend(x, x, x, rule).output_BTHK.sum())(x)
        if not jnp.isfinite(gradient).all():
            raise FloatingPointError(f'{operation.name} has a gradient that is not finite')


def documents() -> None:
    from sinklab.data.documents.sources import texts

    texts('stdlib')


def cache() -> None:
    from sinklab.cache import cache

    cache().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=cache()):
        pass


def checkpoint() -> None:
    import jax.numpy as jnp
    from orbax.checkpoint import v1 as ocp

    with tempfile.TemporaryDirectory() as folder:
        ocp.save(f'{folder}/state', {'x': jnp.arange(3)})
        if ocp.load(f'{folder}/state', {'x': jnp.zeros(3, int)})['x'][2] != 2:
            raise ValueError('a checkpoint came back with other numbers')


CHECKS = {
    'devices': devices,
    'attention, forward and backward': attention,
    'standard library as a corpus': documents,
    'token cache': cache,
    'checkpoints': checkpoint,
}


def show(found: dict) -> None:
    from rich.table import Table
    from rich.text import Text

    from sinklab.cli import terminal

    console, table = terminal.console(), Table(box=None, show_header=False)
    table.add_row('python', found['python'])
    for name, version in found['versions'].items():
        table.add_row(name, version)
    for name, version in found['extras'].items():
        table.add_row(name, version or f'absent (extra {EXTRAS[name]})')
    table.add_row('devices', terminal.cell(', '.join(found['devices'])))
    for name, outcome in found['checks'].items():
        table.add_row(name, Text('ok', 'green') if outcome == 'ok' else Text('broken', 'red'))
    console.print(table)
    absent = sorted({EXTRAS[name] for name, version in found['extras'].items() if not version})
    if absent:
        print('To install an extra:')
    for extra in absent:
        print(f'  {escape_control(format_extra_command(extra))}')
