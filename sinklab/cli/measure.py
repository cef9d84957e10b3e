"""Measure attention sinks of a trained model: a checkpoint of a run, or an open model.

example:
  sinklab measure runs/quickstart/softmax-0@600 --inputs=natural,random,repeated
  sinklab measure runs/quickstart/softmax-0 --all
  sinklab measure hf:openai-community/gpt2 --source='text:corpus/*.txt' --lengths=16,64,256 --eps=0.2,0.3 --json
  sinklab measure gguf:SmolLM2.gguf --inputs=natural,random,repeated
"""

import argparse
import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, get_args

from sinklab.analysis.bos import BosMode
from sinklab.cli import terminal
from sinklab.cli.checkpoint_flags import add_model_argument
from sinklab.cli.flag_types import add_options
from sinklab.config.spec import DtypeName
from sinklab.errors import UserError
from sinklab.metrics.emergence import merge_emergence
from sinklab.metrics.registry import METRIC_INFOS, find_metric_info
from sinklab.report.summary_table import format_legend
from sinklab.storage.files import list_entries, open_writable_folder
from sinklab.storage.paths import parse_path

if TYPE_CHECKING:
    from sinklab.analysis.measure import MeasureRequest, MeasureResult
    from sinklab.analysis.model_protocol import MeasurableModel

PRINTED_METRICS = (
    'sink/1',
    'alpha/1',
    'alpha/floor',
    'sink/any',
    'mass/row',
    'entropy/row',
    'contribution/1',
    'qk/cos/difference',
    'induction_score',
    'induction_score/max',
    'gradient_sink_ratio',
)
SHARED_FIELDS = 'source', 'sequences', 'length', 'seed', 'keys', 'positions', 'loss', 'gradients'


