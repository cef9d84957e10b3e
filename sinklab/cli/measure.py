"""everything that is measured, of a step of a run or of an open model

example:
  sinklab measure runs/quickstart/softmax@600 --inputs=natural,random,repeated
  sinklab measure runs/quickstart/softmax --all
  sinklab measure hf:openai-community/gpt2 --source='text:corpus/*.txt' --lengths=16,64,256 --eps=0.2,0.3 --json
"""

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from sinklab.files.place import place
from sinklab.record import Refusal, unknown

INPUTS = 'natural', 'random', 'repeated', 'domains'
BOS = 'auto', 'none', 'force'
USUAL = dict(sequences=100, length=64)  # of the paper, for what was not probed in a training
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


def arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument('model', metavar='RUN[@STEP] | hf:PATH_OR_ID', help='a run folder, or an open model')
    verb.add_argument('--inputs', default='natural', metavar='KIND,...', help=f'of {", ".join(INPUTS)}')
    verb.add_argument('--source', help="texts, as config.data.source has them; else a run's own, or stdlib")
    verb.add_argument('--sequences', type=int, metavar='N', help='else as the run was probed, or 100')
    verb.add_argument('--length', type=int, metavar='T', help='else as the run was probed, or 64')
    verb.add_argument('--lengths', default='', metavar='T,...', help='sinks of the first T tokens, in the same pass')
    verb.add_argument('--eps', default='', metavar='E,...', help='thresholds of these; else 0.3')
    verb.add_argument('--seed', type=int, default=0, help='of random and repeated inputs')
    verb.add_argument('--positions', metavar='replace:K | swap:K', help='token 1 at the place of token K, or both')
    verb.add_argument('--perturb', type=int, metavar='K', help='also how far another token K spreads')
    verb.add_argument('--bos', choices=BOS, default='auto', help='before each text of an open model')
    verb.add_argument('--remote-code', action='store_true', help='run the code that comes with an open model')
    verb.add_argument('--all', action='store_true', help='every checkpoint of a run, and when its sink emerges')
    verb.add_argument('--out', metavar='DIR', help='a new folder for measured.json and the arrays of each input')
    verb.add_argument('--json', action='store_true', help='print all numbers as JSON')


def run(given: argparse.Namespace, rest: list[str]) -> int:
    if rest:
        raise Refusal(f'{rest[0]} is unknown; see sinklab measure --help')
    how, kinds = asked(given), listed('--inputs', given.inputs, str)
    for kind in kinds:
        if kind not in INPUTS:
            raise Refusal(unknown(f'--inputs={kind}', kind, INPUTS, 'inputs'))
    if given.out and place(given.out).exists():
        raise Refusal(f'--out={given.out} is there already; give a new folder')
    from sinklab.observe import opening

    subjects = steps(given) if given.all else [opening.subject(given.model, given.bos, given.remote_code)]
    found = [measured(subject, kinds, given, how) for subject in subjects]
    told = [said for said, _ in found]
    emerged = series([(subject, one) for subject, (_, one) in zip(subjects, found, strict=True)]) if given.all else {}
    if given.json:
        print(json.dumps(dict(steps=told, series=emerged) if given.all else told[0], indent=2))
    else:
        show(told)
        show_series(emerged)
    return 0


def asked(given: argparse.Namespace) -> dict[str, tuple]:
    """What the Setting has of the command line."""
    lengths, thresholds = listed('--lengths', given.lengths, int), listed('--eps', given.eps, float)
    if thresholds and not lengths:
        raise Refusal(f'--eps={given.eps} is of --lengths; give these, such as --lengths=16,32,64')
    return dict(lengths=lengths, thresholds=thresholds or (0.3,)) if lengths else {}


def listed(option: str, text: str, kind: Callable) -> tuple:
    try:
        return tuple(kind(one) for one in text.split(',') if one)
    except ValueError as error:
        raise Refusal(f'{option}={text} is no list of {kind.__name__}; separate them by commas') from error


def steps(given: argparse.Namespace) -> list[Any]:
    from sinklab.named import run_and_step, wanted
    from sinklab.observe.own import Own

    if given.model.startswith('hf:'):
        raise Refusal(f'--all is of runs, and {given.model} is an open model; leave it out')
    folder, step = run_and_step(given.model)
    return [Own(folder, one) for one in wanted(folder, step)]


