"""Import of a Hugging Face model into a run directory, and export of a run to one."""

import shutil
import uuid
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sinklab.checkpoint.checkpointer import Checkpointer
from sinklab.config.spec import Spec
from sinklab.data import tokenizer as tokens
from sinklab.data.store_files import TOKENIZER_FILE
from sinklab.data.tokenizer import Tokenizer
from sinklab.hf import (
    config,
    files,
    parity,
    weights,
)
from sinklab.run_dir import RunDir, flatten_dict, make_run_id
from sinklab.schema import UserError
from sinklab.storage.atomic_write import TEMPORARY_SUFFIX, writable_folder
from sinklab.storage.paths import check_utf8, is_remote
from sinklab.storage.untrusted_files import resolve_name


def make_config_fields(source_dir: Path, final_dir: Path) -> dict[str, Any]:
    """Make the config fields of a Hugging Face model, by dotted names.

    Its tokenizer will lie in `final_dir`.
    """
    hf_config = files.read_json_object(source_dir / files.CONFIG_FILE)
    config_fields = config.parse_hf_config(hf_config, str(source_dir / files.CONFIG_FILE))
    tokenizer, name = load_source_tokenizer(source_dir), str(source_dir / TOKENIZER_FILE)
    if (size := tokens.get_vocabulary_size(tokenizer)) > config_fields['model.vocabulary']:
        raise UserError(
            f'{name} has ids up to {size - 1}, and the vocab_size of {source_dir / files.CONFIG_FILE} is '
            f'{config_fields["model.vocabulary"]}: it is not the tokenizer of this model'
        )
    end_token = get_first_id(hf_config.get('eos_token_id'))
    begin_token = get_first_id(hf_config.get('bos_token_id'))
    if end_token is None:
        raise UserError(
            f'{source_dir / files.CONFIG_FILE} has no eos_token_id, which is to end documents; write one into it'
        )
    has_bos = begin_token is not None and tokenizer.encode('').ids[:1] == [begin_token]
    fixed_token = begin_token if begin_token not in (None, end_token) else choose_other_token(tokenizer, end_token)
    tokens.check_special_tokens(tokenizer, end_token, fixed_token, name)
    return config_fields | {
        'probe.length': min(64, config_fields['data.length']),
        'probe.keys': min(10, config_fields['data.length']),
        'data.tokenizer': str(final_dir / TOKENIZER_FILE),
        'data.end_token': end_token,
        'data.fixed_token': fixed_token,
        'data.bos': 'documents' if has_bos else 'none',
    }


def load_source_tokenizer(source_dir: Path) -> Tokenizer:
    if not (source_dir / TOKENIZER_FILE).exists():
        raise UserError(
            f'{source_dir / TOKENIZER_FILE} is missing; have transformers write it: '
            'AutoTokenizer.from_pretrained(...).save_pretrained(...)'
        )
    resolve_name(source_dir, TOKENIZER_FILE, source_dir)
    return tokens.load_tokenizer(source_dir / TOKENIZER_FILE)


def get_first_id(value: Any) -> int | None:
    """Return the first token id of a value that is an id, a list of ids, or None."""
    value = value[0] if isinstance(value, list) and value else value
    return value if type(value) is int else None


