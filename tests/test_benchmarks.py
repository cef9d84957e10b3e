"""Tests that run every benchmark at a small size and parse its output.

They assert no time.
"""

import importlib
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from sinklab.config.validate import parse_config
from sinklab.configs import default
from sinklab.planning import topology
from sinklab.train import state

BENCHMARKS = Path(__file__).parents[1] / 'benchmarks'
NUMBER = r'-?[\d.]+'


@pytest.fixture
def run_benchmark(monkeypatch, capsys):
    """Return a function run_benchmark(name, *options) that returns the output of a benchmark."""

    def run(name, *options):
        monkeypatch.setattr(sys, 'argv', [f'{name}.py', *options])
        monkeypatch.syspath_prepend(BENCHMARKS)
        capsys.readouterr()
        try:
            runpy.run_path(str(BENCHMARKS / f'{name}.py'), run_name='__main__')
        except SystemExit as error:
            if error.code:
                raise
        return capsys.readouterr().out

    return run


@pytest.mark.exhaustive
def test_train_loop_benchmark_prints_cost_of_step_and_probe(run_benchmark):
    output = run_benchmark('train_loop', '--size=smoke', '--steps=6', '--rounds=1')
    values = dict(re.findall(rf'^(.+?): +({NUMBER}) \({NUMBER} to {NUMBER}\)$', output, re.MULTILINE))
    positive = {float(values[name]) > 0 for name in ('bare step, ms', 'step of the loop, ms', 'one probe, ms')}
    assert positive == {True}
    assert {'loop over step, %', 'a probe every 100 steps, %'} < values.keys()


@pytest.mark.exhaustive
def test_peers_benchmark_compares_models_of_equal_size(monkeypatch):
    pytest.importorskip('torch')
    monkeypatch.syspath_prepend(BENCHMARKS)
    names = 'ours', 'PyTorch eager', 'plain JAX'
    options = '--size=smoke', '--batch=4', '--length=16', '--cores=1', '--rounds=1', '--steps=1'
    for extra_options in ((), ('--micro_batch=2',), ('--forward',)):
        command = [
            sys.executable,
            str(BENCHMARKS / 'peers.py'),
            *options,
            f'--peers={",".join(names)}',
            *extra_options,
        ]
        output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
        for name in names:
            (loss,) = re.findall(rf'^{name}, loss of the first step: ({NUMBER})$', output, re.MULTILINE)
            assert 5 < float(loss) < 7  # log 300, plus the variance of random logits
        assert re.search(rf'^PyTorch eager over ours: {NUMBER} ', output, re.MULTILINE)


def test_pytorch_peer_has_as_many_parameters_and_threads_as_ours(monkeypatch):
    torch = pytest.importorskip('torch')
    monkeypatch.syspath_prepend(BENCHMARKS)
    spec = parse_config(default.get_config(size='smoke').to_dict())
    names = 'layers', 'heads', 'width', 'head_width', 'ffn_width', 'vocabulary', 'dtype'
    shape = {name: getattr(spec.model, name) for name in names}
    shape |= dict(batch=4, length=16, threads=1, is_forward=False, micro_batch=None)
    module = importlib.import_module('peer_pytorch')
    assert sum(parameter.numel() for parameter in module.Decoder(shape).parameters()) == sum(
        leaf.size for leaf in jax.tree.leaves(state.get_state_shapes(spec)['params'])
    )
    losses = [module.make_decoder_step(shape, is_compiled=False)()]
    losses += [module.make_decoder_step(shape | dict(micro_batch=2), is_compiled=False)()]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize('option', ['--data=2', '--micro_batch=2'])
