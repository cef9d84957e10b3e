"""What is decided before the first step, by all processes alike: what is refused, where, by what and on what data."""

import contextlib
import dataclasses
import platform
import shutil
from collections.abc import Iterator

import jax

from sinklab import devices, sharding
from sinklab.attend.choice import BackendChoice
from sinklab.data.batches import RunData, load_run_data
from sinklab.files.place import is_remote
from sinklab.files.whole import poll_until
from sinklab.folder import RunDir
from sinklab.group import ProcessGroup, broadcast_from_primary, check_equal_on_all, run_on_all_or_raise
from sinklab.lease import NullLease, Lease, hold_lease, read_owner_token
from sinklab.record import UserError
from sinklab.spec import Hardware, Spec
from sinklab.train import fit, fork, layout, probe, state, step


def set_up_run(
    spec: Spec, hardware: Hardware, run_dir: RunDir, group: ProcessGroup
) -> tuple[Hardware, jax.sharding.Mesh, BackendChoice, RunData]:
    """(layout, mesh, what computes attention, data), the same on all processes; what one refuses, all refuse."""
    host_names = group.gather('host', platform.node())
    num_local_processes = host_names.count(host_names[group.index])  # on this host, which share its memory
    mesh = make_mesh_on_all(spec, hardware, group, num_local_processes)
    broadcast_from_primary(group, 'room', lambda: check_disk_space(spec, run_dir, mesh))
    attention = run_on_all_or_raise(group, 'attention', lambda: step.choose_step_backend(spec, hardware))
    check_equal_on_all(group, 'backend', {'what computes attention': attention.backend})
    memory_bytes = devices.get_device_memory_bytes(num_local_processes)
    remat = broadcast_from_primary(group, 'remat', lambda: fit.choose_remat_policy(spec, hardware, mesh, attention.backend, memory_bytes))
    group.report_progress('preparing its data')
    local_fraction = sharding.compute_local_fraction(mesh, spec.optimizer.batch_size)
    data = run_on_all_or_raise(group, 'data', lambda: load_run_data(spec, local_fraction))
    group.report_progress('starting')
    check_equal_on_all(group, 'fingerprint', {f'the data ({name})': value for name, value in data.fingerprint.items()})
    return dataclasses.replace(hardware, remat=remat), mesh, attention, data


@contextlib.contextmanager
def acquire_lease(run_dir: RunDir, group: ProcessGroup, grace_seconds: float) -> Iterator[Lease | NullLease]:
    """The lease of a folder, which process 0 takes for all of them, and all see."""
    with contextlib.ExitStack() as stack:
        leases = []

        def take_lease() -> str:
            leases.append(stack.enter_context(hold_lease(run_dir.path, grace_seconds)))
            return leases[0].token

        token = broadcast_from_primary(group, 'lease', take_lease)
        visible = group.gather('lease is seen', poll_until(lambda: read_owner_token(run_dir.path) == token))
        if not all(visible):
            raise UserError(
                f'process {visible.index(False)} does not see in {run_dir} what process 0 writes there; give all of them '
                'one shared folder as --workdir'
            )
        yield leases[0] if leases else NullLease()


def add_lineage(origin: fork.WarmStart | None, spec: Spec, run_dir: RunDir, row: dict, data: RunData, group: ProcessGroup) -> dict:
    """What row.json is to hold: of a run that is about to begin as a fork, what it comes from as well."""

    def find_lineage() -> dict:
        if origin is None or run_dir.has_run():
            return {}
        return {'from': fork.describe_lineage(origin, spec, run_dir, data.fingerprint)}

    return row | broadcast_from_primary(group, 'lineage', find_lineage)


def make_mesh_on_all(spec: Spec, hardware: Hardware, group: ProcessGroup, num_local_processes: int) -> jax.sharding.Mesh:
    """Make the mesh of all processes, and refuse a layout that does not fit on it.

    Where processes have different numbers of devices, the refusal names that: it is why the layout does not fit.
    """
    try:
        return run_on_all_or_raise(group, 'devices', lambda: make_mesh(spec, hardware, num_local_processes))
    except UserError:
        check_equal_on_all(group, 'number of devices', {'the number of its devices': count_devices()})
        raise


def count_devices() -> int:
    """Return how many devices this process has; 0 where jax finds none."""
    try:
        return len(jax.local_devices())
    except RuntimeError:
        return 0


def make_mesh(spec: Spec, hardware: Hardware, num_local_processes: int) -> jax.sharding.Mesh:
    """Make the mesh, and refuse before the data is read what does not fit on it.

    Args:
        processes: Of the run, on this host.
    """
    mesh = devices.make_mesh(hardware)
    layout.check_layout(spec, hardware, mesh)
    memory_bytes, local_devices = devices.get_device_memory_bytes(num_local_processes), jax.local_devices()
    probe.check_probe_memory(spec, memory_bytes * len(local_devices) if local_devices[0].platform == 'cpu' else memory_bytes)
    layout.check_residual_memory(spec, hardware, mesh, memory_bytes)
    return mesh


def check_disk_space(spec: Spec, run_dir: RunDir, mesh: jax.sharding.Mesh) -> None:
    if is_remote(run_dir.path):
        return  # a bucket has no end
    saved_steps, num_copies = run_dir.list_checkpoint_steps(), spec.checkpoint.keep + 1  # one more while the newest is being written
    needed_bytes = max(0, num_copies - len(saved_steps)) * state.count_bytes(state.make_abstract_state(spec, mesh))
    existing_path = next(path for path in (run_dir.path.absolute(), *run_dir.path.absolute().parents) if path.exists())
    free_bytes = shutil.disk_usage(existing_path).free
    if needed_bytes > free_bytes and spec.optimizer.steps not in saved_steps:
        raise UserError(
            f'{run_dir} has {free_bytes / 1e9:.2f} GB of room, and {num_copies} checkpoints take {needed_bytes / 1e9:.2f} GB more; '
            'make room, choose another --workdir, or lower config.checkpoint.keep'
        )
