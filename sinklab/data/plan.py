"""The plan of a store, in recipe.json: what was asked for, and what follows from that and the source."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from sinklab.data import tokenizer
from sinklab.data.documents import Source
from sinklab.data.shards import FORMAT, RECIPE, TOKENIZER, content
from sinklab.data.survey import survey
from sinklab.files import whole
from sinklab.record import Refusal

OURS = (TOKENIZER, '.unfinished', '.lock')  # what is there before recipe.json


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a store is made of, and how."""

    source: str
    tokenizer: str  # train, or a tokenizer.json
    vocabulary: int | None  # of a tokenizer trained here
    held_out: float
    bos: str
    end_token: int
    fixed_token: int
    lenient: bool = False  # damaged documents are dropped and counted, not refused
    shard_tokens: int = 1 << 24


def hashed(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def asked(recipe: Recipe, source: Source) -> dict[str, Any]:
    """What two attempts must agree in; whether damaged documents are dropped is up to each."""
    fields = dataclasses.asdict(recipe)
    del fields['lenient']
    if recipe.tokenizer != 'train':
        fields['tokenizer'] = hashed(tokenizer.given(recipe.tokenizer))
    return {**fields, 'format': FORMAT, 'identity': hashed(source.identity)}


def made(recipe: Recipe, source: Source) -> tuple[dict[str, Any], str]:
    """(the plan, the text of its tokenizer.json)."""
    train = recipe.tokenizer == 'train'
    what = asked(recipe, source)
    limit, texts = survey(source, recipe.held_out, recipe.lenient, texts=train)
    text = tokenizer.learned(texts, recipe.vocabulary) if train else tokenizer.given(recipe.tokenizer)
    name = 'the tokenizer trained here' if train else recipe.tokenizer
    tokenizer.check(tokenizer.loaded(text, name), recipe.end_token, recipe.fixed_token, name)
    return {**what, 'limit': limit, 'tokenizer_sha256': hashlib.sha256(text.encode()).hexdigest()}, text


def agreed(recipe: Recipe, source: Source, folder: Path) -> dict[str, Any] | None:
    """The plan that a folder was begun with, if it was; refused where that is another, or something else is there."""
    file = folder / RECIPE
    if not file.exists():
        there = folder.iterdir() if folder.is_dir() else ()
        if others := sorted(path.name for path in there if not path.name.endswith(OURS)):
            raise Refusal(f'{folder} holds files and no token store ({others[0]}); give a new folder')
        return None
    try:
        plan = json.loads(file.read_text(encoding='utf-8'))
    except ValueError as error:
        raise Refusal(f'{file} is damaged ({error}); delete {folder}, or give another folder') from error
    what = asked(recipe, source)
    differ = [f'{name} {plan.get(name)} -> {value}' for name, value in what.items() if plan.get(name) != value]
    if plan.get('identity') != what['identity']:
        differ = [words for words in differ if not words.startswith('identity')] or ['the files have changed since']
    if differ:
        raise Refusal(
            f'{folder} was begun from something else ({"; ".join(differ)}); give another folder, or delete it'
        )
    return plan


def settled(recipe: Recipe, source: Source, folder: Path, fresh: tuple[dict, str] | None) -> dict[str, Any]:
    """The plan of a folder, with its tokenizer.json as planned; `fresh` is one that was made for a new folder."""
    plan = agreed(recipe, source, folder)
    if plan and hashlib.sha256(content(folder / TOKENIZER)).hexdigest() == plan['tokenizer_sha256']:
        return plan
    again, text = fresh or made(recipe, source)
    if plan and again != plan:
        raise Refusal(f'{folder / TOKENIZER} is damaged and cannot be made again; bring it anew, or delete {folder}')
    for name, said in ((TOKENIZER, text), (RECIPE, json.dumps(again, indent=2) + '\n')):
        with whole(folder / name) as unfinished:
            unfinished.write_text(said, encoding='utf-8')
    return again
