"""Generated reference pages, compared with an independent listing of the code."""

import fnmatch
import importlib
import json
import re
from pathlib import Path

import numpy as np

import sinklab
from docs import measured_rows, reference
from sinklab.configs import claims as claims_file
from sinklab.configs import default
from sinklab.configs.table import get_field, list_fields
from sinklab.metrics.registry import REQUESTED_METRIC_INFOS
from sinklab.report.claims import FAILS_METRIC
from sinklab.report.sweep_table import EMERGENCE_METRIC

ROOT = Path(__file__).parents[1]
PAGES = reference.build_pages()
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


def test_metrics_page_lists_every_training_and_analysis_metric():
    names = {EMERGENCE_METRIC, FAILS_METRIC, *(info.name for info in REQUESTED_METRIC_INFOS)}
    for path in [*(ROOT / 'sinklab' / 'train').glob('*.py'), *(ROOT / 'sinklab' / 'data').rglob('*.py')]:
        names |= set(re.findall(r"'((?:train|valid|speed|data)/\w+)'", path.read_text(encoding='utf-8')))
    text = ''.join(path.read_text(encoding='utf-8') for path in (ROOT / 'sinklab' / 'analysis').glob('*.py'))
    names |= {f'{name}/{{k}}' for name in re.findall(r"by_layer\(\s*'(\w+)'", text)}
    assert len(names) >= 10
    assert {name for name in names if not find_lines(PAGES['metrics.md'], name)} == set()


TABLES_PAGE = (ROOT / 'docs' / 'paper' / 'tables.md').read_text(encoding='utf-8')


def list_all_rows():
    return {
        f'{path.stem}:{name}': row
        for path in CONFIG_FILES
        for name, row in importlib.import_module(f'sinklab.configs.{path.stem}').ROWS.items()
    }


def test_tables_page_names_existing_rows_and_every_row_of_paper():
    rows = list_all_rows()
    patterns = re.findall(r'\[`(\w+:[\w.*-]+)`\]', TABLES_PAGE)
    assert [pattern for pattern in patterns if not fnmatch.filter(rows, pattern)] == []
    paper_rows = [row for row, info in rows.items() if re.search(r'\((v1|ICLR)\)', info['source'])]
    assert len(paper_rows) > 50
    missing_rows = [row for row in paper_rows if not any(fnmatch.fnmatch(row, pattern) for pattern in patterns)]
    assert [row for row in missing_rows if not row.startswith('quickstart:')] == []


def test_tables_page_has_every_cited_table_and_figure():
    locations = ' '.join(line.split(' | ')[0] for line in TABLES_PAGE.splitlines() if line.startswith('| '))
    sources = {row['source'] for row in list_all_rows().values()}
    sources |= {entry['source'] for entry in claims_file.CLAIMS.values()}
    pattern = r'\((v1|ICLR)\), (Table|Figure)s? (\d+[A-D]?)(?: and (\d+))?'
    for version, kind, *numbers in re.findall(pattern, ' '.join(sources)):
        for number in filter(None, numbers):
            location = rf'{kind}s? (\d+ and )?{number}( and \d+)? \({version}\)'
            assert re.search(location, locations), (version, number)


def test_rows_page_has_means_of_measured_runs():
    runs = json.loads((ROOT / 'docs' / 'results' / 'claims.json').read_text(encoding='utf-8'))['runs']
    assert len(runs) > 20
    for row, seeds in runs.items():
        file, _, name = row.partition(':')
        section = PAGES['rows.md'].partition(f'## `configs/{file}.py`')[2].partition('\n## ')[0]
        (line,) = find_lines(section, name)
        ours = line.split(' | ')[3]
        assert f'{len(seeds)} seeds' in ours
        for metric, digits in (('sink/1', 1), ('valid/loss', 3)):
            values = [run['end'][metric] for run in seeds.values() if metric in run['end']]
            spread = f' ± {np.std(values, ddof=1):.{digits}f}' if len(values) > 1 else ''
            assert not values or f'`{metric}` {np.mean(values):.{digits}f}{spread}' in ours


def test_runs_of_row_are_those_of_measured_row_with_same_config():
    assert measured_rows.find_our_runs('learned_kv:kv_shared') is None
    swiglu_runs, baseline_runs = map(measured_rows.find_our_runs, ('blocks:swiglu', 'attention:softmax'))
    assert swiglu_runs != baseline_runs  # it has twice the heads
    assert measured_rows.find_our_runs('data:fixed_1') == baseline_runs


def test_api_pages_name_existing_and_all_exported_objects():
    api_dir = ROOT / 'docs' / 'reference' / 'api'
    texts = {path.name: path.read_text(encoding='utf-8') for path in api_dir.glob('*.md')}
    for path in re.findall(r'^::: (\S+)$', ''.join(texts.values()), re.MULTILINE):
        module, _, name = path.rpartition('.')
        assert hasattr(importlib.import_module(module), name), path
    exports = {'open', *sinklab.LAZY_IMPORTS}
    assert set(re.findall(r'heading: sinklab\.(\w+)', texts['sinklab.md'])) == exports
