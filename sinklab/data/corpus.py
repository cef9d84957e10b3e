"""The store that a run reads: one that was prepared, or one made now and kept in the cache."""

import hashlib
import json
import sys
from pathlib import Path

from sinklab import spec
from sinklab.cache import cache
from sinklab.data.documents import sources
from sinklab.data.prepare import Lines, prepare
from sinklab.data.store.recipe import SETTINGS, Recipe
from sinklab.data.store.shard import FORMAT, META, TOKENIZER
from sinklab.data.store.store import Store
from sinklab.data.tokens.tokenizer import digest, read
from sinklab.escape import escape_control
from sinklab.files.place import place
from sinklab.record import Refusal, unknown


def corpus(data: spec.Data, vocabulary: int) -> Store:
    kind, _, rest = data.source.partition(':')
    kinds = [*sources.SOURCES, 'store:DIR']
    if kind not in [form.partition(':')[0] for form in kinds]:
        raise Refusal(unknown(f'config.data.source = {data.source!r}', kind, kinds, 'sources'))
    store = Store(rest) if kind == 'store' else store_in_cache(data, vocabulary)
    check(store, data, vocabulary)
    return store


def tokenizer_file(run: Path, data: spec.Data, vocabulary: int, given: str | None = None) -> Path:
    """The tokenizer.json of a run folder: a given one, its config's unless that has changed, its own, its store's."""
    own, named = run / TOKENIZER, None if data.tokenizer == 'train' else place(data.tokenizer)
    if given:
        return place(given)
    if named and named.exists() and not (own.exists() and digest(own) != digest(named)):
        return named
    if own.exists():
        return own
    return named or corpus(data, vocabulary).path / TOKENIZER


def check(store: Store, data: spec.Data, vocabulary: int) -> None:
    """Refuses a store that was made for other runs than this."""
    for name in SETTINGS:
        theirs, ours = store.meta[name], getattr(data, name)
        if theirs != ours:
            raise Refusal(
                f'{store} was prepared with {name} {theirs}, and config.data.{name} is {ours}; set it to {theirs}, '
                f'or prepare another store with --{name}={ours}'
            )
    if data.tokenizer != 'train' and digest(data.tokenizer) != store.meta['tokenizer']:
        raise Refusal(
            f'{store} was made by another tokenizer than config.data.tokenizer={data.tokenizer}; leave that at train '
            'to take the store as it is, or prepare another'
        )
    if (size := store.meta['vocabulary']) > vocabulary:
        raise Refusal(
            f'config.model.vocabulary is {vocabulary}, but the tokenizer gives ids up to {size - 1}; set it to {size}'
        )
    if data.loss == 'assistant' and not store.meta['masked']:
        raise Refusal(f'config.data.loss is assistant, and {store} tells nobody apart; set all, or prepare a chat:')


def store_in_cache(data: spec.Data, vocabulary: int) -> Store:
    """The store of a source; the name of its folder is a hash of all that it is made of."""
    train = data.tokenizer == 'train'
    settings = {name: getattr(data, name) for name in SETTINGS}
    recipe = Recipe(data.source, data.tokenizer, vocabulary if train else None, **settings)
    identity = sources.source(data.source).identity
    what = [FORMAT, identity, vocabulary if train else read(data.tokenizer), data.held_out, data.bos]
    what += [data.source, data.end_token, data.fixed_token]
    folder = cache() / 'stores' / hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
    if not (folder / META).exists():
        print(escape_control(f'preparing {data.source} in {folder}'), file=sys.stderr, flush=True)
        prepare(recipe, folder, listen=Lines())
    return Store(folder)
