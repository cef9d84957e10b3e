"""Saving, restoring, verification, retention and quarantine of the checkpoints of a run."""

import contextlib
import dataclasses
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from sinklab.checkpoint import digests
from sinklab.checkpoint.digests import CorruptionReport
from sinklab.checkpoint.orbax_compat import TEMPORARY_SUFFIX as ORBAX_TEMPORARY_SUFFIX
from sinklab.checkpoint.orbax_compat import load_state, translate_storage_errors, use_orbax_context, use_read_context
from sinklab.config.differences import format_differences
from sinklab.config.spec import CheckpointConfig
from sinklab.errors import UserError
from sinklab.process_group import ProcessGroup, all_gather_or_raise, broadcast_from_primary
from sinklab.run_dir import RunDir
from sinklab.storage import directories
from sinklab.storage.atomic_write import TEMPORARY_SUFFIX, open_writable_folder
from sinklab.storage.directories import DELETED_SUFFIX
from sinklab.storage.paths import check_path_readable_by_orbax, get_error_path, is_remote, make_absolute


def delete_unretained_steps(run_dir: RunDir, retention_policy: CheckpointConfig) -> None:
    """Delete checkpoints that are not retained.

    Orbax's own Checkpointer deletes them when a save is committed, when the new checkpoint has no digests yet, and
    does not delete them atomically.
    """
    keep_every_steps = retention_policy.keep_every_steps
    for step in run_dir.list_checkpoint_steps()[: -retention_policy.keep]:
        if not keep_every_steps or step % keep_every_steps:
            print_lines(*delete_step(run_dir, step))


def delete_step(run_dir: RunDir, step: int) -> list[str]:
    """Delete a step: its checkpoint, unfinished saves of it, and its digests.

    Returns:
        A line for each directory that still has files on the disk. It is no longer a checkpoint but takes space; the
        next attempt at the run tries to delete it again.

    Raises:
        OSError: The checkpoint cannot be renamed, and so is still a checkpoint; or a bucket does not delete it.
    """
    directories.mark_deleted(run_dir.checkpoint_dir / str(step))
    checkpoint_dirs = run_dir.checkpoint_dir / str(step), *run_dir.checkpoint_dir.glob(f'{step}.*')
    return try_to_delete([run_dir.digest_dir / str(step), *checkpoint_dirs])


def try_to_delete(paths: Iterable[Path]) -> list[str]:
    """Delete directories, and return a line for each one on a disk that cannot be deleted."""
    lines = []
    for path in paths:
        try:
            directories.remove_folder(path)
        except OSError as error:
            if is_remote(path):
                raise
            lines.append(
                f'{path} could not be deleted ({error.strerror}: {get_error_path(error) or path}); delete it'
            )
    return lines


def print_lines(*lines: str) -> None:
    for line in lines:
        print(line, file=sys.stderr, flush=True)


def make_digest_dir(run_dir: RunDir, step: int) -> None:
    """Make an empty directory for the digests of a save."""
    directories.remove_folder(run_dir.digest_dir / str(step))
    directories.make_folder(run_dir.digest_dir / str(step))


def clean_up_run_dir(run_dir: RunDir) -> None:
    """Make the directories, and delete files that an earlier process has left incomplete.

    Complete digests without a checkpoint stay, because the checkpoint may have been moved away temporarily.
    """
    with open_writable_folder(run_dir.checkpoint_dir), open_writable_folder(run_dir.digest_dir):
        saved_names = set(map(str, run_dir.list_checkpoint_steps()))
        partial_paths = [
            path
            for path in directories.list_entries(run_dir.checkpoint_dir)
            if is_uncommitted(path.name, saved_names)
        ]
        for path in partial_paths:
            check_is_uncommitted(run_dir, path)
        # STEP.UNIQUE.deleted on a disk, STEP in a bucket; earlier versions wrote STEP.deleted.
        deleted_names = {
            path.name.split('.')[0] if path.name.endswith(DELETED_SUFFIX) else path.name for path in partial_paths
        }
        for path in directories.list_entries(run_dir.digest_dir):
            if path.name not in saved_names and (path.name in deleted_names or not any(path.glob('*.json'))):
                print_lines(*try_to_delete([path]))
        print_lines(*try_to_delete(partial_paths))
        for path in (
            *run_dir.checkpoint_dir.glob(f'*{TEMPORARY_SUFFIX}'),
            *run_dir.digest_dir.glob(f'*/*{TEMPORARY_SUFFIX}'),
        ):
            path.unlink(missing_ok=True)


