"""README content, compared with the code and the committed results."""

import collections
import json
import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from sinklab.cli.config_flags import load_spec
from sinklab.cli.main import main
from sinklab.configs.claims import CLAIMS

ROOT = Path(__file__).parents[1]
README = (ROOT / 'README.md').read_text(encoding='utf-8')


@pytest.fixture
def claims(capsys):
    """Return {claim: verdict}."""
    assert main(['claims', f'--results={ROOT}/docs/results/claims.json', '--json']) == 0
    return {claim['claim']: claim['verdict'] for claim in json.loads(capsys.readouterr().out)}


def test_readme_rows_are_valid(capsys, tmp_path):
    blocks = re.findall(r'^```python\n(.*?)^```', README, re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if block.startswith('# mine.py'))
    (tmp_path / 'mine.py').write_text(block)
    assert main(['rows', f'--config={tmp_path}/mine.py', '--json']) == 0
    plain, other = json.loads(capsys.readouterr().out)
    assert (plain['diff'], other['diff']) == ({}, {'model.qk_norm': True})
    assert load_spec(f'{tmp_path}/mine.py:{other["row"]}', [], 'quickstart')[0].model.qk_norm


@pytest.mark.slow
def test_readme_results_match_measured_runs(claims):
    results_dir = ROOT / 'docs' / 'results'
    runs_by_size = [
        json.loads((results_dir / name).read_text())['runs'] for name in ('claims.json', 'claims_small.json')
    ]
    table = README.partition('| model | claim |')[2].partition('<!-- end -->')[0]
    lines = [[cell.strip() for cell in line.split('|')[1:-1]] for line in table.splitlines()[2:]]
    assert len(lines) == 10
    for _, name, published, *cells in lines:
        row, number = CLAIMS[name.strip('`')]['of'][:2]
        file, _, key = row.partition(':')
        of_row = runpy.run_path(f'{ROOT}/configs/{file}.py')['ROWS'][key]['published'].get(number)
        assert published == ('' if of_row is None else f'{of_row:.1f}')
        assert cells[1] == claims[name.strip('`')]
        for cell, runs in zip(cells[::2], runs_by_size, strict=True):
            sinks = [run['end'][number] for run in runs.get(row, {}).values()]
            spread = f' ± {np.std(sinks, ddof=1):.1f}' if len(sinks) > 1 else ''
            assert cell == (f'{np.mean(sinks):.1f}{spread} ({len(sinks)})' if sinks else '')


@pytest.mark.slow
@pytest.mark.parametrize('path', ['README.md', 'docs/index.md', 'docs/faq.md'])
def test_counts_of_verdicts_match_computed_verdicts(claims, path):
    verdicts = collections.Counter(claims.values())
    _, _, sentence = (ROOT / path).read_text(encoding='utf-8').lower().partition(f'of {len(claims)} claims')
    names = 'holds', 'contradicted', 'not seen', 'unsettled', 'not testable here', 'not run'
    counts = re.findall(r'\d+', sentence.partition('claims.md')[0])
    assert [int(number) for number in counts] == [verdicts[name] for name in names if verdicts[name]]


def test_readme_links_exist():
    links = re.findall(r'\]\(([^)#]+)', README)
    assert len(links) > 15
    assert [link for link in links if not link.startswith('http') and not (ROOT / link).exists()] == []


def test_metric_tables_of_docs_match_registry():
    written = runpy.run_path(str(ROOT / 'docs' / 'metric_tables.py'))
    for path, numbers in written['PAGES'].items():
        text = path.read_text(encoding='utf-8')
        assert written['update_page'](text, numbers) == text
        assert len(numbers) <= text.count('`')
