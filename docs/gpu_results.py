"""Tables of docs/results/gpu.md, from the results of benchmarks/gpu.py.

    python -m docs.gpu_results [DIR]

With DIR the script first copies its result files to docs/results/. It names what was not run.
"""

import json
import shutil
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import gpu_kernels, gpu_speed
from docs.page_parts import write_part
from docs.reference import format_table

RESULTS_DIR = Path(__file__).parent / 'results'
PAGE = RESULTS_DIR / 'gpu.md'
MAX_ERROR = 0.02  # as in the verification at the start of a run


def read_results(name: str) -> dict:
    file = RESULTS_DIR / f'gpu_{name}.json'
    return json.loads(file.read_text(encoding='utf-8')) if file.exists() else dict(sessions=[], cells={})


def format_sessions() -> str:
    """Return a table of machines, versions and commands, with the time of their cells."""
    lines = []
    for results in map(read_results, ('kernels', 'speed')):
        for number, session in enumerate(results['sessions']):
            cells = [cell for cell in results['cells'].values() if cell['session'] == number]
            code = session['code']
            versions = ', '.join(
                f'{name} {code[name]}' for name in ('python', 'jax', 'flax', 'numpy') if code.get(name)
            )
            minutes = format_number([cell['seconds'] / 60 for cell in cells if 'seconds' in cell], '.1f', sum)
            commit = (code.get('commit') or 'unknown')[:8]
            machine = f'{session["device"]}; {session["machine"]}'
            lines.append([session['date'], machine, versions, commit, f'`{session["command"]}`', len(cells), minutes])
    headings = ['date', 'machine', 'versions', 'commit', 'command', 'cells', 'minutes of cells']
    return format_table(headings, lines)


def format_kernels() -> str:
    """Return the largest errors of each backend, the cells above MAX_ERROR, and the errors of special cells."""
    cells = read_results('kernels')['cells']
    planned = gpu_kernels.make_cells(is_tiny=False)
    lines, problems = [], []
    for backend in gpu_kernels.BACKENDS:
        names = [name for name, cell in planned.items() if cell['backend'] == backend]
        compared = [cells[name] for name in names if 'output' in cells.get(name, {})]
        unsupported = sum('unsupported' in cells.get(name, {}) for name in names)
        errors = [format_number([cell[name] for cell in compared], '.1e', max) for name in gpu_kernels.OUTPUTS]
        lines.append([backend, len(compared), unsupported, len(names) - len(compared) - unsupported, *errors])
        problems += [name for name in names if gpu_kernels.get_largest_error(cells.get(name, {})) > MAX_ERROR]
        problems += [f'{name} ({cells[name]["failed"]})' for name in names if 'failed' in cells.get(name, {})]
    special = [name for name, cell in planned.items() if gpu_kernels.is_special(cell)]
    special_errors = [
        [name, f'{gpu_kernels.get_largest_error(cells[name]):.1e}']
        for name in special
        if 'output' in cells.get(name, {})
    ]
    headings = ['backend', 'compared', 'unsupported', 'missing', *gpu_kernels.OUTPUTS]
    return (
        f'{format_table(headings, lines)}Cells with an error above {MAX_ERROR:.0%}, or that failed: '
        f'{", ".join(problems) or "none"}.\n\nSpecial cells compared: {len(special_errors)} of {len(special)}.\n\n'
        + (format_table(['special cell', 'largest error'], special_errors) if special_errors else '')
    )


def format_attention() -> str:
    """Return TFLOP/s of attention, a line for each shape and direction."""
    cells = read_results('speed')['cells']
    lines = []
    total = 0
    for name, cell in gpu_speed.make_cells(is_tiny=False).items():
        for direction in gpu_speed.DIRECTIONS if 'width' in cell else ():
            total += 1
            if speeds := cells.get(name, {}).get(direction):
                figures = (
                    format_number(speeds.get(kernel), '.0f', statistics.median) for kernel in gpu_speed.KERNELS
                )
                lines.append([cell['length'], cell['width'], direction.replace('_', ' '), *figures])
    return format_measured(['T', 'K', 'direction', *gpu_speed.KERNELS], lines, total)


def format_steps() -> str:
    """Return milliseconds, MFU and planned memory of training steps, a line for each model and variant."""
    cells = read_results('speed')['cells']
    lines = []
    total = 0
    for name, cell in gpu_speed.make_cells(is_tiny=False).items():
        for variant in (*gpu_speed.STEP_VARIANTS, gpu_speed.PLAIN_JAX) if 'model' in cell else ():
            total += 1
            if not (step := cells.get(name, {}).get('steps', {}).get(variant)):
                continue
            milliseconds = f'{1e3 * statistics.median(step["seconds"]):.1f}'
            mfu = format_number(step['mfu'] and [100 * step['mfu']], '.1f', max)
            memory = f'{step["planned_bytes"] / 1e9:.1f}' if 'planned_bytes' in step else ''
            layout = [step.get('attention', ''), step['remat'], cells[name]['batch']]
            lines.append([cell['model'], variant, *layout, milliseconds, mfu, memory])
    headings = ['model', 'step', 'attention', 'remat', 'batch', 'ms', 'MFU, %', 'planned GB']
    return format_measured(headings, lines, total)


def format_measured(headings: list[str], lines: list[list], total: int) -> str:
    """Return a table of what was measured, and how much of the plan was not."""
    text = format_table(headings, lines) if lines else ''
    return text + (f'Not run: {total - len(lines)} of {total}.\n' if len(lines) < total else '')


def format_number(values: Sequence[float] | None, number_format: str, reduce: Callable) -> str:
    return format(reduce(values), number_format) if values else ''


def make_parts() -> dict[str, str]:
    """Return the generated parts of the page."""
    return {
        'sessions': format_sessions(),
        'kernels': format_kernels(),
        'attention': format_attention(),
        'steps': format_steps(),
    }


def copy_results(folder: Path) -> None:
    """Copy the result files of a folder to docs/results; exit if there are none, or if they are of --tiny."""
    files = sorted(folder.glob('gpu_*.json'))
    sessions = [session for file in files for session in json.loads(file.read_text())['sessions']]
    if not files or any('--tiny' in session['command'] for session in sessions):
        sys.exit(f'{folder} has {"results of --tiny" if files else "no results"}; give the folder of a measurement')
    for file in files:
        shutil.copy(file, RESULTS_DIR)


if __name__ == '__main__':
    for folder in sys.argv[1:]:
        copy_results(Path(folder))
    for name, content in make_parts().items():
        write_part(PAGE, name, content)