OPTIONS = {
    'inputs': (str, 'KIND,...', 'kinds of inputs: natural, random, repeated, induction (default: natural)'),
    'source': (str, 'SOURCE', "texts, such as 'text:corpus/*.txt' (default: those of the run, or stdlib)"),
    'sequences': (int, 'N', 'number of texts (default: as in the probes of the run, or 100)'),
    'length': (int, 'T', 'tokens of each text (default: as in the probes of the run, or 64)'),
    'lengths': (str, 'T,...', 'also measure Sink_1 of the first T tokens of each text, such as 16,32,64'),
    'eps': (str, 'E,...', 'thresholds on alpha for --lengths, such as 0.2,0.3 (default: 0.3)'),
    'keys': (int, 'K', 'measure the sinks of the first K tokens (default: as in the probes of the run, or 10)'),
    'seed': (int, 'N', 'seed of random, repeated and induction inputs (default: 0)'),
    'quantize': (
        str,
        'BITS,...',
        'also the loss of a run, unrounded and with weights and activations of these bits, such as 8,4',
    ),
    'positions': (str, 'KIND:K', 'replace:K gives token 1 the position of token K, and swap:K exchanges both'),
    'bos': (get_args(BosMode), 'MODE', 'BOS before each text: auto (as in training), none or force (default: auto)'),
    'dtype': (get_args(DtypeName), 'DTYPE', 'dtype to compute in (default: that of the run, or float32)'),
    'out': (str, 'DIR', 'write measured.json and the arrays of each kind of input into this new folder'),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_options(parser, OPTIONS)
    parser.set_defaults(inputs='natural', lengths='', eps='', quantize='', seed=0, bos='auto')
    parser.add_argument('--loss', action='store_true', help='also measure the loss of these texts')
    parser.add_argument('--gradients', action='store_true', help='also measure the gradient-sink ratio of a run')
    parser.add_argument(
        '--all', action='store_true', help='measure every checkpoint of a run, and say when its sink emerges'
    )
    parser.add_argument('--json', action='store_true', help='print all numbers as JSON')


def run(args: argparse.Namespace, extra_args: list[str]) -> int:
    request = parse_request(args)
    if args.out:
        if list_entries(parse_path(args.out)):
            raise UserError(f'--out={args.out} contains files; give a new folder')
        with open_writable_folder(parse_path(args.out)):
            pass  # refused before anything is measured
    from sinklab.analysis import measure, model_ref

    models: Iterable
    if args.all:
        models = model_ref.open_all_checkpoints(args.model, args.bos, args.dtype)
    else:
        models = [model_ref.open_model(args.model, args.bos, args.dtype)]
    names = None if args.out else ('',)  # only --out keeps matrices
    results = [run_job(model, request, names) for model in models]
    report = measure.make_record(results, args.all)
    try:
        if args.out:
            with open_writable_folder(parse_path(args.out)):
                measure.write_results(results, args.out, args.all)
    finally:  # numbers that cannot be written are printed nevertheless
        if args.json:
            print(json.dumps(report, indent=2, allow_nan=False))
        else:
            print_measurements(report['steps'] if args.all else [report])
            print_emergence(report['series'] if args.all else {})
    return 0


def run_job(model: 'MeasurableModel', request: 'MeasureRequest', names: tuple[str, ...] | None) -> 'MeasureResult':
    """Measure a model, with a progress bar of sequences on a terminal."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from sinklab.analysis.measure import make_job

    job = make_job(model, request)
    console = terminal.make_console(stderr=True)
    columns = TextColumn('{task.description}', markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not terminal.is_live(console)) as bar:
        task = bar.add_task(f'measuring {model.name}', total=job.num_sequences)
        return job.run(lambda count: bar.advance(task, count), names)


def parse_request(args: argparse.Namespace) -> 'MeasureRequest':
    from sinklab.analysis.measure import MeasureRequest

    kinds, lengths = parse_list('--inputs', args.inputs, str), parse_list('--lengths', args.lengths, int)
    thresholds = parse_list('--eps', args.eps, float)
    if thresholds and not lengths:
        raise UserError(f'--eps={args.eps} needs --lengths; give it, such as --lengths=16,32,64')
    fields = {name: getattr(args, name) for name in SHARED_FIELDS} | (
        dict(thresholds=thresholds) if thresholds else {}
    )
    quantize = parse_list('--quantize', args.quantize, int)
    return MeasureRequest(inputs=kinds, lengths=lengths, quantize=quantize, **fields)


def parse_list(option: str, text: str, element_type: Callable) -> tuple:
    try:
        return tuple(dict.fromkeys(element_type(item) for item in text.split(',') if item))
    except ValueError as error:
        raise UserError(f'{option}={text} is not a list of {element_type.__name__}; separate by commas') from error


def print_measurements(reports: list[dict]) -> None:
    """Print measurements: a line for each metric of a single model, or a line for each of several models."""
    names = dict.fromkeys(name for report in reports for values in report['inputs'].values() for name in values)
    main_names = dict.fromkeys([*PRINTED_METRICS, *(info.name for info in METRIC_INFOS if info.in_table)])
    printed_names = [name for name in main_names if name in names]
    printed_names += [name for name in names if name.startswith(('loss', 'sink/1/T'))]
    infos = list(map(find_metric_info, printed_names))
    headings = ['model', 'inputs', *(info.label for info in infos), 'published Sink_1']
    rows = []
    for report in reports:
        for name, values in report['inputs'].items():
            cells = [format_metric(info.format_value, values.get(info.name)) for info in infos]
            published = format_metric('{:.1f} %'.format, report['published'].get(name))
            rows.append([report['model'], name, *cells, published])
    columns = [column for column in zip(headings, *rows, strict=True) if {*column[1:]} != {'-'}]
    console = terminal.make_console(width=200)
    if len(reports) == 1:
        print(reports[0]['model'])
        inputs, *lines = columns[1:]
        terminal.print_table(console, ['number', *inputs[1:]], lines)
    else:
        shown_headings, *lines = zip(*columns, strict=True)
        terminal.print_table(console, shown_headings, lines, wrap_columns=['inputs'])
    terminal.print_wrapped(f'{format_legend([info.label for info in infos], infos)}.')
    positions = f', --positions={reports[0]["positions"]}' if 'positions' in reports[0] else ''
    print(f'computed in {reports[0]["dtype"]}, --bos={reports[0]["bos"]}{positions}')
    for report in reports:
        for remark in report.get('remarks', ()):
            print(f'{report["model"]}: {remark}')


def format_metric(format_value: Callable[[float], str], value: float | None) -> str:
    return '-' if value is None else format_value(value)


def print_emergence(series: dict[str, dict]) -> None:
    for name, entry in series.items():
        if not entry['emergence']:
            print(f'{name}: no sink has emerged')
            continue
        heads = ', '.join(f'layer {layer} head {head} (step {step})' for step, layer, head in entry['heads'][:3])
        heads_text = f'first heads, from 0, with a mean alpha_1 above 0.3: {heads or "none"}'
        print(f'{name}: Sink_1 {merge_emergence([entry["emergence"]]).format_sentence()}; {heads_text}')