def is_uncommitted(name: str, saved_names: set[str]) -> bool:
    """Return whether a directory is a checkpoint that is incomplete or partly deleted."""
    return (
        ORBAX_TEMPORARY_SUFFIX in name
        or name.endswith(DELETED_SUFFIX)
        or (name.isdigit() and name not in saved_names)
    )


def check_is_uncommitted(run_dir: RunDir, path: Path) -> None:
    """Raise UserError if a checkpoint is complete, but was copied to a bucket without its commit marker."""
    if not path.name.isdigit() or (path / DELETED_SUFFIX).exists():
        return
    if isinstance(digests.read_digests_of_any_run(run_dir, int(path.name)), digests.CheckpointDigests):
        raise UserError(
            f'{path} has no {directories.COMMIT_MARKER}, as after a copy from a disk; create an empty object of '
            'that name there, or delete it'
        )


def quarantine_step(run_dir: RunDir, step: int) -> Path:
    """Move a checkpoint and its digests to the quarantine directory."""
    names = itertools.chain([f'{step}'], (f'{step}.{number}' for number in itertools.count(1)))
    quarantine_dir = next(
        run_dir.quarantine_dir / name for name in names if not (run_dir.quarantine_dir / name).exists()
    )
    with open_writable_folder(quarantine_dir):
        directories.move_folder(run_dir.checkpoint_dir / str(step), quarantine_dir / 'checkpoint')
        with contextlib.suppress(FileNotFoundError):
            directories.move_folder(run_dir.digest_dir / str(step), quarantine_dir / 'digests')
    return quarantine_dir


WAIT_REPORT_SECONDS = 30.0  # seconds of waiting for a save before a message, and between messages


