"""What is decided before the first step, by all processes alike: what is refused, where, by what and on what data."""

import contextlib
import dataclasses
import platform
import shutil
from collections.abc import Iterator

import jax

from sinklab import devices, sharding
from sinklab.attend.choice import Choice
from sinklab.data.batches import Sequences, sequences
from sinklab.files.place import is_remote
from sinklab.files.whole import awaited
from sinklab.folder import Folder
from sinklab.group import Group, once, same, unanimous
from sinklab.lease import Elsewhere, Lease, lease, seen
from sinklab.record import Refusal
from sinklab.spec import Hardware, Spec
from sinklab.train import fit, fork, layout, probe, state, step


def start(
    spec: Spec, hardware: Hardware, folder: Folder, group: Group
) -> tuple[Hardware, jax.sharding.Mesh, Choice, Sequences]:
    """(layout, mesh, what computes attention, data), the same on all processes; what one refuses, all refuse."""
    hosts = group.gather('host', platform.node())
    processes = hosts.count(hosts[group.index])  # on this host, which share its memory
    mesh = mesh_of_all(spec, hardware, group, processes)
    once(group, 'room', lambda: check_room(spec, folder, mesh))
    attention = unanimous(group, 'attention', lambda: step.choice(spec, hardware))
    same(group, 'backend', {'what computes attention': attention.backend})
    memory = devices.device_memory(processes)
    remat = once(group, 'remat', lambda: fit.chosen(spec, hardware, mesh, attention.backend, memory))
    group.at('preparing its data')
    share = sharding.share(mesh, spec.optimizer.batch_size)
    data = unanimous(group, 'data', lambda: sequences(spec, share))
    group.at('starting')
    same(group, 'fingerprint', {f'the data ({name})': value for name, value in data.fingerprint.items()})
    return dataclasses.replace(hardware, remat=remat), mesh, attention, data


@contextlib.contextmanager
def held(folder: Folder, group: Group, grace: float) -> Iterator[Lease | Elsewhere]:
    """The lease of a folder, which process 0 takes for all of them, and all see."""
    with contextlib.ExitStack() as stack:
        own = []

        def take() -> str:
            own.append(stack.enter_context(lease(folder.path, grace)))
            return own[0].token

        token = once(group, 'lease', take)
        sees = group.gather('lease is seen', awaited(lambda: seen(folder.path) == token))
        if not all(sees):
            raise Refusal(
                f'process {sees.index(False)} does not see in {folder} what process 0 writes there; give all of them '
                'one shared folder as --workdir'
            )
        yield own[0] if own else Elsewhere()


def forked(origin: fork.Origin | None, spec: Spec, folder: Folder, row: dict, data: Sequences, group: Group) -> dict:
    """What row.json is to hold: of a run that is about to begin as a fork, what it comes from as well."""

    def lineage() -> dict:
        if origin is None or folder.is_claimed():
            return {}
        return {'from': fork.lineage(origin, spec, folder, data.fingerprint)}

    return row | once(group, 'lineage', lineage)


def mesh_of_all(spec: Spec, hardware: Hardware, group: Group, processes: int) -> jax.sharding.Mesh:
    """Make the mesh of all processes, and refuse a layout that does not fit on it.

    Where processes have different numbers of devices, the refusal names that: it is why the layout does not fit.
    """
    try:
        return unanimous(group, 'devices', lambda: check(spec, hardware, processes))
    except Refusal:
        same(group, 'number of devices', {'the number of its devices': count_devices()})
        raise


def count_devices() -> int:
    """Return how many devices this process has; 0 where jax finds none."""
    try:
        return len(jax.local_devices())
    except RuntimeError:
        return 0


def check(spec: Spec, hardware: Hardware, processes: int) -> jax.sharding.Mesh:
    """Make the mesh, and refuse before the data is read what does not fit on it.

    Args:
        processes: Of the run, on this host.
    """
    mesh = devices.mesh(hardware)
    layout.check(spec, hardware, mesh)
    memory, local = devices.device_memory(processes), jax.local_devices()
    probe.check(spec, memory * len(local) if local[0].platform == 'cpu' else memory)
    layout.check_memory(spec, hardware, mesh, memory)
    return mesh


def check_room(spec: Spec, folder: Folder, mesh: jax.sharding.Mesh) -> None:
    if is_remote(folder.path):
        return  # a bucket has no end
    saved, copies = folder.checkpoint_steps(), spec.checkpoint.keep + 1  # one more while the newest is being written
    needed = max(0, copies - len(saved)) * state.size(state.abstract(spec, mesh))
    existing = next(path for path in (folder.path.absolute(), *folder.path.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free and spec.optimizer.steps not in saved:
        raise Refusal(
            f'{folder} has {free / 1e9:.2f} GB of room, and {copies} checkpoints take {needed / 1e9:.2f} GB more; '
            'make room, choose another --workdir, or lower config.checkpoint.keep'
        )
