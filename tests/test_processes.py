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


@pytest.mark.slow
def test_one_two_and_four_processes_read_the_same_global_batches_and_train_alike(config, tmp_path):
    found = {count: trained(count, tmp_path / str(count), 6, config) for count in (1, 2, 4)}
    for count, processes in found.items():
        for number, process in enumerate(processes):
            assert process['batches'] == found[1][0]['batches']
            assert process['losses'] == found[1][0]['losses']  # in hexadecimal: bit for bit
            mine = range(number * BATCH // count, (number + 1) * BATCH // count)
            read = {row for step, start, stop in process['read'] for row in range(start, stop)}
            assert read == set(mine)  # and no process reads another's rows


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes_as_if_nothing_had_happened(config, tmp_path):
    whole = trained(2, tmp_path / 'whole', 6, config)[0]
    trained(2, tmp_path / 'changed', 3, config)
    later = trained(4, tmp_path / 'changed', 5, config)[0]
    last = trained(1, tmp_path / 'changed', 6, config)[0]
    for name in ('batches', 'losses'):
        assert later[name] | last[name] == {step: whole[name][step] for step in ('4', '5', '6')}
    assert [*later['batches'], *last['batches']] == ['4', '5', '6']
