"""Measure attention sinks of a trained model: a checkpoint of a run, or an open model.

example:
  sinklab measure runs/quickstart/softmax-0@600 --inputs=natural,random,repeated
  sinklab measure runs/quickstart/softmax-0 --all
  sinklab measure hf:openai-community/gpt2 --source='text:corpus/*.txt' --lengths=16,64,256 --eps=0.2,0.3 --json
  sinklab measure gguf:SmolLM2.gguf --inputs=natural,random,repeated
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from sinklab.analysis.bos import BosMode
from sinklab.cli.checkpoint_flags import add_model_argument
from sinklab.config.spec import DtypeName
from sinklab.errors import UserError
from sinklab.storage.atomic_write import open_writable_folder
from sinklab.storage.paths import parse_path

if TYPE_CHECKING:
    from sinklab.analysis.measure import MeasureRequest, MeasureResult
    from sinklab.analysis.model_protocol import MeasurableModel, ProgressFn
    from sinklab.metrics.metric import MetricInfo

PRINTED_METRICS = (
    'sink/1',
    'alpha/1',
    'alpha/floor',
    'sink/any',
    'mass/row',
    'entropy/row',
    'contribution/1',
    'qk/cos/difference',
)
LAYER_METRICS = {
    'perturbation': 'relative change of the other tokens when one token is changed, after each block',
    'selection': "rise of the loss (nats) without each layer's queries",
}
SHARED_FIELDS = 'source', 'sequences', 'length', 'seed', 'keys', 'positions', 'perturb', 'loss', 'selection'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument(
        '--inputs',
        default='natural',
        metavar='KIND,...',
        help='kinds of inputs: natural, random, repeated, domains (default: natural)',
    )
    parser.add_argument(
        '--source', help="texts to read, such as 'text:corpus/*.txt' (default: those of the run, or stdlib)"
    )
    parser.add_argument(
        '--sequences', type=int, metavar='N', help='number of texts (default: as in the probes of the run, or 100)'
    )
    parser.add_argument(
        '--length', type=int, metavar='T', help='tokens of each text (default: as in the probes of the run, or 64)'
    )
    parser.add_argument(
        '--lengths',
        default='',
        metavar='T,...',
        help='also measure Sink_1 of the first T tokens of each text, such as 16,32,64',
    )
    parser.add_argument(
        '--eps', default='', metavar='E,...', help='thresholds on alpha for --lengths, such as 0.2,0.3 (default: 0.3)'
    )
    parser.add_argument(
        '--keys',
        type=int,
        metavar='K',
        help='measure the sinks of each of the first K tokens (default: as in the probes of the run, or 10)',
    )
    parser.add_argument(
        '--seed',
        type=int,
        default=0,
        help='seed of random and repeated inputs, and of the replacement of --perturb (default: 0)',
    )
    parser.add_argument(
        '--positions',
        metavar='replace:K | swap:K',
        help='give token 1 the position of token K, or exchange the positions of both, such as swap:5',
    )
    parser.add_argument(
        '--perturb', type=int, metavar='K', help='also measure how other tokens change when token K is replaced'
    )
    parser.add_argument(
        '--selection',
        action='store_true',
        help='also measure the rise of the loss when the queries of one layer are 0; only for runs',
    )
    parser.add_argument('--loss', action='store_true', help='also measure the loss of these texts')
    parser.add_argument(
        '--bos',
        choices=get_args(BosMode),
        default='auto',
        help='BOS before each text: auto (as in training), none (never) or force (always)',
    )
    parser.add_argument(
        '--dtype',
        choices=get_args(DtypeName),
        help='dtype to compute in (default: that of the config of the run, or float32 for an open model)',
    )
    parser.add_argument(
        '--remote-code',
        action='store_true',
        help='run the Python code that comes with an open model; only for a model that you trust',
    )
    parser.add_argument(
        '--all', action='store_true', help='measure every checkpoint of a run, and say when its sink emerges'
    )
    parser.add_argument(
        '--out', metavar='DIR', help='write measured.json and the arrays of each kind of input into this new folder'
    )
    parser.add_argument('--json', action='store_true', help='print all numbers as JSON')


def run(args: argparse.Namespace, extra_args: list[str]) -> int:
    request = parse_request(args)
    if args.out and parse_path(args.out).exists() and not is_empty_folder(parse_path(args.out)):
        raise UserError(f'--out={args.out} already exists; give a new folder')
    from sinklab.analysis import measure, model_ref

    measured_models = (
        model_ref.open_all_checkpoints(args.model, args.bos, args.dtype)
        if args.all
        else [model_ref.open_model(*get_model_args(args))]
    )
    if args.out:
        with open_writable_folder(parse_path(args.out)):
            pass  # creating the folder fails before anything is measured, if it cannot be written
    names = None if args.out else ('',)  # only --out keeps matrices
    answers = [run_job(measured_model, request, names) for measured_model in measured_models]
    report = measure.make_record(answers, args.all)
    try:
        if args.json:
            print(json.dumps(report, indent=2, allow_nan=False))
        else:
            print_measurements(report['steps'] if args.all else [report])
            print_emergence(report['series'] if args.all else {})
        sys.stdout.flush()
    finally:  # also if the reader closes the output (| head); after printing, so that a full disk loses no result
        if args.out:
            with open_writable_folder(parse_path(args.out)):
                measure.write_results(answers, args.out, args.all)
    return 0


def is_empty_folder(path: Path) -> bool:
    """Return whether a folder is empty, such as that of a measurement that failed."""
    return path.is_dir() and not any(path.iterdir())


def run_job(model: 'MeasurableModel', request: 'MeasureRequest', names: tuple[str, ...] | None) -> 'MeasureResult':
    from sinklab.analysis.measure import make_job

    job = make_job(model, request)
    with show_progress(model.name, job.num_sequences) as on_progress:
        return job.run(on_progress, names)


def get_model_args(args: argparse.Namespace) -> tuple[str, str, bool, str | None]:
    return args.model, args.bos, args.remote_code, args.dtype


def parse_request(args: argparse.Namespace) -> 'MeasureRequest':
    kinds, lengths = parse_list('--inputs', args.inputs, str), parse_list('--lengths', args.lengths, int)
    thresholds = parse_list('--eps', args.eps, float)
    if thresholds and not lengths:
        raise UserError(f'--eps={args.eps} needs --lengths; give it, such as --lengths=16,32,64')
    from sinklab.analysis.measure import MeasureRequest

    fields = {name: getattr(args, name) for name in SHARED_FIELDS}
    return MeasureRequest(
        inputs=kinds, lengths=lengths, **fields | (dict(thresholds=thresholds) if thresholds else {})
    )


def parse_list(option: str, text: str, element_type: Callable) -> tuple:
    try:
        return tuple(dict.fromkeys(element_type(item) for item in text.split(',') if item))
    except ValueError as error:
        raise UserError(f'{option}={text} is not a list of {element_type.__name__}; separate by commas') from error


@contextlib.contextmanager
def show_progress(model_name: str, sequences: int) -> Iterator['ProgressFn']:
    """Show a progress bar of sequences, on a terminal only."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn

    from sinklab.cli import terminal

    console = terminal.make_console(stderr=True)
    columns = (
        terminal.make_progress_column('{task.description}'),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not terminal.is_live(console)) as bar:
        task = bar.add_task(f'measuring {model_name}', total=sequences)
        yield lambda count: bar.advance(task, count)


