"""Evaluate a checkpoint or an open model on tasks of lm-evaluation-harness, such as HellaSwag.

example:
  sinklab evaluate runs/quickstart/softmax-0@600 --tasks=hellaswag,piqa --limit=500
  sinklab evaluate runs/quickstart/softmax-0 --tasks=mine --include=tasks --few_shot=2 --json
"""

import argparse
import json

from sinklab.cli.reader import model_argument
from sinklab.escape import escape_control
from sinklab.files.place import place
from sinklab.install import format_extra_command
from sinklab.record import Refusal


def arguments(verb: argparse.ArgumentParser) -> None:
    model_argument(verb)
    verb.add_argument(
        '--tasks',
        required=True,
        metavar='NAME,...',
        help='tasks or groups of tasks, such as hellaswag,piqa; * stands for any characters',
    )
    verb.add_argument('--include', metavar='DIR', help='folder with YAML files of your own tasks')
    verb.add_argument('--limit', type=int, metavar='N', help='only the first N texts of each task')
    verb.add_argument(
        '--few_shot',
        type=int,
        metavar='K',
        help='number of solved examples before each text (default: as the task says)',
    )
    verb.add_argument('--out', metavar='FILE', help='also write all numbers as JSON into this new file')
    verb.add_argument('--json', action='store_true', help='print all numbers as JSON')


def run(given: argparse.Namespace, rest: list[str]) -> int:
    if rest:
        raise Refusal(f'{rest[0]} is unknown; see sinklab evaluate --help')
    check(given)
    try:
        from sinklab.observe import downstream
    except ImportError as error:
        raise Refusal(f'evaluate needs {error.name}; install it: {format_extra_command("evaluate")}') from error
    tasks = [name for name in given.tasks.split(',') if name]
    found = downstream.evaluated(given.model, tasks, given.include, given.limit, given.few_shot)
    if given.out:
        write(given.out, found)
    if given.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)
    return 0


def check(given: argparse.Namespace) -> None:
    if not given.tasks.strip(','):
        raise Refusal('--tasks= is empty; give names, such as --tasks=hellaswag')
    if (given.limit or 1) < 1 or given.limit == 0 or (given.few_shot or 0) < 0:
        raise Refusal(f'--limit={given.limit} --few_shot={given.few_shot} is none; give at least 1 and 0')
    if given.include and not place(given.include).is_dir():
        raise Refusal(f'--include={given.include} is no folder; give one with YAML files of tasks')
    if given.out and place(given.out).exists():
        raise Refusal(f'--out={given.out} is there already; give a new file')


def write(out: str, found: dict) -> None:
    from sinklab.files.whole import whole, writable

    path = place(out)
    with writable(path.parent), whole(path) as unfinished:
        unfinished.write_text(json.dumps(found, indent=2) + '\n', encoding='utf-8')


def show(found: dict) -> None:
    from sinklab.cli import terminal

    rows = []
    for name, task in found['tasks'].items():
        for key, value, error in metrics(task['numbers']):
            ends = ('-' if one is None else str(one) for one in (task['samples'], task['few_shot']))
            rows.append([name, key, text(value), '-' if error is None else text(error), *ends])
    headings = 'task', 'metric', 'value', 'standard error', 'texts', 'few-shot'
    terminal.print_table(terminal.console(width=200), headings, rows, words=['metric'])
    print(', '.join([escape_control(found['model']), *beside(found.get('measured', {}))]))


def text(value: float) -> str:
    return f'{value:z.4f}' if abs(value) < 1e5 else f'{value:.3e}'


def beside(measured: dict[str, float]) -> list[str]:
    """What the run itself has measured after the same step."""
    from sinklab.measure import table as measures

    numbers = {name: measures.number(name) for name in measured}
    return [
        f'{number.label} {number.text(measured[name])}' if number else f'{name} {measured[name]:.3f}'
        for name, number in numbers.items()
    ]


def metrics(numbers: dict[str, float]) -> list[tuple[str, float, float | None]]:
    """(name, value, standard error) of each; a filter of answers stands behind the name."""
    found = []
    for key, value in numbers.items():
        name, _, filtered = key.partition(',')
        if not name.endswith('_stderr'):
            label = name if filtered in ('', 'none') else f'{name} ({filtered})'
            found.append((label, value, numbers.get(f'{name}_stderr,{filtered}')))
    return found
