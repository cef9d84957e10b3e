"""A folder of Hugging Face -> a run folder at step 0, whose parameters a run begins with."""

from pathlib import Path
from typing import Any

import numpy as np

from sinklab.checkpoint.checkpoints import Checkpointer
from sinklab.data.tokens import tokenizer as tokens
from sinklab.data.tokens.tokenizer import Tokenizer
from sinklab.files.validation import resolve_name
from sinklab.files.whole import writable_folder
from sinklab.folder import RunDir, flatten_dict, make_run_id
from sinklab.llama import config, files, weights
from sinklab.record import UserError
from sinklab.spec import Spec

TOKENIZER_FILE = 'tokenizer.json'


def make_config_fields(source_dir: Path, final_dir: Path) -> dict[str, Any]:
    """What a config has of a folder, by dotted names, if its tokenizer comes to lie in `home`."""
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
        raise UserError(f'{source_dir / files.CONFIG_FILE} has no eos_token_id, which is to end documents; write one into it')
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
    """One id of what may be several or none."""
    value = value[0] if isinstance(value, list) and value else value
    return value if type(value) is int else None


def choose_other_token(tokenizer: Tokenizer, end_token: int) -> int:
    """A token beside the end, special if there is one."""
    special = [token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    return next(token_id for token_id in (*sorted(special), 0, 1) if token_id != end_token)


def import_model(source_dir: Path, spec: Spec, run_dir: RunDir, row: dict) -> int:
    """Makes a run folder of a source, and returns how many parameters it has."""
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