def test_peers_benchmark_refuses_batch_that_option_does_not_divide(option, monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    peers = importlib.import_module('peers')
    monkeypatch.setattr('sys.argv', ['peers.py', '--batch=3', option])
    with pytest.raises(SystemExit) as raised:
        peers.parse_arguments()
    assert raised.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert '--batch=3' in message
    assert option in message


def test_peers_benchmark_names_unknown_and_missing_peers(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    peers = importlib.import_module('peers')
    monkeypatch.setattr(peers, 'ROOT', tmp_path)
    assert not {'litgpt', 'MaxText'} & set(peers.choose_peers('all'))
    assert 'litgpt is not installed' in capsys.readouterr().out
    with pytest.raises(SystemExit):
        peers.choose_peers('litgpt,plain JAX')
    with pytest.raises(SystemExit) as raised:
        peers.choose_peers('nope')
    assert 'nope' in str(raised.value)


@pytest.mark.slow
def test_data_benchmark_prints_read_and_prepare_rates(run_benchmark):
    options = '--read_tokens=100000', '--text_mb=0.2', '--vocabulary=300'
    output = run_benchmark('data', *options, '--rounds=1', '--seconds=0.01')
    rates = dict(re.findall(rf'^(.+?), .+: ({NUMBER}) \({NUMBER} to {NUMBER}\)$', output, re.MULTILINE))
    assert rates.keys() == {'batches', 'NumPy', 'tokenizers', 'prepare'}
    assert all(float(rate) > 0 for rate in rates.values())


@pytest.mark.slow
def test_loss_benchmark_compares_chunked_and_full_logits(run_benchmark):
    output = run_benchmark('loss', '--batch=2', '--length=32', '--width=16', '--vocabulary=64', '--rounds=2')
    pattern = rf'^(\w+) +(\w+)( with gradients)? +{NUMBER} ms \({NUMBER} to {NUMBER}\), {NUMBER} MiB$'
    lines = re.findall(pattern, output, re.MULTILINE)
    assert len(set(lines)) == 2 * 2 * 2
    assert {dtype for dtype, *_ in lines} == {'float32', 'bfloat16'}
    assert {name for _, name, _ in lines} == {'chunked', 'full'}


@pytest.mark.exhaustive
def test_attention_benchmark_covers_dense_and_matrix_free_backends(run_benchmark):
    output = run_benchmark('attention', '--lengths=16,32', '--max_dense_length=16', '--rounds=2')
    case_pattern = r'T= *(\d+) (\S+) +(forward|with gradients) +(\S+(?: \+ sinks)?)'
    pattern = rf'^{case_pattern} +{NUMBER} ms .* (?:{NUMBER} x|-) +{NUMBER} MiB$'
    lines = re.findall(pattern, output, re.MULTILINE)
    assert len(set(lines)) == 3 * 2 * (3 + 2)
    assert {length for length, _, _, name in lines if name == 'dense'} == {'16'}


@pytest.mark.exhaustive
@pytest.mark.skipif(topology.find_libtpu() is None, reason='libtpu, which has the compiler, could not be installed')
def test_tpu_cost_benchmark_prints_cost_from_ahead_of_time_compiler(run_benchmark):
    """Compare with the committed costs if the libtpu version is the same."""
    committed_version = json.loads((BENCHMARKS / 'tpu_cost.json').read_text())['versions']['libtpu']
    options = ['--check'] if topology.find_libtpu_version() == committed_version else []
    output = run_benchmark('tpu_cost', '--chips=v6e', '--kernels=softmax forward', *options)
    pattern = r'^v6e +softmax forward +(\d+) +(\d+)% +(\d+)% +(\d+)$'
    bundles, matrix, vector, cycles = re.search(pattern, output, re.MULTILINE).groups()
    assert min(map(int, (bundles, cycles))) > 1000
    assert 0 < int(matrix) <= 100
    assert 0 < int(vector) <= 100


@pytest.mark.parametrize(
    ('bundles', 'matrix', 'message'),
    [
        (103, 0.9, ''),
        (104, 0.9, 'more than 1.03 of the bundles of softmax'),
        (103, 0.89, 'less than 90% of the matrix'),
    ],
)
def test_tpu_cost_benchmark_reports_kernel_over_limit(bundles, matrix, message, capsys):
    check_limits = runpy.run_path(str(BENCHMARKS / 'tpu_cost.py'))['check_limits']
    softmax, sigmoid = dict(bundles=100, matrix=1.0), dict(bundles=bundles, matrix=matrix)
    assert check_limits({'v6e softmax backward': softmax, 'v6e sigmoid backward': sigmoid}) == bool(message)
    stderr = capsys.readouterr().err
    assert stderr.startswith(f'v6e sigmoid backward: {message}') if message else not stderr


@pytest.mark.slow
def test_gradients_benchmark_prints_errors_by_parameter(run_benchmark):
    output = run_benchmark('gradients', '--sequences=16', '--part_size=8', '--models=logit, post')
    lines = re.findall(r'^(logit, post) +([\w.]+) +(\S+e\S+) +(\S+e\S+)$', output, re.MULTILINE)
    assert {'embedding_VD', 'blocks.attention.columns.score_H'} < {name for _, name, *_ in lines}
    assert all(float(sum_error) < float(rounding_error) for *_, sum_error, rounding_error in lines)


@pytest.mark.slow
def test_streaming_benchmark_compares_one_pass_with_token_by_token(run_benchmark):
    output = run_benchmark('streaming', '--size=smoke', '--tokens=16', '--cache=1+3', '--rounds=2')
    spread_pattern = r'[\d.e+-]+ \([\d.e+-]+ to [\d.e+-]+\)'
    for pattern in (
        f'one pass: {spread_pattern} s',
        f'token by token: {spread_pattern} s',
        f'ratio: {spread_pattern}',
    ):
        assert re.search(f'^{pattern}', output, re.MULTILINE)
    assert float(re.search(r'^losses differ by: (\S+)$', output, re.MULTILINE).group(1)) < 1e-4


@pytest.mark.slow
def test_checkpoints_benchmark_prints_time_of_each_part(run_benchmark):
    output = run_benchmark('checkpoints', '--megabytes=1', '--rounds=1')
    values = dict(re.findall(rf'^(.+?), s: ({NUMBER}) \({NUMBER} to {NUMBER}\)$', output, re.MULTILINE))
    assert {'save, until the call returns', 'digests, per GB', 'verification, per GB', 'restore'} < values.keys()


@pytest.mark.exhaustive
def test_startup_benchmark_prints_time_of_each_part(run_benchmark):
    output = run_benchmark('startup_time', '--rounds=1')
    spread_pattern = rf'({NUMBER}) \({NUMBER} to {NUMBER}\)'
    column_pattern = '  '.join(f'{kind} +{spread_pattern}' for kind in ('cold', 'warm', 'restart'))
    times = {
        name: [*map(float, seconds)]
        for name, *seconds in re.findall(rf'^(\w[\w ]+?) +{column_pattern}$', output, re.M)
    }
    assert {'imports', 'data', 'initial state', 'validation', 'probe', 'step', 'checkpoints'} < times.keys()
    assert all(
        first_step_seconds < end_seconds
        for first_step_seconds, end_seconds in zip(times['first step'], times['end'], strict=True)
    )