class Checkpointer:
    """The checkpoints of one run directory. All processes of the group call its methods in the same order.

    `check_lease` is called before each write, also in the background, and raises if another job owns the directory.
    `run_id` is given for a run whose run.json is written after its first checkpoint. Otherwise the id is read from
    that file or, if it is missing, from the checkpoints.
    """

    def __init__(
        self,
        run_dir: RunDir,
        retention_policy: CheckpointConfig,
        data_fingerprint: dict[str, str | int],
        group: ProcessGroup | None = None,
        check_lease: Callable[[], None] = lambda: None,
        run_id: str | None = None,
    ):
        self.run_dir, self.retention_policy, self.data_fingerprint = run_dir, retention_policy, data_fingerprint
        self.group, self.check_lease = group or ProcessGroup(), check_lease
        self.run_id = run_id or broadcast_from_primary(self.group, lambda: digests.find_run_id(run_dir))
        self.pool, self.pending_save = ThreadPoolExecutor(1, 'checkpoint'), None
        self.save_seconds: float | None = None  # duration of the latest finished save, including its digests
        broadcast_from_primary(self.group, lambda: clean_up_run_dir(run_dir))
        self.newest_step = self.find_latest_committed_step()  # its save may still be running

    def find_latest_committed_step(self) -> int | None:
        """Return the step of the newest finished checkpoint, valid or not."""
        return broadcast_from_primary(self.group, lambda: max(self.run_dir.list_checkpoint_steps(), default=None))

    def find_latest_valid_step(self) -> tuple[int | None, list[str]]:
        """Return the newest valid step, and a line for each newer one that was quarantined or deleted."""
        corruptions: dict[int, CorruptionReport] = {}
        for step in reversed(broadcast_from_primary(self.group, self.run_dir.list_checkpoint_steps)):
            if not (corruption := find_corruption_on_all(self.run_dir, step, self.group)):
                return step, self.quarantine_corrupt(corruptions, step)
            corruptions[step] = corruption
        if corruptions and not is_uncommitted_save(corruptions):
            descriptions = '; '.join(f'{step}: {corruption.reason}' for step, corruption in corruptions.items())
            raise UserError(
                f'{self.run_dir.checkpoint_dir} has no valid checkpoint ({descriptions}); restore the files, or '
                f'delete only {self.run_dir.checkpoint_dir} to start again with the same command'
            )
        return None, self.quarantine_corrupt(corruptions, None)

    def quarantine_corrupt(self, corruptions: dict[int, CorruptionReport], valid_step: int | None) -> list[str]:
        """Quarantine or delete corrupt checkpoints so that their steps can be saved again."""
        self.newest_step = valid_step

        def clear_steps() -> list[str]:
            with translate_storage_errors(self.run_dir):
                if not is_uncommitted_save(corruptions):
                    return [f'it is quarantined in {quarantine_step(self.run_dir, step)}' for step in corruptions]
                return ['; '.join(delete_step(self.run_dir, step)) or 'it is deleted' for step in corruptions]

        results = broadcast_from_primary(self.group, clear_steps) if corruptions else []
        return [
            f'{self.run_dir.checkpoint_dir / str(step)} is skipped: {corruption.reason}; {result}'
            for (step, corruption), result in zip(corruptions.items(), results, strict=True)
        ]

    def restore(self, step: int, abstract_state: dict) -> dict:
        """Restore the state of a valid step, with the shardings of `abstract_state`."""
        broadcast_from_primary(self.group, lambda: self.check_compatible(step, abstract_state))
        return load_state(self.run_dir.checkpoint_dir / str(step), abstract_state)

    def check_compatible(self, step: int, abstract_state: dict) -> None:
        """Raise UserError if a checkpoint has other data, another data order or another model than the run."""
        path = self.run_dir.checkpoint_dir / str(step)
        metadata = read_metadata(path)
        saved_data = metadata.custom_metadata['data']
        saved_order = saved_data.get('order')  # earlier versions did not save it
        if data_differences := format_differences(saved_data, self.data_fingerprint | {'order': saved_order}):
            raise UserError(
                f'{self.run_dir} was trained on other data ({", ".join(data_differences)}); restore that data, '
                'or give a new --workdir'
            )
        if saved_order is not None and saved_order != self.data_fingerprint.get('order'):
            raise UserError(
                f'the order of the data of {self.run_dir} has changed, e.g. with another version of grain; install '
                f'the versions in {self.run_dir}/environment.json, or give a new --workdir'
            )
        check_same_model(path, metadata.metadata, abstract_state)

    def save(self, step: int, state: dict) -> None:
        """Start a save in the background, after raising the error of an earlier save, if any."""
        self.wait_until_finished()
        start_time = time.perf_counter()
        path = make_absolute(self.run_dir.checkpoint_dir / str(step))
        with translate_storage_errors(self.run_dir), use_orbax_context(path):
            if self.group.process_index == 0:
                make_digest_dir(self.run_dir, step)
            response = ocp.save_async(path, state, custom_metadata={'data': self.data_fingerprint})
        self.newest_step, self.pending_save = step, self.pool.submit(self.finish_save, step, response, start_time)

    def finish_save(self, step: int, response: Any, start_time: float) -> float:
        """Commit a save, write its digests, and delete checkpoints that are no longer retained."""
        path = self.run_dir.checkpoint_dir / str(step)
        with translate_storage_errors(self.run_dir, saving_path=path):
            response.result()
        self.check_lease()
        seconds = time.perf_counter() - start_time
        digests.write_digests(
            self.run_dir, step, self.group.process_index, self.group.process_count, seconds, self.run_id
        )
        seconds = time.perf_counter() - start_time
        if self.group.process_index == 0:
            self.check_lease()
            delete_unretained_steps(self.run_dir, self.retention_policy)
        return seconds

    def raise_save_error(self) -> None:
        """Raise the error of a save in the background, if any."""
        if self.pending_save and self.pending_save.done():
            self.wait_until_finished()

    def wait_until_finished(self) -> None:
        """Wait until the pending save is finished, and raise its error, if any.

        A message is printed every `WAIT_REPORT_SECONDS`.
        """
        pending: Future[float] | None
        pending, self.pending_save = self.pending_save, None
        start_time = time.monotonic()
        while pending and futures.wait([pending], WAIT_REPORT_SECONDS).not_done:
            print_lines(
                f'the checkpoint of step {self.newest_step} is being written to {self.run_dir}; '
                f'waiting for {time.monotonic() - start_time:.0f} s'
            )
        if pending:
            with translate_storage_errors(self.run_dir):
                self.save_seconds = pending.result()

    def wait_on_all_processes(self) -> None:
        """Wait until all processes have finished their saves; one that exits earlier would end the others."""
        self.wait_until_finished()
        self.group.all_gather(None)

    def delete_if_newest(self, step: int) -> None:
        """Delete the newest checkpoint if it is of this step, whose state turned out to be unusable."""
        if self.newest_step == step:
            self.wait_until_finished()
            broadcast_from_primary(self.group, lambda: print_lines(*delete_step(self.run_dir, step)))
            self.newest_step = self.find_latest_committed_step()

    def close(self) -> None:
        try:
            self.wait_until_finished()
        finally:
            self.pool.shutdown()


def is_uncommitted_save(corruptions: dict[int, CorruptionReport]) -> bool:
    """Return whether only the last save is invalid, because its process ended before the save did."""
    return len(corruptions) == 1 and all(corruption.is_incomplete for corruption in corruptions.values())


