"""Metadata of a checkpoint, and restoring or saving its parameters only."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from sinklab.checkpoint import digests
from sinklab.checkpoint.orbax import (
    TEMPORARY_SUFFIX,
    shorten_read_errors,
    suppress_orbax_logs,
    translate_write_errors,
    use_orbax_context,
)
from sinklab.run_dir import RunDir
from sinklab.schema import UserError
from sinklab.storage import directories
from sinklab.storage.atomic_write import writable_folder
from sinklab.storage.paths import check_checkpoint_path, is_remote, make_absolute


def read_metadata(checkpoint: Path) -> Any:
    """Read the metadata of a checkpoint without its arrays: `metadata`, a tree, and `custom_metadata`."""
    with shorten_read_errors(checkpoint), use_orbax_context(checkpoint):
        checkpoint_metadata = ocp.metadata(make_absolute(checkpoint))
        if not (
            checkpoint_metadata.metadata and checkpoint_metadata.custom_metadata
        ):  # Orbax reads empty files as empty metadata
            raise ValueError('it does not say what it holds')
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
                f'{checkpoint} is of another model: {name} is {saved_shapes.get(name, "not there")}, and '
                f'{expected_shapes.get(name, "nothing")} is wanted; give the config that it was trained with'
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
            f'{checkpoint} is not there; {run_dir} has {run_dir.list_checkpoint_steps() or "no checkpoints"}'
        )
    if corruption := digests.find_corruption(run_dir, step):
        raise UserError(
            f'{checkpoint} is not sound: {corruption.reason}; take another step, see sinklab checkpoint verify'
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
    with (
        shorten_read_errors(checkpoint),
        use_orbax_context(checkpoint),
        ocp.Context(pytree_options=make_partial_load_options()),
    ):
        return ocp.load(make_absolute(checkpoint), {'params': target}, checkpointable_name='state')['params']


def save_parameters(run_dir: RunDir, step: int, output_path: Path, dtype: str | None = None) -> int:
    """Save only the parameters of a run at a step, and return how many there are."""
    check_checkpoint_path(output_path)
    params = restore_parameters(run_dir.path, step, dtype)
    output_path = make_absolute(output_path)
    with (
        writable_folder(output_path.parent),
        translate_write_errors(output_path),
        delete_on_failure(output_path),
        suppress_orbax_logs(),
        use_orbax_context(output_path),
    ):
        ocp.save(output_path, params)
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@contextlib.contextmanager
def delete_on_failure(output_path: Path) -> Iterator[None]:
    """Delete the temporary directories that a failed save leaves next to its output directory."""
    existing_paths = set(list_temporary_dirs(output_path))
    try:
        yield
    except BaseException:
        for path in set(list_temporary_dirs(output_path)) - existing_paths:
            with contextlib.suppress(OSError):
                directories.remove_folder(path)
        raise


def list_temporary_dirs(output_path: Path) -> list[Path]:
    """List the temporary directories that Orbax renames to `output_path` when a save is complete."""
    if is_remote(output_path):  # nothing is renamed in a bucket
        return []
    return [
        path
        for path in directories.list_entries(output_path.parent)
        if path.name.startswith(f'{output_path.name}{TEMPORARY_SUFFIX}')
    ]


def make_partial_load_options() -> ocp.options.PyTreeOptions:
    return ocp.options.PyTreeOptions(loading=ocp.options.PyTreeOptions.Loading(partial_load=True))


def get_restore_dtype(leaf: Any, dtype: str | None) -> jnp.dtype:
    """Return the dtype to restore a leaf in; only floating-point leaves are converted."""
    return jnp.dtype(dtype) if dtype and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype
