"""The plan of a store, in recipe.json: what was asked for, its tokenizer, and which documents are held out."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from sinklab.data.documents.document import Source
from sinklab.data.documents.split import survey
from sinklab.data.store.shard import FORMAT, RECIPE, TOKENIZER, digest
from sinklab.data.tokens import tokenizer
from sinklab.files.validation import read_json
from sinklab.files.whole import whole
from sinklab.record import Refusal

OURS = (TOKENIZER, '.unfinished', '.lock', 'lease.json')  # what is there before recipe.json
SETTINGS = ('bos', 'end_token', 'fixed_token', 'held_out')  # that a run's config.data must have, too
Plan = dict[str, Any]


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


def hash_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def request(recipe: Recipe, source: Source) -> Plan:
    """What two attempts must agree on; whether damaged documents are dropped is up to each."""
    fields = dataclasses.asdict(recipe)
    del fields['lenient']
    if recipe.tokenizer != 'train':
        fields['tokenizer'] = hash_of(tokenizer.read(recipe.tokenizer))
    return {**fields, 'format': FORMAT, 'identity': hash_of(source.identity)}


def new_plan(recipe: Recipe, source: Source) -> tuple[Plan, str]:
    """(the plan, the text of its tokenizer.json)."""
    train = recipe.tokenizer == 'train'
    what = request(recipe, source)
    limit, texts = survey(source, recipe.held_out, recipe.lenient, texts=train)
    text = tokenizer.train(texts, recipe.vocabulary) if train else tokenizer.read(recipe.tokenizer)
    name = 'the tokenizer trained here' if train else recipe.tokenizer
    tokenizer.check(tokenizer.parse(text, name), recipe.end_token, recipe.fixed_token, name)
    return {**what, 'limit': limit, 'tokenizer_sha256': hashlib.sha256(text.encode()).hexdigest()}, text


def plan_in(folder: Path, recipe: Recipe, source: Source) -> Plan | None:
    """The plan that a folder was begun with, if it was; refused where that is another, or something else is there."""
    file = folder / RECIPE
    if not file.exists():
        there = folder.iterdir() if folder.is_dir() else ()
        if others := sorted(path.name for path in there if not path.name.endswith(OURS)):
            raise Refusal(f'{folder} holds files and no token store ({others[0]}); give a new folder')
        return None
    remedy = f'delete {folder}, or give another folder'
    plan = read_json(file, remedy=remedy)
    if not {'limit', 'tokenizer_sha256'} <= plan.keys():
        raise Refusal(f'{file} is damaged (it has no limit or no tokenizer_sha256); {remedy}')
    what = request(recipe, source)
    differ = {name: f'{name} {plan.get(name)} -> {value}' for name, value in what.items() if plan.get(name) != value}
    if differ.pop('identity', None):
        differ = differ or {'source': 'the files have changed since'}
    if differ:
        changes = '; '.join(differ.values())
        raise Refusal(f'{folder} was begun from something else ({changes}); give another folder, or delete it')
    return plan


def plan_with_tokenizer(folder: Path, recipe: Recipe, source: Source, fresh: tuple[Plan, str] | None) -> Plan:
    """The plan of a folder, once its tokenizer.json is as planned; `fresh` is the new plan of an empty folder."""
    plan = plan_in(folder, recipe, source)
    if plan and digest(folder / TOKENIZER) == plan['tokenizer_sha256']:
        return plan
    again, text = fresh or new_plan(recipe, source)
    if plan and again != plan:
        raise Refusal(f'{folder / TOKENIZER} is damaged and cannot be made again; bring it anew, or delete {folder}')
    for name, said in ((TOKENIZER, text), (RECIPE, json.dumps(again, indent=2) + '\n')):
        with whole(folder / name) as unfinished:
            unfinished.write_text(said, encoding='utf-8')
    return again