def find_corruption_on_all(run_dir: RunDir, step: int, group: ProcessGroup) -> CorruptionReport | None:
    """Verify a checkpoint, a share of its files on each process; return a corruption or None."""

    def find_local_corruption() -> dict | None:
        with translate_storage_errors(run_dir):
            corruption = digests.find_corruption(run_dir, step, group.process_index, group.process_count)
        return dataclasses.asdict(corruption) if corruption else None

    corruptions = all_gather_or_raise(group, find_local_corruption)
    return next((CorruptionReport(**corruption) for corruption in corruptions if corruption), None)


def read_metadata(checkpoint: Path) -> Any:
    """Read the metadata of a checkpoint without its arrays: `metadata`, a tree, and `custom_metadata`."""
    with use_read_context(checkpoint):
        checkpoint_metadata = ocp.metadata(make_absolute(checkpoint))
        if not (
            checkpoint_metadata.metadata and checkpoint_metadata.custom_metadata
        ):  # Orbax reads empty files as empty metadata
            raise ValueError('it has no metadata')
    return checkpoint_metadata


def get_leaf_shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of each leaf by its name."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator='/'): tuple(leaf.shape) for path, leaf in leaves}


def check_same_model(checkpoint: Path, saved_tree: Any, expected_tree: Any) -> None:
    """Raise UserError if the shapes of a checkpoint are not those of the expected model."""
    saved_shapes, expected_shapes = get_leaf_shapes(saved_tree), get_leaf_shapes(expected_tree)
    for name in sorted(saved_shapes.keys() | expected_shapes.keys()):
        if saved_shapes.get(name) != expected_shapes.get(name):
            raise UserError(
                f'{checkpoint} belongs to another model: {name} is {saved_shapes.get(name, "missing")}, and the '
                f'config needs {expected_shapes.get(name, "none")}; give the config that it was trained with'
            )


def restore_parameters(path: str | Path, step: int, dtype: str | None = None, abstract_params: Any = None) -> Any:
    """Restore the parameters of a run at a step, after verifying them.

    Args:
        path: Run directory.
        step: Step of the checkpoint.
        dtype: Name of the dtype of floating-point leaves; None for the saved dtype.
        abstract_params: Shapes and shardings of the parameters; None to return NumPy arrays.

    Raises:
        UserError: The checkpoint is missing, corrupt, or of another model than `abstract_params`.
    """
    run_dir = RunDir(path)
    checkpoint = run_dir.checkpoint_dir / str(step)
    if step not in run_dir.list_checkpoint_steps():
        raise UserError(
            f'{checkpoint} does not exist; {run_dir} has {run_dir.list_checkpoint_steps() or "no checkpoints"}'
        )
    if corruption := digests.find_corruption(run_dir, step):
        raise UserError(
            f'{checkpoint} is corrupt: {corruption.reason}; use another step, see sinklab checkpoint verify'
        )
    saved_params = read_metadata(checkpoint).metadata['params']
    if abstract_params is None:
        target = jax.tree.map(lambda leaf: np.empty(leaf.shape, get_restore_dtype(leaf, dtype)), saved_params)
    else:
        check_same_model(checkpoint, saved_params, abstract_params)
        target = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, get_restore_dtype(leaf, dtype), sharding=leaf.sharding),
            abstract_params,
        )
    return load_state(checkpoint, {'params': target}, partial_load=True)['params']


def save_parameters(run_dir: RunDir, step: int, output_path: Path, dtype: str | None = None) -> int:
    """Save only the parameters of a run at a step, and return how many there are."""
    check_path_readable_by_orbax(output_path)
    params = restore_parameters(run_dir.path, step, dtype)
    output_path = make_absolute(output_path)
    with (
        open_writable_folder(output_path.parent),
        translate_storage_errors(None, saving_path=output_path),
        use_orbax_context(output_path),
    ):
        if is_remote(output_path):  # nothing is renamed in a bucket
            ocp.save(output_path, params)
        else:  # Orbax does not delete the files of a save that fails
            with tempfile.TemporaryDirectory(
                TEMPORARY_SUFFIX, f'{output_path.name}.', output_path.parent, ignore_cleanup_errors=True
            ) as temporary_dir:
                temporary_path = Path(temporary_dir, output_path.name)
                ocp.save(temporary_path, params)
                temporary_path.rename(output_path)
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def get_restore_dtype(leaf: Any, dtype: str | None) -> jnp.dtype:
    """Return the dtype to restore a leaf in; only floating-point leaves are converted."""
    return jnp.dtype(dtype) if dtype and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype
