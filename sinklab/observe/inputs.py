"""What a finished model is measured on: texts, ids at random, one id repeated, each domain of a source."""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from sinklab.data.batches import sequences
from sinklab.data.documents.document import Document, intact
from sinklab.data.documents.sources import source
from sinklab.observe.own import Own
from sinklab.observe.subject import Subject
from sinklab.record import Refusal

INPUTS = 'natural', 'random', 'repeated', 'domains'
LONGEST = 40  # characters of a text for each token that is wanted of it


@dataclasses.dataclass(frozen=True)
class Wanted:
    sequences: int
    length: int
    seed: int
    source: str | None  # of texts; None: a run's own, held out


def inputs(subject: Subject, kinds: list[str], wanted: Wanted) -> dict[str, np.ndarray]:
    """ids_PT by names: of a kind, and of domains domain/NAME. What is repeated has no other token before it."""
    found = {}
    for kind in kinds:
        found |= domains(subject, wanted) if kind == 'domains' else {kind: KINDS[kind](subject, wanted)}
    return {name: ids_PT if name == 'repeated' else subject.shaped(ids_PT) for name, ids_PT in found.items()}


def natural(subject: Subject, wanted: Wanted) -> np.ndarray:
    if wanted.source is None:
        return held_out(subject, wanted)
    return beginnings(subject, wanted, documents(wanted.source), wanted.source)


def random(subject: Subject, wanted: Wanted) -> np.ndarray:
    return np.random.default_rng(wanted.seed).integers(subject.vocabulary, size=(wanted.sequences, wanted.length))


def repeated(subject: Subject, wanted: Wanted) -> np.ndarray:
    ids_P1 = np.random.default_rng(wanted.seed).integers(subject.vocabulary, size=(wanted.sequences, 1))
    return ids_P1.repeat(wanted.length, 1)


def domains(subject: Subject, wanted: Wanted) -> dict[str, np.ndarray]:
    """The texts of each domain of a source, or of a run's own store."""
    if wanted.source is None:
        names = subject.domains()
        if len(names) < 2:
            raise Refusal(f'{subject.name} was trained on one domain; give natural instead of domains')
        return {f'domain/{name}': held_out(subject, wanted, domain=name) for name in names}
    by_domain: dict[str, list[Document]] = {}
    for document in documents(wanted.source):
        by_domain.setdefault(document.domain, []).append(document)
    if len(by_domain) < 2:
        raise Refusal(f'{wanted.source} has one domain; give natural instead of domains')
    return {f'domain/{name}': beginnings(subject, wanted, iter(found), name) for name, found in by_domain.items()}


def documents(given: str) -> Iterator[Document]:
    return (one for one in map(intact, source(given).documents()) if not one.blank)


def beginnings(subject: Subject, wanted: Wanted, found: Iterator[Document], name: str) -> np.ndarray:
    """The first ids of the first texts that have enough of them."""
    ids = (subject.encode(document.text[: LONGEST * wanted.length]) for document in found)
    chosen = [*itertools.islice((one[: wanted.length] for one in ids if len(one) >= wanted.length), wanted.sequences)]
    if len(chosen) < wanted.sequences:
        raise Refusal(
            f'{wanted.sequences} texts of {wanted.length} tokens are wanted and {name} has {len(chosen)}; lower '
            '--sequences or --length, or give another --source'
        )
    return np.array(chosen)


def held_out(subject: Own, wanted: Wanted, domain: str | None = None) -> np.ndarray:
    """What the probes of a run's own training see, of another number and length."""
    probe = subject.spec.probe
    sizes = dict(sequences=wanted.sequences, length=wanted.length, domain=domain or probe.domain)
    probe = dataclasses.replace(probe, inputs='natural', **sizes)
    return sequences(dataclasses.replace(subject.spec, probe=probe)).probe_PT


KINDS = {'natural': natural, 'random': random, 'repeated': repeated}


def positions(given: str, length: int) -> np.ndarray:
    """Places of tokens, from 0: replace:K has token 1 stand where token K does, swap:K each where the other does."""
    kind, _, place = given.partition(':')
    if kind not in ('replace', 'swap') or not place.isdecimal() or not 2 <= int(place) <= length:
        raise Refusal(f'--positions={given} is none; give replace:K or swap:K, K from 2 to {length}')
    position_T = np.arange(length)
    position_T[0] = int(place) - 1
    if kind == 'swap':
        position_T[int(place) - 1] = 0
    return position_T
