"""The parameters of a run -> a folder that transformers serves, there once it computes the same."""

import shutil
import uuid
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from sinklab.data.store.shard import TOKENIZER
from sinklab.data.tokens import tokenizer as tokens
from sinklab.files.place import check_utf8, is_remote
from sinklab.files.whole import UNFINISHED, writable
from sinklab.llama import config, files, parity, weights
from sinklab.record import Refusal
from sinklab.spec import Spec

BACKEND = 'PreTrainedTokenizerFast'


def check(spec: Spec, out: Path, length: int | None) -> dict[str, Any]:
    """The config.json of a run's model that takes so many tokens; refuses what transformers has no name for."""
    if length is not None and length < 1:
        raise Refusal(f'--length is {length}; a model takes at least 1 token')
    if spec.data.task != 'text':
        raise Refusal(f'config.data.task is {spec.data.task}, whose ids are those of no tokenizer; text it can be')
    begin = spec.data.fixed_token if spec.data.bos == 'documents' else spec.data.end_token
    found = config.written(spec.model, length or spec.data.length, begin, spec.data.end_token)
    if is_remote(out):
        raise Refusal(f'--out={out} lies in a bucket, where transformers does not read; give a local folder')
    check_utf8(out, 'transformers could not read a model there')
    if out.exists():
        raise Refusal(f'--out={out} is there already; give a new folder')
    parity.libraries()
    return found


def write(spec: Spec, params: dict, content: dict[str, Any], tokenizer: Path, out: Path, dtype: str) -> parity.Found:
    """Writes a folder, and holds it to what these parameters compute here; there is none if that fails."""
    unfinished = out.with_name(f'{out.name}.{uuid.uuid4().hex[:8]}{UNFINISHED}')
    with writable(unfinished):
        try:
            written(spec, params, content, tokenizer, unfinished, dtype)
            found = parity.check(unfinished, spec, rounded(params, dtype), content['max_position_embeddings'])
            unfinished.rename(out)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return found


def written(spec: Spec, params: dict, content: dict[str, Any], tokenizer: Path, out: Path, dtype: str) -> None:
    files.write_json(out / files.CONFIG, content | dict(dtype=dtype, torch_dtype=dtype))
    files.write(out, weights.write(spec.model, params), jnp.dtype(dtype))
    begin, end = content['bos_token_id'], content['eos_token_id']
    (out / TOKENIZER).write_bytes(tokenizer.read_bytes())
    text = tokens.load(tokenizer).id_to_token
    usual = {
        'tokenizer_config.json': dict(
            tokenizer_class=BACKEND,
            bos_token=text(begin),
            eos_token=text(end),
            model_max_length=content['max_position_embeddings'],
            clean_up_tokenization_spaces=False,
            model_input_names=['input_ids', 'attention_mask'],
        ),
        'generation_config.json': dict(bos_token_id=begin, eos_token_id=end),
    }
    for name in files.BESIDE:
        files.copy_beside(tokenizer.parent, out, name)
        if name in usual and not (out / name).exists():
            files.write_json(out / name, usual[name])


def rounded(params: dict, dtype: str) -> dict:
    """Parameters as a file in this dtype has them."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(dtype)).astype('float32'), params)
