"""The command line: subcommands, usage errors and exit codes."""

import argparse
import difflib
import gc
import importlib
import os
import re
import sys
from collections.abc import Container, Sequence
from itertools import takewhile
from types import ModuleType
from typing import Any

import sinklab
from sinklab import standard_streams, startup_signals
from sinklab.errors import UserError
from sinklab.escape import escape_control

# The summary of each command. Its module in sinklab.cli is imported when the command is run.
COMMANDS = {
    'prepare': 'Prepare a token store from documents, which any number of runs can read.',
    'train': 'Train a language model, and measure its attention sinks during training.',
    'compile': 'Compile a run for TPUs or GPUs that this machine lacks, and estimate the memory that it needs.',
    'rows': 'List the rows of config files: what each changes, and its published numbers with their source.',
    'sweep': 'Train the rows of a table, each with each seed, and compare them with published numbers.',
    'claims': 'Test claims of the paper by training runs, and give a verdict on each.',
    'report': 'Show runs as a table, and write a page (report.html) that needs no network.',
    'measure': 'Measure attention sinks of a trained model: a checkpoint of a run, or an open model.',
    'evaluate': 'Evaluate a checkpoint or an open model on tasks of lm-evaluation-harness, such as HellaSwag.',
    'tail': 'Follow a run in progress from any terminal: its step, loss and Sink_1, and how it ends.',
    'checkpoint': 'List, verify, export or import checkpoints.',
    'stream': 'Measure the perplexity of a long text with a KV cache of x first and y recent tokens '
    '(StreamingLLM, Table 3).',
    'sample': 'Generate text with a run or an open model, from a prompt, with a KV cache of x first and y recent '
    'tokens.',
    'doctor': 'Check this installation: versions, devices, and whether the features that sinklab needs work.',
}
EPILOG = """example:
  sinklab rows --config=configs/quickstart.py
  sinklab sweep --config=configs/quickstart.py --rows=softmax,sigmoid_apple --workdir=runs/quickstart --report
  sinklab train --config=configs/quickstart.py:softmax --workdir=runs/softmax
  sinklab measure runs/softmax
  sinklab VERB --help  # options and examples of a verb"""
# Commands whose exit code is that of their runs, even if the reader of their output has gone.
TRAINING_COMMANDS = 'train', 'sweep', 'claims'
OVERRIDE_COMMANDS = 'train', 'compile', 'sweep', 'claims'  # commands that take --config.PATH=VALUE


class CommandParser(argparse.ArgumentParser):
    """Argument parser that reports unknown options before missing ones."""

    subcommands: argparse._SubParsersAction | None = None

    def add_subparsers(self, **kwargs: Any) -> argparse._SubParsersAction:
        self.subcommands = super().add_subparsers(**kwargs)
        return self.subcommands

    def check_unknown_options(self, argv: Sequence[str]) -> None:
        """Raise UserError for options that the subcommand does not have, and suggest the most similar one.

        --config.PATH=VALUE and everything after -- are left to the subcommand. As in argparse, a word with a space is
        the value of the option before it: --prompt '-- a comment'.
        """
        if self.subcommands:
            index = next((index for index, word in enumerate(argv) if word in self.subcommands.choices), None)
            if index is not None:
                self.subcommands.choices[argv[index]].check_unknown_options(argv[index + 1 :])
            return
        words = list(takewhile(lambda word: word != '--', argv))
        typed_options = [
            word for index, word in enumerate(words) if word.startswith('--') and not self.is_value(words, index)
        ]
        if '-h' in argv or '--help' in typed_options:
            return
        options = [option for option in self._option_string_actions if option.startswith('--')]
        unknown = [word for word in typed_options if word.partition('=')[0] not in options]
        known_options = [option for option in options if option != '--help']
        unknown = [word for word in unknown if not word.startswith('--config.')]
        if unknown:
            errors = [
                f'{word} is unknown{self.format_suggestion(word.partition("=")[0], known_options)}'
                for word in unknown
            ]
            raise UserError(f'{"; ".join(errors)}; see {self.prog} --help')

    def is_value(self, words: Sequence[str], index: int) -> bool:
        """Return whether argparse parses a word as a value although it begins with dashes."""
        if ' ' in words[index].partition('=')[0]:
            return True
        previous_option = self._option_string_actions.get(words[index - 1]) if index else None
        return ' ' in words[index] and previous_option is not None and previous_option.nargs != 0

    def error(self, message: str) -> None:
        suggestion = suggest_choice(message)
        print(f'{self.prog}: {escape_control(message)}{suggestion}; see {self.prog} --help', file=sys.stderr)
        raise SystemExit(1)

    def format_suggestion(self, option: str, known_options: Sequence[str]) -> str:
        """Suggest the option or the config field that the user may have meant; return '' if none is similar."""
        fields = []
        if self.prog.rpartition(' ')[2] in OVERRIDE_COMMANDS:
            from sinklab.configs import default
            from sinklab.configs.table import find_closest_name, list_fields

            field = find_closest_name(option.lstrip('-').replace('-', '_'), list(list_fields(default.get_config())))
            fields = [field] if field else []
        exact_matches = [f'--config.{field}' for field in fields if option[2:] in (field, field.rpartition('.')[2])]
        matches = (
            exact_matches
            or difflib.get_close_matches(option, known_options, 1, 0.75)
            or [f'--config.{field}' for field in fields]
        )
        return f'; did you mean {matches[0]}?' if matches else ''


