"""Guide to adding a metric: its edits applied to a copy of this tree, its commands and their results."""

import json

import numpy as np
import pytest
from doc_pages import NEEDS_GIT, make_edited_copy, read_blocks, read_commands, run_command

PAGE = 'guides/add_a_metric.md'
pytestmark = [pytest.mark.slow, NEEDS_GIT]


def test_guide_adds_metric_in_one_file_and_all_outputs_show_it(tmp_path):
    sources = {
        line for block in read_blocks(PAGE, 'diff') for line in block.splitlines() if line.startswith('+++ b/sinklab')
    }
    assert len(sources) == 1
    tree = make_edited_copy(tmp_path / 'sinklab', PAGE)
    outputs = {command: run_command(tree, command) for command in read_commands(PAGE)}
    run = tree / 'runs' / 'own'
    assert 'alpha_self' in next(text for command, text in outputs.items() if 'sinklab report' in command)
    last_record = json.loads((run / 'metrics.jsonl').read_text().splitlines()[-1])
    *_, newest_probe = sorted((run / 'probe').glob('*.npz'))
    assert 0 < last_record['alpha/self'] == pytest.approx(float(np.load(newest_probe)['own_LH'].mean()), rel=1e-5)
    report_html = (run / 'report.html').read_text()
    assert '>alpha_self</th>' in report_html
    assert 'Who looks at itself' in report_html
