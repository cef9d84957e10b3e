"""Saving, restoring, verification and retention of the checkpoints of a run."""

import contextlib
import errno
import logging
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from sinklab.checkpoint import digests
from sinklab.config.differences import format_differences
from sinklab.config.spec import CheckpointConfig
from sinklab.errors import UserError, format_error, print_status
from sinklab.process_group import ProcessGroup, all_gather_or_raise, broadcast_from_primary
from sinklab.run_dir import RunDir, select_steps
from sinklab.storage.files import list_entries, open_writable_folder, remove_folder
from sinklab.storage.paths import get_file_system, is_remote, make_absolute

# Orbax logs an error of the storage with a traceback in several threads; it also raises the error.
logging.getLogger('absl').setLevel(logging.CRITICAL)


class Checkpointer:
    """The checkpoints of one run directory. All processes of the group call its methods in the same order.

    Args:
        run_dir: The run directory.
        retention_policy: Which checkpoints are kept.
        data_fingerprint: Digests of the data, which a resumed run must read again.
        group: The processes of the run; None: this one.
        check_owner: Called before each write, also in the background; raises if another job owns the directory.
    """

    def __init__(
        self,
        run_dir: RunDir,
        retention_policy: CheckpointConfig,
        data_fingerprint: dict[str, str | int],
        group: ProcessGroup | None = None,
        check_owner: Callable[[], None] = lambda: None,
    ):
        self.run_dir, self.retention_policy, self.data_fingerprint = run_dir, retention_policy, data_fingerprint
        self.group = group or ProcessGroup()
        self.check_owner = check_owner
        self.pool = ThreadPoolExecutor(1, 'checkpoint')
        self.pending_save: Future[None] | None = None
        broadcast_from_primary(self.group, lambda: remove_unfinished_saves(run_dir))

    def get_path(self, step: int) -> Path:
        return make_absolute(self.run_dir.checkpoint_dir / str(step))

    def choose_sound_step(self) -> tuple[int | None, list[str]]:
        """Choose the newest checkpoint that is as it was saved, and move newer ones to damaged/.

        Returns:
            The step, or None if there is no checkpoint; and a line for each checkpoint that was moved.

        Raises:
            UserError: All checkpoints are damaged.
        """
        damages: dict[int, str] = {}
        sound_step = None
        for step in reversed(broadcast_from_primary(self.group, self.run_dir.list_checkpoint_steps)):
            if not (damage := find_damage_on_all(self.get_path(step), self.group)):
                sound_step = step
                break
            damages[step] = damage
        # If the only checkpoint has no digests, the process was killed at the end of its first save.
        is_first_save = list(damages.values()) == [digests.NO_DIGESTS]
        if sound_step is None and damages and not is_first_save:
            reasons = '; '.join(f'{step}: {damage}' for step, damage in damages.items())
            raise UserError(
                f'{self.run_dir.checkpoint_dir} has no sound checkpoint ({reasons}); restore the files, or delete '
                'that folder to start again with the same command'
            )
        lines = broadcast_from_primary(self.group, lambda: [self.move_damaged(*item) for item in damages.items()])
        return sound_step, lines

    def move_damaged(self, step: int, damage: str) -> str:
        """Move a damaged checkpoint away, so that its step can be saved again; return a line about it."""
        target = self.run_dir.path / 'damaged' / str(step)
        with open_writable_folder(target.parent):
            remove_folder(target)  # of an earlier attempt
            if is_remote(target):
                get_file_system().mv(os.fspath(self.get_path(step)), os.fspath(target), recursive=True)
            else:
                self.get_path(step).rename(target)
        return f'{self.get_path(step)} is skipped: {damage}; it is moved to {target}'

    def restore(self, step: int, abstract_state: dict) -> dict:
        """Restore the state of a sound step, with the shardings of `abstract_state`.

        Raises:
            UserError: The checkpoint was trained on other data, in another order, or belongs to another model.
        """
        broadcast_from_primary(self.group, lambda: self.check_same_data(step))
        return load_state(self.get_path(step), abstract_state)

    def check_same_data(self, step: int) -> None:
        metadata = read_metadata(self.get_path(step))
        if differences := format_differences(metadata.custom_metadata['data'], self.data_fingerprint):
            raise UserError(
                f'{self.run_dir} was trained on other data ({", ".join(differences)}); restore that data, or if only '
                f'its order differs, the version of grain in {self.run_dir}/environment.json, or give a new --workdir'
            )

    def save(self, step: int, state: dict) -> None:
        """Start a save in the background, after raising the error of an earlier save, if any."""
        self.wait_until_finished()
        path = self.get_path(step)
        self.check_owner()
        with use_orbax_context(path), translate_save_errors(path):
            response = ocp.save_async(path, state, custom_metadata={'data': self.data_fingerprint})
        self.pending_save = self.pool.submit(self.finish_save, path, response)

    def finish_save(self, path: Path, response: Any) -> None:
        """Commit a save, write its digests, and delete checkpoints that are no longer kept."""
        with translate_save_errors(path):
            response.result()
        self.check_owner()
        digests.write_digests(path, self.group.process_index, self.group.process_count)
        if self.group.process_index == 0:
            delete_unretained_steps(self.run_dir, self.retention_policy)

    def raise_save_error(self) -> None:
        """Raise the error of a save in the background, if any."""
        if self.pending_save and self.pending_save.done():
            self.wait_until_finished()

    def wait_until_finished(self) -> None:
        """Wait until the pending save is finished, and raise its error, if any."""
        pending = self.pending_save
        self.pending_save = None
        if pending:
            pending.result()

    def wait_on_all_processes(self) -> None:
        """Wait until all processes have finished their saves; one that exits earlier would end the others."""
        self.wait_until_finished()
        self.group.all_gather(None)

    def close(self) -> None:
        try:
            self.wait_until_finished()
        finally:
            self.pool.shutdown()


