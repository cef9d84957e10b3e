import argparse
import gc
import os
import sys
from collections.abc import Sequence

import sinklab
from sinklab import streams
from sinklab.cli import (
    checkpoint,
    claims,
    compile,
    doctor,
    evaluate,
    measure,
    prepare,
    processes,
    report,
    rows,
    sample,
    stream,
    sweep,
    tail,
    train,
)
from sinklab.escape import escape_control
from sinklab.lease import Superseded
from sinklab.train.outcome import of_error

VERBS = {
    'prepare': prepare,
    'train': train,
    'compile': compile,
    'rows': rows,
    'sweep': sweep,
    'claims': claims,
    'report': report,
    'measure': measure,
    'evaluate': evaluate,
    'tail': tail,
    'checkpoint': checkpoint,
    'stream': stream,
    'sample': sample,
    'doctor': doctor,
}
EXAMPLE = """example:
  sinklab rows --config=configs/quickstart.py
  sinklab sweep --config=configs/quickstart.py --rows=softmax,sigmoid_apple --workdir=runs/quickstart --report
  sinklab train --config=configs/quickstart.py:softmax --workdir=runs/softmax
  sinklab measure runs/softmax
  sinklab VERB --help  # the options of a verb, and examples"""
# Verbs whose exit code is that of their runs, whoever reads what they print.
TRAINING = 'train', 'sweep', 'claims'


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        print(f'{self.prog}: {escape_control(message)}; see {self.prog} --help', file=sys.stderr)
        raise SystemExit(1)


def parser() -> Parser:
    top = Parser(
        prog='sinklab',
        description=sinklab.__doc__.partition('\n')[0],
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument('--version', action='version', version=f'sinklab {sinklab.__version__}')
    verbs = top.add_subparsers(dest='verb', metavar='VERB', required=True)
    for name, module in VERBS.items():
        summary, _, example = module.__doc__.partition('\n')
        verb = verbs.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=example.strip('\n'),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.arguments(verb)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb. Exit codes: 0 done, 1 refused, 3 diverged, 42 start it again, 130 after Ctrl-C, 70 crashed."""
    gc.set_threshold(100_000)  # what a start makes stays: to look through it again and again takes a second
    given, rest = parser().parse_known_args(arguments)
    if given.verb in TRAINING:
        streams.ignore_closed_output()
    try:
        return VERBS[given.verb].run(given, rest)
    except streams.OutputClosed:  # its reader has enough
        return 0
    except (Exception, KeyboardInterrupt) as error:
        return ended(given.verb, error)


def ended(verb: str, error: BaseException) -> int:
    """Says what has ended a verb, and returns its exit code."""
    end = of_error(error)
    if end.trace:
        print(end.trace, end='', file=sys.stderr)
    if end.kind != 'crashed':
        print(f'sinklab {verb}: {escape_control(processes.line(end))}', file=sys.stderr)
    sys.stderr.flush()
    if isinstance(error, Superseded | KeyboardInterrupt):
        os._exit(end.code)  # an orderly end would write what is still being written, or wait for what is compiled
    return end.code
