"""Tests that execute every page of docs/tutorials at its smoke size."""

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest
from doc_pages import PROGRAMS
from tiny_specs import make_case_params

from docs.run_tutorial import TutorialRunner, make_quick, read_blocks, run_page, select_lines, update_outputs
from sinklab.cli.config_flags import apply_overrides
from sinklab.cli.main import build_parser
from sinklab.configs import default

ROOT = Path(__file__).parents[1]
TUTORIALS = ROOT / 'docs' / 'tutorials'
REQUIRED_MODULES = {
    'open_model': ('torch', 'transformers'),
    'notebook': ('pandas', 'matplotlib'),
    'interventions': ('pandas',),
}
RUNNABLE_PAGES = sorted(path.stem for path in TUTORIALS.glob('*.md') if path.stem != 'pod')


def read_page(name):
    return (TUTORIALS / f'{name}.md').read_text(encoding='utf-8')


@pytest.fixture
def runner(tmp_path):
    """Return a tutorial runner in an empty folder with `sinklab` and `python` of this checkout."""
    (tmp_path / 'bin').mkdir()
    for name, module in PROGRAMS.items():
        (tmp_path / 'bin' / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        (tmp_path / 'bin' / name).chmod(0o755)
    (tmp_path / 'here').mkdir()
    return TutorialRunner(
        tmp_path / 'here',
        dict(PATH=f'{tmp_path / "bin"}{os.pathsep}{os.environ["PATH"]}', PYTHONPATH=str(ROOT), JAX_PLATFORMS='cpu'),
    )


@pytest.mark.slow
@pytest.mark.parametrize('name', make_case_params(RUNNABLE_PAGES, ['first_run']))
def test_tutorial_commands_print_shown_output(name, runner):
    """Compare words, columns and rows, because numbers differ between runs and sizes."""
    for module in REQUIRED_MODULES.get(name, ()):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f'docs/tutorials/{name}.md needs {module}, which is not installed')
    for block, printed in run_page(make_quick(read_page(name)), runner):
        assert block.text.strip(), f'docs/tutorials/{name}.md shows an empty output'
        if ', as in' not in block.lines:
            check_output(block.text.splitlines(), select_lines('\n'.join(printed), block.lines))


def reduce_to_shape(line: str) -> str:
    """Return the parts of a line that are the same on each machine: numbers become #, spaces are merged."""
    line = re.sub(r'\d{4}-\d\d-\d\dT[\d:+.]+', '#', line)  # a date and time
    line = re.sub(r'[^\w\s./@:=,-]', ' ', line)
    line = re.sub(r'(?<![A-Za-z_\d])[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?', '#', line)
    return ' '.join('#' if word in ('-', 'nan') else word for word in line.split())


def check_output(shown, printed):
    """Compare shown with printed output: columns and rows of a table, words of other lines.

    The columns of one table may be a subset of those of the other, because empty columns are omitted and
    shorter names leave space for more columns.
    """
    message = f'run python docs/run_tutorial.py --update on this page; it printed {printed}'
    shown_columns, printed_columns = (
        set(reduce_to_shape(lines[0].replace(' - ', ' ')).split()) for lines in (shown, printed)
    )
    shown, printed = ([reduce_to_shape(line) for line in lines] for lines in (shown, printed))
    if len(shown) > 1 and len(shown_columns) > 2 and '#' not in shown_columns:
        assert shown_columns <= printed_columns or printed_columns <= shown_columns, message
        shown, printed = ([line.split(' ')[0] for line in lines[1:]] for lines in (shown, printed))
    assert shown == printed, message


def test_run_page_runs_blocks_in_order_and_updates_outputs(tmp_path):
    page = '\n'.join([
        'To try this page in seconds:\n`export NUMBER=7`.\n```sh\nexport NUMBER=8\n```\n',
        '```python\n# one.py\nprint(2 + 3)\n```\n',
        f'```sh\n{sys.executable} one.py; echo a b\n```\n',
        '<!-- output: first 1 -->\n```text\nold\n```\n',
        '```sh\necho $NUMBER\n```\n<!-- output: last 1 -->\n```text\nold\n```\n',
        '```python\nx = 4\n```\n```python\nx * 2\n```\n\n<!-- output: all, as in a notebook -->\n```text\nold\n```\n',
        '```console\nexit 1\n```\n',
    ])  # fmt: skip
    outputs = run_page(make_quick(page), TutorialRunner(tmp_path))
    assert [printed for _, printed in outputs] == [['5', 'a b'], ['7'], ['8']]
    updated_blocks = read_blocks(update_outputs(make_quick(page), outputs))
    assert [block.text for block in updated_blocks if block.lines] == ['5\n', '7\n', '8\n']


@pytest.mark.slow
def test_pod_tutorial_commands_run_and_resume_both_runs(run_commands):
    """Run the commands with stub programs, which record their calls."""
    script = ''.join(block.text for block in read_blocks(read_page('pod')) if block.kind == 'console')
    calls, parser = run_commands(script), build_parser()
    for call in calls:
        if call[0] == 'sinklab':
            _, overrides = parser.parse_known_args(call[1:])
            apply_overrides(default.get_config(), overrides)
    commands = [' '.join(call) for call in calls]
    creations = [command for command in commands if 'queued-resources create' in command]
    assert any('pair-sigmoid-1b-0' in command for command in creations)
    assert sum('create pair-softmax-1b-0' in command for command in creations) > 1, 'resume creates the TPUs again'
    assert any('runs/pair/softmax_1b-0' in call and call.startswith('sinklab report') for call in commands)
