"""Import and export of models of the LLaMA family: folders of Hugging Face transformers, and GGUF files."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from sinklab.errors import UserError, format_error
from sinklab.run_dir import GGUF_PREFIX, HF_PREFIX, RunDir, read_spec
from sinklab.storage.paths import check_checkpoint_path, get_cache_dir, join_path, make_absolute, parse_path

IMPORT_VERSION = 3  # version of the defaults


def export_model(args: argparse.Namespace) -> int:
    """Export a checkpoint as a transformers model, and compare the outputs of both.

    Raises:
        UserError: transformers has no such model, or an argument is invalid. This is checked before arrays are read.
    """
    import jax

    jax.config.update('jax_platforms', 'cpu')  # CPUs multiply float32 in full float32 precision
    from sinklab.analysis.model_ref import resolve_checkpoint
    from sinklab.analysis.run_model import find_run_tokenizer
    from sinklab.checkpoint import checkpointer
    from sinklab.hf import convert

    run_dir, step = resolve_checkpoint(args.run)
    spec = read_spec(run_dir)
    out = parse_path(args.out)
    hf_config = convert.check_export(spec, out, args.length)
    tokenizer = find_run_tokenizer(run_dir, step, spec)
    params = checkpointer.restore_parameters(run_dir.path, step)
    parity_text = convert.export_model(spec, params, hf_config, tokenizer, make_absolute(out), args.dtype)
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    path = run_dir.checkpoint_dir / str(step)
    print(f'{args.out}: {hf_config["model_type"]}, {num_parameters:,} parameters of {path}; {parity_text}')
    return 0


def import_model(args: argparse.Namespace) -> int:
    import jax

    jax.config.update('jax_platforms', 'cpu')  # a training run may occupy the accelerators
    run_dir = RunDir(args.out)
    if run_dir.path.exists():
        raise UserError(f'--out={args.out} already exists; give a new folder')
    source = find_importable_dir(args.source)
    num_parameters = write_imported_run(args.source, source, run_dir, make_absolute(run_dir.path))
    from_flag = shlex.quote(f'--from=params:{run_dir}')
    print(f'{run_dir}: {num_parameters:,} parameters of {args.source}; start from them with {from_flag}')
    for remark in run_dir.read_remarks():
        print(f'{args.source}: {remark}')
    return 0


def find_importable_dir(model_ref: str) -> Path:
    """Return the folder of hf:PATH_OR_ID or gguf:PATH.

    Raises:
        UserError: Our own model cannot represent the model, a GGUF file has no readable tokenizer, or the memory is
            too small.
    """
    from sinklab.data.store import TOKENIZER_FILE
    from sinklab.hf import convert, files, gguf

    is_gguf = model_ref.startswith(GGUF_PREFIX)
    source = gguf.find_model_dir(model_ref)
    config_path = source / files.CONFIG_FILE
    hf_config = files.read_json_object(config_path)
    try:
        convert.check_model_type(hf_config.get('model_type'), model_ref if is_gguf else str(config_path))
    except UserError as error:
        raise UserError(f'{error}; sinklab measure and sinklab.open take {model_ref} without an import') from error
    if is_gguf and not (source / TOKENIZER_FILE).exists():
        raise UserError(
            f'{model_ref} has no tokenizer that transformers can read; give the safetensors folder of the model as '
            'hf:PATH'
        )
    num_parameters = files.count_parameters(source)
    files.check_memory(8 * num_parameters, num_parameters, model_ref)  # in PyTorch and in NumPy
    return source


def write_imported_run(model_ref: str, source: Path, run_dir: RunDir, final_path: Path) -> int:
    """Write a run folder with the parameters of an open model as the checkpoint of step 0.

    Args:
        model_ref: hf:PATH, hf:ORG/NAME or gguf:PATH.
        source: The folder of the model.
        run_dir: The new run folder.
        final_path: The path to which the run folder will be moved, which its config refers to.

    Returns:
        The number of parameters.
    """
    from sinklab.config.validate import parse_config
    from sinklab.configs import default, fine_tuning
    from sinklab.hf import convert, files, gguf

    check_checkpoint_path(run_dir.path)
    config = default.get_config()
    fields = convert.make_config_fields(source, final_path)
    try:
        config.update_from_flattened_dict(fine_tuning.IMPORTED_MODEL_OPTIMIZER | fields)
    except TypeError as error:
        raise UserError(
            f'{source / files.CONFIG_FILE} describes a model that is not supported: {format_error(error)}'
        ) from error
    row: dict[str, Any] = dict(config=model_ref, row=get_model_name(model_ref), source=model_ref, size=None)
    row |= dict(overrides={}, diff={}, published={}, optimizer_defaults='configs/fine_tuning.py')
    if remarks := gguf.read_remarks(source):
        row['remarks'] = remarks
    return convert.import_model(source, parse_config(config.to_dict()), run_dir, row)


def resolve_from_flag(model_ref: str, child_dir: RunDir) -> str:
    """Resolve --from=hf:PATH or --from=gguf:PATH to --from=params:RUN@0 of an imported run in the cache.

    A child run that exists has its parent in row.json, so the model may have been changed or deleted since.
    """
    if child_dir.has_run() and (parent := child_dir.read_parent()):
        parent_path = join_path(child_dir.path, parent['run'])
        name = parent_path.name.rpartition('-')[0]
        if (parent_path.parent, name) == (get_imports_root(), get_model_name(model_ref)):
            return f'params:{parent_path}@0'
    return f'params:{get_cached_import(model_ref)}@0'


def get_cached_import(model_ref: str) -> RunDir:
    """Return the imported run of hf:PATH_OR_ID or gguf:PATH in the cache; import it if it is not there."""
    from sinklab.hf import files, gguf

    name = f'{get_model_name(model_ref)}-{gguf.compute_identity(model_ref)}.{IMPORT_VERSION}'
    run_dir = RunDir(get_imports_root() / name)
    if not run_dir.has_run():
        source = find_importable_dir(model_ref)
        with files.write_folder(run_dir.path) as temp_path:
            print(f'importing {model_ref} into {run_dir}', file=sys.stderr, flush=True)
            write_imported_run(model_ref, source, RunDir(temp_path), run_dir.path)
    return run_dir


def get_model_name(model_ref: str) -> str:
    return Path(model_ref.removeprefix(HF_PREFIX).removeprefix(GGUF_PREFIX)).absolute().name


def get_imports_root() -> Path:
    return get_cache_dir().resolve() / 'imports'
