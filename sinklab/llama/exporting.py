"""The parameters of a run -> a folder that transformers serves, there once it computes the same."""

import shutil
import uuid
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from sinklab.data.store.shard import TOKENIZER_FILE
from sinklab.data.tokens import tokenizer as tokens
from sinklab.files.place import check_utf8, is_remote
from sinklab.files.whole import TEMPORARY_SUFFIX, writable_folder
from sinklab.llama import config, files, parity, weights
from sinklab.record import UserError
from sinklab.spec import Spec

TOKENIZER_CLASS = 'PreTrainedTokenizerFast'


def check_export(spec: Spec, output_dir: Path, length: int | None) -> dict[str, Any]:
    """The config.json of a run's model that takes so many tokens; refuses what transformers has no name for."""
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


def export_model(spec: Spec, params: dict, hf_config: dict[str, Any], tokenizer_path: Path, output_dir: Path, dtype: str) -> parity.ParityReport:
    """Writes a folder, and holds it to what these parameters compute here; there is none if that fails."""
    unfinished = output_dir.with_name(f'{output_dir.name}.{uuid.uuid4().hex[:8]}{TEMPORARY_SUFFIX}')
    with writable_folder(unfinished):
        try:
            write_model_files(spec, params, hf_config, tokenizer_path, unfinished, dtype)
            report = parity.check_parity(unfinished, spec, round_params(params, dtype), hf_config['max_position_embeddings'])
            unfinished.rename(output_dir)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return report


def write_model_files(spec: Spec, params: dict, hf_config: dict[str, Any], tokenizer_path: Path, output_dir: Path, dtype: str) -> None:
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
    """Parameters as a file in this dtype has them."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(dtype)).astype('float32'), params)
