"""The command line: subcommands, usage errors and exit codes."""

import argparse
import difflib
import importlib
import os
import re
import signal
import sys
from collections.abc import Container, Sequence
from types import ModuleType
from typing import Any, NoReturn

import sinklab
from sinklab.errors import UserError, print_status

# The summary of each command. Its module in sinklab.cli is imported when the command is run.
COMMANDS = {
    'prepare': 'Prepare a token store from documents, which any number of runs can read.',
    'train': 'Train a language model, and measure its attention sinks during training.',
    'compile': 'Compile a run for TPUs or GPUs that this machine lacks, and print the memory that it needs.',
    'rows': 'List the rows of config files: what each changes, and its published numbers with their source.',
    'sweep': 'Train the rows of a table, each with each seed, and compare them with published numbers.',
    'claims': 'Test claims of the paper by training runs, and give a verdict on each.',
    'report': 'Show runs as a table, and write a page (report.html) that needs no network.',
    'measure': 'Measure attention sinks of a trained model: a checkpoint of a run, or an open model.',
    'evaluate': 'Evaluate a checkpoint of a run on tasks of lm-evaluation-harness, such as HellaSwag.',
    'checkpoint': 'List, verify, export or import checkpoints.',
    'stream': 'Measure the perplexity of a long text with a KV cache of x first and y recent tokens '
    '(StreamingLLM, Table 3).',
    'sample': 'Generate text with a run or an open model, from a prompt, with a KV cache of x first and y recent '
    'tokens.',
}
EPILOG = """example:
  sinklab rows --config=configs/quickstart.py
  sinklab sweep --config=configs/quickstart.py --rows=softmax,sigmoid_minus_log_t --workdir=runs/quickstart --report
  sinklab train --config=configs/quickstart.py:softmax --workdir=runs/softmax
  sinklab measure runs/softmax
  sinklab VERB --help  # options and examples of a verb"""
METRIC_HELP = 'a Python file of your own that registers metrics or FFN activations, such as mine.py'
OVERRIDE_COMMANDS = 'train', 'compile', 'sweep', 'claims'  # commands that take --config.PATH=VALUE


class CommandParser(argparse.ArgumentParser):
    """Argument parser that raises UserError, and suggests the option that the user may have meant."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
        self.set_defaults(parser=self)  # a parsed command line has that of its subcommand

    def list_options(self) -> list[str]:
        return re.findall(r'^  (?:-\w, )?(--[\w-]+)', self.format_help(), re.MULTILINE)

    def refuse_unknown(self, words: Sequence[str]) -> None:
        """Raise UserError for words that are no override --config.PATH=VALUE of a command that takes overrides."""
        takes_overrides = self.prog.rpartition(' ')[2] in OVERRIDE_COMMANDS
        errors = [
            f'{word} is unknown{self.suggest_option(word.partition("=")[0], takes_overrides)}'
            for word in words
            if not (takes_overrides and word.startswith('--config.'))
        ]
        if errors:
            raise UserError(f'{"; ".join(errors)}; see {self.prog} --help')

    def suggest_option(self, option: str, takes_overrides: bool) -> str:
        """Suggest the option or the config field that the user may have meant; return '' if none is similar."""
        options = [name for name in self.list_options() if name != '--help']
        exact = []
        if takes_overrides:
            from sinklab.config.spec import get_field_types

            fields = get_field_types()
            exact = [f'--config.{field}' for field in fields if option[2:] in (field, field.rpartition('.')[2])]
        matches = difflib.get_close_matches(option, options, 1, 0.9) or sorted(exact, key=len)
        matches = matches or difflib.get_close_matches(option, options, 1, 0.75)
        return f'; did you mean {matches[0]}?' if matches else ''

    def error(self, message: str) -> NoReturn:
        raise UserError(f'{message}; see {self.prog} --help')


def build_parser(commands: Container[str | None] = COMMANDS) -> CommandParser:
    """Build the parser of the command line, with the arguments of the given commands."""
    root_parser = CommandParser(prog='sinklab', description=sinklab.__doc__.partition('\n')[0], epilog=EPILOG)
    root_parser.add_argument('--version', action='version', version=f'sinklab {sinklab.__version__}')
    subparsers = root_parser.add_subparsers(dest='command', metavar='VERB', required=True)
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if name in commands:
            module = import_command(name)
            subparser.epilog = module.__doc__.partition('\n')[2].strip('\n')
            module.add_arguments(subparser)
            if name not in ('prepare', 'checkpoint'):
                subparser.add_argument('--metric', metavar='FILE', help=METRIC_HELP)
    return root_parser


def import_command(name: str) -> ModuleType:
    return importlib.import_module(f'sinklab.cli.{name}')


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code.

    Exit codes: sinklab/exit_status.py.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    command = next((word for word in words if word in COMMANDS), None)
    try:
        args, extra_args = build_parser([command]).parse_known_args(words)
        args.parser.refuse_unknown(extra_args)
        if getattr(args, 'metric', None) and args.command != 'train':  # which runs it after its processes have joined
            from sinklab.cli.config_flags import load_metric_file

            load_metric_file(args.metric)
        return import_command(args.command).run(args, extra_args)
    except KeyboardInterrupt:
        print(f'sinklab {command}: stopped', file=sys.stderr, flush=True)
        os._exit(128 + signal.SIGINT)  # an orderly exit may crash in jax, which is still computing
    except Exception as error:
        if isinstance(error, BrokenPipeError) and command != 'train':  # whose progress suppresses errors of printing
            return 0  # the reader of the output has gone, as after `| head`
        return report_error(command, error)


def report_error(command: str | None, error: Exception) -> int:
    """Print the error that ended a command, and return the exit code."""
    from sinklab.cli import process_flags
    from sinklab.process_group import limit_shutdown
    from sinklab.storage.folder_lock import FolderTakenError
    from sinklab.train.run_outcome import classify_error

    exit_status = classify_error(error)
    if exit_status.trace:
        print_status(exit_status.trace.rstrip())
    if exit_status.kind != 'crashed':
        name = f'sinklab {command}' if command else 'sinklab'
        print_status(f'{name}: {process_flags.format_exit_status(exit_status)}')
    limit_shutdown(exit_status.exit_code)
    if isinstance(error, FolderTakenError):
        os._exit(exit_status.exit_code)  # an orderly exit would finish pending writes
    return exit_status.exit_code
