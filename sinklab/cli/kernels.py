"""The measured table of `sinklab doctor --kernels`: operation x mask x backend, on the devices here."""

import json
import sys
from typing import Any

LENGTH, HEADS, WIDTH = 256, 2, 64
MASKS = 'causal', 'prefix', 'window', 'document', 'alibi'  # the rules of examples.py that are shown


def run(as_json: bool) -> int:
    """Prints the table; 1 where a backend that auto may choose here is wrong or fails."""
    import jax

    from sinklab import program_cache
    from sinklab.attend import examples
    from sinklab.attend.backends import BACKENDS
    from sinklab.attend.rule import Case

    program_cache.install()
    platform, operations, found = jax.default_backend(), examples.operations(), []
    for name in (name for name in BACKENDS if name != 'dense'):
        for number, ((similarity, normalizer), operation) in enumerate(operations.items(), 1):
            rules = examples.rules(operation, HEADS, LENGTH)
            for mask in MASKS:
                cell = dict(backend=name, similarity=similarity, normalizer=normalizer, mask=mask)
                case = Case(rules[mask], HEADS, WIDTH, WIDTH, 'bfloat16')
                found.append(cell | outcome(name, platform, case))
            if found[-1]['outcome'] != 'lacks':
                print(f'{name} [{number}/{len(operations)}] {similarity}/{normalizer}', file=sys.stderr)
    print(json.dumps(dict(platform=platform, kernels=found), indent=2)) if as_json else show(platform, found)
    return 1 if any(cell['outcome'] == 'wrong' for cell in found) else 0


def outcome(name: str, platform: str, case: Any) -> dict:
    """outcome: ok, wrong, or lacks; with the largest error or the reason."""
    from sinklab.attend.choice import cannot
    from sinklab.attend.verification import ACCURACY, Unsupported, error

    if reason := cannot(name, platform, case):
        return dict(outcome='lacks', reason=reason)
    try:
        found = error(name, case)
    except Unsupported as failure:
        return dict(outcome='wrong', reason=str(failure))
    except Exception as failure:  # whatever fails here is what was asked for
        return dict(outcome='wrong', reason=f'{type(failure).__name__}: {failure}'.splitlines()[0])
    return dict(outcome='ok' if found <= ACCURACY else 'wrong', error=found)


def show(platform: str, found: list[dict]) -> None:
    from rich.table import Table

    from sinklab.attend.verification import ACCURACY
    from sinklab.cli import terminal

    console = terminal.console()
    lacking = {}
    for cell in found:
        if cell['outcome'] == 'lacks':
            lacking.setdefault((cell['backend'], cell['reason']), []).append(cell)
    table = Table(
        box=None,
        title=f"largest error on {platform}, forward and backward, over the largest entry of float32's definition; "
        f'bfloat16, T={LENGTH}, {HEADS} heads of {WIDTH}; ok up to {ACCURACY:.0e}',
        title_justify='left',
    )
    for heading in ('backend', 'operation', *MASKS):
        table.add_column(heading)
    rows = {}
    for cell in found:
        rows.setdefault((cell['backend'], f'{cell["similarity"]}/{cell["normalizer"]}'), []).append(cell)
    for (backend, operation), cells in rows.items():
        if any(cell['outcome'] != 'lacks' for cell in cells):
            table.add_row(backend, operation, *map(cell_text, cells))
    console.print(table)
    for (backend, reason), cells in lacking.items():
        every = len(cells) == len(rows) // len({name for name, _ in rows}) * len(MASKS)
        console.print(f'{backend} lacks {"everything" if every else f"{len(cells)} cells"}: {reason}')
    if lacking:
        console.print('what another lacks, dense and chunked have')
    for cell in found:
        if 'error' not in cell and cell['outcome'] == 'wrong':
            operation = f'{cell["similarity"]}/{cell["normalizer"]}'
            console.print(terminal.cell(f'{cell["backend"]} {operation} {cell["mask"]}: {cell["reason"]}', 'red'))


def cell_text(cell: dict) -> Any:
    from rich.text import Text

    if cell['outcome'] == 'lacks':
        return '-'
    if 'error' not in cell:
        return Text('fails', 'red')
    return Text(f'{cell["error"]:.0e}', '' if cell['outcome'] == 'ok' else 'red')
