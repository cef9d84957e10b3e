"""The measured table of `sinklab doctor --kernels`: operation x mask x backend, on the devices here."""

import json
import sys
from typing import Any

CASE_LENGTH, CASE_HEADS, CASE_HEAD_WIDTH = 256, 2, 64
SHOWN_MASKS = 'causal', 'prefix', 'window', 'document', 'alibi'  # the rules of examples.py that are shown


def check_backends(as_json: bool) -> int:
    """Prints the table; 1 where a backend that auto may choose here is wrong or fails."""
    import jax

    from sinklab import program_cache
    from sinklab.attend import examples
    from sinklab.attend.backends import BACKENDS
    from sinklab.attend.rule import AttentionProblem

    program_cache.install_verified_cache()
    platform, operations, cells = jax.default_backend(), examples.make_operations(), []
    for backend_name in (backend_name for backend_name in BACKENDS if backend_name != 'dense'):
        for index, ((similarity, normalizer), operation) in enumerate(operations.items(), 1):
            specs = examples.make_specs(operation, CASE_HEADS, CASE_LENGTH)
            for mask in SHOWN_MASKS:
                cell = dict(backend=backend_name, similarity=similarity, normalizer=normalizer, mask=mask)
                problem = AttentionProblem(specs[mask], CASE_HEADS, CASE_HEAD_WIDTH, CASE_HEAD_WIDTH, 'bfloat16')
                cells.append(cell | check_backend(backend_name, platform, problem))
            if cells[-1]['outcome'] != 'lacks':
                print(f'{backend_name} [{index}/{len(operations)}] {similarity}/{normalizer}', file=sys.stderr)
    print(json.dumps(dict(platform=platform, kernels=cells), indent=2)) if as_json else print_backend_table(platform, cells)
    return 1 if any(cell['outcome'] == 'wrong' for cell in cells) else 0


def check_backend(backend_name: str, platform: str, problem: Any) -> dict:
    """outcome: ok, wrong, or lacks; with the largest error or the reason."""
    from sinklab.attend.choice import explain_unsupported
    from sinklab.attend.verification import MAX_RELATIVE_ERROR, UnsupportedBackendError, measure_error

    if reason := explain_unsupported(backend_name, platform, problem):
        return dict(outcome='lacks', reason=reason)
    try:
        relative_error = measure_error(backend_name, problem)
    except UnsupportedBackendError as failure:
        return dict(outcome='wrong', reason=str(failure))
    except Exception as failure:  # whatever fails here is what was asked for
        return dict(outcome='wrong', reason=f'{type(failure).__name__}: {failure}'.splitlines()[0])
    return dict(outcome='ok' if relative_error <= MAX_RELATIVE_ERROR else 'wrong', error=relative_error)


def print_backend_table(platform: str, all_cells: list[dict]) -> None:
    from rich.table import Table

    from sinklab.attend.verification import MAX_RELATIVE_ERROR
    from sinklab.cli import terminal

    console = terminal.make_console()
    unsupported = {}
    for cell in all_cells:
        if cell['outcome'] == 'lacks':
            unsupported.setdefault((cell['backend'], cell['reason']), []).append(cell)
    table = Table(
        box=None,
        title=f"largest error on {platform}, forward and backward, over the largest entry of float32's definition; "
        f'bfloat16, T={CASE_LENGTH}, {CASE_HEADS} heads of {CASE_HEAD_WIDTH}; ok up to {MAX_RELATIVE_ERROR:.0e}',
        title_justify='left',
    )
    for heading in ('backend', 'operation', *SHOWN_MASKS):
        table.add_column(heading)
    rows = {}
    for cell in all_cells:
        rows.setdefault((cell['backend'], f'{cell["similarity"]}/{cell["normalizer"]}'), []).append(cell)
    for (backend, operation), cells in rows.items():
        if any(cell['outcome'] != 'lacks' for cell in cells):
            table.add_row(backend, operation, *map(format_backend_cell, cells))
    console.print(table)
    for (backend, reason), cells in unsupported.items():
        is_every_cell = len(cells) == len(rows) // len({name for name, _ in rows}) * len(SHOWN_MASKS)
        console.print(f'{backend} lacks {"everything" if is_every_cell else f"{len(cells)} cells"}: {reason}')
    if unsupported:
        console.print('what another lacks, dense and chunked have')
    for cell in all_cells:
        if 'error' not in cell and cell['outcome'] == 'wrong':
            operation = f'{cell["similarity"]}/{cell["normalizer"]}'
            console.print(terminal.make_cell(f'{cell["backend"]} {operation} {cell["mask"]}: {cell["reason"]}', 'red'))


def format_backend_cell(cell: dict) -> Any:
    from rich.text import Text

    if cell['outcome'] == 'lacks':
        return '-'
    if 'error' not in cell:
        return Text('fails', 'red')
    return Text(f'{cell["error"]:.0e}', '' if cell['outcome'] == 'ok' else 'red')
