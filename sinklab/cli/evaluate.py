"""Evaluate a checkpoint of a run on tasks of lm-evaluation-harness, such as HellaSwag.

example:
  sinklab evaluate runs/quickstart/softmax-0@600 --tasks=hellaswag,piqa --limit=500
  sinklab evaluate runs/quickstart/softmax-0 --tasks=mine --include=tasks --few_shot=2 --json
"""

import argparse
import json

from sinklab.cli import terminal
from sinklab.cli.flag_types import add_options, non_negative_int, positive_int
from sinklab.errors import UserError, format_extra_command
from sinklab.run_dir import MODEL_PREFIXES
from sinklab.storage.paths import parse_path

OPTIONS = {
    'include': (str, 'DIR', 'folder with YAML files of your own tasks'),
    'limit': (positive_int, 'N', 'only the first N texts of each task'),
    'few_shot': (non_negative_int, 'K', 'solved examples before each text (default: as the task defines)'),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'run', metavar='RUN[@STEP]', help='run folder, such as runs/softmax@500 (default: its newest step)'
    )
    parser.add_argument(
        '--tasks', required=True, metavar='NAME,...', help='tasks or groups, such as hellaswag,piqa; * is a wildcard'
    )
    add_options(parser, OPTIONS)
    parser.add_argument('--json', action='store_true', help='print all numbers as JSON')


def run(args: argparse.Namespace, extra_args: list[str]) -> int:
    tasks = [name for name in args.tasks.split(',') if name]
    if not tasks:
        raise UserError('--tasks= is empty; give names, such as --tasks=hellaswag')
    if args.include and not parse_path(args.include).is_dir():
        raise UserError(f'--include={args.include} is not a folder; give one with YAML files of tasks')
    if args.run.startswith(MODEL_PREFIXES):
        raise UserError(
            f'{args.run} is an open model and no run; evaluate it with lm_eval --model hf --model_args pretrained=DIR'
        )
    try:
        from sinklab.analysis import lm_eval
    except ImportError as error:
        raise UserError(f'evaluate needs {error.name}; install it: {format_extra_command("evaluate")}') from error
    results = lm_eval.evaluate_tasks(args.run, tasks, args.include, args.limit, args.few_shot)
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        print_results(results)
    return 0


def print_results(results: dict) -> None:
    rows = []
    for name, task in results['tasks'].items():
        counts = ['-' if count is None else count for count in (task['samples'], task['few_shot'])]
        for metric, value, error in list_metrics(task['numbers']):
            rows.append([name, metric, format_number(value), '-' if error is None else format_number(error), *counts])
    headings = 'task', 'metric', 'value', 'standard error', 'texts', 'few-shot'
    terminal.print_table(terminal.make_console(width=200), headings, rows, wrap_columns=['metric'])
    print(results['model'])


def format_number(value: float) -> str:
    return f'{value:z.4f}' if abs(value) < 1e5 else f'{value:.3e}'


def list_metrics(numbers: dict[str, float]) -> list[tuple[str, float, float | None]]:
    """List (name, value, standard error) of the metrics of a task.

    Args:
        numbers: {'NAME,FILTER': value} of lm-evaluation-harness, with standard errors as 'NAME_stderr,FILTER'.

    Returns:
        One tuple for each metric; a filter of answers is appended to the name, in parentheses.
    """
    rows = []
    for key, value in numbers.items():
        name, _, filter_name = key.partition(',')
        if not name.endswith('_stderr'):
            label = name if filter_name in ('', 'none') else f'{name} ({filter_name})'
            rows.append((label, value, numbers.get(f'{name}_stderr,{filter_name}')))
    return rows
