"""Real processes and collectives: equal global batches for any number of processes, and after a change of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import find_free_port

HERE = Path(__file__).parent
OWN_FILE = """
import jax
from sinklab.model.layers import register_ffn_activation
one = jax.numpy.ones(())
register_ffn_activation('own', lambda x: one * x)
"""


@pytest.mark.exhaustive
def test_two_processes_with_four_devices_match_one_process(tmp_path):
    """A flag of XLA:CPU once gave wrong gradients on this layout; a file of the user starts the devices."""
    own_file = tmp_path / 'own.py'
    own_file.write_text(OWN_FILE)
    port, layout_flags = find_free_port(), ['--data=2', '--fsdp=4', f'--metric={own_file}']
    command = [sys.executable, '-m', 'sinklab', 'train', '--config=configs/default.py', '--size=smoke']
    optimizer_options = dict(batch_size=16, steps=6, name='sgd', beta2=None, epsilon=None, clip_norm=None)
    command += [
        '--config.data.length=16',
        *(f'--config.optimizer.{name}={value}' for name, value in optimizer_options.items()),
    ]
    distributed_flags = [f'--coordinator=127.0.0.1:{port}', '--processes=2']
    runs = dict(
        one=[[]],
        eight=[layout_flags],
        two=[[*layout_flags, *distributed_flags, f'--process={index}'] for index in range(2)],
    )
    losses = {}
    for name, flags_of_processes in runs.items():
        workdir = tmp_path / name
        processes = [
            subprocess.Popen([*command, f'--workdir={workdir}', *flags], cwd=HERE.parent, stderr=subprocess.PIPE)
            for flags in flags_of_processes
        ]
        errors = [process.communicate(timeout=300)[1].decode() for process in processes]
        assert [process.returncode for process in processes] == [0] * len(processes), errors
        records = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
        losses[name] = [record['train/loss'] for record in records if 'train/loss' in record]
    assert len(losses['one']) > 1
    assert losses['eight'] == pytest.approx(losses['one'], rel=1e-6)
    assert losses['two'] == pytest.approx(losses['one'], rel=1e-6)
