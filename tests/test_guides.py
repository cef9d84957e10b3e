"""Documentation pages: their commands, options, files, exit codes, extras, rows and links match the code."""

import argparse
import json
import re
import shlex
from pathlib import Path

import pytest

from sinklab.cli.config_flags import load_spec, parse_overrides
from sinklab.cli.main import build_parser, main
from sinklab.configs import default, table
from sinklab.exit_status import EXIT_CODES, FINAL_EXIT_CODES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / 'docs'
PAGES = [ROOT / 'README.md', *sorted(DOCS.glob('**/*.md'))]
FIELDS = set(table.list_fields(default.get_config()))
COMMAND_PATTERN = re.compile(r'(?:^|[ /])sinklab ((?!train --config=\.\.\.)[a-z][^`|]*)')


def read_page(name):
    return (DOCS / name).read_text(encoding='utf-8')


def list_commands(path):
    """Return the arguments of every `sinklab` command in the code blocks of a page."""
    blocks = re.findall(r'^```(?:sh|console)\n(.*?)^```', path.read_text(encoding='utf-8'), re.MULTILINE | re.DOTALL)
    lines = (line.partition(' #')[0] for line in '\n'.join(blocks).replace('\\\n', ' ').splitlines())
    matches = [match for line in lines if '()' not in line and (match := COMMAND_PATTERN.search(line))]
    return [shlex.split(match[1], comments=True) for match in matches]


def get_subparsers(parser):
    return next((action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)), {})


@pytest.mark.parametrize(
    'path', [path for path in PAGES if path.stem != 'add_an_operation'], ids=lambda path: path.stem
)
def test_page_commands_have_existing_options_fields_and_rows(path):
    """Check all pages but that whose config file is made by its edits."""
    for arguments in list_commands(path):
        parsed, remaining = build_parser().parse_known_args(arguments)
        for argument in remaining:
            assert argument.startswith('--config.'), arguments
            assert parse_overrides([argument]).keys() <= {*FIELDS}, arguments
        config_file, _, row = (getattr(parsed, 'config', None) or '').partition(':')
        if config_file.startswith('configs/'):
            assert (ROOT / config_file).exists(), arguments
            module = __import__(f'sinklab.configs.{Path(config_file).stem}', fromlist=['ROWS'])
            assert not row or row in module.ROWS, arguments


@pytest.mark.parametrize('path', PAGES, ids=lambda path: path.stem)
def test_page_inline_commands_have_known_subcommands_and_options(path):
    for command in re.findall(r'`sinklab ([a-z]+(?:\s[^`]*)?)`', path.read_text(encoding='utf-8')):
        parser, arguments = build_parser(), command.split()
        while arguments and get_subparsers(parser):
            assert arguments[0] in get_subparsers(parser), command
            parser = get_subparsers(parser)[arguments.pop(0)]
        options = {name for action in parser._actions for name in action.option_strings}
        for argument in arguments:
            name = argument.partition('=')[0]
            assert not name.startswith('--') or name in options or name.startswith('--config.'), command


@pytest.mark.parametrize('path', [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md'], ids=lambda path: path.stem)
def test_links_exist(path):
    """MkDocs checks those of docs/."""
    links = re.findall(r'\]\(([^)#]+)', path.read_text(encoding='utf-8'))
    assert links
    assert [link for link in links if not link.startswith('http') and not (ROOT / link).exists()] == []


def test_getting_started_lists_every_extra():
    page = read_page('getting_started.md')
    extras = re.findall(r"^        '(\w+)': \[", (ROOT / 'setup.py').read_text(), re.M)
    assert {extra for extra in extras if not re.search(rf'^\|.*`{extra}`.*\|.*\|$', page, re.M)} == set()


def test_run_folders_guide_lists_every_exit_code():
    codes = {*EXIT_CODES.values(), *FINAL_EXIT_CODES}
    page = read_page('guides/run_folders.md')
    assert {code for code in codes if not re.search(rf'^\| {code} \|', page, re.M)} == set()


@pytest.mark.parametrize('size', ['paper', 'quickstart'])
def test_sweeps_guide_has_valid_example_rows(capsys, tmp_path, size):
    (block,) = re.findall(
        r'^```python\n(.*?)^```', read_page('guides/sweeps_and_claims.md'), re.MULTILINE | re.DOTALL
    )
    (tmp_path / 'mine.py').write_text(block)
    assert main(['rows', f'--config={tmp_path}/mine.py', f'--size={size}', '--json']) == 0
    rows = {row['row']: row['diff'] for row in json.loads(capsys.readouterr().out)}
    assert rows['long_warmup'] == {'optimizer.warmup_steps': 400}
    decay = {'paper': 0.3, 'quickstart': 1.5}[size]
    assert rows['more_decay'] == {'optimizer.weight_decay': pytest.approx(decay)}


def test_readme_rows_are_valid(capsys, tmp_path):
    readme = (ROOT / 'README.md').read_text(encoding='utf-8')
    blocks = re.findall(r'^```python\n(.*?)^```', readme, re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if block.startswith('# mine.py'))
    (tmp_path / 'mine.py').write_text(block)
    assert main(['rows', f'--config={tmp_path}/mine.py', '--json']) == 0
    plain, other = json.loads(capsys.readouterr().out)
    assert (plain['diff'], other['diff']) == ({}, {'model.qk_norm': True})
    assert load_spec(f'{tmp_path}/mine.py:{other["row"]}', [], 'quickstart')[0].model.qk_norm
