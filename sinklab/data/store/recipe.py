"""The plan of a store, in recipe.json: what was asked for, its tokenizer, and which documents are held out."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from sinklab.data.documents.document import Source
from sinklab.data.documents.split import survey_corpus
from sinklab.data.store.shard import FORMAT_VERSION, RECIPE_FILE, TOKENIZER_FILE, digest_file
from sinklab.data.tokens import tokenizer
from sinklab.files.validation import read_json
from sinklab.files.whole import atomic_write
from sinklab.record import UserError

SETUP_FILES = (TOKENIZER_FILE, '.unfinished', '.lock', 'lease.json')  # what is there before recipe.json
SHARED_SETTINGS = ('bos', 'end_token', 'fixed_token', 'held_out')  # that a run's config.data must have, too
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


def digest_json(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def build_request(recipe: Recipe, source: Source) -> Plan:
    """What two attempts must agree on; whether damaged documents are dropped is up to each."""
    fields = dataclasses.asdict(recipe)
    del fields['lenient']
    if recipe.tokenizer != 'train':
        fields['tokenizer'] = digest_json(tokenizer.read_tokenizer_json(recipe.tokenizer))
    return {**fields, 'format': FORMAT_VERSION, 'identity': digest_json(source.identity)}


def make_plan(recipe: Recipe, source: Source) -> tuple[Plan, str]:
    """(the plan, the text of its tokenizer.json)."""
    train = recipe.tokenizer == 'train'
    requested = build_request(recipe, source)
    limit, texts = survey_corpus(source, recipe.held_out, recipe.lenient, with_texts=train)
    text = tokenizer.train_tokenizer(texts, recipe.vocabulary) if train else tokenizer.read_tokenizer_json(recipe.tokenizer)
    name = 'the tokenizer trained here' if train else recipe.tokenizer
    tokenizer.check_special_tokens(tokenizer.parse_tokenizer(text, name), recipe.end_token, recipe.fixed_token, name)
    return {**requested, 'limit': limit, 'tokenizer_sha256': hashlib.sha256(text.encode()).hexdigest()}, text


def read_plan(folder: Path, recipe: Recipe, source: Source) -> Plan | None:
    """The plan that a folder was begun with, if it was; refused where that is another, or something else is there."""
    file = folder / RECIPE_FILE
    if not file.exists():
        paths = folder.iterdir() if folder.is_dir() else ()
        if unexpected := sorted(path.name for path in paths if not path.name.endswith(SETUP_FILES)):
            raise UserError(f'{folder} holds files and no token store ({unexpected[0]}); give a new folder')
        return None
    remedy = f'delete {folder}, or give another folder'
    plan = read_json(file, remedy=remedy)
    if not {'limit', 'tokenizer_sha256'} <= plan.keys():
        raise UserError(f'{file} is damaged (it has no limit or no tokenizer_sha256); {remedy}')
    requested = build_request(recipe, source)
    differences = {name: f'{name} {plan.get(name)} -> {value}' for name, value in requested.items() if plan.get(name) != value}
    if differences.pop('identity', None):
        differences = differences or {'source': 'the files have changed since'}
    if differences:
        changes = '; '.join(differences.values())
        raise UserError(f'{folder} was begun from something else ({changes}); give another folder, or delete it')
    return plan


def ensure_plan(folder: Path, recipe: Recipe, source: Source, fresh_plan: tuple[Plan, str] | None) -> Plan:
    """The plan of a folder, once its tokenizer.json is as planned; `fresh` is the new plan of an empty folder."""
    plan = read_plan(folder, recipe, source)
    if plan and digest_file(folder / TOKENIZER_FILE) == plan['tokenizer_sha256']:
        return plan
    planned, text = fresh_plan or make_plan(recipe, source)
    if plan and planned != plan:
        raise UserError(f'{folder / TOKENIZER_FILE} is damaged and cannot be made again; bring it anew, or delete {folder}')
    for name, content in ((TOKENIZER_FILE, text), (RECIPE_FILE, json.dumps(planned, indent=2) + '\n')):
        with atomic_write(folder / name) as unfinished:
            unfinished.write_text(content, encoding='utf-8')
    return planned
