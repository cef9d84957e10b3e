"""The README: what it shows is so."""

import json
import re
import runpy
from pathlib import Path

from sinklab.cli.config import load
from sinklab.cli.doctor import EXTRAS
from sinklab.cli.main import main

ROOT = Path(__file__).parents[1]
README = ROOT / 'README.md'


def test_the_config_file_of_the_readme_has_rows_that_parse(capsys, tmp_path):
    (block,) = re.findall(r'^```python\n(.*?)^```', README.read_text(encoding='utf-8'), re.MULTILINE | re.DOTALL)
    (tmp_path / 'mine.py').write_text(block)
    assert main(['rows', f'--config={tmp_path}/mine.py', '--json']) == 0
    plain, other = json.loads(capsys.readouterr().out)
    assert plain['diff'] == {}
    (changed,) = other['diff']
    assert load(f'{tmp_path}/mine.py:{other["row"]}', [])[0].optimizer.warmup_steps == other['diff'][changed]


def test_every_extra_that_doctor_offers_is_told_in_the_readme():
    told = README.read_text(encoding='utf-8').partition('from a clone')[2].partition('## From there')[0]
    for extra in set(EXTRAS.values()):
        assert re.search(rf'[`\[,]{extra}[`\],]', told), extra


def test_the_tables_of_numbers_are_those_of_the_measures():
    written = runpy.run_path(str(ROOT / 'docs' / 'number_table.py'))
    for path, numbers in written['PAGES'].items():
        text = path.read_text(encoding='utf-8')
        assert written['page'](text, numbers) == text
        assert len(numbers) <= text.count('`')
