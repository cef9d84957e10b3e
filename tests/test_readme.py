"""README content, compared with the code and the committed results."""

import collections
import json
import re
import runpy
from pathlib import Path

import pytest

from sinklab.cli.config_flags import load_spec
from sinklab.cli.main import main

ROOT = Path(__file__).parents[1]
README = (ROOT / 'README.md').read_text(encoding='utf-8')


@pytest.fixture
def verdict_by_claim(capsys):
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


@pytest.mark.parametrize('path', ['README.md', 'docs/index.md', 'docs/faq.md'])
def test_counts_of_verdicts_match_computed_verdicts(verdict_by_claim, path):
    verdicts = collections.Counter(verdict_by_claim.values())
    _, _, sentence = (ROOT / path).read_text(encoding='utf-8').partition('<!-- claims: counts -->')
    names = [
        'holds',
        'contradicted',
        'not seen',
        'diverged',
        'unsettled',
        'too few seeds',
        'not testable here',
        'not run',
    ]
    counts = [int(number) for number in re.findall(r'\d+', sentence.partition('<!--')[0])]
    assert counts == [len(verdict_by_claim), *(verdicts[name] for name in names if verdicts[name])]


def test_readme_links_exist():
    links = re.findall(r'\]\(([^)#]+)', README)
    assert len(links) > 15
    assert [link for link in links if not link.startswith('http') and not (ROOT / link).exists()] == []


def test_metric_tables_of_docs_match_registry():
    script_globals = runpy.run_path(str(ROOT / 'docs' / 'metric_tables.py'))
    for path, metric_infos in script_globals['PAGES'].items():
        text = path.read_text(encoding='utf-8')
        assert text.count(script_globals['TABLE_HEAD']) == 1
        assert script_globals['update_page'](text, metric_infos) == text