def remove_unfinished_saves(run_dir: RunDir) -> None:
    """Delete what interrupted saves have left."""
    saved_names = set(map(str, run_dir.list_checkpoint_steps()))
    with open_writable_folder(run_dir.checkpoint_dir):
        for path in list_entries(run_dir.checkpoint_dir):
            if path.name not in saved_names and (path.name.isdecimal() or '.orbax-checkpoint-tmp' in path.name):
                remove_folder(path)


def delete_unretained_steps(run_dir: RunDir, retention_policy: CheckpointConfig) -> None:
    """Delete checkpoints that are not kept; Orbax would do that before the newest one has its digests."""
    keep_every_steps = retention_policy.keep_every_steps
    for step in run_dir.list_checkpoint_steps()[: -retention_policy.keep]:
        is_kept = retention_policy.is_log_step(step) or (keep_every_steps and step % keep_every_steps == 0)
        if not is_kept:
            try:
                remove_folder(run_dir.checkpoint_dir / str(step))
            except OSError as error:
                print_status(f'checkpoint {step} could not be deleted ({format_error(error)})')


def find_damage_on_all(checkpoint: Path, group: ProcessGroup) -> str | None:
    """Verify a checkpoint, a share of its files on each process; describe a damage, or return None."""
    damages = all_gather_or_raise(
        group, lambda: digests.find_damage(checkpoint, group.process_index, group.process_count)
    )
    return next(filter(None, damages), None)


def read_metadata(checkpoint: Path) -> Any:
    """Read the metadata of a checkpoint without its arrays: `metadata`, a tree, and `custom_metadata`."""
    with use_orbax_context(checkpoint), translate_read_errors(checkpoint):
        metadata = ocp.metadata(make_absolute(checkpoint))
        if not (metadata.metadata and metadata.custom_metadata):  # Orbax reads empty files as empty metadata
            raise ValueError('it has no metadata')
    return metadata


