"""Models of LLaMA's family, from where transformers has them and back."""

import argparse
import contextlib
import shutil
import sys
import uuid
from pathlib import Path

from sinklab.cache import cache
from sinklab.escape import quote_shell
from sinklab.files.place import absolute, check_checkpoint_path, joined, place
from sinklab.files.whole import UNFINISHED
from sinklab.folder import Folder
from sinklab.llama import PREFIX
from sinklab.named import spec_of
from sinklab.record import Refusal

IMPORTS = 2  # counts the defaults that imports have had, so that a run that began with older ones finds its own


def export(given: argparse.Namespace) -> int:
    """Refuses what cannot be said before it reads an array."""
    import jax

    from sinklab import program_cache

    program_cache.install()
    jax.config.update('jax_platforms', 'cpu')  # where float32 is multiplied as float32
    from sinklab.checkpoint import restore
    from sinklab.llama import exporting
    from sinklab.observe.opening import step_of
    from sinklab.observe.own import tokenizer_of

    folder, step = step_of(given.run)
    spec, out = spec_of(folder), place(given.out)
    content = exporting.check(spec, out, given.length)
    tokenizer = tokenizer_of(folder, step, spec, given.tokenizer)
    params = restore.parameters(folder.path, step)
    found = exporting.write(spec, params, content, tokenizer, absolute(out), given.dtype or 'float32')
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    said = f'{given.out}: {content["model_type"]}, {count:,} parameters of {folder.checkpoints / str(step)}'
    print(f'{said}; {found}')
    return 0


def bring(given: argparse.Namespace) -> int:
    import jax

    from sinklab import program_cache

    program_cache.install()
    jax.config.update('jax_platforms', 'cpu')  # a run may hold the others
    folder = Folder(given.out)
    if folder.path.exists():
        raise Refusal(f'--out={given.out} is there already; give a new folder')
    count = imported(given.source, folder, absolute(folder.path))
    by = quote_shell(f'--from=params:{folder}')
    print(f'{folder}: {count:,} parameters of {given.source}; begin with them by {by}')
    return 0


def imported(given: str, folder: Folder, home: Path) -> int:
    """Makes a run folder, which comes to lie at `home`, and returns how many parameters it has."""
    from configs import default, fine_tuning
    from sinklab.llama import files, importing
    from sinklab.parse import parse

    check_checkpoint_path(folder.path)
    source = files.opened(given)
    config, fields = default.get_config(), importing.fields(source, home)
    try:
        config.update_from_flattened_dict(fine_tuning.IMPORTED | fields)
    except TypeError as error:
        raise Refusal(f'{source / files.CONFIG} says what no model here can be: {error}') from error
    row = dict(config=given, row=source.resolve().name, size=None, overrides={}, diff={}, published={}, source=given)
    row['optimizer_defaults'] = 'configs/fine_tuning.py'
    return importing.write(source, parse(config.to_dict()), folder, row)


def kept(given: str, child: Folder) -> str:
    """What --from=hf:PATH stands for: params:RUN@0, of a run in the cache that is imported where it is not there.

    A run that has begun with one knows it, wherever the model itself is by now.
    """
    if lineage := child.lineage() if child.is_claimed() else {}:
        known = joined(child.path, lineage['run'])
        if known.parent == home() and known.name.rpartition('-')[0] == name_of(given):
            return f'params:{known}@0'
    folder = place_of(given)
    if not folder.is_claimed():
        print(f'importing {given} into {folder}', file=sys.stderr, flush=True)
        unfinished = folder.path.with_name(f'{folder.path.name}.{uuid.uuid4().hex[:8]}{UNFINISHED}')
        try:
            imported(given, Folder(unfinished), folder.path)
            with contextlib.suppress(OSError):  # another process was first
                unfinished.rename(folder.path)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return f'params:{folder}@0'


def place_of(given: str) -> Folder:
    from sinklab.llama import files

    return Folder(home() / f'{name_of(given)}-{files.identity(files.opened(given))}.{IMPORTS}')


def name_of(given: str) -> str:
    return Path(given.removeprefix(PREFIX)).absolute().name


def home() -> Path:
    return cache().resolve() / 'imports'
