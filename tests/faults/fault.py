"""Config of a run that records its progress, pauses at every step, and injects a fault into itself.

Environment variables control it. FAULT is JSON: process, event (the number of a step or of an exchange of values),
seconds after it, and signal. NOTES is a folder for the records. OTHER makes this process differ from the others in
its versions, commit, data or backend.
"""

import dataclasses
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from sinklab.configs import default
from sinklab.configs.sizes import SMOKE

PAUSE_SECONDS = float(os.environ.get('PAUSE', 0.05))  # seconds per step
NOTES_DIR = Path(os.environ.get('NOTES', '/nowhere'))


def get_config(row=None):
    config = default.get_config()
    changes = {
        'optimizer.steps': 12,
        'optimizer.batch_size': 8,
        'optimizer.peak_learning_rate': 1e-2,
        'optimizer.warmup_steps': 2,
        'valid.every_steps': 5,
        'probe.every_steps': 3,
        'checkpoint.every_steps': 4,
    }
    config.update_from_flattened_dict({**SMOKE, **changes})
    return config


class FaultyGroup:
    """Process group that counts events, and injects its fault at one of them."""

    def __init__(self, group):
        self.group, self.process_index, self.process_count = group, group.process_index, group.process_count
        self.event_count = 0
        self.fault = json.loads(os.environ.get('FAULT', '{}'))

    def all_gather(self, value):
        self.count_event('all-gather')
        return self.group.all_gather(value)

    def count_event(self, name):
        if NOTES_DIR.is_dir():
            with (NOTES_DIR / f'{self.process_index}').open('a') as file:
                file.write(f'{name}\n')
        if (self.fault.get('process'), self.fault.get('event')) == (self.process_index, self.event_count):
            threading.Timer(self.fault['seconds'], self.inject).start() if self.fault['seconds'] else self.inject()
        self.event_count += 1

    def inject(self):
        (NOTES_DIR / 'harmed').write_text(f'{time.monotonic()}')
        os.kill(os.getpid(), getattr(signal, self.fault['signal']))


def change_versions():
    from sinklab import environment

    environment.get_package_versions = lambda: {'jax': '0.0'}


def change_commit():
    from sinklab import environment

    environment.get_commit = lambda: 'another'


def change_data():
    from sinklab.train import loop

    def load_other_data(spec, original_load_run_data=loop.load_run_data):
        run_data = original_load_run_data(spec)
        return dataclasses.replace(run_data, fingerprint=run_data.fingerprint | {'store': 'another'})

    loop.load_run_data = load_other_data


def change_backend():
    from sinklab.attn.backends import BackendChoice
    from sinklab.train import step

    step.choose_backend = lambda *_: BackendChoice('dense')


DIFFERENCES = dict(versions=change_versions, commit=change_commit, data=change_data, backend=change_backend)
DIFFERENCES.get(os.environ.get('OTHER'), lambda: None)()

if 'train' in sys.argv and {'NOTES', 'FAULT', 'PAUSE'} & os.environ.keys():
    from sinklab.train import loop

    def train_with_faults(*args, group, original_train=loop.train, **options):
        group = FaultyGroup(group)

        def pause_after_step(logger, step_num, metrics, original_make_record=loop.MetricsLogger.make_record):
            time.sleep(PAUSE_SECONDS)
            group.count_event(f'step {step_num}')
            return original_make_record(logger, step_num, metrics)

        loop.MetricsLogger.make_record = pause_after_step
        return original_train(*args, group=group, **options)

    loop.train = train_with_faults
