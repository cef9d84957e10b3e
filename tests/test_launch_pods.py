"""Guides of the launchers, whose commands run with programs that record their arguments."""

import re
from pathlib import Path

import pytest
from command_recorders import get_scheduler

from sinklab.cli.config_flags import apply_overrides
from sinklab.cli.main import build_parser
from sinklab.configs import default
from sinklab.exit_status import FINAL_EXIT_CODES

ROOT = Path(__file__).parents[1]
PAGES = {
    name: (ROOT / 'docs' / 'guides' / f'{name}.md').read_text(encoding='utf-8')
    for name in ('cloud_tpu', 'gke', 'slurm')
}
COMMON_PAGE = (ROOT / 'docs' / 'guides' / 'launchers.md').read_text(encoding='utf-8')
LAUNCHERS = {'cloud_tpu': 'queued_resources', 'gke': 'jobset', 'slurm': 'slurm'}
CONSOLE_BLOCK = r'^```console\n(.*?)^```'


def list_sections():
    """Return {(page, heading): commands of that section}."""
    sections = {}
    for page, text in PAGES.items():
        _, *parts = re.split(r'^## ', text, flags=re.MULTILINE)
        for part in parts:
            commands = ''.join(re.findall(CONSOLE_BLOCK, part, re.MULTILINE | re.DOTALL))
            sections[page, part.partition('\n')[0]] = commands
    return {section: commands for section, commands in sections.items() if commands}


@pytest.mark.slow
@pytest.mark.parametrize('section', list_sections(), ids=lambda section: f'{section[0]}: {section[1]}')
def test_guide_commands_run_and_name_existing_files(section, run_commands, tmp_path):
    calls = run_commands(list_sections()[section])
    parser = build_parser()
    for call in calls:
        if call[0] == 'sinklab':
            _, overrides = parser.parse_known_args(call[1:])
            apply_overrides(default.get_config(), overrides)
        for argument in call:
            name, _, path = argument.rpartition('=')
            is_file_argument = name in ('--filename', '--metadata-from-file=startup-script') and '://' not in path
            assert not is_file_argument or (tmp_path / path).is_file(), call
    launches = re.findall(r'^python -m launch\.(\w+) (\w+)', list_sections()[section], re.MULTILINE)
    assert len(calls) >= len(launches)


@pytest.mark.parametrize('page', PAGES)
def test_guide_runs_every_verb_of_launcher(page):
    verbs = get_scheduler(LAUNCHERS[page]).verbs
    run_verbs = set(re.findall(r'^python -m launch\.(\w+) (\w+)', PAGES[page], re.MULTILINE))
    assert run_verbs == {(LAUNCHERS[page], verb) for verb in verbs}


def test_guide_exit_codes_match_launchers():
    table = COMMON_PAGE.partition('## When a run ends')[2].partition('\n## ')[0]
    rows = dict(re.findall(r'^\| ([\d, ]+) \| [^|]+ \| ([^|]+) \|', table, re.MULTILINE))
    codes = {int(code): meaning for row, meaning in rows.items() for code in row.split(',')}
    assert {code for code, meaning in codes.items() if meaning.startswith('ends the job')} == set(FINAL_EXIT_CODES)
    assert all(meaning.startswith(('ends the job', 'starts again')) for meaning in codes.values())
