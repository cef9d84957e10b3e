"""Tiny runs, their files, and callbacks."""

import json

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp
from tiny_specs import make_tiny_spec

from sinklab.checkpoint import digests
from sinklab.checkpoint.checkpointer import Checkpointer
from sinklab.config.spec import Layout
from sinklab.data.run_data import load_run_data
from sinklab.parallel import device_mesh
from sinklab.run_dir import RunDir
from sinklab.train import loop, state
from sinklab.train.callbacks import Callback

CLOCK_METRICS = ('seconds', 'speed/tokens_per_second', 'speed/mfu')


def make_spec(corpus, **changes):
    return make_tiny_spec(
        **{'data__source': corpus, 'checkpoint__every_steps': 4, 'probe__every_steps': 3, **changes}
    )


def train_run(spec, path, *callbacks, **options):
    loop.train(spec, Layout(), RunDir(path), dict(row='tiny'), *callbacks, **options)
    return RunDir(path).read_records()


def drop_clock_metrics(records, after=0):
    return [
        {name: value for name, value in record.items() if name not in CLOCK_METRICS}
        for record in records
        if record['step'] > after
    ]


def read_timeless_records(path):
    return drop_clock_metrics(RunDir(path).read_records(), after=-1)


def load_parameters(path, step):
    return jax.tree.leaves(ocp.load(path / 'checkpoints' / str(step), checkpointable_name='state')['params'])


def restore_state(folder, spec, step):
    """Restore the state that a run has saved at a step."""
    checkpoints = Checkpointer(folder, spec.checkpoint, load_run_data(spec).fingerprint)
    train_state = checkpoints.restore(step, state.make_abstract_state(spec, device_mesh.make_mesh(Layout())))
    checkpoints.close()
    return train_state


def assert_same_trees(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def write_checkpoints(folder, *steps, content=b'of a run'):
    """Write checkpoints that have digests but cannot be restored."""
    for step in steps:
        (folder.checkpoint_dir / str(step) / 'state').mkdir(parents=True)
        (folder.checkpoint_dir / str(step) / 'state' / 'manifest.ocdbt').write_bytes(content)
        digests.write_digests(folder.checkpoint_dir / str(step), 0, 1)


def read_contents(path):
    """Return the content of every file, except what each attempt writes about itself."""
    return {
        file: file.read_bytes()
        for file in path.rglob('*')
        if file.is_file() and file.name not in ('outcome.json', 'owner.json', 'run.lock')
    }


def read_outcome(path):
    return json.loads((path / 'outcome.json').read_text())


class CrashError(Exception):
    pass


class CrashingCallback(Callback):
    def __init__(self, step, error=CrashError):
        self.step, self.error = step, error

    def on_record(self, record, written):
        if record['step'] == self.step:
            raise self.error


class RecordingCallback(Callback):
    """Callback that records the start of the run and the messages."""

    def __init__(self):
        self.train_begin_arguments, self.messages = None, []

    def on_train_begin(self, step, attention, changes):
        self.train_begin_arguments = step, changes

    def on_message(self, line):
        self.messages.append(line)
