"""Measure attention sinks of a trained model: a checkpoint of a run, or an open model of Hugging Face.

example:
  sinklab measure runs/quickstart/softmax-0@600 --inputs=natural,random,repeated
  sinklab measure runs/quickstart/softmax-0 --all
  sinklab measure hf:openai-community/gpt2 --source='text:corpus/*.txt' --lengths=16,64,256 --eps=0.2,0.3 --json
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from sinklab.cli.reader import model_argument
from sinklab.escape import escape_control
from sinklab.files.place import place
from sinklab.files.whole import writable
from sinklab.record import Refusal

if TYPE_CHECKING:
    from sinklab.measure.measure import Number
    from sinklab.observe.study import Answer, Question
    from sinklab.observe.subject import Subject, Watch

BOS = 'auto', 'none', 'force'
TOLD = (
    'sink/1',
    'alpha/1',
    'alpha/floor',
    'sink/any',
    'mass/row',
    'entropy/row',
    'contribution/1',
    'qk/cos/difference',
)
BY_LAYER = {
    'perturbation': 'relative change of the other tokens when one token is changed, after each block',
    'selection': "rise of the loss (nats) without each layer's queries",
}
SAME = 'source', 'sequences', 'length', 'seed', 'keys', 'positions', 'perturb', 'loss', 'selection'


def arguments(verb: argparse.ArgumentParser) -> None:
    model_argument(verb)
    verb.add_argument(
        '--inputs',
        default='natural',
        metavar='KIND,...',
        help='kinds of inputs: natural, random, repeated, domains (default: natural)',
    )
    verb.add_argument(
        '--source', help="texts to read, such as 'text:corpus/*.txt' (default: those of the run, or stdlib)"
    )
    verb.add_argument(
        '--sequences', type=int, metavar='N', help='number of texts (default: as the run was probed, or 100)'
    )
    verb.add_argument(
        '--length', type=int, metavar='T', help='tokens of each text (default: as the run was probed, or 64)'
    )
    verb.add_argument(
        '--lengths',
        default='',
        metavar='T,...',
        help='also Sink_1 of the first T tokens of each text, such as 16,32,64',
    )
    verb.add_argument(
        '--eps', default='', metavar='E,...', help='thresholds on alpha for --lengths, such as 0.2,0.3 (default: 0.3)'
    )
    verb.add_argument(
        '--keys',
        type=int,
        metavar='K',
        help='sinks of each of the first K tokens (default: as the run was probed, or 10)',
    )
    verb.add_argument('--seed', type=int, default=0, help='seed of random and repeated inputs (default: 0)')
    verb.add_argument(
        '--positions',
        metavar='replace:K | swap:K',
        help='give token 1 the position of token K, or exchange the positions of both, such as swap:5',
    )
    verb.add_argument(
        '--perturb', type=int, metavar='K', help='also how much the other tokens change when token K is another one'
    )
    verb.add_argument(
        '--selection',
        action='store_true',
        help='also how much the loss rises when the queries of one layer are 0; of runs alone',
    )
    verb.add_argument('--loss', action='store_true', help='also the loss of these texts')
    verb.add_argument(
        '--bos',
        choices=BOS,
        default='auto',
        help='BOS before each text: auto (as in training), none (never) or force (always)',
    )
    verb.add_argument(
        '--remote-code',
        action='store_true',
        help='run the Python code that comes with an open model; only for a model that you trust',
    )
    verb.add_argument(
        '--all', action='store_true', help='measure every checkpoint of a run, and say when its sink emerges'
    )
    verb.add_argument(
        '--out', metavar='DIR', help='write measured.json and the arrays of each kind of input into this new folder'
    )
    verb.add_argument('--json', action='store_true', help='print all numbers as JSON')


def run(given: argparse.Namespace, rest: list[str]) -> int:
    if rest:
        raise Refusal(f'{rest[0]} is unknown; see sinklab measure --help')
    question = asked(given)
    if given.out and place(given.out).exists():
        raise Refusal(f'--out={given.out} is there already; give a new folder')
    from sinklab.observe import opening, study

    subjects = opening.subjects(given.model, given.bos) if given.all else [opening.subject(*model(given))]
    if given.out:
        with writable(place(given.out).parent):
            pass  # before anything is measured
    answers = [answer(subject, question) for subject in subjects]
    found = study.record(answers, given.all)
    try:
        if given.json:
            print(json.dumps(found, indent=2, allow_nan=False))
        else:
            show(found['steps'] if given.all else [found])
            show_series(found['series'] if given.all else {})
        sys.stdout.flush()
    finally:  # also when the reader of the output has gone (| head); after it, so that a full disk costs no result
        if given.out:
            with writable(place(given.out)):
                study.keep(answers, given.out, given.all)
    return 0


def answer(subject: 'Subject', question: 'Question') -> 'Answer':
    from sinklab.observe.study import study

    begun = study(subject, question)
    with progress(subject.name, begun.sequences) as watch:
        return begun.answer(watch)


def model(given: argparse.Namespace) -> tuple[str, str, bool]:
    return given.model, given.bos, given.remote_code


def asked(given: argparse.Namespace) -> 'Question':
    kinds, lengths = listed('--inputs', given.inputs, str), listed('--lengths', given.lengths, int)
    thresholds = listed('--eps', given.eps, float)
    if thresholds and not lengths:
        raise Refusal(f'--eps={given.eps} is of --lengths; give these, such as --lengths=16,32,64')
    from sinklab.observe.study import Question

    same = {name: getattr(given, name) for name in SAME}
    return Question(inputs=kinds, lengths=lengths, **same | (dict(thresholds=thresholds) if thresholds else {}))


def listed(option: str, text: str, kind: Callable) -> tuple:
    try:
        return tuple(dict.fromkeys(kind(one) for one in text.split(',') if one))
    except ValueError as error:
        raise Refusal(f'{option}={text} is no list of {kind.__name__}; separate them by commas') from error


@contextlib.contextmanager
def progress(name: str, sequences: int) -> Iterator['Watch']:
    """Counts sequences on a terminal, and nowhere else."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn

    from sinklab.cli import terminal

    console = terminal.console(stderr=True)
    columns = terminal.column('{task.description}'), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not terminal.is_live(console)) as bar:
        task = bar.add_task(f'measuring {escape_control(name)}', total=sequences)
        yield lambda read: bar.advance(task, read)


