"""README: its example rows and counts of verdicts."""

import collections
import json
import re
from pathlib import Path

import numpy as np
import pytest

from docs.claims_results import README_CLAIMS
from sinklab.cli.config_flags import load_spec
from sinklab.cli.main import main
from sinklab.configs.claims import CLAIMS

ROOT = Path(__file__).parents[1]


def test_readme_rows_are_valid(capsys, tmp_path):
    readme = (ROOT / 'README.md').read_text(encoding='utf-8')
    blocks = re.findall(r'^```python\n(.*?)^```', readme, re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if block.startswith('# mine.py'))
    (tmp_path / 'mine.py').write_text(block)
    assert main(['rows', f'--config={tmp_path}/mine.py', '--json']) == 0
    plain, other = json.loads(capsys.readouterr().out)
    assert (plain['diff'], other['diff']) == ({}, {'model.qk_norm': True})
    assert load_spec(f'{tmp_path}/mine.py:{other["row"]}', [], 'quickstart')[0].model.qk_norm


@pytest.mark.parametrize('path', ['README.md', 'docs/index.md'])
def test_counts_of_verdicts_match_computed_verdicts(capsys, path):
    assert main(['claims', f'--results={ROOT}/docs/results/claims.json', '--json']) == 0
    verdicts = collections.Counter(claim['verdict'] for claim in json.loads(capsys.readouterr().out))
    _, _, sentence = (ROOT / path).read_text(encoding='utf-8').partition('<!-- claims: counts -->')
    counts = [int(number) for number in re.findall(r'\d+', sentence.partition('<!--')[0])]
    assert counts[0] == sum(verdicts.values())
    assert sorted(counts[1:]) == sorted(verdicts.values())


def test_table_of_results_has_means_and_deviations_of_stored_runs():
    readme = (ROOT / 'README.md').read_text(encoding='utf-8')
    runs = json.loads((ROOT / 'docs' / 'results' / 'claims.json').read_text(encoding='utf-8'))['runs']
    lines = readme.partition('<!-- claims: readme -->')[2].partition('<!-- end -->')[0].strip().splitlines()[2:]
    assert len(lines) == len(README_CLAIMS)
    for name, line in zip(README_CLAIMS, lines, strict=True):
        for reading in ('right', 'left'):
            row, metric = CLAIMS[name][reading][:2]
            values = [run['end'][metric] for run in runs[row].values()]
            assert f'| {np.mean(values):.1f} ± {np.std(values, ddof=1):.1f} |' in line
