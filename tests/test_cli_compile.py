"""sinklab compile: memory, time and collectives of a run on absent devices."""

import contextlib
import json

import pytest

from sinklab.cli.main import main
from sinklab.planning import topology

pytestmark = pytest.mark.skipif(
    topology.find_libtpu() is None, reason='libtpu is not installed: make .venv/test does'
)
CONFIG_OPTIONS = ['--config=configs/scale.py:softmax_60m', '--size=smoke']


def run_compile(capsys, *options, exit_code=0):
    assert main(['compile', *CONFIG_OPTIONS, *options, '--json']) == exit_code
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_compile_reports_every_program_of_run(capsys):
    report = run_compile(capsys, '--topology=v5e:2x2')
    assert list(report['programs']) == ['state', 'validation', 'probe', 'step']
    assert (report['mesh'], report['attention'], report['fits']) == (dict(data=1, fsdp=4, tensor=1), 'tpu', True)
    peaks = {name: entry['bytes']['peak'] for name, entry in report['programs'].items()}
    assert report['peak_bytes_per_chip'] == max(peaks.values()) > 0
    assert report['memory_bytes_per_chip'] == 16 * 2**30
    assert 0 < report['estimate']['mfu'] < 1
    assert len(report['programs']['step']['buffers']) == 10
    kinds = {(entry['kind'], entry['axis']) for entry in report['programs']['step']['collectives']}
    assert ('all-gather', 'fsdp') in kinds


@pytest.mark.slow
def test_compile_data_parallel_step_has_only_one_all_reduce_per_gradient(capsys):
    options = ['--data=4', '--programs=step', '--config.optimizer.batch_size=16', '--micro_batch=4']
    report = run_compile(capsys, '--topology=v5e:2x2', *options)
    assert report['micro_batch'] == 4
    collectives = report['programs']['step']['collectives']
    assert {collective['axis'] for collective in collectives} == {'data'}
    assert {collective['kind'] for collective in collectives} == {'all-reduce'}
    assert {collective['times'] for collective in collectives} == {1}


@pytest.mark.slow
def test_compile_scatters_gradients_per_micro_batch_and_reduces_over_data_once(capsys):
    options = ['--data=2', '--fsdp=2', '--programs=step', '--config.optimizer.batch_size=16', '--micro_batch=4']
    report = run_compile(capsys, '--topology=v5e:2x2', *options)
    collectives = report['programs']['step']['collectives']
    micro_batches = report['batch_size'] // report['micro_batch']
    assert {collective['times'] for collective in collectives if collective['axis'] == 'data'} == {1}
    scatter_counts = [
        collective['times']
        for collective in collectives
        if (collective['kind'], collective['axis']) == ('reduce-scatter', 'fsdp')
    ]
    assert scatter_counts
    assert all(times % micro_batches == 0 for times in scatter_counts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (['--topology=v5e'], '--topology=v5e is unknown; give a chip and a shape'),
        (['--topology=h100:9'], 'of GPUs give one node of Hopper, h100:1 to h100:8 or h200:1 to h200:8'),
        (['--topology=2xh100:8'], 'of GPUs give one node of Hopper'),
        (['--topology=a100:8'], 'of GPUs give one node of Hopper'),
        (['--topology=v9:2x2'], '--topology=v9:2x2 is unknown'),
        (['--topology=v5e:0x0'], '--topology=v5e:0x0 is unknown'),
        (['--topology=0xv5e:2x2'], '--topology=0xv5e:2x2 is unknown'),
        (['--topology=v5p:2x2'], 'v5p topologies have 3 dimensions, such as v5p:4x4x4'),
        (['--topology=v5e:3x7'], 'v5e:3x7 is not a topology of libtpu'),
        (['--topology=v5e:2x2', '--fsdp=3'], 'give sizes whose product is 4'),
        (['--topology=v5e:2x2', '--programs=all'], 'all is unknown; give some of state, validation, probe, step'),
        (['--topology=v5e:2x2', '--remat=some'], '--remat: some is unknown'),
        (['--topology=v5e:2x2', '--remat=auto,ffn'], '--remat: auto,ffn is unknown'),
        (['--topology=v5e:2x2', '--attention=gpu'], 'it needs gpu'),
        (['--topology=v5e:2x2', '--fit', '--programs=step'], '--fit compiles only the step; remove --programs'),
    ],
    ids=' '.join,
)
def test_compile_rejects_invalid_options_in_one_line(capsys, options, message):
    with contextlib.suppress(SystemExit):  # of argparse
        assert main(['compile', *CONFIG_OPTIONS, *options]) == 1
    stderr_lines = capsys.readouterr().err.splitlines()
    assert message in stderr_lines[-1]


@pytest.mark.slow
def test_compile_rejects_model_that_exceeds_memory(capsys):
    options = ['--config=configs/scale.py:softmax_1b', '--topology=v5e:2x2', '--remat=auto']
    assert main(['compile', *options]) == 1
    assert 'GiB' in capsys.readouterr().err


@pytest.mark.slow
def test_compile_fit_returns_layouts_in_order_of_estimated_time(capsys):
    report = run_compile(capsys, '--topology=v5e:2x2', '--fit')
    best_layouts, refused_layouts = report['best'], report['refused']
    assert [layout['formula_seconds'] for layout in best_layouts] == sorted(
        layout['formula_seconds'] for layout in best_layouts
    )
    assert all(layout['mesh']['data'] * layout['mesh']['fsdp'] == 4 for layout in best_layouts)
    assert len({tuple(layout['options']) for layout in best_layouts}) == 3
    for layout in best_layouts:
        assert layout['formula_bytes'] > 0
        micro_batch_options = [option for option in layout['options'] if option.startswith('--micro_batch')]
        assert micro_batch_options == [f'--micro_batch={layout["micro_batch"]}']
    assert all(layout['refused'] for layout in refused_layouts)


@pytest.mark.slow
@pytest.mark.skipif(not topology.has_cuda_plugin(), reason='the plugin of jax for CUDA is not installed')
@pytest.mark.parametrize('attention', ['cudnn', 'gpu'])
def test_compile_supports_topology_of_absent_gpus(capsys, attention):
    options = ['--config.model.dtype=bfloat16', '--config.model.width=256', '--config.model.head_width=64']
    options += ['--config.data.length=256', '--config.probe.length=64', '--config.optimizer.batch_size=8']
    report = run_compile(capsys, '--topology=h100:4', f'--attention={attention}', *options)
    assert (report['mesh'], report['crosses']) == (dict(data=1, fsdp=4, tensor=1), dict(fsdp='devices'))
    assert report['attention'] == attention
    assert report['memory_bytes_per_chip'] == 80e9
    assert 0 < report['peak_bytes_per_chip'] < 80e9
    collectives = report['programs']['step']['collectives']
    sent_bytes = {
        kind: sum(collective['sent'] for collective in collectives if collective['kind'] == kind)
        for kind in ('all-gather', 'reduce-scatter')
    }
    ratio = sent_bytes['all-gather'] / sent_bytes['reduce-scatter']
    assert 0.8 < ratio <= 1, (
        'all-gather twice in bfloat16, once for both embedding tables; reduce-scatter once in float32'
    )


@pytest.mark.skipif(topology.has_cuda_plugin(), reason='the plugin of jax for CUDA is installed')
def test_compile_without_cuda_plugin_names_package(capsys):
    assert main(['compile', *CONFIG_OPTIONS, '--topology=h100:8']) == 1
    assert 'jax[cuda13]' in capsys.readouterr().err
