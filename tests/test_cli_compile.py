"""sinklab compile: memory of a run on absent devices; collectives of a compiled step."""

import contextlib
import json

import pytest

from benchmarks.hlo import HloProgram, find_crossed_axes
from sinklab.chip_specs import CHIPS
from sinklab.cli.main import main
from sinklab.config.spec import Layout
from sinklab.config.validate import parse_config
from sinklab.configs import scale
from sinklab.planning import topology
from sinklab.planning.compile_run import compile_run

pytestmark = pytest.mark.skipif(
    topology.find_libtpu() is None, reason='libtpu is not installed: make .venv/test does'
)
CONFIG_OPTIONS = ['--config=configs/scale.py:softmax_60m', '--size=smoke']


def run_compile(capsys, *options, exit_code=0):
    assert main(['compile', *CONFIG_OPTIONS, *options, '--json']) == exit_code
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_compile_reports_memory_of_step(capsys):
    report = run_compile(capsys, '--topology=v5e:2x2')
    assert (report['mesh'], report['attention'], report['fits']) == (dict(data=1, fsdp=4, tensor=1), 'tpu', True)
    assert 0 < report['peak_bytes_per_chip'] < report['memory_bytes_per_chip'] == 16 * 2**30


def compile_step(layout):
    """Return the collectives of a train step, each with the mesh axes that it crosses."""
    config = scale.get_config('softmax_60m', 'smoke')
    config.optimizer.batch_size = 16
    devices = topology.make_tpu_devices('v5e:2x2')
    compiled_step = compile_run(parse_config(config.to_dict()), layout, devices, CHIPS['v5e'])
    program = HloProgram(compiled_step.executable.as_text())
    return [
        (collective, find_crossed_axes(collective, compiled_step.mesh)) for collective in program.find_collectives()
    ]


@pytest.mark.slow
def test_data_parallel_step_has_only_one_all_reduce_per_gradient():
    collectives = compile_step(Layout(data=4, micro_batch=4))
    assert {(collective.kind, axis, collective.num_executions) for collective, axis in collectives} == {
        ('all-reduce', 'data', 1)
    }


@pytest.mark.slow
def test_step_scatters_gradients_per_micro_batch_and_reduces_over_data_once():
    collectives = compile_step(Layout(data=2, fsdp=2, micro_batch=4))
    assert {collective.num_executions for collective, axis in collectives if axis == 'data'} == {1}
    counts = [
        collective.num_executions
        for collective, axis in collectives
        if (collective.kind, axis) == ('reduce-scatter', 'fsdp')
    ]
    assert counts
    assert all(count % 4 == 0 for count in counts)


@pytest.mark.parametrize(
    ('options', 'value'),
    [
        (['--topology=v5e'], '--topology=v5e'),
        (['--topology=h100:9'], '--topology=h100:9'),
        (['--topology=2xh100:8'], '--topology=2xh100:8'),
        (['--topology=a100:8'], '--topology=a100:8'),
        (['--topology=v9:2x2'], '--topology=v9:2x2'),
        (['--topology=0xv5e:2x2'], '--topology=0xv5e:2x2'),
        (['--topology=v5p:2x2'], 'v5p:4x4x4'),
        (['--topology=v5e:3x7'], 'v5e:3x7'),
        (['--topology=v5e:2x2', '--fsdp=3'], '--fsdp=3'),
        (['--topology=v5e:2x2', '--remat=auto,ffn'], 'auto,ffn'),
        (['--topology=v5e:2x2', '--attention=gpu'], 'gpu'),
    ],
    ids=' '.join,
)
def test_compile_rejects_invalid_options_in_one_line(capsys, options, value):
    with contextlib.suppress(SystemExit):  # of argparse
        assert main(['compile', *CONFIG_OPTIONS, *options]) == 1
    assert value in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_compile_rejects_model_that_exceeds_memory(capsys):
    options = ['--config=configs/scale.py:softmax_1b', '--topology=v5e:2x2', '--remat=full']
    assert main(['compile', *options]) == 1
    assert '--micro_batch' in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not topology.has_cuda_plugin(), reason='the plugin of jax for CUDA is not installed')
@pytest.mark.parametrize('attention', ['cudnn', 'gpu'])
def test_compile_supports_topology_of_absent_gpus(capsys, attention):
    options = ['--config.model.dtype=bfloat16', '--config.model.width=256', '--config.model.head_width=64']
    options += ['--config.data.length=256', '--config.probe.length=64', '--config.optimizer.batch_size=8']
    report = run_compile(capsys, '--topology=h100:4', f'--attention={attention}', *options)
    assert report['mesh'] == dict(data=1, fsdp=4, tensor=1)
    assert report['attention'] == attention
    assert report['memory_bytes_per_chip'] == 80e9
    assert 0 < report['peak_bytes_per_chip'] < 80e9


@pytest.mark.skipif(topology.has_cuda_plugin(), reason='the plugin of jax for CUDA is installed')
def test_compile_without_cuda_plugin_names_package(capsys):
    assert main(['compile', *CONFIG_OPTIONS, '--topology=h100:8']) == 1
    assert 'jax[cuda13]' in capsys.readouterr().err
