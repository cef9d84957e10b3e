"""Generated reference pages, compared with an independent listing of the code."""

import functools
import importlib
import json
import re
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest

from docs import api_pages, paper_tables, reference
from sinklab import run_files
from sinklab.analysis.measure import LOSS_INFO
from sinklab.cli import main
from sinklab.config import spec
from sinklab.configs import claims as claims_file
from sinklab.configs import default, scale
from sinklab.configs.table import get_field, list_fields
from sinklab.exit_status import EXIT_CODES
from sinklab.metrics.registry import METRIC_INFOS, OFFLINE_METRIC_INFOS
from sinklab.report.claims import FAILS_METRIC
from sinklab.report.sweep_table import EMERGENCE_METRIC

ROOT = Path(__file__).parents[1]
PAGES = reference.build_pages()
build_paper_tables_page = functools.cache(paper_tables.build_page)
CONFIG_FILES = sorted(
    path for path in (ROOT / 'configs').glob('*.py') if '\nROWS' in path.read_text(encoding='utf-8')
)


def find_lines(page, first):
    """Return the lines of all tables whose first cell contains this text in backquotes."""
    return [line for line in page.splitlines() if line.startswith('|') and f'`{first}`' in line.split(' | ')[0]]


def test_config_page_lists_every_field_with_default_and_meaning():
    config = default.get_config()
    for path in list_fields(config):
        lines = [line for line in find_lines(PAGES['config.md'], path) if f'id="{path}"' in line or path == 'seed']
        assert len(lines) == 1, path
        cells = [cell.strip() for cell in lines[0].strip('|').split(' | ')]
        assert cells[1] == f'`{reference.format_value(get_field(config, path))}`'
        assert len(cells[3]) > 10


def test_config_page_lists_every_choice():
    choices = {*spec.NORMALIZERS_BY_SIMILARITY, *spec.HYPERPARAMETERS['name'], *spec.HYPERPARAMETERS['schedule']}
    for names in (spec.PositionName, spec.FFNName, spec.GateName, spec.DtypeName, spec.NormalizerName):
        choices |= {*get_args(names)}
    assert {choice for choice in choices if f'`{choice}`' not in PAGES['config.md']} == set()


def list_commands(parser, name=''):
    """Yield (name, parser) of every command."""
    for action in parser._actions:
        for command, subparser in action.choices.items() if action.nargs == 'A...' else ():
            yield f'{name} {command}'.strip(), subparser
            yield from list_commands(subparser, f'{name} {command}'.strip())


def test_commands_page_lists_every_command_with_its_options():
    for name, parser in list_commands(main.build_parser()):
        section = PAGES['commands.md'].partition(f' `sinklab {name}` {{ #sinklab-{name.replace(" ", "-")} }}')[2]
        for action in parser._actions:
            assert all(option in section.partition('\n## ')[0] for option in action.option_strings), name


@pytest.mark.parametrize('info', [*METRIC_INFOS, *OFFLINE_METRIC_INFOS], ids=lambda info: info.name)
def test_metrics_page_lists_every_registered_metric(info):
    (line,) = {line for line in find_lines(PAGES['metrics.md'], info.name) if 'log.' not in line}
    assert info.description.split()[0] in line.replace('\\', '')


def test_metrics_page_lists_every_training_and_analysis_metric():
    names = {LOSS_INFO.name, EMERGENCE_METRIC, FAILS_METRIC}
    for path in [*(ROOT / 'sinklab' / 'train').glob('*.py'), *(ROOT / 'sinklab' / 'data').rglob('*.py')]:
        names |= set(re.findall(r"'((?:train|valid|speed|data)/\w+)'", path.read_text(encoding='utf-8')))
    text = ''.join(path.read_text(encoding='utf-8') for path in (ROOT / 'sinklab' / 'analysis').glob('*.py'))
    names |= {f'{name}/{{k}}' for name in re.findall(r"by_layer\(\s*'(\w+)'", text)}
    assert len(names) >= 11
    assert {name for name in names if not find_lines(PAGES['metrics.md'], name)} == set()


@pytest.mark.parametrize('path', CONFIG_FILES, ids=lambda path: path.stem)
def test_rows_page_lists_every_row_with_changes_and_published_numbers(path):
    section = PAGES['rows.md'].partition(f'## `configs/{path.name}`')[2].partition('\n## ')[0]
    for name, row in importlib.import_module(f'sinklab.configs.{path.stem}').ROWS.items():
        (line,) = find_lines(section, name)
        for field in row['diff']:
            assert f'`{field}=' in line
        for metric, value in row['published'].items():
            assert metric in line
            assert metric == 'fails' or (f'{value:.2f}' if isinstance(value, float) else str(value)) in line
        assert reference.escape_markdown_text(row['source'])[1:] in line


