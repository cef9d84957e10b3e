"""What a checkpoint holds, and its parameters alone."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from sinklab.checkpoint import digests
from sinklab.checkpoint.log_filters import quiet
from sinklab.checkpoint.orbax import TEMPORARY, one_line, reaching
from sinklab.checkpoint.storage import writing
from sinklab.files import tree
from sinklab.files.place import absolute, check_checkpoint_path, is_remote
from sinklab.files.whole import writable
from sinklab.folder import Folder
from sinklab.record import Refusal


def metadata(checkpoint: Path) -> Any:
    """What Orbax knows of a checkpoint without reading its arrays: `metadata`, a tree, and `custom_metadata`."""
    with one_line(checkpoint), reaching(checkpoint):
        saved = ocp.metadata(absolute(checkpoint))
        if not (saved.metadata and saved.custom_metadata):  # what is empty reads as that
            raise ValueError('it does not say what it holds')
    return saved


def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """The shape of each leaf by its name."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator='/'): tuple(leaf.shape) for path, leaf in leaves}


def check_model(checkpoint: Path, saved: Any, wanted: Any) -> None:
    """Refuses a checkpoint of another model."""
    theirs, ours = shapes(saved), shapes(wanted)
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            raise Refusal(
                f'{checkpoint} is of another model: {name} is {theirs.get(name, "not there")}, and '
                f'{ours.get(name, "nothing")} is wanted; give the config that it was trained with'
            )


def parameters(path: str | Path, step: int, dtype: str | None = None, abstract: Any = None) -> Any:
    """The verified parameters of a run at a step, NumPy arrays or what `abstract` says, in another dtype if given."""
    folder = Folder(path)
    checkpoint = folder.checkpoints / str(step)
    if step not in folder.checkpoint_steps():
        raise Refusal(f'{checkpoint} is not there; {folder} has {folder.checkpoint_steps() or "no checkpoints"}')
    if fault := digests.fault(folder, step):
        raise Refusal(f'{checkpoint} is not sound: {fault.why}; take another step, see sinklab checkpoint verify')
    saved = metadata(checkpoint).metadata['params']
    if abstract is None:
        wanted = jax.tree.map(lambda leaf: np.empty(leaf.shape, kind(leaf, dtype)), saved)
    else:
        check_model(checkpoint, saved, abstract)
        wanted = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, kind(leaf, dtype), sharding=leaf.sharding), abstract
        )
    with one_line(checkpoint), reaching(checkpoint), ocp.Context(pytree_options=partial()):
        return ocp.load(absolute(checkpoint), {'params': wanted}, checkpointable_name='state')['params']


def write_parameters(folder: Folder, step: int, out: Path, dtype: str | None = None) -> int:
    """Saves the parameters of a run at a step alone, and returns how many they are."""
    check_checkpoint_path(out)
    params = parameters(folder.path, step, dtype)
    out = absolute(out)
    with writable(out.parent), writing(out), leaving_nothing(out), quiet(), reaching(out):
        ocp.save(out, params)
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@contextlib.contextmanager
def leaving_nothing(out: Path) -> Iterator[None]:
    """Remove what a save that fails has written beside the folder that it was to make."""
    before = set(unfinished(out))
    try:
        yield
    except BaseException:
        for path in set(unfinished(out)) - before:
            with contextlib.suppress(OSError):
                tree.remove(path)
        raise


def unfinished(out: Path) -> list[Path]:
    """Return the folders that Orbax writes before they get the name of this one."""
    if is_remote(out):  # nothing is renamed there
        return []
    return [path for path in tree.entries(out.parent) if path.name.startswith(f'{out.name}{TEMPORARY}')]


def partial() -> ocp.options.PyTreeOptions:
    return ocp.options.PyTreeOptions(loading=ocp.options.PyTreeOptions.Loading(partial_load=True))


def kind(leaf: Any, dtype: str | None) -> jnp.dtype:
    """What a leaf's dtype is to be; only floating point changes its own."""
    return jnp.dtype(dtype) if dtype and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype
