import argparse
import gc
import os
import sys
import traceback
from collections.abc import Sequence

import sinklab
from sinklab.cli import checkpoint, doctor, prepare, report, rows, sweep, train
from sinklab.lease import Superseded
from sinklab.record import Refusal

VERBS = {
    'prepare': prepare,
    'train': train,
    'rows': rows,
    'sweep': sweep,
    'report': report,
    'checkpoint': checkpoint,
    'doctor': doctor,
}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        print(f'{self.prog}: {message}; see {self.prog} --help', file=sys.stderr)
        raise SystemExit(1)


def parser() -> Parser:
    top = Parser(prog='sinklab', description=sinklab.__doc__, allow_abbrev=False)
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
    try:
        return VERBS[given.verb].run(given, rest)
    except Superseded as superseded:
        print(f'sinklab {given.verb}: {superseded}', file=sys.stderr, flush=True)
        os._exit(1)  # an orderly end would write to its end what is still being written
    except Refusal as refusal:
        print(f'sinklab {given.verb}: {refusal}', file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:
        traceback.print_exc()
        return 70
    except KeyboardInterrupt:
        print(f'sinklab {given.verb}: stopped at once; what was saved before is intact', file=sys.stderr)
        sys.stderr.flush()
        os._exit(130)  # an orderly end would wait for what is being compiled
