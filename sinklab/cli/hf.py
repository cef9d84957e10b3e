"""Import and export of models of the LLaMA family in the format of Hugging Face transformers."""

import argparse
import contextlib
import shutil
import sys
import uuid
from pathlib import Path

from sinklab.errors import UserError, format_error
from sinklab.escape import quote_shell
from sinklab.run_dir import HF_PREFIX, RunDir, read_spec
from sinklab.storage.atomic_write import TEMPORARY_SUFFIX
from sinklab.storage.cache_dir import get_cache_dir
from sinklab.storage.paths import (
    check_path_readable_by_orbax,
    join_path,
    make_absolute,
    parse_path,
)

IMPORT_VERSION = (
    2  # version of the import defaults: a run that started from an import with older defaults still finds that one
)


def export_model(args: argparse.Namespace) -> int:
    """Export a checkpoint as a transformers model, and compare the outputs of both.

    Raises:
        UserError: transformers has no such model, or an argument is invalid. This is checked before arrays are read.
    """
    import jax

    from sinklab import compilation_cache

    compilation_cache.install_verified_cache()
    jax.config.update('jax_platforms', 'cpu')  # CPUs multiply float32 in full float32 precision
    from sinklab.analysis.model_ref import resolve_checkpoint
    from sinklab.analysis.run_model import find_run_tokenizer
    from sinklab.checkpoint import checkpointer
    from sinklab.hf import convert

    run_dir, step = resolve_checkpoint(args.run)
    spec, out = read_spec(run_dir), parse_path(args.out)
    hf_config = convert.check_export(spec, out, args.length)
    tokenizer = find_run_tokenizer(run_dir, step, spec, args.tokenizer)
    params = checkpointer.restore_parameters(run_dir.path, step)
    parity_text = convert.export_model(
        spec, params, hf_config, tokenizer, make_absolute(out), args.dtype or 'float32'
    )
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    message = (
        f'{args.out}: {hf_config["model_type"]}, {num_parameters:,} '
        f'parameters of {run_dir.checkpoint_dir / str(step)}'
    )
    print(f'{message}; {parity_text}')
    return 0


def import_model(args: argparse.Namespace) -> int:
    import jax

    from sinklab import compilation_cache

    compilation_cache.install_verified_cache()
    jax.config.update('jax_platforms', 'cpu')  # a training run may occupy the accelerators
    run_dir = RunDir(args.out)
    if run_dir.path.exists():
        raise UserError(f'--out={args.out} already exists; give a new folder')
    num_parameters = write_imported_run(args.source, run_dir, make_absolute(run_dir.path))
    from_flag = quote_shell(f'--from=params:{run_dir}')
    print(f'{run_dir}: {num_parameters:,} parameters of {args.source}; start from them with {from_flag}')
    return 0


def write_imported_run(hf_source: str, run_dir: RunDir, final_path: Path) -> int:
    """Write a run folder with the parameters of a Hugging Face model as the checkpoint of step 0.

    Args:
        hf_source: hf:PATH or hf:ORG/NAME.
        run_dir: The new run folder.
        final_path: The path to which the run folder will be moved, which its config refers to.

    Returns:
        The number of parameters.
    """
    from sinklab.config.validate import parse_config
    from sinklab.configs import default, fine_tuning
    from sinklab.hf import convert, files

    check_path_readable_by_orbax(run_dir.path)
    source = files.fetch_model_dir(hf_source)
    config, fields = default.get_config(), convert.make_config_fields(source, final_path)
    try:
        config.update_from_flattened_dict(fine_tuning.IMPORTED_MODEL_OPTIMIZER | fields)
    except TypeError as error:
        raise UserError(
            f'{source / files.CONFIG_FILE} describes a model that is not supported: {format_error(error)}'
        ) from error
    row = dict(
        config=hf_source, row=source.resolve().name, size=None, overrides={}, diff={}, published={}, source=hf_source
    )
    row['optimizer_defaults'] = 'configs/fine_tuning.py'
    return convert.import_model(source, parse_config(config.to_dict()), run_dir, row)


def get_cached_import(hf_source: str, child_dir: RunDir) -> str:
    """Resolve --from=hf:PATH to --from=params:RUN@0 of an imported run in the cache.

    The model is imported if it is not in the cache. A child run that exists already has its parent in row.json, so
    the model itself may have been moved or deleted since.

    Args:
        hf_source: hf:PATH or hf:ORG/NAME.
        child_dir: The run folder of the run that is to start from the model.

    Returns:
        The value of --from.
    """
    if lineage := child_dir.read_lineage() if child_dir.has_run() else {}:
        parent_path = join_path(child_dir.path, lineage['run'])
        if parent_path.parent == get_imports_root() and parent_path.name.rpartition('-')[0] == get_model_name(
            hf_source
        ):
            return f'params:{parent_path}@0'
    run_dir = get_import_dir(hf_source)
    if not run_dir.has_run():
        print(f'importing {hf_source} into {run_dir}', file=sys.stderr, flush=True)
        temp_path = run_dir.path.with_name(f'{run_dir.path.name}.{uuid.uuid4().hex[:8]}{TEMPORARY_SUFFIX}')
        try:
            write_imported_run(hf_source, RunDir(temp_path), run_dir.path)
            with contextlib.suppress(OSError):  # another process has imported it in the meantime
                temp_path.rename(run_dir.path)
        finally:
            shutil.rmtree(temp_path, ignore_errors=True)
    return f'params:{run_dir}@0'


def get_import_dir(hf_source: str) -> RunDir:
    from sinklab.hf import files

    return RunDir(
        get_imports_root()
        / f'{get_model_name(hf_source)}-{files.compute_identity(files.fetch_model_dir(hf_source))}.{IMPORT_VERSION}'
    )


def get_model_name(hf_source: str) -> str:
    return Path(hf_source.removeprefix(HF_PREFIX)).absolute().name


def get_imports_root() -> Path:
    return get_cache_dir().resolve() / 'imports'
