"""Benchmarks at a small size: they run, and print what pages need. No time is asserted."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from benchmarks import peers, step_cost, tpu_cost
from sinklab.config.validate import parse_config
from sinklab.configs import default
from sinklab.planning import topology
from sinklab.train import state

ROOT = Path(__file__).parents[1]
NUMBER = r'-?[\d.]+'
COMMITTED_STEP_COSTS = json.loads(step_cost.FIGURES.read_text())


def run_benchmark(name, *options):
    command = [sys.executable, '-m', f'benchmarks.{name}', *options]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=900).stdout


@pytest.mark.exhaustive
def test_peers_benchmark_compares_models_of_equal_size():
    pytest.importorskip('torch')
    names = 'ours', 'PyTorch eager', 'plain JAX'
    options = (
        '--size=smoke',
        '--batch=4',
        '--length=16',
        '--data=1',
        '--rounds=1',
        '--steps=1',
        f'--peers={",".join(names)}',
    )
    for extra_options in ((), ('--micro_batch=2',)):
        output = run_benchmark('peers', *options, *extra_options)
        for name in names:
            (loss,) = re.findall(rf'^{name}, loss of the first step: ({NUMBER})$', output, re.MULTILINE)
            assert 5 < float(loss) < 7  # log 300, plus the variance of random logits
            assert re.search(rf'^{name}: {NUMBER} .* of ours$', output, re.MULTILINE)


def test_pytorch_peer_has_as_many_parameters_and_threads_as_ours():
    torch = pytest.importorskip('torch')
    from benchmarks import peer_pytorch

    spec = parse_config(default.get_config(size='smoke').to_dict())
    shape = {name: getattr(spec.model, name) for name in (*peers.MODEL_FIELDS, 'dtype')}
    shape |= dict(batch=4, length=16, threads=1, micro_batch=None)
    assert sum(parameter.numel() for parameter in peer_pytorch.Decoder(shape).parameters()) == sum(
        leaf.size for leaf in jax.tree.leaves(state.get_state_shapes(spec)['params'])
    )
    losses = [peer_pytorch.make_decoder_step(shape | change, False)() for change in ({}, dict(micro_batch=2))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert torch.get_num_threads() == 1


@pytest.mark.exhaustive
def test_attention_benchmark_covers_dense_and_chunked():
    output = run_benchmark('attention', '--lengths=16,32', '--max_dense_length=16', '--rounds=2')
    pattern = (
        rf'^T= *(\d+) (\S+) +(forward|with gradients) +(\w+) +{NUMBER} \({NUMBER} to {NUMBER}\) ms, {NUMBER} MiB$'
    )
    lines = re.findall(pattern, output, re.MULTILINE)
    assert len(set(lines)) == 3 * 2 * (2 + 1)
    assert {length for length, _, _, name in lines if name == 'dense'} == {'16'}


@pytest.mark.exhaustive
@pytest.mark.skipif(topology.find_libtpu() is None, reason='libtpu, which has the compiler, could not be installed')
def test_tpu_cost_benchmark_prints_committed_costs():
    """Compare with the committed costs if the libtpu version is the same."""
    committed_version = json.loads(tpu_cost.FIGURES.read_text())['versions']['libtpu']
    options = ['--check'] if step_cost.find_libtpu_version() == committed_version else []
    output = run_benchmark('tpu_cost', '--chips=v6e', '--kernels=softmax forward,splash forward', *options)
    bundles = [int(number) for number in re.findall(r'^v6e +\w+ forward +(\d+) +\d+% +\d+%', output, re.MULTILINE)]
    assert len(bundles) == 2
    assert bundles[0] < 1.1 * bundles[1], 'more bundles than splash attention of JAX needs'


def test_check_figures_reports_cost_that_differs_from_committed_figure(capsys):
    costs = COMMITTED_STEP_COSTS['costs']
    assert step_cost.check_figures(costs) == 0
    name, cost = next(iter(costs.items()))
    assert step_cost.check_figures({name: cost | dict(scattered=cost['scattered'] * 1.2)}) == 1
    assert all(part in err for err in [capsys.readouterr().err] for part in (name, 'scattered'))
    assert step_cost.check_figures(dict(other=cost)) == 1
    assert 'other: ' in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.skipif(
    step_cost.find_libtpu_version() != COMMITTED_STEP_COSTS['versions']['libtpu'],
    reason='the figures are of another libtpu',
)
def test_sigmoid_1b_step_on_two_slices_has_committed_figures():
    run_benchmark('step_cost', '--topologies=2xv5e:8x8', '--rows=sigmoid_1b', '--check')
