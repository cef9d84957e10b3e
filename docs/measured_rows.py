"""Our numbers of the rows of configs/, from docs/results/claims.json, for the page of rows."""

import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import Any

from sinklab.cli import config_flags
from sinklab.config.differences import flatten_dict
from sinklab.config.spec import Spec
from sinklab.errors import UserError
from sinklab.metrics.registry import find_metric_info
from sinklab.report.sweep_table import summarize_values
from sinklab.sweep import results

RESULTS_FILE = Path(__file__).parent / 'results' / 'claims.json'


@functools.cache
def load_results() -> dict[str, Any]:
    return results.read_results(RESULTS_FILE)


@functools.cache
def load_specs() -> dict[str, Spec]:
    """Return {TABLE:ROW: config at the size of our results} of all rows that are valid at this size."""
    specs = {}
    for file in config_flags.list_config_files():
        module = config_flags.load_config_module(file)
        for name in getattr(module, 'ROWS', {}):
            with contextlib.suppress(UserError):
                spec, _ = config_flags.load_spec(f'{file}:{name}', [], load_results()['size'], module)
                specs[f'{Path(file).stem}:{name}'] = spec
    return specs


@functools.cache
def find_measured_rows() -> dict[str, str]:
    """Return {row: a measured row with the same config at the size of our results}."""
    return results.find_measured_rows(load_results(), load_specs())


def find_our_runs(row: str) -> dict[str, dict] | None:
    """Return our runs by seed: those of a measured row with the same config; None where there are none."""
    measured_row = find_measured_rows().get(row)
    return load_results()['runs'][measured_row] if measured_row else None


def format_our_numbers(row: str, row_info: dict) -> str:
    """Format our numbers of a row, and the changes of the row that have another value at the size of our results."""
    runs = find_our_runs(row)
    if runs is None:
        return '-'
    ends = [run['end'] for run in runs.values()]
    published = row_info['published']
    parts = []
    for name in ('sink/1', *(name for name in ('sink/2', 'sink/star') if name in published), 'valid/loss'):
        if values := [end[name] for end in ends if name in end]:
            parts.append(f'`{name}` {format_spread(values, name)}')
    num_failed = sum(bool(end.get('fails')) for end in ends)
    if num_failed or published.get('fails'):
        parts.append(f'fails in {num_failed} of {len(runs)}')
    config = flatten_dict(dataclasses.asdict(load_specs()[row]))
    scaled = {path: config[path] for path, value in row_info['diff'].items() if config.get(path, value) != value}
    with_values = [
        f'with `{path}={value:g}`' if isinstance(value, float) else f'with `{path}={value}`'
        for path, value in scaled.items()
    ]
    return '<br>'.join([*parts, f'{len(runs)} seeds', *with_values])


def format_spread(values: list[float], name: str) -> str:
    """Format the mean and, of several values, the standard deviation."""
    stats = summarize_values(values)
    info = find_metric_info(name)
    digits = 1 if info and info.unit == '%' else 3
    return f'{stats["mean"]:.{digits}f}' + ('' if stats['sd'] is None else f' ± {stats["sd"]:.{digits}f}')