def print_measurements(reports: list[dict]) -> None:
    """Print measurements: a line for each metric of a single model, or a line for each of several models."""
    if len(reports) == 1:
        print(reports[0]['model'])
        print_one_model(reports[0])
    else:
        print_several_models(reports)
    positions = f', --positions={reports[0]["positions"]}' if 'positions' in reports[0] else ''
    print(f'computed in {reports[0]["dtype"]}, --bos={reports[0]["bos"]}{positions}')
    for report in reports:
        for remark in report.get('remarks', ()):
            print(f'{report["model"]}: {remark}')
        print_layer_metrics(report)
        for proposition in report['propositions']:
            number_text = '-' if proposition['number'] is None else f'{proposition["number"]:.2g}'
            verdict = 'holds' if proposition['holds'] else 'FAILS'
            print(f'{report["model"]}: {proposition["claim"]}: {number_text}, {verdict}')


def select_metrics(reports: list[dict]) -> list['MetricInfo']:
    """Select the metrics to print that a report has: PRINTED_METRICS, the loss, and Sink_1 by length."""
    from sinklab.analysis.measure import LOSS_INFO
    from sinklab.metrics import registry

    names = dict.fromkeys(name for item in reports for values in item['inputs'].values() for name in values)
    length_metrics = [registry.find_metric_info(name) for name in names if name.startswith('sink/1/T')]
    return [
        item for item in (*map(registry.find_metric_info, PRINTED_METRICS), LOSS_INFO) if item.name in names
    ] + length_metrics


