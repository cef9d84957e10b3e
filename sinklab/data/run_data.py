"""The data that a run reads: its token store, training batches, held-out windows and probe sequences."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from sinklab.config.spec import DataConfig, ProbeConfig, Spec
from sinklab.data.batches import (
    PROBE_STREAM,
    VALIDATION_STREAM,
    Batches,
    Windows,
    make_shuffled_batches,
    make_synthetic_batches,
    set_fixed_token,
)
from sinklab.data.bigram_backcopy import fit_chain, sample_sequences
from sinklab.data.prepare import (
    PROBE_LENGTH,
    PROBE_SEQUENCES,
    SHARED_SETTINGS,
    Recipe,
    build_request,
    digest_json,
    prepare_store,
)
from sinklab.data.sources import SOURCES, open_source, read_texts
from sinklab.data.store import META_FILE, PROBE_FILE, TOKENIZER_FILE, Store
from sinklab.data.tokenizer import compute_tokenizer_digest
from sinklab.errors import UserError, format_unknown_name, print_status
from sinklab.storage.files import read_arrays
from sinklab.storage.paths import get_cache_dir, parse_path

LARGE_VOCABULARY = 10_000  # with which Python has more than two bytes per token


@dataclasses.dataclass(frozen=True)
class RunData:
    """Training batches, held-out windows and probe sequences of a run."""

    batches: Batches
    valid_NT: np.ndarray  # held-out windows of T + 1 ids
    probe_PT: np.ndarray
    fingerprint: dict[str, str | int]  # digests and settings that determine the batches
    triggers: int | None = None  # ids below this number are trigger tokens of Bigram-Backcopy
    tokenizer: str | None = None  # contents of tokenizer.json

    def is_trigger(self, ids_NT: np.ndarray) -> np.ndarray | None:
        """Return the mask of trigger tokens, or None if the task has no triggers."""
        return None if self.triggers is None else ids_NT < self.triggers


def load_run_data(spec: Spec) -> RunData:
    """Load the training batches, held-out windows and probe sequences of a run.

    Raises:
        UserError: The source cannot be read or does not match the configuration, or it has too few windows.
    """
    return TASKS[spec.data.task](spec)


def make_fingerprint(spec: Spec, batches: Batches, **digests: str) -> dict[str, str | int]:
    settings = dict(seed=spec.data.seed, batch_size=spec.optimizer.batch_size, length=spec.data.length)
    return dict(**digests, **settings, order=batches.order_digest)


def load_text_data(spec: Spec) -> RunData:
    data, vocabulary = spec.data, spec.model.vocabulary
    check_stdlib_size(spec)
    store = open_corpus(data, vocabulary)
    # A mixture with weights has one set of windows per domain. Without weights all domains are shuffled together.
    weights = valid_weights = store.meta['weights']
    parts = valid_parts = {name: [name] for name in weights} or {'': store.domains}
    if spec.valid.domain:
        [name] = store.resolve_domains(spec.valid.domain, 'config.valid.domain')
        valid_parts, valid_weights = {name: [name]}, {name: 1.0}

    def make_windows(split: str, parts: dict[str, list[str]], share: float, fix: bool) -> list[Windows]:
        return [
            Windows(
                [store.get_tokens(split, domain) for domain in domains],
                data,
                vocabulary,
                f'{split} {name}'.strip(),
                share,
                fix,
            )
            for name, domains in parts.items()
        ]

    held_out = make_windows('held_out', valid_parts, 1.0, data.fixed_held_out)
    check_enough_windows(spec, held_out, valid_weights)
    probe_PT = PROBE_INPUTS[spec.probe.inputs](store, spec.probe, PREPENDED_IDS[spec.probe.prepend](data))
    train = make_windows('train', parts, data.share, True)
    if (batch_size := spec.optimizer.batch_size) > (num_windows := sum(map(len, train))):
        raise UserError(
            f'config.optimizer.batch_size is {batch_size}, and the training data has {num_windows} windows of '
            f'{data.length} tokens; lower it, or give more data'
        )
    batches = make_shuffled_batches(train, data.seed, batch_size, weights)
    valid = make_shuffled_batches(held_out, 0, spec.valid.windows, valid_weights)
    return RunData(
        batches,
        valid_NT=valid.read_rows(0, range(spec.valid.windows)),
        probe_PT=set_fixed_token(probe_PT, data) if data.fixed_held_out else probe_PT,
        fingerprint=make_fingerprint(spec, batches, store=store.digest, tokenizer=store.meta['tokenizer'][:16]),
        tokenizer=store.read_tokenizer_json(),
    )


def check_stdlib_size(spec: Spec) -> None:
    """Raise UserError if the source `stdlib` is far too small for validation, before it is tokenized."""
    if spec.data.source.partition(':')[0] == 'stdlib' and spec.model.vocabulary >= LARGE_VOCABULARY:
        held_out_bytes = spec.data.held_out * sum(piece.size for piece in open_source('stdlib').pieces)
        if 2 * spec.valid.windows * spec.data.length > held_out_bytes:
            raise UserError(
                f'config.data.source={spec.data.source} is too small for config.valid.windows={spec.valid.windows} '
                f'of {spec.data.length} tokens; give --size=quickstart, or more text (--config.data.source=text:GLOB)'
            )


def check_enough_windows(spec: Spec, held_out: list[Windows], weights: Mapping[str, float]) -> None:
    """Raise UserError if validation would read a held-out window twice."""
    for part, name in zip(held_out, weights or [''], strict=True):
        num_needed = math.ceil(spec.valid.windows * weights.get(name, 1.0))
        if len(part) < num_needed:
            documents = f'documents of {name}' if name else 'documents'
            raise UserError(
                f'config.valid.windows is {spec.valid.windows} but the held-out {documents} have {len(part)} '
                f'windows of {spec.data.length + 1} tokens, of which it needs {num_needed}; lower it, lower '
                'config.data.length, hold out more, or give a smaller --size'
            )


def load_backcopy_data(spec: Spec) -> RunData:
    data, valid, probe = spec.data, spec.valid, spec.probe
    chain = fit_chain(read_texts(data.source), spec.model.vocabulary, data.triggers)

    def draw(stream: int, count: int, length: int) -> np.ndarray:
        return sample_sequences(chain, count, length, np.random.default_rng([data.seed, stream]))

    batches = make_synthetic_batches(chain, data.seed, spec.optimizer.batch_size, data.length + 1)
    return RunData(
        batches,
        valid_NT=draw(VALIDATION_STREAM, valid.windows, data.length + 1),
        probe_PT=draw(PROBE_STREAM, probe.sequences, probe.length),
        fingerprint=make_fingerprint(spec, batches, bigrams=chain.digest),
        triggers=chain.triggers,
    )


TASKS = {'text': load_text_data, 'backcopy': load_backcopy_data}
PREPENDED_IDS = {
    'none': lambda data: [],
    'bos': lambda data: [data.fixed_token],
    'eos': lambda data: [data.end_token],
}


def open_corpus(data: DataConfig, vocabulary: int) -> Store:
    """Open the token store of `data.source`, preparing it in the cache if it is not a `store:` already.

    Raises:
        UserError: The kind of the source is unknown, or the store does not match the configuration.
    """
    kind, _, store_path = data.source.partition(':')
    kinds = [*SOURCES, 'store:DIR']
    if kind not in [form.partition(':')[0] for form in kinds]:
        suggestion = None if ':' in data.source else f'text:{data.source}'
        raise UserError(
            format_unknown_name(f'config.data.source = {data.source!r}', kind, kinds, 'sources', suggestion)
        )
    store = Store(store_path) if kind == 'store' else open_cached_store(data, vocabulary)
    check_store(store, data, vocabulary)
    return store


def open_cached_store(data: DataConfig, vocabulary: int) -> Store:
    """Open the cached store of a source, preparing it if needed; a hash of its inputs names the folder."""
    settings = {name: getattr(data, name) for name in SHARED_SETTINGS}
    recipe = Recipe(data.source, data.tokenizer, vocabulary if data.tokenizer == 'train' else None, **settings)
    folder = get_cache_dir() / 'stores' / digest_json(build_request(recipe, open_source(data.source)))[:16]
    if not (folder / META_FILE).exists():
        print_status(f'preparing {data.source} in {folder}')
        prepare_store(recipe, folder)
    return Store(folder)


def check_store(store: Store, data: DataConfig, vocabulary: int) -> None:
    """Raise UserError if a store was prepared with settings other than those of the configuration."""
    for name in SHARED_SETTINGS:
        store_value = store.meta[name]
        config_value = getattr(data, name)
        if store_value != config_value:
            raise UserError(
                f'{store} was prepared with {name} {store_value}, and config.data.{name} is {config_value}; '
                f'set it to {store_value}, or prepare another store with --{name}={config_value}'
            )
    if data.tokenizer != 'train' and compute_tokenizer_digest(data.tokenizer) != store.meta['tokenizer']:
        raise UserError(
            f'{store} was prepared with another tokenizer than config.data.tokenizer={data.tokenizer}; set it to '
            'train to use the tokenizer of the store, or prepare another store'
        )
    if (size := store.meta['vocabulary']) > vocabulary:
        raise UserError(
            f'config.model.vocabulary is {vocabulary}, but the tokenizer gives ids up to {size - 1}; set it to {size}'
        )
    if data.loss == 'assistant' and not store.meta['masked']:
        raise UserError(f'config.data.loss is assistant, but {store} has no roles; set it to all, or prepare a chat:')


def find_tokenizer_file(run_dir: Path, data: DataConfig, vocabulary: int) -> Path:
    """Find the tokenizer.json of a run: that of the run folder, of the configuration, or of the store.

    If that of the run folder is a copy of the one that the configuration names, it is the latter: an export also
    reads other files beside it.
    """
    run_file = run_dir / TOKENIZER_FILE
    if data.tokenizer == 'train':
        return run_file if run_file.exists() else open_corpus(data, vocabulary).path / TOKENIZER_FILE
    config_file = parse_path(data.tokenizer)
    if not run_file.exists() or (config_file.exists() and config_file.read_bytes() == run_file.read_bytes()):
        return config_file
    return run_file


def make_natural_probe(store: Store, probe: ProbeConfig, prefix_ids: list[int]) -> np.ndarray:
    """Return the first tokens of held-out documents, in order of their keys.

    If there are too few documents, the next segments of the same documents follow.

    Args:
        store: The token store.
        probe: Number, length and domain of the sequences.
        prefix_ids: Ids that are prepended to each text. They count towards `probe.length`.

    Returns:
        int32 of shape (probe.sequences, probe.length).

    Raises:
        UserError: The held-out documents have too few segments of this length.
    """
    names = store.resolve_domains(probe.domain, 'config.probe.domain')
    text_tokens = probe.length - len(prefix_ids)
    parts = [list_held_out_texts(store, name) for name in names]
    domain_number, first, length, key = (np.concatenate(column) for column in zip(*parts, strict=True))
    if (count := int(np.sum(length // text_tokens))) < probe.sequences:
        raise UserError(
            f'config.probe needs {probe.sequences} sequences of {probe.length} tokens, but the held-out documents '
            f'have {count}; lower config.probe.sequences or length, or hold out more'
        )
    chosen: list[tuple[str, int]] = []
    number = 0
    while len(chosen) < probe.sequences:
        candidates = np.flatnonzero(length >= (number + 1) * text_tokens)
        candidates = candidates[np.argsort(key[candidates])][: probe.sequences - len(chosen)]
        chosen += [(store.domains[domain_number[i]], int(first[i]) + number * text_tokens) for i in candidates]
        number += 1
    tokens_by_domain = {name: store.get_tokens('held_out', name) for name in names}
    ids = [tokens_by_domain[name].read_ids(start, start + text_tokens) for name, start in chosen]
    return np.stack([np.array([*prefix_ids, *text], np.int32) for text in ids])


def list_held_out_texts(store: Store, domain: str) -> tuple[np.ndarray, ...]:
    """Return arrays (domain number, start, length, key) of all held-out documents, without their BOS."""
    tokens = store.get_tokens('held_out', domain)
    starts, keys = tokens.read_documents()
    first = starts + int(store.has_bos)
    domain_number = np.full(len(keys), store.domains.index(domain))
    return domain_number, first, np.append(starts, len(tokens))[1:] - first, keys


def make_synthetic_probe(store: Store, probe: ProbeConfig, prefix_ids: list[int]) -> np.ndarray:
    """Return sequences of random ids, or of one repeated id each, which are the same for all runs on the store.

    Raises:
        UserError: The store has too few of them.
    """
    if probe.sequences > PROBE_SEQUENCES or probe.length > PROBE_LENGTH:
        raise UserError(
            f'config.probe needs {probe.sequences} sequences of {probe.length} tokens, but a store has '
            f'{PROBE_SEQUENCES} {probe.inputs} ones of {PROBE_LENGTH}; lower config.probe.sequences or length'
        )
    arrays = read_arrays(store.path / PROBE_FILE)
    sequences = {'random': arrays['random_PT'], 'repeated': np.tile(arrays['repeated_P'][:, None], PROBE_LENGTH)}
    ids_PT = sequences[probe.inputs][: probe.sequences, : probe.length - len(prefix_ids)]
    return np.insert(ids_PT, [0] * len(prefix_ids), prefix_ids, axis=1)


PROBE_INPUTS = {'natural': make_natural_probe, 'random': make_synthetic_probe, 'repeated': make_synthetic_probe}
