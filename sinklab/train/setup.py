"""Setup of a run before its first step: lease, mesh, checks, attention backend, data, lineage."""

import contextlib
import dataclasses
import platform
import shutil
from collections.abc import Callable, Iterator

import jax

from sinklab.attn.backends import BackendChoice
from sinklab.config.spec import Hardware, Spec
from sinklab.data.run_data import RunData, load_run_data
from sinklab.errors import UserError
from sinklab.parallel import device_mesh
from sinklab.process_group import (
    ProcessGroup,
    broadcast_from_primary,
    check_equal_on_all,
    run_on_all_or_raise,
)
from sinklab.run_dir import RunDir
from sinklab.storage.files import poll_until
from sinklab.storage.folder_lock import hold_folder, read_owner
from sinklab.storage.paths import is_remote
from sinklab.train import (
    layout_checks,
    memory_estimate,
    sink_probe,
    state,
    step,
    warm_start,
)


def set_up_run(
    spec: Spec, hardware: Hardware, run_dir: RunDir, group: ProcessGroup
) -> tuple[Hardware, jax.sharding.Mesh, BackendChoice, RunData]:
    """Set up a run: return (hardware, mesh, attention backend, data), consistent on all processes.

    The returned hardware has the chosen micro-batch and remat policy. An error on one process is raised on all
    processes.
    """
    host_names = group.all_gather(platform.node())
    num_local_processes = host_names.count(host_names[group.process_index])  # they share the memory of this host
    mesh, hardware = run_on_all_or_raise(group, lambda: make_checked_mesh(spec, hardware, num_local_processes))
    broadcast_from_primary(group, lambda: check_disk_space(spec, run_dir, mesh))
    attention = run_on_all_or_raise(group, lambda: step.choose_verified_backend(spec, hardware))
    check_equal_on_all(group, {'the attention backend': attention.backend})
    memory_bytes = device_mesh.get_device_memory_bytes(num_local_processes)
    remat = broadcast_from_primary(
        group,
        lambda: memory_estimate.choose_remat_policy(spec, hardware, mesh, attention.backend, memory_bytes),
    )
    data = run_on_all_or_raise(group, lambda: load_run_data(spec))
    check_equal_on_all(group, {f'the data ({name})': value for name, value in data.fingerprint.items()})
    return dataclasses.replace(hardware, remat=remat), mesh, attention, data


@contextlib.contextmanager
def hold_run_dir(run_dir: RunDir, group: ProcessGroup, grace_seconds: float) -> Iterator[Callable[[], None]]:
    """Hold a run directory on process 0, and check that all processes see it; yield what `hold_folder` yields."""
    with contextlib.ExitStack() as stack:
        checks = [lambda: None]

        def hold_on_primary() -> str:
            checks.append(stack.enter_context(hold_folder(run_dir.path, grace_seconds)))
            return read_owner(run_dir.path)['token']

        token = broadcast_from_primary(group, hold_on_primary)
        visible = group.all_gather(poll_until(lambda: read_owner(run_dir.path).get('token') == token))
        if not all(visible):
            raise UserError(
                f'process {visible.index(False)} does not see the files that process 0 writes in {run_dir}; give one '
                'shared folder as --workdir to all processes'
            )
        yield checks[-1]


def make_row_content(
    origin: warm_start.WarmStart | None, spec: Spec, run_dir: RunDir, row: dict, data: RunData, group: ProcessGroup
) -> dict:
    """Return the content of row.json; for a new fork, with its lineage."""

    def find_lineage() -> dict:
        if origin is None or run_dir.has_run():
            return {}
        return {'from': warm_start.describe_lineage(origin, spec, run_dir, data.fingerprint)}

    return row | broadcast_from_primary(group, find_lineage)


def make_checked_mesh(spec: Spec, hardware: Hardware, num_local_processes: int) -> tuple[jax.sharding.Mesh, Hardware]:
    """Make the mesh, choose the micro-batch, and check the layout and memory before any data is read.

    Args:
        spec: Config of the run.
        hardware: Requested layout.
        num_local_processes: Number of processes of the run on this host.

    Raises:
        UserError: The layout does not divide batch or parameters, or memory does not suffice.
    """
    mesh = device_mesh.make_mesh(hardware)
    layout_checks.check_layout(spec, hardware, mesh)
    memory_bytes, local_devices = device_mesh.get_device_memory_bytes(num_local_processes), jax.local_devices()
    sink_probe.check_probe_memory(
        spec, memory_bytes * len(local_devices) if local_devices[0].platform == 'cpu' else memory_bytes
    )
    hardware = dataclasses.replace(hardware, micro_batch=memory_estimate.choose_micro_batch(spec, hardware, mesh))
    layout_checks.check_batch_memory(spec, hardware, mesh, memory_bytes)
    return mesh, hardware


def check_disk_space(spec: Spec, run_dir: RunDir, mesh: jax.sharding.Mesh) -> None:
    if is_remote(run_dir.path):
        return  # a bucket has no size limit
    saved_steps = run_dir.list_checkpoint_steps()
    num_copies = spec.checkpoint.keep + 1  # one more while the newest is being written
    needed_bytes = max(0, num_copies - len(saved_steps)) * state.count_bytes(state.make_abstract_state(spec, mesh))
    existing_path = next(
        path for path in (run_dir.path.absolute(), *run_dir.path.absolute().parents) if path.exists()
    )
    free_bytes = shutil.disk_usage(existing_path).free
    if needed_bytes > free_bytes and spec.optimizer.steps not in saved_steps:
        raise UserError(
            f'{run_dir} has {free_bytes / 1e9:.2f} GB of free space, and {num_copies} checkpoints need '
            f'{needed_bytes / 1e9:.2f} GB more; free some space, choose another --workdir, or lower '
            'config.checkpoint.keep'
        )
