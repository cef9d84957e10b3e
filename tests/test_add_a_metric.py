"""Guide to adding a metric or an FFN activation: its file and commands in a copy of this tree, and their results."""

import json

import numpy as np
import pytest
from doc_pages import copy_code, read_blocks, read_commands, run_command

PAGE = 'guides/add_a_metric.md'
pytestmark = pytest.mark.slow


def test_file_of_user_adds_metric_and_activation_to_all_outputs(tmp_path):
    copy_code(tmp_path)
    own_file, script = read_blocks(PAGE, 'python')
    (tmp_path / 'mine.py').write_text(own_file)
    outputs = {command: run_command(tmp_path, command) for command in read_commands(PAGE)}
    for verb in ('train', 'sweep', 'report', 'measure'):
        assert 'alpha_previous' in next(text for command, text in outputs.items() if f'sinklab {verb}' in command)
    for name in ('own', 'relu/softmax-0', 'relu/squared_relu-0'):
        run = tmp_path / 'runs' / name
        last_record = json.loads((run / 'metrics.jsonl').read_text().splitlines()[-1])
        *_, newest_probe = sorted((run / 'probe').glob('*.npz'))
        mean = np.load(newest_probe)['previous_LH'].mean()
        assert 0 < last_record['alpha/previous'] == pytest.approx(mean, rel=1e-5)
    report_html = (tmp_path / 'runs' / 'report.html').read_text()
    assert '>alpha_previous</th>' in report_html
    assert 'Who looks at the previous token' in report_html
    registered, expected = map(float, run_command(tmp_path, '.venv/bin/python -', script).split())
    assert registered == pytest.approx(expected, rel=1e-5)
