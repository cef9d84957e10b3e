"""What is decided before the first step, by all processes alike: what is refused, where, by what and on what data."""

import os
import shutil

import jax

from sinklab import sharding
from sinklab.attend.choice import Choice
from sinklab.data.batches import Sequences, sequences
from sinklab.folder import Folder
from sinklab.group import Group, once, same, together
from sinklab.record import Refusal
from sinklab.spec import Hardware, Spec
from sinklab.train import layout, probe, state, step


def start(
    spec: Spec, hardware: Hardware, folder: Folder, group: Group
) -> tuple[jax.sharding.Mesh, Choice, Sequences]:
    """(mesh, what computes attention, data), the same on all processes; what one of them refuses, all refuse."""
    mesh = together(group, 'devices', lambda: check(spec, hardware))
    once(group, 'room', lambda: check_room(spec, folder, mesh))
    attention = together(group, 'attention', lambda: step.choice(spec, hardware))
    same(group, 'backend', {'what computes attention': attention.backend})
    data = together(group, 'data', lambda: sequences(spec))
    same(group, 'fingerprint', {f'the data ({name})': value for name, value in data.fingerprint.items()})
    return mesh, attention, data


def check(spec: Spec, hardware: Hardware) -> jax.sharding.Mesh:
    """All that can be refused of a run before the data is read."""
    layout.check(spec, hardware)
    mesh = sharding.mesh(hardware)
    probe.check(spec, memory())
    layout.check_memory(spec, hardware, memory())
    return mesh


def memory() -> int:
    """Bytes of memory of a device of this process."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get('bytes_limit')
    return limit or os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')


def check_room(spec: Spec, folder: Folder, mesh: jax.sharding.Mesh) -> None:
    saved, copies = folder.checkpoint_steps(), spec.checkpoint.keep + 1  # one more while the newest is being written
    needed = max(0, copies - len(saved)) * state.size(state.abstract(spec, mesh))
    existing = next(path for path in (folder.path.absolute(), *folder.path.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free and spec.optimizer.steps not in saved:
        raise Refusal(
            f'{folder} has {free / 1e9:.2f} GB of room, and {copies} checkpoints take {needed / 1e9:.2f} GB more; '
            'make room, choose another --workdir, or lower config.checkpoint.keep'
        )
