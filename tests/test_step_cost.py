"""Estimated communication and memory of a 1B train step: committed figures and the compiled program."""

import json
import subprocess
import sys

import pytest

from benchmarks import step_cost

COMMITTED = json.loads(step_cost.FIGURES.read_text())


def test_check_figures_reports_cost_that_differs_from_committed_figure(capsys):
    costs = COMMITTED['costs']
    assert step_cost.check_figures(costs) == 0
    name, cost = next(iter(costs.items()))
    assert step_cost.check_figures({name: cost | dict(scattered=cost['scattered'] * 1.2)}) == 1
    assert all(part in err for err in [capsys.readouterr().err] for part in (name, 'scattered'))
    assert step_cost.check_figures(dict(other=cost)) == 1
    assert 'other: ' in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.skipif(
    step_cost.find_libtpu_version() != COMMITTED['versions']['libtpu'], reason='the figures are of another libtpu'
)
def test_sigmoid_1b_step_on_two_slices_has_committed_figures():
    command = [sys.executable, '-m', 'benchmarks.step_cost', '--topologies=2xv5e:8x8', '--rows=sigmoid_1b', '--check']
    result = subprocess.run(command, cwd=step_cost.FIGURES.parents[1], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