def load_state(checkpoint: Path, abstract_state: Any, partial_load: bool = False) -> Any:
    """Load the leaves of a checkpoint that `abstract_state` has; with `partial_load` it need not have all of them.

    Raises:
        UserError: The checkpoint lacks a leaf of `abstract_state`, or cannot be read.
    """
    with use_orbax_context(checkpoint, partial_load), translate_read_errors(checkpoint):
        loaded_state = ocp.load(make_absolute(checkpoint), abstract_state, checkpointable_name='state')
        for path, leaf in jax.tree_util.tree_leaves_with_path(loaded_state):
            if isinstance(leaf, jax.ShapeDtypeStruct):  # a partial load returns it for a missing leaf
                raise ValueError(f'{jax.tree_util.keystr(path, simple=True, separator="/")} is missing')
    return loaded_state


@contextlib.contextmanager
def use_orbax_context(path: Path, partial_load: bool = False) -> Iterator[None]:
    """Use an Orbax context that creates folders before its threads, which would wait 300 s for a missing one."""
    context = ocp.Context()
    context.asynchronous.create_directories_asynchronously = False
    context.pytree.loading.partial_load = partial_load
    if is_remote(path):  # nothing is renamed in a bucket: a save there ends with a commit file
        context.atomicity.mode = ocp.options.AtomicityMode.COMMIT_FILE
    with context:
        yield


@contextlib.contextmanager
def translate_read_errors(checkpoint: Path) -> Iterator[None]:
    """Translate errors of a checkpoint that cannot be read into a UserError of one line."""
    try:
        yield
    except (OSError, MemoryError, jax.errors.JaxRuntimeError):
        raise  # of the disk or the device
    except Exception as error:  # of any type: it depends on what is wrong with a file
        raise UserError(
            f'{checkpoint} cannot be read ({describe_root_cause(error)}); it is of another model or version, or '
            'damaged: see sinklab checkpoint verify'
        ) from error


@contextlib.contextmanager
def translate_save_errors(checkpoint: Path) -> Iterator[None]:
    """Translate the errors of TensorStore, which are ValueErrors, into OSErrors with the errno in their text.

    An OSError without a path, as Orbax raises it from a write, gets that of the checkpoint.
    """
    try:
        yield
    except OSError as error:
        if error.errno and not error.filename:
            raise OSError(error.errno, error.strerror, str(checkpoint)) from error
        raise
    except ValueError as error:
        match = re.search(r'OS error (\d+)', str(error))
        code = int(match[1]) if match else errno.ENOSPC if 'RESOURCE_EXHAUSTED' in str(error) else errno.EIO
        reason = describe_root_cause(error) if code == errno.EIO else os.strerror(code)
        raise OSError(code, reason, str(checkpoint)) from error


def describe_root_cause(error: BaseException) -> str:
    """Return the type and message of the root cause of an error."""
    while error.__cause__:
        error = error.__cause__
    return format_error(error, with_type=True)


def restore_parameters(path: str | Path, step: int, abstract_params: Any = None) -> Any:
    """Restore the parameters of a run at a step, after verifying them.

    Args:
        path: Run directory.
        step: Step of the checkpoint.
        abstract_params: Shapes and shardings of the parameters; None to return NumPy arrays.

    Raises:
        UserError: The checkpoint is missing or damaged, or lacks a parameter.
    """
    run_dir = RunDir(path)
    select_steps(run_dir, step)
    checkpoint = run_dir.checkpoint_dir / str(step)
    if damage := digests.find_damage(checkpoint):
        raise UserError(f'{checkpoint} is damaged: {damage}; use another step, see sinklab checkpoint verify')
    if abstract_params is None:
        saved_params = read_metadata(checkpoint).metadata['params']
        abstract_params = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), saved_params)
    return load_state(checkpoint, {'params': abstract_params}, partial_load=True)['params']
