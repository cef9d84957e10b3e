"""The store that a run reads: one that was prepared, or one made now and kept in the cache."""

import hashlib
import json
import sys
from pathlib import Path

from sinklab import spec
from sinklab.cache import get_cache_dir
from sinklab.data.documents import sources
from sinklab.data.prepare import ProgressPrinter, prepare_store
from sinklab.data.store.recipe import SHARED_SETTINGS, Recipe
from sinklab.data.store.shard import FORMAT_VERSION, META_FILE, TOKENIZER_FILE
from sinklab.data.store.store import Store
from sinklab.data.tokens.tokenizer import compute_tokenizer_digest, read_tokenizer_json
from sinklab.escape import escape_control
from sinklab.files.place import parse_path
from sinklab.record import UserError, format_unknown_name


def open_corpus(data: spec.DataConfig, vocabulary: int) -> Store:
    kind, _, store_path = data.source.partition(':')
    kinds = [*sources.SOURCES, 'store:DIR']
    if kind not in [form.partition(':')[0] for form in kinds]:
        raise UserError(format_unknown_name(f'config.data.source = {data.source!r}', kind, kinds, 'sources'))
    store = Store(store_path) if kind == 'store' else open_cached_store(data, vocabulary)
    check_store(store, data, vocabulary)
    return store


def find_tokenizer_file(run_dir: Path, data: spec.DataConfig, vocabulary: int, override: str | None = None) -> Path:
    """The tokenizer.json of a run folder: a given one, its config's unless that has changed, its own, its store's."""
    run_file, config_file = run_dir / TOKENIZER_FILE, None if data.tokenizer == 'train' else parse_path(data.tokenizer)
    if override:
        return parse_path(override)
    if config_file and config_file.exists() and not (run_file.exists() and compute_tokenizer_digest(run_file) != compute_tokenizer_digest(config_file)):
        return config_file
    if run_file.exists():
        return run_file
    return config_file or open_corpus(data, vocabulary).path / TOKENIZER_FILE


def check_store(store: Store, data: spec.DataConfig, vocabulary: int) -> None:
    """Refuses a store that was made for other runs than this."""
    for name in SHARED_SETTINGS:
        store_value, config_value = store.meta[name], getattr(data, name)
        if store_value != config_value:
            raise UserError(
                f'{store} was prepared with {name} {store_value}, and config.data.{name} is {config_value}; set it to {store_value}, '
                f'or prepare another store with --{name}={config_value}'
            )
    if data.tokenizer != 'train' and compute_tokenizer_digest(data.tokenizer) != store.meta['tokenizer']:
        raise UserError(
            f'{store} was made by another tokenizer than config.data.tokenizer={data.tokenizer}; leave that at train '
            'to take the store as it is, or prepare another'
        )
    if (size := store.meta['vocabulary']) > vocabulary:
        raise UserError(
            f'config.model.vocabulary is {vocabulary}, but the tokenizer gives ids up to {size - 1}; set it to {size}'
        )
    if data.loss == 'assistant' and not store.meta['masked']:
        raise UserError(f'config.data.loss is assistant, and {store} tells nobody apart; set all, or prepare a chat:')


def open_cached_store(data: spec.DataConfig, vocabulary: int) -> Store:
    """The store of a source; the name of its folder is a hash of all that it is made of."""
    is_trained = data.tokenizer == 'train'
    settings = {name: getattr(data, name) for name in SHARED_SETTINGS}
    recipe = Recipe(data.source, data.tokenizer, vocabulary if is_trained else None, **settings)
    identity = sources.open_source(data.source).identity
    cache_key = [FORMAT_VERSION, identity, vocabulary if is_trained else read_tokenizer_json(data.tokenizer), data.held_out, data.bos]
    cache_key += [data.source, data.end_token, data.fixed_token]
    folder = get_cache_dir() / 'stores' / hashlib.sha256(json.dumps(cache_key).encode()).hexdigest()[:16]
    if not (folder / META_FILE).exists():
        print(escape_control(f'preparing {data.source} in {folder}'), file=sys.stderr, flush=True)
        prepare_store(recipe, folder, on_progress=ProgressPrinter())
    return Store(folder)
