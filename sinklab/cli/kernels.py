"""The measured table of `sinklab doctor --kernels`: operation x mask x backend, on the devices here."""

import dataclasses
import json
import sys

LENGTH, HEADS, WIDTH = 256, 2, 64
MASKS = 'causal', 'prefix', 'window', 'document', 'alibi'


def run(as_json: bool) -> int:
    """Prints the table; 1 where a backend that auto may choose here is wrong or fails."""
    import jax

    from sinklab.attend import fused

    platform, found = jax.default_backend(), []
    for name in (name for name in fused.BACKENDS if name != 'dense'):
        for number, (similarity, normalizer) in enumerate(operations(), 1):
            for mask in MASKS:
                cell = dict(backend=name, similarity=similarity, normalizer=normalizer, mask=mask)
                found.append(cell | measured(name, platform, similarity, normalizer, mask))
            if found[-1]['outcome'] != 'lacks':
                print(f'{name} [{number}/{len(operations())}] {similarity}/{normalizer}', file=sys.stderr)
    print(json.dumps(dict(platform=platform, kernels=found), indent=2)) if as_json else show(platform, found)
    return 1 if any(cell['outcome'] == 'wrong' for cell in found) else 0


def operations() -> list[tuple[str, str]]:
    from sinklab.spec import PAIRS

    return [(similarity, normalizer) for similarity, normalizers in PAIRS.items() for normalizer in normalizers]


def measured(name, platform, similarity, normalizer, mask) -> dict:
    """outcome: ok, wrong, or lacks; with the largest error or the reason."""
    from sinklab.attend import fused
    from sinklab.spec import Attention

    power = 2.0 if normalizer == 'p_norm' else None
    attention = Attention(similarity, normalizer, 'identity', gain=1.0, power=power, offset=0.0)
    case = fused.Case(attention, LENGTH, HEADS, WIDTH, WIDTH, 'bfloat16', curve=mask == 'alibi')
    case = case if mask == 'alibi' else dataclasses.replace(case, mask=mask)
    if reason := fused.cannot(name, platform, case):
        return dict(outcome='lacks', reason=reason)
    try:
        error = fused.error(name, case)
    except Exception as failure:  # whatever fails here is what was asked for
        return dict(outcome='wrong', reason=f'{type(failure).__name__}: {failure}'.splitlines()[0])
    return dict(outcome='ok' if error <= fused.ACCURACY else 'wrong', error=error)


def show(platform: str, found: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    from sinklab.attend import fused

    console = Console(highlight=False)
    lacking = {}
    for cell in found:
        if cell['outcome'] == 'lacks':
            lacking.setdefault((cell['backend'], cell['reason']), []).append(cell)
    table = Table(
        box=None,
        title=f"largest error on {platform}, forward and backward, over the largest entry of float32's definition; "
        f'bfloat16, T={LENGTH}, {HEADS} heads of {WIDTH}; ok up to {fused.ACCURACY:.0e}',
        title_justify='left',
    )
    for heading in ('backend', 'operation', *MASKS):
        table.add_column(heading)
    rows = {}
    for cell in found:
        rows.setdefault((cell['backend'], f'{cell["similarity"]}/{cell["normalizer"]}'), []).append(cell)
    for (backend, operation), cells in rows.items():
        if any(cell['outcome'] != 'lacks' for cell in cells):
            table.add_row(backend, operation, *map(shown, cells))
    console.print(table)
    for (backend, reason), cells in lacking.items():
        every = len(cells) == len(rows) // len({name for name, _ in rows}) * len(MASKS)
        console.print(f'{backend} lacks {"everything" if every else f"{len(cells)} cells"}: {reason}')
    if lacking:
        console.print('what another lacks, dense and chunked have')
    for cell in found:
        if 'error' not in cell and cell['outcome'] == 'wrong':
            operation = f'{cell["similarity"]}/{cell["normalizer"]}'
            console.print(f'[red]{cell["backend"]} {operation} {cell["mask"]}: {cell["reason"]}[/]')


def shown(cell: dict) -> str:
    if cell['outcome'] == 'lacks':
        return '-'
    if 'error' not in cell:
        return '[red]fails[/]'
    return f'{cell["error"]:.0e}' if cell['outcome'] == 'ok' else f'[red]{cell["error"]:.0e}[/]'
