"""Probe sequences, which all runs of a store are measured on, and prompts in the training format."""

import numpy as np

from sinklab.config import spec
from sinklab.data.store import Store
from sinklab.data.store_files import PROBE_LENGTH, PROBE_SEQUENCES
from sinklab.loss_mask import exclude_from_loss, strip_loss_mask
from sinklab.schema import UserError


def make_natural_probe(store: Store, probe: spec.ProbeConfig, prefix_ids: list[int]) -> np.ndarray:
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
            f'config.probe wants {probe.sequences} sequences of {probe.length} tokens and the held-out documents '
            f'have {count}; lower config.probe.sequences or length, or hold out more'
        )
    chosen, number = [], 0
    while len(chosen) < probe.sequences:
        candidates = np.flatnonzero(length >= (number + 1) * text_tokens)
        candidates = candidates[np.argsort(key[candidates])][: probe.sequences - len(chosen)]
        chosen += [(store.domains[domain_number[i]], int(first[i]) + number * text_tokens) for i in candidates]
        number += 1
    tokens_by_domain = {name: store.get_tokens('held_out', name) for name in names}
    ids = store.map_reads(lambda text: tokens_by_domain[text[0]].read_ids(text[1], text[1] + text_tokens), chosen)
    return np.stack([np.array([*prefix_ids, *text], np.int32) for text in ids])


def list_held_out_texts(store: Store, domain: str) -> tuple[np.ndarray, ...]:
    """Return arrays (domain number, start, length, key) of all held-out documents, without their BOS."""
    tokens = store.get_tokens('held_out', domain)
    starts, keys = tokens.read_documents()
    first = starts + int(store.has_bos)
    domain_number = np.full(len(keys), store.domains.index(domain))
    return domain_number, first, np.append(starts, len(tokens))[1:] - first, keys


def make_random_probe(store: Store, probe: spec.ProbeConfig, prefix_ids: list[int]) -> np.ndarray:
    return prepend_ids(load_probe_ids(store, 'random_PT', probe)[:, : probe.length], prefix_ids)


def make_repeated_probe(store: Store, probe: spec.ProbeConfig, prefix_ids: list[int]) -> np.ndarray:
    return prepend_ids(
        np.repeat(load_probe_ids(store, 'repeated_P', probe)[:, None], probe.length, axis=1), prefix_ids
    )


def load_probe_ids(store: Store, name: str, probe: spec.ProbeConfig) -> np.ndarray:
    if probe.sequences > PROBE_SEQUENCES or probe.length > PROBE_LENGTH:
        raise UserError(
            f'config.probe wants {probe.sequences} sequences of {probe.length} tokens, and of {probe.inputs} ones a '
            f'store has {PROBE_SEQUENCES} of {PROBE_LENGTH}; lower config.probe.sequences or length'
        )
    return store.load_probe_arrays()[name][: probe.sequences]


def prepend_ids(ids_PT: np.ndarray, prefix_ids: list[int]) -> np.ndarray:
    """Prepend ids to each row and drop as many ids at its end."""
    return np.insert(ids_PT, [0] * len(prefix_ids), prefix_ids, axis=1)[:, : ids_PT.shape[1]]


PROBE_INPUTS = {'natural': make_natural_probe, 'random': make_random_probe, 'repeated': make_repeated_probe}


def add_training_tokens(ids_T: np.ndarray, data: spec.DataConfig) -> np.ndarray:
    """Add BOS and the fixed token to a prompt if training data has them; both are excluded from the loss.

    Raises:
        UserError: The prompt is too short to reach the position of the fixed token.
    """
    added_token = exclude_from_loss(data.fixed_token)
    if data.bos == 'documents':
        ids_T = np.insert(ids_T, 0, added_token)
    if data.fixed_position is None:
        return ids_T
    position = data.fixed_position - 1
    if len(ids_T) < position:
        raise UserError(
            f'the text has {len(ids_T)} tokens, and training had token {data.fixed_token} at place '
            f'{data.fixed_position}; give at least {position}'
        )
    if strip_loss_mask(ids_T[position : position + 1]).tolist() == [data.fixed_token]:
        return ids_T
    return np.insert(ids_T, position, added_token)
