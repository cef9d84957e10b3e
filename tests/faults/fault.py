"""Config of a run that records its progress, pauses at every step, and injects a fault into itself.

Environment variables control it. FAULT is JSON: process, event (the number of a progress report), seconds after it,
and what (a signal, FILL or VANISH). NOTES is a folder for the records. With ONCE, the fault does not happen again.
OTHER makes this process differ from the others in its versions, commit, data or backend.
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

PAUSE = float(os.environ.get('PAUSE', 0.05))  # seconds per step
NOTES = Path(os.environ.get('NOTES', '/nowhere'))


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
    """Process group that records progress reports, and injects its fault at one of them."""

    def __init__(self, group, folder):
        self.group, self.index, self.count, self.gather = group, group.index, group.count, group.gather
        self.folder, self.notes = folder, 0
        self.fault = json.loads(os.environ.get('FAULT', '{}'))

    def report_progress(self, activity, step=0, usual_seconds=None):
        self.group.report_progress(activity, step, usual_seconds)
        if activity == 'reading its batch':
            time.sleep(PAUSE)
        if NOTES.is_dir():
            with (NOTES / f'{self.index}').open('a') as file:
                file.write(f'{activity} {step}\n')
        is_due = (self.fault.get('process'), self.fault.get('event')) == (self.index, self.notes)
        if is_due and not ('ONCE' in os.environ and (NOTES / 'harmed').exists()):
            threading.Timer(self.fault['seconds'], self.inject).start() if self.fault['seconds'] else self.inject()
        self.notes += 1

    def inject(self):
        (NOTES / 'harmed').write_text(f'{time.monotonic()}')
        dict(FILL=self.fill, VANISH=self.vanish).get(self.fault['what'], self.kill)()

    def kill(self):
        os.kill(os.getpid(), getattr(signal, self.fault['what']))

    def fill(self):
        with (self.folder / 'ballast').open('wb', buffering=0) as file:
            try:
                while file.write(b'x' * 4096):
                    pass
            except OSError:
                return

    def vanish(self):
        self.folder.rename(self.folder.with_name('gone'))


def versions():
    from sinklab import environment

    environment.get_package_versions = lambda: {'jax': '0.0'}


def commit():
    from sinklab import environment

    environment.get_commit = lambda: 'another'


def data():
    from sinklab.train import setup

    def load_other_data(spec, share, sequences=setup.load_run_data):
        run_data = sequences(spec, share)
        return dataclasses.replace(run_data, fingerprint=run_data.fingerprint | {'store': 'another'})

    setup.load_run_data = load_other_data


def backend():
    from sinklab.attn.backends import BackendChoice
    from sinklab.train import step

    step.choose_verified_backend = lambda spec, hardware: BackendChoice('dense')


OTHERS = dict(versions=versions, commit=commit, data=data, backend=backend)
OTHERS.get(os.environ.get('OTHER'), lambda: None)()

if 'train' in sys.argv and {'NOTES', 'FAULT', 'PAUSE'} & os.environ.keys():
    from sinklab.train import loop

    def start_with_faults(run, begin=loop.TrainLoop.__post_init__):
        run.group = FaultyGroup(run.group, run.run_dir.path)
        begin(run)

    loop.TrainLoop.__post_init__ = start_with_faults
