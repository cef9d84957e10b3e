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
    runs = json.loads((ROOT / 'docs' / 'results' / 'claims.json').read_text())['runs']
    table = README.partition('| model | claim |')[2].partition('\n\n')[0]
    result = re.findall(r'\| `([\w.]+)`: [^|]+ \| ([\d.]+) \| ([\d.]+) ± ([\d.]+) \| ([\w ]+) \|', table)
    assert len(result) == 8
    for name, published, mean, deviation, verdict in result:
        row, number = CLAIMS[name]['of'][:2]
        file, _, key = row.partition(':')
        sinks = [run['end'][number] for run in runs[row].values()]
        of_row = runpy.run_path(f'{ROOT}/configs/{file}.py')['ROWS'][key]['published'][number]
        assert (published, mean, deviation) == (
            f'{of_row:.1f}',
            f'{np.mean(sinks):.1f}',
            f'{np.std(sinks, ddof=1):.1f}',
        )
        assert verdict == claims[name]
        assert len(sinks) == (5 if name == 'rate_lower' else 8)


@pytest.mark.slow
def test_readme_verdict_counts_match_computed_verdicts(claims):
    verdicts = collections.Counter(claims.values())
    status = ' '.join(README.partition('of 85 claims')[2].partition('([details]')[0].replace('>', '').split())
    names = 'holds', 'contradicted', 'not seen', 'unsettled', 'not testable here', 'not run'
    assert [int(number) for number in re.findall(r'\d+', status)] == [verdicts[name] for name in names]
    assert verdicts.total() == 85


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
