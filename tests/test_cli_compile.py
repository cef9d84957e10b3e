"""sinklab compile: memory, time and collectives of a run on absent devices."""

import json

import pytest

from sinklab.cli.main import main
from sinklab.install_commands import format_package_command
from sinklab.planning import topology

pytestmark = pytest.mark.skipif(
    topology.find_libtpu() is None, reason='libtpu is not installed: make .venv/test does'
)
ROW = ['--config=configs/scale.py:softmax_60m', '--size=smoke']


def compiled(capsys, *more, code=0):
    assert main(['compile', *ROW, *more, '--json']) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_compile_reports_every_program_of_run(capsys):
    found = compiled(capsys, '--topology=v5e:2x2')
    assert list(found['programs']) == ['state', 'validation', 'probe', 'step']
    assert (found['mesh'], found['attention'], found['fits']) == (dict(data=1, fsdp=4, tensor=1), 'tpu', True)
    peaks = {name: one['bytes']['peak'] for name, one in found['programs'].items()}
    assert found['peak_bytes_per_chip'] == max(peaks.values()) > 0
    assert found['memory_bytes_per_chip'] == 16 * 2**30
    assert 0 < found['estimate']['mfu'] < 1
    assert len(found['programs']['step']['buffers']) == 10
    kinds = {(one['kind'], one['axis']) for one in found['programs']['step']['collectives']}
    assert ('all-gather', 'fsdp') in kinds


@pytest.mark.slow
def test_compile_data_parallel_step_has_only_one_all_reduce_per_gradient(capsys):
    more = ['--data=4', '--programs=step', '--config.optimizer.batch_size=16', '--micro_batch=4']
    found = compiled(capsys, '--topology=v5e:2x2', *more)
    assert found['micro_batch'] == 4
    collectives = found['programs']['step']['collectives']
    assert {one['axis'] for one in collectives} == {'data'}
    assert {one['kind'] for one in collectives} == {'all-reduce'}
    assert {one['times'] for one in collectives} == {1}


@pytest.mark.slow
def test_compile_scatters_gradients_per_micro_batch_and_reduces_over_data_once(capsys):
    more = ['--data=2', '--fsdp=2', '--programs=step', '--config.optimizer.batch_size=16', '--micro_batch=4']
    found = compiled(capsys, '--topology=v5e:2x2', *more)
    collectives = found['programs']['step']['collectives']
    parts = found['batch_size'] // found['micro_batch']
    assert {one['times'] for one in collectives if one['axis'] == 'data'} == {1}
    scattered = [one['times'] for one in collectives if (one['kind'], one['axis']) == ('reduce-scatter', 'fsdp')]
    assert scattered
    assert all(times % parts == 0 for times in scattered)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('given', 'words'),
    [
        (['--topology=v5e'], '--topology=v5e is unknown; give a chip and a shape'),
        (['--topology=h100:9'], 'of GPUs give one node of Hopper, h100:1 to h100:8 or h200:1 to h200:8'),
        (['--topology=2xh100:8'], 'of GPUs give one node of Hopper'),
        (['--topology=a100:8'], 'of GPUs give one node of Hopper'),
        (['--topology=v9:2x2'], '--topology=v9:2x2 is unknown'),
        (['--topology=v5e:0x0'], '--topology=v5e:0x0 is unknown'),
        (['--topology=0xv5e:2x2'], '--topology=0xv5e:2x2 is unknown'),
        (['--topology=v5p:2x2'], 'chips of v5p stand in 3 dimensions, such as v5p:4x4x4'),
        (['--topology=v5e:3x7'], 'v5e:3x7 is not a topology of libtpu'),
        (['--topology=v5e:2x2', '--fsdp=3'], 'give sizes whose product is 4'),
        (['--topology=v5e:2x2', '--programs=all'], 'all is unknown; give some of state, validation, probe, step'),
        (
            ['--topology=v5e:2x2', '--remat=some'],
            '--remat=some is unknown; give none, full, auto, or some of',
        ),
        (['--topology=v5e:2x2', '--attention=gpu'], 'it needs gpu'),
        (['--topology=v5e:2x2', '--fit', '--programs=step'], '--fit compiles only the step; remove --programs'),
    ],
    ids=' '.join,
)
def test_compile_rejects_invalid_options_in_one_line(capsys, given, words):
    assert main(['compile', *ROW, *given]) == 1
    said = capsys.readouterr().err.splitlines()
    assert words in said[-1]


@pytest.mark.slow
def test_compile_rejects_model_that_exceeds_memory(capsys):
    row = ['--config=configs/scale.py:softmax_1b', '--topology=v5e:2x2', '--remat=auto']
    assert main(['compile', *row]) == 1
    assert 'GiB' in capsys.readouterr().err


@pytest.mark.slow
def test_compile_fit_returns_layouts_in_order_of_estimated_time(capsys):
    found = compiled(capsys, '--topology=v5e:2x2', '--fit')
    best, refused = found['best'], found['refused']
    assert [one['formula_seconds'] for one in best] == sorted(one['formula_seconds'] for one in best)
    assert all(one['mesh']['data'] * one['mesh']['fsdp'] == 4 for one in best)
    assert len({tuple(one['options']) for one in best}) == 3
    for one in best:
        assert one['formula_bytes'] > 0
        given = [option for option in one['options'] if option.startswith('--micro_batch')]
        assert given == [f'--micro_batch={one["micro_batch"]}']
    assert all(one['refused'] for one in refused)


@pytest.mark.slow
@pytest.mark.skipif(not topology.has_cuda_plugin(), reason='the plugin of jax for CUDA is not installed')
@pytest.mark.parametrize('attention', ['cudnn', 'gpu'])
def test_compile_supports_topology_of_absent_gpus(capsys, attention):
    more = ['--config.model.dtype=bfloat16', '--config.model.width=256', '--config.model.head_width=64']
    more += ['--config.data.length=256', '--config.probe.length=64', '--config.optimizer.batch_size=8']
    found = compiled(capsys, '--topology=h100:4', f'--attention={attention}', *more)
    assert (found['mesh'], found['crosses']) == (dict(data=1, fsdp=4, tensor=1), dict(fsdp='devices'))
    assert found['attention'] == attention
    assert found['memory_bytes_per_chip'] == 80e9
    assert 0 < found['peak_bytes_per_chip'] < 80e9
    collectives = found['programs']['step']['collectives']
    sent = {
        kind: sum(one['sent'] for one in collectives if one['kind'] == kind)
        for kind in ('all-gather', 'reduce-scatter')
    }
    gathered = sent['all-gather'] / sent['reduce-scatter']
    assert 0.8 < gathered <= 1, (
        'all-gather twice in bfloat16, once for both embedding tables; reduce-scatter once in float32'
    )


@pytest.mark.skipif(topology.has_cuda_plugin(), reason='the plugin of jax for CUDA is installed')
def test_compile_without_cuda_plugin_names_package(capsys):
    assert main(['compile', *ROW, '--topology=h100:8']) == 1
    assert format_package_command('jax[cuda13]') in capsys.readouterr().err