def show(found: list[dict]) -> None:
    """Print what was measured: of one model a line for each number, of several a line for each model."""
    if len(found) == 1:
        print(escape_control(found[0]['model']))
        show_one(found[0])
    else:
        show_several(found)
    for one in found:
        for remark in one.get('remarks', ()):
            print(escape_control(f'{one["model"]}: {remark}'))
        show_layers(one)
        for told in one['propositions']:
            number = '-' if told['number'] is None else f'{told["number"]:.2g}'
            verdict = 'holds' if told['holds'] else 'FAILS'
            print(escape_control(f'{one["model"]}: {told["claim"]}: {number}, {verdict}'))


def shown_numbers(found: list[dict]) -> list['Number']:
    """Return the numbers of TOLD that some of these have, and what was asked for beside them."""
    from sinklab.measure import table as measures
    from sinklab.observe.study import LOSS

    names = dict.fromkeys(name for one in found for values in one['inputs'].values() for name in values)
    asked = [measures.number(name) for name in names if name.startswith('sink/1/T')]
    return [one for one in (*map(measures.number, TOLD), LOSS) if one.name in names] + asked


def show_one(found: dict) -> None:
    """Print a table with a line for each number, a column for each kind of input, and what the numbers are."""
    from sinklab.cli import terminal
    from sinklab.report.closing import legend

    inputs, rows, numbers = found['inputs'], [], shown_numbers([found])
    for number in numbers:
        rows.append([number.label, *(cell(number, values.get(number.name)) for values in inputs.values())])
        rows[-1].append(number.sentence)
        if number.name == 'sink/1' and any(value is not None for value in found['published'].values()):
            each = [found['published'].get(name) for name in inputs]
            texts = ['-' if value is None else f'{value:.1f} %' for value in each]
            rows.append(['published', *texts, 'Sink_1 as published of this row or model.'])
    headings, out = ['number', *inputs, 'what it is'], terminal.console(width=120)
    if len(inputs) == 1:
        terminal.print_table(out, headings, rows, words=headings[-1:])
    else:  # there is no room for sentences in a line
        terminal.print_table(out, headings[:-1], [row[:-1] for row in rows])
        out.print(f'{legend([row[0] for row in rows], numbers)}.', soft_wrap=not out.is_terminal)


def show_several(found: list[dict]) -> None:
    """Print a table with a line for each step and kind of input."""
    from sinklab.cli import terminal
    from sinklab.report.closing import legend

    numbers, rows = shown_numbers(found), []
    for one in found:
        for name, values in one['inputs'].items():
            rows.append([one['model'], name, *(cell(number, values.get(number.name)) for number in numbers)])
    headings = ['model', 'inputs', *(number.label for number in numbers)]
    out = terminal.console(width=200)
    terminal.print_table(out, headings, rows, words=['inputs'])
    out.print(f'{legend(headings, numbers)}.', soft_wrap=not out.is_terminal)


def show_layers(found: dict) -> None:
    """Print how far a token spreads, and what queries are worth, by layer, where that was asked for."""
    for name, values in found['inputs'].items():
        for family, words in BY_LAYER.items():
            each = [value for one, value in values.items() if one.startswith(f'{family}/')]
            if each:
                said = ' '.join('-' if value is None else f'{value:z.3g}' for value in each)
                print(escape_control(f'{found["model"]}, {name}: {words}: {said}'))


def cell(number: 'Number', value: float | None) -> str:
    return '-' if value is None else number.text(value)


def show_series(told: dict[str, dict]) -> None:
    from sinklab.measure.emergence import span

    for name, one in told.items():
        if not one['emergence']:
            print(escape_control(f'{name}: no sink has emerged'))
            continue
        heads = ', '.join(f'layer {layer} head {head} (step {step})' for step, layer, head in one['heads'][:3])
        first = f'first heads with a mean alpha_1 above 0.3: {heads or "none"}'
        print(escape_control(f'{name}: Sink_1 {span([one["emergence"]]).sentence()}; {first}'))
