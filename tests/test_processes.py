"""Real processes and collectives: equal global batches for any number of processes, and after a change of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import find_free_port
from stores import make_store, make_texts, write_source

HERE = Path(__file__).parent
BATCH_SIZE = 8


@pytest.fixture(scope='module')
def config(tmp_path_factory):
    """Return the config of a run that reads each window more than once."""
    folder = tmp_path_factory.mktemp('store')
    make_store(folder / 'store', write_source(folder / 'a.jsonl', make_texts(60)), shard_tokens=500)
    return dict(
        data__source=f'store:{folder}/store',
        data__held_out=0.2,
        data__random_first=2,
        data__random_last=3,
        optimizer__batch_size=BATCH_SIZE,
        optimizer__steps=12,
    )


def run_training(num_processes, folder, last, config):
    """Return the results of `num_processes` processes that continue the run in `folder` up to step `last`."""
    inputs = json.dumps(dict(config=config, folder=str(folder), last=last, out=f'{folder}-{num_processes}-{last}'))
    port = find_free_port()
    environment = {**os.environ, 'PYTHONPATH': f'{HERE}{os.pathsep}{HERE.parent}'}
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / 'train_process.py'), str(number), str(num_processes), str(port), inputs],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(num_processes)
    ]
    outputs = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * num_processes, '\n'.join(outputs)
    return [
        json.loads(Path(f'{folder}-{num_processes}-{last}-{number}.json').read_text())
        for number in range(num_processes)
    ]


# Stages of one run: number of processes, last step.
STAGES = [
    pytest.param(((2, 3), (1, 5)), id='2-1', marks=pytest.mark.exhaustive),
    pytest.param(((2, 3), (4, 6), (1, 7)), id='2-4-1', marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize('stages', STAGES)
def test_global_batches_do_not_depend_on_process_count(stages, config, tmp_path):
    steps = stages[-1][1]
    reference = run_training(1, tmp_path / 'whole', steps, config)[0]
    assert len(set(reference['batches'].values())) == steps
    first = 0
    for num_processes, last in stages:
        for number, result in enumerate(run_training(num_processes, tmp_path / 'changing', last, config)):
            steps = [str(step) for step in range(first + 1, last + 1)]
            assert result['batches'] == {step: reference['batches'][step] for step in steps}
            assert result['losses'] == {step: reference['losses'][step] for step in steps}  # bitwise
            read_rows = {row for _, start, stop in result['read'] for row in range(start, stop)}
            # Each process reads only its own rows.
            assert read_rows == set(
                range(number * BATCH_SIZE // num_processes, (number + 1) * BATCH_SIZE // num_processes)
            )
        first = last


@pytest.mark.slow
def test_two_processes_with_four_devices_match_one_process(tmp_path):
    """A flag of XLA:CPU once gave wrong gradients on this layout."""
    port, layout_flags = find_free_port(), ['--data=2', '--fsdp=4']
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