def suggest_choice(message: str) -> str:
    """Suggest the closest choice if argparse says that a choice is invalid; return '' if none is similar."""
    match = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
    choices = [choice.strip("'") for choice in match[2].split(', ')] if match else []
    matches = difflib.get_close_matches(match[1], choices, 1) if match else []
    return f'; did you mean {matches[0]}?' if matches else ''


def build_parser(commands: Container[str] = COMMANDS) -> CommandParser:
    """Build the parser of the command line, with the arguments of the given commands."""
    root_parser = CommandParser(
        prog='sinklab',
        description=sinklab.__doc__.partition('\n')[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    root_parser.add_argument('--version', action='version', version=f'sinklab {sinklab.__version__}')
    subparsers = root_parser.add_subparsers(dest='command', metavar='VERB', required=True)
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(
            name,
            help=summary,
            description=summary,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if name in commands:
            module = import_command(name)
            subparser.epilog = module.__doc__.partition('\n')[2].strip('\n')
            module.add_arguments(subparser)
    return root_parser


def import_command(name: str) -> ModuleType:
    return importlib.import_module(f'sinklab.cli.{name}')


def find_command(arguments: Sequence[str]) -> str | None:
    """Return the command among the arguments of the command line; None if there is none."""
    return next((argument for argument in arguments if argument in COMMANDS), None)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code.

    Exit codes: sinklab/exit_status.py.
    """
    gc.set_threshold(100_000)  # scanning the long-lived objects of start-up repeatedly takes a second
    arg_list = sys.argv[1:] if argv is None else list(argv)
    command = find_command(arg_list)
    root_parser = build_parser([command])
    try:
        root_parser.check_unknown_options(arg_list)
    except UserError as refusal:
        return report_error(command, refusal)
    args, extra_args = root_parser.parse_known_args(arg_list)
    if args.command in TRAINING_COMMANDS:
        standard_streams.ignore_closed_output()
    try:
        return import_command(args.command).run(args, extra_args)
    except standard_streams.OutputClosedError:  # the reader of the output has closed it
        return 0
    except (Exception, KeyboardInterrupt) as error:
        return report_error(args.command, KeyboardInterrupt() if startup_signals.was_interrupted() else error)


def report_error(command: str, error: BaseException) -> int:
    """Print the error that ended a command, and return the exit code."""
    from sinklab.cli import process_flags
    from sinklab.process_group import limit_shutdown
    from sinklab.storage.folder_lock import FolderTakenError
    from sinklab.train.run_outcome import classify_error

    exit_status = classify_error(error)
    if exit_status.trace:
        print(exit_status.trace, end='', file=sys.stderr)
    if exit_status.kind != 'crashed':
        print(f'sinklab {command}: {escape_control(process_flags.format_exit_status(exit_status))}', file=sys.stderr)
    sys.stderr.flush()
    limit_shutdown(exit_status.exit_code)
    if isinstance(error, FolderTakenError | KeyboardInterrupt):
        os._exit(exit_status.exit_code)  # an orderly exit would finish pending writes, or wait for a compilation
    return exit_status.exit_code
