"""Real processes, real collectives: the same global batches for any number of them, and after a change of it."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from stores import corpus_of, made, written

HERE = Path(__file__).parent
BATCH = 8


@pytest.fixture(scope='module')
def config(tmp_path_factory):
    """A run that reads each of its windows more than once."""
    folder = tmp_path_factory.mktemp('store')
    made(folder / 'store', written(folder / 'a.jsonl', corpus_of(60)), shard_tokens=500)
    return dict(
        data__source=f'store:{folder}/store',
        data__held_out=0.2,
        data__random_first=2,
        data__random_last=3,
        optimizer__batch_size=BATCH,
        optimizer__steps=12,
    )


def free_port():
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        return listener.getsockname()[1]


def trained(count, folder, last, config):
    """What each of `count` processes has found, going on in `folder` up to a step."""
    given = json.dumps(dict(config=config, folder=str(folder), last=last, out=f'{folder}-{count}-{last}'))
    port = free_port()
    environment = {**os.environ, 'PYTHONPATH': f'{HERE}{os.pathsep}{HERE.parent}'}
    running = [
        subprocess.Popen(
            [sys.executable, str(HERE / 'one_process.py'), str(number), str(count), str(port), given],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    said = [process.communicate(timeout=300)[1] for process in running]
    assert [process.returncode for process in running] == [0] * count, '\n'.join(said)
    return [json.loads(Path(f'{folder}-{count}-{last}-{number}.json').read_text()) for number in range(count)]


# One run, saved and gone on with: how many processes, up to which step.
STAGES = [
    pytest.param(((2, 3), (1, 5)), id='2-1', marks=pytest.mark.exhaustive),
    pytest.param(((2, 3), (4, 6), (1, 7)), id='2-4-1', marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize('stages', STAGES)
def test_any_number_of_processes_reads_the_same_global_batches_and_a_run_goes_on_with_another_one(
    stages, config, tmp_path
):
    steps = stages[-1][1]
    whole = trained(1, tmp_path / 'whole', steps, config)[0]
    assert len(set(whole['batches'].values())) == steps
    first = 0
    for count, last in stages:
        for number, process in enumerate(trained(count, tmp_path / 'changing', last, config)):
            steps = [str(step) for step in range(first + 1, last + 1)]
            assert process['batches'] == {step: whole['batches'][step] for step in steps}
            assert process['losses'] == {step: whole['losses'][step] for step in steps}  # bit for bit
            read = {row for _, start, stop in process['read'] for row in range(start, stop)}
            assert read == set(range(number * BATCH // count, (number + 1) * BATCH // count))  # and no other's rows
        first = last
