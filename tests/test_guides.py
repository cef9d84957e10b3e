"""Documentation pages: their commands, options, files, exit codes, extras and counts match the code."""

import argparse
import json
import re
import shlex
from pathlib import Path

import pytest

from sinklab import run_dir
from sinklab.cli import config_flags, train
from sinklab.cli.config_flags import list_config_files
from sinklab.cli.doctor import EXTRA_OF_PACKAGE
from sinklab.cli.main import build_parser, main
from sinklab.configs import default, table
from sinklab.exit_status import EXIT_CODES, FINAL_EXIT_CODES
from sinklab.report.runs import RUN_METRIC_INFOS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / 'docs'
GUIDES = ('run_folders', 'reports', 'sweeps_and_claims', 'several_hosts', 'measure', 'evaluate', 'streaming', 'data')
PAGES = [
    'index.md',
    'getting_started.md',
    'concepts.md',
    'faq.md',
    'paper/decisions.md',
    *(f'guides/{name}.md' for name in (*GUIDES, 'buckets')),
]
FIELDS = set(table.list_fields(default.get_config()))


def read_page(page):
    return (DOCS / page).read_text(encoding='utf-8')


def list_commands(page):
    """Return the arguments of every `sinklab` command in the code blocks of a page."""
    command_lines = []
    for block in re.findall(r'^```(?:sh|console)\n(.*?)^```', read_page(page), re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if match := re.search(r'(?:^|[ /])sinklab ((?!train --config=\.\.\.)[a-z].*)', line.removeprefix('$ ')):
                command_lines.append(shlex.split(match[1], comments=True))
    return command_lines


def list_options(verb):
    """Return the options of a command, without --help."""
    (subparsers,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return {name for action in subparsers.choices[verb]._actions for name in action.option_strings} - {'-h', '--help'}


@pytest.mark.parametrize('page', PAGES)
def test_page_begins_with_title_and_purpose(page):
    title, blank_line, first_line, *_ = read_page(page).splitlines()
    assert title.startswith('# ')
    assert not blank_line
    assert first_line.startswith('This page ')


@pytest.mark.parametrize('page', PAGES)
def test_page_commands_have_existing_options_fields_and_rows(page):
    for arguments in list_commands(page):
        parsed, remaining = build_parser().parse_known_args(arguments)
        for argument in remaining:
            assert argument.startswith('--config.'), arguments
            assert argument.removeprefix('--config.').partition('=')[0] in FIELDS, arguments
        config_file, _, row = (getattr(parsed, 'config', None) or '').partition(':')
        if config_file.startswith('configs/'):
            assert (ROOT / config_file).exists(), arguments
        if row:
            module = __import__(f'sinklab.configs.{Path(config_file).stem}', fromlist=['ROWS'])
            assert row in module.ROWS, arguments


@pytest.mark.parametrize('verb', ['measure', 'evaluate', 'report'])
def test_guide_explains_every_option_of_command(verb):
    page = read_page('guides/reports.md' if verb == 'report' else f'guides/{verb}.md')
    assert {name for name in list_options(verb) if not re.search(rf'`{name}[`=]', page)} == set()


def test_getting_started_lists_every_command_and_extra():
    page = read_page('getting_started.md')
    (subparsers,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    assert {verb for verb in subparsers.choices if f'| `sinklab {verb}` |' not in page} == set()
    assert {
        extra for extra in EXTRA_OF_PACKAGE.values() if not re.search(rf'^\|.*`{extra}`.*\|.*\|$', page, re.M)
    } == set()


def test_getting_started_shows_output_of_train(capsys):
    """Print the numbers of the page with the code, and compare columns, units and text."""
    page = read_page('getting_started.md')
    command, *printed_lines = re.search(r'```\n(\$ sinklab train .*?)```', page, re.DOTALL)[1].splitlines()
    parsed, remaining = build_parser().parse_known_args(shlex.split(command)[2:])
    last_step, seconds = (int(value) for value in re.findall(r'\d+', printed_lines[0]))
    values = {line[1:14].strip(): line[14:].split()[0] for line in printed_lines[2:] if re.match(r' \S', line)}
    last_record = {info.name: float(values[info.label]) for info in RUN_METRIC_INFOS if info.label in values}
    steps = [int(step) for step in re.search(r'between steps (\d+) and (\d+)', page).groups()]
    records = [{'step': step, 'sink/1': rate} for step, rate in zip(steps, (0.0, last_record['sink/1']), strict=True)]
    _, row, _, expected = config_flags.load_and_describe(parsed.config, [])
    last_record = {'step': last_step, 'seconds': float(seconds), **last_record}
    train.print_results(run_dir.RunDir(parsed.workdir), row, [*records, last_record], expected)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == printed_lines
    assert not remaining


def test_run_folders_guide_lists_every_file_and_exit_code():
    page = read_page('guides/run_folders.md')
    assert {name for name in run_dir.RUN_FILES if f'| `{name}` |' not in page} == set()
    codes = {*EXIT_CODES.values(), *FINAL_EXIT_CODES}
    assert {code for code in codes if not re.search(rf'^\| {code} \|', page, re.M)} == set()


def test_sweeps_guide_lists_every_config_file_with_rows():
    page = read_page('guides/sweeps_and_claims.md')
    assert {file for file in list_config_files() if f'| `{file}` |' not in page} <= {'configs/default.py'}


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