def choose_other_token(tokenizer: Tokenizer, end_token: int) -> int:
    """Return the id of another token than `end_token`, of a special token if there is one."""
    special = [token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    return next(token_id for token_id in (*sorted(special), 0, 1) if token_id != end_token)


def import_model(source_dir: Path, spec: Spec, run_dir: RunDir, row: dict) -> int:
    """Write the run directory of a Hugging Face model; return its number of parameters."""
    params = weights.read_params(spec.model, files.SafetensorsReader(source_dir), str(source_dir))
    with writable_folder(run_dir.path):
        for name in (TOKENIZER_FILE, *files.COMPANION_FILES):
            files.copy_companion(source_dir, run_dir.path, name)
    data_fingerprint = dict(tokenizer=tokens.compute_tokenizer_digest(run_dir.path / TOKENIZER_FILE)[:16])
    run_id = make_run_id()
    checkpointer = Checkpointer(run_dir, spec.checkpoint, data_fingerprint, run_id=run_id)
    try:
        checkpointer.save(0, dict(step=np.zeros((), np.int32), params=params))
    finally:
        checkpointer.close()
    run_dir.initialize(spec, row, run_id=run_id)
    return sum(leaf.size for leaf in flatten_dict(params).values())


TOKENIZER_CLASS = 'PreTrainedTokenizerFast'


def check_export(spec: Spec, output_dir: Path, length: int | None) -> dict[str, Any]:
    """Check that a run can be exported; return the config.json of its model.

    Raises:
        UserError: transformers has no such model, or the output directory cannot be used.
    """
    if length is not None and length < 1:
        raise UserError(f'--length is {length}; a model takes at least 1 token')
    if spec.data.task != 'text':
        raise UserError(f'config.data.task is {spec.data.task}, whose ids are those of no tokenizer; text it can be')
    begin_token = spec.data.fixed_token if spec.data.bos == 'documents' else spec.data.end_token
    hf_config = config.make_hf_config(spec.model, length or spec.data.length, begin_token, spec.data.end_token)
    if is_remote(output_dir):
        raise UserError(f'--out={output_dir} lies in a bucket, where transformers does not read; give a local folder')
    check_utf8(output_dir, 'transformers could not read a model there')
    if output_dir.exists():
        raise UserError(f'--out={output_dir} is there already; give a new folder')
    parity.require_libraries()
    return hf_config


def export_model(
    spec: Spec, params: dict, hf_config: dict[str, Any], tokenizer_path: Path, output_dir: Path, dtype: str
) -> parity.ParityReport:
    """Write a Hugging Face model directory and check its parity; delete it if the check fails."""
    unfinished = output_dir.with_name(f'{output_dir.name}.{uuid.uuid4().hex[:8]}{TEMPORARY_SUFFIX}')
    with writable_folder(unfinished):
        try:
            write_model_files(spec, params, hf_config, tokenizer_path, unfinished, dtype)
            report = parity.check_parity(
                unfinished, spec, round_params(params, dtype), hf_config['max_position_embeddings']
            )
            unfinished.rename(output_dir)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return report


def write_model_files(
    spec: Spec, params: dict, hf_config: dict[str, Any], tokenizer_path: Path, output_dir: Path, dtype: str
) -> None:
    files.write_json(output_dir / files.CONFIG_FILE, hf_config | dict(dtype=dtype, torch_dtype=dtype))
    files.write_arrays(output_dir, weights.convert_params(spec.model, params), jnp.dtype(dtype))
    begin_token, end_token = hf_config['bos_token_id'], hf_config['eos_token_id']
    (output_dir / TOKENIZER_FILE).write_bytes(tokenizer_path.read_bytes())
    id_to_token = tokens.load_tokenizer(tokenizer_path).id_to_token
    default_files = {
        'tokenizer_config.json': dict(
            tokenizer_class=TOKENIZER_CLASS,
            bos_token=id_to_token(begin_token),
            eos_token=id_to_token(end_token),
            model_max_length=hf_config['max_position_embeddings'],
            clean_up_tokenization_spaces=False,
            model_input_names=['input_ids', 'attention_mask'],
        ),
        'generation_config.json': dict(bos_token_id=begin_token, eos_token_id=end_token),
    }
    for name in files.COMPANION_FILES:
        files.copy_companion(tokenizer_path.parent, output_dir, name)
        if name in default_files and not (output_dir / name).exists():
            files.write_json(output_dir / name, default_files[name])


def round_params(params: dict, dtype: str) -> dict:
    """Return parameters in float32 after rounding to the dtype of the exported files."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(dtype)).astype('float32'), params)
