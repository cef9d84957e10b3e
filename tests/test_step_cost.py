"""Gate on communication and memory of a 1B train step: rules, committed figures and compiled program."""

import json
import math
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import make_tiny_spec

from sinklab.planning import topology
from sinklab.train import state

GATE_SCRIPT = Path(__file__).parents[1] / 'benchmarks' / 'step_cost.py'
COMMITTED_FIGURES = json.loads(GATE_SCRIPT.with_suffix('.json').read_text())
DATA, FSDP = 2, 4


@pytest.fixture(scope='module')
def gate():
    gate_globals = runpy.run_path(str(GATE_SCRIPT))
    gate_globals['find_broken_rules'].__globals__['MIN_BYTES'] = 0  # all arrays of a tiny model are smaller
    return gate_globals


def make_collective(dtype, sent_bytes, is_async=True):
    """Return a collective that sends the given bytes from each device."""
    return SimpleNamespace(types=(f'{dtype}[8]',), is_async=is_async, sent_bytes=sent_bytes)


def make_valid_step():
    """Return the collectives by purpose of a step that satisfies all rules for a tiny model."""
    num_param_bytes = state.count_bytes(state.get_state_shapes(make_tiny_spec())['params'])
    all_bytes, min_bytes = num_param_bytes * (FSDP - 1) / FSDP, 2 * num_param_bytes / FSDP * (DATA - 1) / DATA
    return dict(
        gathered=[make_collective('bf16', all_bytes)],
        scattered=[make_collective('f32', all_bytes)],
        between=[make_collective('f32', min_bytes)],
        others=[],
    )


def list_broken_rules(gate, purposes, peak=1, estimate=3, shapes=frozenset({(3,)})):
    mesh = SimpleNamespace(shape=dict(data=DATA, fsdp=FSDP, tensor=1))
    result = SimpleNamespace(mesh=mesh, peak_bytes=peak, memory_bytes=2)
    return gate['find_broken_rules'](make_tiny_spec(), result, estimate, purposes, shapes, 0.6)


def test_find_broken_rules_is_empty_for_valid_step(gate):
    assert list_broken_rules(gate, make_valid_step()) == []


def get_stacked_shape():
    ffn = state.get_state_shapes(make_tiny_spec())['params']['blocks']['ffn']
    return max((leaf.shape for leaf in ffn.values()), key=math.prod)


VIOLATIONS = {
    'the step fits into the memory of a chip': lambda step: dict(peak=3),
    'the estimate from shapes is at least the peak memory': lambda step: dict(estimate=0),
    'all-gathers overlap with computation': lambda step: step['gathered'].append(
        make_collective('bf16', step['gathered'][0].sent_bytes, is_async=False)
    ),
    'weights are gathered in bfloat16': lambda step: step['gathered'].append(make_collective('f32', 1)),
    'no other collective sends 1 MiB or more': lambda step: step['others'].append(make_collective('f32', 1)),
    'reduce-scatters of gradients send at most 1.1 of the least bytes': lambda step: step['scattered'].append(
        make_collective('f32', 0.11 * step['scattered'][0].sent_bytes)
    ),
    'all gradients are reduce-scattered': lambda step: step.update(
        scattered=[make_collective('f32', 0.9 * step['scattered'][0].sent_bytes)]
    ),
    'gradients are all-reduced once between slices': lambda step: step['between'].extend(step['between']),
    'no array has all layers of a parameter': lambda step: dict(shapes=frozenset({get_stacked_shape()})),
}


@pytest.mark.parametrize('rule', VIOLATIONS)
def test_find_broken_rules_names_violated_rule(gate, rule):
    step = make_valid_step()
    changes = VIOLATIONS[rule](step) or {}
    assert list_broken_rules(gate, step, **changes) == [rule]


def test_check_figures_reports_cost_above_committed_figure(gate, capsys):
    costs = COMMITTED_FIGURES['costs']
    assert not any(cost['broken'] for cost in costs.values())
    assert gate['check_figures'](costs) == 0
    name, cost = next(iter(costs.items()))
    assert gate['check_figures']({name: cost | dict(scattered=cost['scattered'] * 1.2)}) == 1
    assert all(part in err for err in [capsys.readouterr().err] for part in (name, 'scattered'))
    assert gate['check_figures'](dict(other=cost)) == 1
    assert 'other: ' in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.skipif(topology.find_libtpu() is None, reason='libtpu, which has the compiler, could not be installed')
def test_sigmoid_1b_step_on_two_slices_satisfies_rules_and_fits():
    """Compare the costs with the committed ones if the libtpu version is the same."""
    check_option = ['--check'] if topology.find_libtpu_version() == COMMITTED_FIGURES['libtpu'] else []
    command = [sys.executable, GATE_SCRIPT, '--topologies=2xv5e:8x8', '--rows=sigmoid_1b', *check_option]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    name, _, compiled, _, size, *_ = result.stdout.splitlines()[-1].split()
    assert name == 'sigmoid_1b'
    assert int(compiled) < 240
    assert 1 < float(size) < 16