def measured(subject: Any, kinds: tuple[str, ...], given: argparse.Namespace, how: dict) -> tuple[dict, dict]:
    """(all numbers by inputs, what they are of, and what was published; what was measured, with its arrays)."""
    from sinklab.observe import inputs, measuring, published

    usual = dict(vars(subject.spec.probe), source=None) if hasattr(subject, 'spec') else dict(USUAL, source='stdlib')
    fields = {name: getattr(given, name) or usual[name] for name in ('sequences', 'length', 'source')}
    check(subject, fields['length'], fields['sequences'], how.get('lengths', ()))
    ids = inputs.inputs(subject, kinds, inputs.Wanted(**fields, seed=given.seed))
    position_T = inputs.positions(given.positions, fields['length']) if given.positions else None
    found = {
        name: measuring.remembered(subject, ids_PT, position_T, **how, repeated=name == 'repeated')
        for name, ids_PT in ids.items()
    }
    if given.out:
        keep(subject, found, given)
    told = dict(
        model=subject.name,
        digest=subject.digest,
        **fields,
        inputs={name: one.numbers | perturbed(subject, ids[name], given) for name, one in found.items()},
        published=published.published(given.model),
        propositions=propositions(subject, found),
    )
    return told, found


def perturbed(subject: Any, ids_PT: Any, given: argparse.Namespace) -> dict[str, float]:
    from sinklab.observe.perturbation import spread

    if given.perturb is None:
        return {}
    if not 1 <= given.perturb <= ids_PT.shape[1]:
        raise Refusal(f'--perturb={given.perturb} is no token; give 1 to {ids_PT.shape[1]}')
    return spread(subject, ids_PT, given.perturb - 1, given.seed)


def propositions(subject: Any, found: dict) -> list[dict]:
    """What must hold of one token, repeated."""
    from sinklab.measure.propositions import verdicts

    if 'repeated' not in found:
        return []
    told = verdicts(subject.position, len(subject.columns()), found['repeated'].numbers)
    return [dict(claim=claim, number=number, holds=holds) for claim, number, holds in told]


def check(subject: Any, length: int, sequences: int, lengths: tuple[int, ...]) -> None:
    if subject.longest and length > subject.longest:
        raise Refusal(f'{subject.name} reads {subject.longest} tokens, and --length is {length}; lower it')
    if length < 2 or sequences < 1:
        raise Refusal(f'--length={length} --sequences={sequences} is nothing to measure; give at least 2 and 1')
    if wrong := [one for one in lengths if not 1 <= one <= length]:
        raise Refusal(f'--lengths has {wrong[0]}, and texts have {length} tokens; give 1 to {length}, or --length')


def keep(subject: Any, found: dict, given: argparse.Namespace) -> None:
    from sinklab.observe import measuring

    folder = place(given.out) / (f'{subject.step:08}' if given.all else '')
    folder.mkdir(parents=True, exist_ok=True)
    for name, one in found.items():
        measuring.save(folder / f'{name.replace("/", "-")}.npz', one)


def show(found: list[dict]) -> None:
    from rich.console import Console
    from rich.table import Table

    from sinklab.measure import table as measures

    numbers = [measures.number(name) for name in TOLD]
    table = Table('model', 'inputs', box=None)
    for number in numbers:
        table.add_column(number.label, justify='right')
    table.add_column('published Sink_1', justify='right')
    for one in found:
        for name, values in one['inputs'].items():
            cells = ['-' if number.name not in values else number.text(values[number.name]) for number in numbers]
            published = one['published'].get(name)
            table.add_row(one['model'], name, *cells, '-' if published is None else f'{published:.2f} %')
    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(table)
    for one in found:
        for told in one['propositions']:
            print(f'{one["model"]}: {told["claim"]}: {told["number"]:.2g}, {"holds" if told["holds"] else "FAILS"}')


def series(found: list[tuple[Any, dict]]) -> dict[str, dict]:
    """By inputs, of a run of which several steps were measured: when its sink emerges, and in which heads first."""
    from sinklab.measure.emergence import emergence, first_heads
    from sinklab.measure.sink import THRESHOLD

    steps = [subject.step for subject, _ in found]
    told = {}
    for name in found[0][1]:
        each = [one[name] for _, one in found]
        alpha_NLH = [one.arrays['alpha_LPHJ'][..., 0].mean(1) for one in each]
        emerged = emergence(steps, [one.numbers['sink/1'] for one in each])
        told[name] = dict(emergence=emerged, heads=first_heads(steps, alpha_NLH, THRESHOLD))
    return told


def show_series(told: dict[str, dict]) -> None:
    from sinklab.measure.emergence import between

    for name, one in told.items():
        if not one['emergence']:
            print(f'{name}: no sink has emerged')
            continue
        heads = ', '.join(f'layer {layer} head {head} at step {step}' for step, layer, head in one['heads'][:3])
        print(f'{name}: Sink_1 emerges at step {between(*one["emergence"])}; first {heads or "no head on average"}')