def test_exit_codes_page_lists_every_code_and_kind():
    assert reference.EXIT_MEANINGS.keys() == EXIT_CODES.keys()
    for kind, code in EXIT_CODES.items():
        assert any(f'`{kind}`' in line for line in find_lines(PAGES['exit_codes.md'], code)), kind


def test_run_files_page_lists_files_and_every_schema_field():
    assert {'config.json', 'metrics.jsonl', 'checkpoints/'} <= reference.list_run_files().keys()
    for name, schema in run_files.SCHEMAS.items():
        section = PAGES['run_files.md'].partition(f'### `{name}.json`')[2].partition('\n### ')[0]
        for field in msgspec.structs.fields(*(get_args(schema) or [schema])) if schema is not dict else ():
            assert find_lines(section, field.encode_name), (name, field.encode_name)


@pytest.mark.parametrize(
    'path', [path for path in CONFIG_FILES if path.stem != 'quickstart'], ids=lambda path: path.stem
)
def test_paper_tables_page_links_every_row(path):
    for name in importlib.import_module(f'sinklab.configs.{path.stem}').ROWS:
        assert f'[`{path.stem}:{name}`](../reference/rows.md#{path.stem}-{name})' in build_paper_tables_page()


def test_paper_tables_page_has_section_for_every_cited_table_and_figure():
    titles = ' '.join(line for line in build_paper_tables_page().splitlines() if line.startswith('### '))
    sources = {row['source'] for row in paper_tables.load_all_rows().values()}
    sources |= {entry['source'] for entry in claims_file.CLAIMS.values()}
    for version, kind, entry, other_entry in re.findall(
        r'\((v1|ICLR)\), (Table|Figure)s? (\d+[A-D]?)(?: and (\d+))?', ' '.join(sources)
    ):
        for number in filter(None, (entry, other_entry)):
            assert re.search(rf'{kind}s? (\d+ and )?{number}( and \d+)? \({version}\)', titles), (version, number)


def test_paper_tables_page_lists_every_claim_with_verdict():
    for name, verdict in paper_tables.load_verdicts().items():
        (line, *_) = [line for line in build_paper_tables_page().splitlines() if line.startswith(f'- `{name}` ')]
        assert f'**{verdict["verdict"]}' in line


def test_paper_tables_page_numbers_match_measured_runs():
    runs = json.loads((ROOT / 'docs' / 'results' / 'claims.json').read_text(encoding='utf-8'))['runs']
    assert len(runs) > 20
    for row, seeds in runs.items():
        lines = [line for line in build_paper_tables_page().splitlines() if line.startswith(f'| [`{row}`]')]
        assert lines, row
        sinks = [run['end']['sink/1'] for run in seeds.values() if 'sink/1' in run['end']]
        losses = [run['end']['valid/loss'] for run in seeds.values() if 'valid/loss' in run['end']]
        for line in lines:
            our_results = line.split(' | ')[2]
            assert f'{len(seeds)} seeds' in our_results
            assert bool(sinks) == ('`sink/1`' in our_results)  # without a number if all runs diverged
            for name, values, digits in (('sink/1', sinks, 1), ('valid/loss', losses, 3)):
                spread = f' ± {np.std(values, ddof=1):.{digits}f}' if len(values) > 1 else ''
                assert not values or f'`{name}` {np.mean(values):.{digits}f}{spread}' in our_results


def test_chip_hours_are_those_of_config_file_and_of_estimated_step():
    page = build_paper_tables_page()
    assert f'at least {scale.CHIP_HOURS["60M"]} chip-hours' in page
    for size, hours in scale.CHIP_HOURS.items():
        assert f'{hours} ({size})' in page
    costs = json.loads((ROOT / 'benchmarks' / 'step_cost.json').read_text(encoding='utf-8'))['costs']
    seconds = scale.get_config('softmax_1b').optimizer.steps * costs['softmax_1b v5e:16x16']['milliseconds'] / 1000
    assert scale.CHIP_HOURS['1B'] == round(seconds * 256 / 3600, -1)


def test_runs_of_row_are_those_of_measured_row_with_same_config():
    assert paper_tables.find_our_runs('columns:kv_shared') is None
    swiglu_runs, baseline_runs = map(paper_tables.find_our_runs, ('blocks:swiglu', 'attention:softmax'))
    assert swiglu_runs != baseline_runs  # it has twice the heads
    assert paper_tables.find_our_runs('data:fixed_1') == baseline_runs


def test_api_pages_name_exported_objects():
    assert '::: sinklab.open' in api_pages.build_pages()['sinklab.md']
    with pytest.raises(AttributeError):
        api_pages.check_object_exists('sinklab.train.callbacks.Missing')
