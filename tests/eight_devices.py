"""First steps of a run on eight devices, in many layouts: python eight_devices.py FOLDER CASES.

CASES is JSON, {name: {hardware, dtype, from}}. `from` names an earlier case. The case resumes from its checkpoint of
step 1. Each case writes FOLDER/NAME.npz: the loss, each parameter by its path, its momentum, and the size of the part
on one device.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from conftest import draw_params, make_tiny_spec

from sinklab.checkpoint.checkpointer import Checkpointer
from sinklab.config.spec import Hardware
from sinklab.parallel import device_mesh, sharding
from sinklab.process_group import ProcessGroup
from sinklab.run_dir import RunDir
from sinklab.train import state, step

BATCH, STEPS = 16, 3
SGD_CHANGES = dict(optimizer__name='sgd', optimizer__beta2=None, optimizer__epsilon=None, optimizer__clip_norm=None)
jax.config.update('jax_num_cpu_devices', 8)


def run_steps(folder: Path, name: str, hardware: dict, dtype: str = 'float32', **options: str) -> dict:
    spec, hardware = (
        make_tiny_spec(model__dtype=dtype, optimizer__batch_size=BATCH, **SGD_CHANGES),
        Hardware(**hardware),
    )
    ids_BT = np.random.default_rng(0).integers(0, 300, (STEPS, BATCH, 17)).astype(np.int32)
    mesh = device_mesh.make_mesh(hardware)
    with jax.set_mesh(mesh):
        train_state, first_step = begin_run(folder, options.get('from'), spec, mesh)
        train_step = step.make_train_step(spec, hardware, mesh)
        for step_index in range(first_step, STEPS):
            batch = sharding.put_batch(ids_BT[step_index], mesh)
            train_state, metrics = train_step(train_state, batch, sharding.make_per_device_array(0, mesh))
            if step_index == 0:
                open_checkpointer(folder / name, spec).save(1, train_state)
    return dict(loss=metrics['train/loss'], **collect_arrays(train_state))


def begin_run(folder: Path, origin: str | None, spec, mesh) -> tuple[dict, int]:
    if origin:
        return open_checkpointer(folder / origin, spec).restore(1, state.make_abstract_state(spec, mesh)), 1
    new_state = state.create_state(spec, mesh) | dict(params=draw_params(spec, 0.1))
    return jax.device_put(new_state, state.get_state_shardings(spec, mesh)), 0


def open_checkpointer(folder: Path, spec) -> Checkpointer:
    return Checkpointer(RunDir(folder), spec.checkpoint, {}, ProcessGroup())


def collect_arrays(train_state: dict) -> dict:
    (trace,) = (leaf.trace for leaf in train_state['opt_state'][1] if hasattr(leaf, 'trace'))
    leaves = {}
    for kind, tree in dict(params=train_state['params'], momentum=trace).items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = '.'.join([kind, *(entry.key for entry in path)])
            leaves |= {name: leaf, f'{name} on each': leaf.addressable_shards[0].data.size}
    return leaves


if __name__ == '__main__':
    folder = Path(sys.argv[1])
    for name, case in json.loads(sys.argv[2]).items():
        np.savez(folder / f'{name}.npz', **jax.device_get(run_steps(folder, name, **case)))
