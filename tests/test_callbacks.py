"""Callbacks of the training loop: when they are called, what they see, and what becomes of metrics and errors."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_runs import drop_clock_metrics, load_parameters, make_spec, train_run

from sinklab.train.callbacks import Callback

GUIDE = Path(__file__).parents[1] / 'docs' / 'guides' / 'add_a_callback.md'


@pytest.mark.slow
def test_state_callback_sees_metrics_and_state_at_its_interval_and_changes_neither(finished_run, corpus, tmp_path):
    calls = []

    def record_call(step, metrics, state):
        calls.append((step, metrics, jax.device_get(state)))

    callbacks = [(record_call, 4), (lambda *_: {'mine': 1.5}, 3)]
    records = train_run(make_spec(corpus), tmp_path / 'run', state_callbacks=callbacks)
    assert [step for step, _, _ in calls] == [4, 8]
    for step, metrics, state in calls:
        assert state['step'] == step
        assert metrics['train/loss'] == next(record['train/loss'] for record in records if record['step'] == step)
        saved_parameters = load_parameters(tmp_path / 'run', step)
        jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(state['params']), saved_parameters)
    assert calls[-1][1]['valid/loss'] == records[-1]['valid/loss']
    assert [record['step'] for record in records if record.pop('mine', None)] == [3, 6, 8]
    assert drop_clock_metrics(records) == drop_clock_metrics(finished_run[1])


@pytest.mark.slow
def test_metrics_of_state_callback_are_written_and_passed_to_later_callbacks(corpus, tmp_path):
    callbacks = [
        (lambda step, metrics, state: {'first': np.float32(step)}, 5),
        (lambda step, metrics, state: {'second': 2 * metrics['first']}, 5),
    ]
    train_run(make_spec(corpus, log__every_steps=7), tmp_path / 'run', state_callbacks=callbacks)
    lines = [json.loads(line) for line in (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()]
    assert {line['step']: line['second'] for line in lines if 'second' in line} == {5: 10, 8: 16}


class EventRecorder(Callback):
    def __init__(self):
        self.events = []

    def on_train_begin(self, step, attention, changes):
        self.events.append(('begin', step))

    def on_record(self, record, written):
        self.events.append(('record', record['step']))
        if record['step'] == 2:
            raise KeyError('bug')

    def on_train_end(self):
        self.events.append('end')


@pytest.mark.slow
def test_callback_receives_begin_records_and_end_after_error(corpus, tmp_path):
    recorder = EventRecorder()
    with pytest.raises(KeyError):
        train_run(make_spec(corpus), tmp_path / 'run', recorder)
    assert recorder.events == [('begin', 0), ('record', 0), ('record', 1), ('record', 2), 'end']


@pytest.mark.exhaustive
def test_script_of_guide_prints_what_guide_says(tmp_path):
    guide_text = GUIDE.read_text(encoding='utf-8')
    (script,) = re.findall(r'^```python\n(.*?)^```', guide_text, re.MULTILINE | re.DOTALL)
    result = subprocess.run([sys.executable, '-c', script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert f'It prints `{result.stdout.strip()}`' in guide_text
