import argparse
import difflib
import gc
import os
import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

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
from sinklab.record import Refusal
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
OVERRIDING = 'train', 'compile', 'sweep', 'claims'  # verbs that take --config.PATH=VALUE


class Parser(argparse.ArgumentParser):
    """A parser that names unknown options before it asks for missing ones."""

    subcommands: argparse._SubParsersAction | None = None

    def add_subparsers(self, **given: Any) -> argparse._SubParsersAction:
        self.subcommands = super().add_subparsers(**given)
        return self.subcommands

    def refuse_unknown(self, arguments: Sequence[str]) -> None:
        """Refuse options that the subcommand of a command line does not have, with the one that is most like each.

        --config.PATH=VALUE is left to the subcommand, and so is what follows --. As in argparse, a word with a space
        is the value of the option before it: --prompt '-- a comment'. Raises Refusal.
        """
        if self.subcommands:
            at = next((at for at, word in enumerate(arguments) if word in self.subcommands.choices), None)
            if at is not None:
                self.subcommands.choices[arguments[at]].refuse_unknown(arguments[at + 1 :])
            return
        words = list(takewhile(lambda word: word != '--', arguments))
        given = [word for at, word in enumerate(words) if word.startswith('--') and not self.is_value(words, at)]
        if '-h' in arguments or '--help' in given:
            return
        options = [option for option in self._option_string_actions if option.startswith('--')]
        unknown = [word for word in given if word.partition('=')[0] not in options]
        known = [option for option in options if option != '--help']
        unknown = [word for word in unknown if not word.startswith('--config.')]
        if unknown:
            faults = [f'{word} is unknown{self.suggest(word.partition("=")[0], known)}' for word in unknown]
            raise Refusal(f'{"; ".join(faults)}; see {self.prog} --help')

    def is_value(self, words: Sequence[str], at: int) -> bool:
        """Return whether argparse reads a word as a value although it begins with dashes."""
        if ' ' in words[at].partition('=')[0]:
            return True
        before = self._option_string_actions.get(words[at - 1]) if at else None
        return ' ' in words[at] and before is not None and before.nargs != 0

    def error(self, message: str) -> None:
        print(f'{self.prog}: {escape_control(message)}; see {self.prog} --help', file=sys.stderr)
        raise SystemExit(1)

    def suggest(self, name: str, options: Sequence[str]) -> str:
        """Return which option, or which field of the config, may have been meant."""
        fields = []
        if self.prog.rpartition(' ')[2] in OVERRIDING:
            from configs import default
            from configs.table import closest, flat

            field = closest(name.lstrip('-').replace('-', '_'), list(flat(default.get_config())))
            fields = [field] if field else []
        exact = [f'--config.{field}' for field in fields if name[2:] in (field, field.rpartition('.')[2])]
        near = exact or difflib.get_close_matches(name, options, 1, 0.75) or [f'--config.{field}' for field in fields]
        return f'; did you mean {near[0]}?' if near else ''


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
    words, top = sys.argv[1:] if arguments is None else list(arguments), parser()
    try:
        top.refuse_unknown(words)
    except Refusal as refusal:
        return ended(next(word for word in words if word in VERBS), refusal)
    given, rest = top.parse_known_args(words)
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