def print_one_model(report: dict) -> None:
    """Print a table with a line for each metric and a column for each kind of input, with descriptions."""
    from sinklab.cli import terminal
    from sinklab.report.summary_table import format_legend

    inputs, rows, infos = report['inputs'], [], select_metrics([report])
    for info in infos:
        rows.append([info.label, *(format_metric(info, values.get(info.name)) for values in inputs.values())])
        rows[-1].append(info.description)
        if info.name == 'sink/1' and any(value is not None for value in report['published'].values()):
            published_values = [report['published'].get(name) for name in inputs]
            texts = ['-' if value is None else f'{value:.1f} %' for value in published_values]
            rows.append(['published', *texts, 'Published Sink_1 of this model.'])
    headings, console = ['number', *inputs, 'what it is'], terminal.make_console(width=120)
    if len(inputs) == 1:
        terminal.print_table(console, headings, rows, wrap_columns=headings[-1:])
    else:  # a line has no room for descriptions
        terminal.print_table(console, headings[:-1], [row[:-1] for row in rows])
        console.print(f'{format_legend([row[0] for row in rows], infos)}.', soft_wrap=not console.is_terminal)


def print_several_models(reports: list[dict]) -> None:
    """Print a table with a line for each step and kind of input."""
    from sinklab.cli import terminal
    from sinklab.report.summary_table import format_legend

    infos, rows = select_metrics(reports), []
    for report in reports:
        for name, values in report['inputs'].items():
            rows.append([report['model'], name, *(format_metric(info, values.get(info.name)) for info in infos)])
    headings = ['model', 'inputs', *(info.label for info in infos)]
    console = terminal.make_console(width=200)
    terminal.print_table(console, headings, rows, wrap_columns=['inputs'])
    console.print(f'{format_legend(headings, infos)}.', soft_wrap=not console.is_terminal)


def print_layer_metrics(report: dict) -> None:
    """Print the metrics of LAYER_METRICS by layer, if they were measured."""
    for name, values in report['inputs'].items():
        for family, description in LAYER_METRICS.items():
            layer_values = [value for key, value in values.items() if key.startswith(f'{family}/')]
            if layer_values:
                text = ' '.join('-' if value is None else f'{value:z.3g}' for value in layer_values)
                print(f'{report["model"]}, {name}: {description}: {text}')


def format_metric(info: 'MetricInfo', value: float | None) -> str:
    return '-' if value is None else info.format_value(value)


def print_emergence(series: dict[str, dict]) -> None:
    from sinklab.metrics.emergence import merge_emergence

    for name, entry in series.items():
        if not entry['emergence']:
            print(f'{name}: no sink has emerged')
            continue
        heads = ', '.join(f'layer {layer} head {head} (step {step})' for step, layer, head in entry['heads'][:3])
        heads_text = f'first heads with a mean alpha_1 above 0.3: {heads or "none"}'
        print(f'{name}: Sink_1 {merge_emergence([entry["emergence"]]).format_sentence()}; {heads_text}')
