"""A folder of Hugging Face -> a run folder at step 0, whose parameters a run begins with."""

from pathlib import Path
from typing import Any

import numpy as np

from sinklab.checkpoint.checkpoints import Checkpoints
from sinklab.data.tokens import tokenizer as tokens
from sinklab.data.tokens.tokenizer import Tokenizer
from sinklab.files.validation import resolve_name
from sinklab.files.whole import writable
from sinklab.folder import Folder, flat, new_run_id
from sinklab.llama import config, files, weights
from sinklab.record import Refusal
from sinklab.spec import Spec

TOKENIZER = 'tokenizer.json'


def fields(source: Path, home: Path) -> dict[str, Any]:
    """What a config has of a folder, by dotted names, if its tokenizer comes to lie in `home`."""
    given = files.read_json(source / files.CONFIG)
    found = config.fields(given, str(source / files.CONFIG))
    tokenizer, name = tokenizer_of(source), str(source / TOKENIZER)
    if (size := tokens.size(tokenizer)) > found['model.vocabulary']:
        raise Refusal(
            f'{name} has ids up to {size - 1}, and the vocab_size of {source / files.CONFIG} is '
            f'{found["model.vocabulary"]}: it is not the tokenizer of this model'
        )
    end = first(given.get('eos_token_id'))
    begin = first(given.get('bos_token_id'))
    if end is None:
        raise Refusal(f'{source / files.CONFIG} has no eos_token_id, which is to end documents; write one into it')
    begins = begin is not None and tokenizer.encode('').ids[:1] == [begin]
    fixed = begin if begin not in (None, end) else another(tokenizer, end)
    tokens.check(tokenizer, end, fixed, name)
    return found | {
        'probe.length': min(64, found['data.length']),
        'probe.keys': min(10, found['data.length']),
        'data.tokenizer': str(home / TOKENIZER),
        'data.end_token': end,
        'data.fixed_token': fixed,
        'data.bos': 'documents' if begins else 'none',
    }


def tokenizer_of(source: Path) -> Tokenizer:
    if not (source / TOKENIZER).exists():
        raise Refusal(
            f'{source / TOKENIZER} is missing; have transformers write it: '
            'AutoTokenizer.from_pretrained(...).save_pretrained(...)'
        )
    resolve_name(source, TOKENIZER, source)
    return tokens.load(source / TOKENIZER)


def first(given: Any) -> int | None:
    """One id of what may be several or none."""
    given = given[0] if isinstance(given, list) and given else given
    return given if type(given) is int else None


def another(tokenizer: Tokenizer, end: int) -> int:
    """A token beside the end, special if there is one."""
    special = [number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    return next(number for number in (*sorted(special), 0, 1) if number != end)


def write(source: Path, spec: Spec, folder: Folder, row: dict) -> int:
    """Makes a run folder of a source, and returns how many parameters it has."""
    params = weights.read(spec.model, files.Arrays(source), str(source))
    with writable(folder.path):
        for name in (TOKENIZER, *files.BESIDE):
            files.copy_beside(source, folder.path, name)
    data = dict(tokenizer=tokens.digest(folder.path / TOKENIZER)[:16])
    run_id = new_run_id()
    saved = Checkpoints(folder, spec.checkpoint, data, run_id=run_id)
    try:
        saved.save(0, dict(step=np.zeros((), np.int32), params=params))
    finally:
        saved.close()
    folder.claim(spec, row, run_id=run_id)
    return sum(leaf.size for leaf in flat(params).values())
