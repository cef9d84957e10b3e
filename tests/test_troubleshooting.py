"""Messages of docs/troubleshooting.md, compared with message templates in the code."""

import argparse
import ast
import functools
import re
from pathlib import Path

import pytest

from sinklab.cli.main import build_parser

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / 'docs' / 'troubleshooting.md').read_text(encoding='utf-8')
ENTRIES = dict(re.findall(r'^### (.*?)\n(.*?)(?=^##|\Z)', PAGE, re.MULTILINE | re.DOTALL))
BLOCKS = re.findall(r'^```text\n(.*?)^```', PAGE, re.MULTILINE | re.DOTALL)
MESSAGES = [line for block in BLOCKS for line in block.splitlines()]
WILDCARD = '\0'  # a value in a template of the code, and ... in a message of the page
MIN_CHARACTERS = 8  # characters of a message that its template must have
MIN_SHARE = 0.15  # of a message's characters, which its template must have


def read_templates():
    """Yield every text in the code that could be a message, with ANY in place of values."""
    for folder in ('sinklab', 'configs'):
        for path in (ROOT / folder).rglob('*.py'):
            tree = ast.parse(path.read_text(encoding='utf-8'))
            constants = {
                node.targets[0].id: node.value.value
                for node in tree.body
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and is_text(node.value)
            }
            for node in ast.walk(tree):
                if isinstance(node, ast.JoinedStr) or is_text(node):
                    yield re.sub(rf'\{{\w+\}}|{WILDCARD}+', WILDCARD, render_literal(node, constants))


def is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def render_literal(node, constants):
    """Return the text of a literal: constants of its module have their text, and other values are WILDCARD."""
    if isinstance(node, ast.JoinedStr):
        return ''.join(render_literal(part, constants) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return constants.get(node.value.id if isinstance(node.value, ast.Name) else None, WILDCARD)
    return node.value


@functools.cache
def collect_templates():
    """Return the fixed parts of every template that is long enough."""
    split_templates = {tuple(template.split(WILDCARD)) for template in read_templates()}
    return [parts for parts in split_templates if sum(map(len, parts)) >= MIN_CHARACTERS]


def count_cut_characters(text, part):
    """Return how many characters at the end of a text are the beginning of a part."""
    return next((length for length in range(len(text), 0, -1) if part.startswith(text[-length:])), 0)


def count_shared_characters(message, parts):
    """Return how many characters of a message are fixed parts of a template; 0 if the template cannot print it.

    The parts must follow each other in the message, from its beginning to its end. Parts may be missing where the
    message has "...".
    """
    position, shared = 0, 0
    for number, part in enumerate(parts):
        start = position if number or message.startswith('...') else 0
        anywhere = number > 0 or message.startswith('...')
        index = message.find(part, start) if anywhere else (0 if message.startswith(part) else -1)
        if index >= 0:
            position, shared = index + len(part), shared + len(part)
            continue
        cut = message.find('...', position)
        length = count_cut_characters(message[position:cut], part)
        if cut < 0 or (not anywhere and length < cut):
            return 0
        position, shared = cut + len('...'), shared + length
    is_complete = message.endswith(('...', parts[-1]))
    return shared if is_complete else 0


def is_printed(message):
    """Return whether the code has a template that can print a message."""
    min_characters = max(MIN_CHARACTERS, MIN_SHARE * len(message))
    return any(count_shared_characters(message, parts) >= min_characters for parts in collect_templates())


def test_every_entry_has_message_cause_and_fix():
    assert len(ENTRIES) >= 30
    for heading, entry in ENTRIES.items():
        assert re.search(r'^```text\n', entry, re.MULTILINE), heading
        assert '**Cause:**' in entry, heading
        assert '**Fix:**' in entry, heading


@pytest.mark.parametrize('message', MESSAGES)
def test_page_message_matches_template_in_code(message):
    assert is_printed(message)


def test_unknown_message_matches_no_template():
    assert not is_printed('runs/base is in use: host b has worked there for 340 s; wait a little and try again')
    assert not is_printed('config.model.head was not found; these are its fields: attention, columns')


def get_subcommands(parser):
    """Return {name: parser} of a parser's subcommands."""
    return next((action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)), {})


@pytest.mark.parametrize('path', sorted((ROOT / 'docs').glob('**/*.md')), ids=lambda path: path.name)
def test_page_commands_have_known_subcommands_and_options(path):
    """Check commands in backticks against the parser."""
    for command in re.findall(r'`sinklab ([a-z]+(?:\s[^`]*)?)`', path.read_text(encoding='utf-8')):
        parser, arguments = build_parser(), command.split()
        while arguments and get_subcommands(parser):
            assert arguments[0] in get_subcommands(parser), command
            parser = get_subcommands(parser)[arguments.pop(0)]
        options = {name for action in parser._actions for name in action.option_strings}
        for argument in arguments:
            name = argument.partition('=')[0]
            assert not name.startswith('--') or name in options or name.startswith('--config.'), command
