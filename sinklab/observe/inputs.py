"""What a finished model is measured on: texts, ids at random, one id repeated, each domain of a source."""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from sinklab.data.batches import load_run_data
from sinklab.data.documents.document import Document, require_intact
from sinklab.data.documents.sources import open_source
from sinklab.observe.own import RunModel
from sinklab.observe.subject import MeasurableModel
from sinklab.record import UserError

INPUT_KINDS = 'natural', 'random', 'repeated', 'domains'
MAX_CHARS_PER_TOKEN = 40  # characters of a text for each token that is wanted of it


@dataclasses.dataclass(frozen=True)
class InputSpec:
    sequences: int
    length: int
    seed: int
    source: str | None  # of texts; None: a run's own, held out


def make_inputs(model: MeasurableModel, kinds: list[str], input_spec: InputSpec) -> dict[str, np.ndarray]:
    """ids_PT by names: of a kind, and of domains domain/NAME. What is repeated has no other token before it."""
    inputs = {}
    for kind in kinds:
        inputs |= read_domains(model, input_spec) if kind == 'domains' else {kind: INPUT_MAKERS[kind](model, input_spec)}
    return {name: ids_PT if name == 'repeated' else model.apply_training_format(ids_PT) for name, ids_PT in inputs.items()}


def read_natural(model: MeasurableModel, input_spec: InputSpec) -> np.ndarray:
    if input_spec.source is None:
        return load_held_out(model, input_spec)
    return encode_beginnings(model, input_spec, read_documents(input_spec.source), input_spec.source)


def draw_random(model: MeasurableModel, input_spec: InputSpec) -> np.ndarray:
    return np.random.default_rng(input_spec.seed).integers(model.vocabulary, size=(input_spec.sequences, input_spec.length))


def draw_repeated(model: MeasurableModel, input_spec: InputSpec) -> np.ndarray:
    ids_P1 = np.random.default_rng(input_spec.seed).integers(model.vocabulary, size=(input_spec.sequences, 1))
    return ids_P1.repeat(input_spec.length, 1)


def read_domains(model: MeasurableModel, input_spec: InputSpec) -> dict[str, np.ndarray]:
    """The texts of each domain of a source, or of a run's own store."""
    if input_spec.source is None:
        names = model.domains()
        if len(names) < 2:
            raise UserError(f'{model.name} was trained on one domain; give natural instead of domains')
        return {f'domain/{name}': load_held_out(model, input_spec, domain=name) for name in names}
    by_domain: dict[str, list[Document]] = {}
    for document in read_documents(input_spec.source):
        by_domain.setdefault(document.domain, []).append(document)
    if len(by_domain) < 2:
        raise UserError(f'{input_spec.source} has one domain; give natural instead of domains')
    return {f'domain/{name}': encode_beginnings(model, input_spec, iter(domain_documents), name) for name, domain_documents in by_domain.items()}


def read_documents(source_name: str) -> Iterator[Document]:
    return (document for document in map(require_intact, open_source(source_name).read_documents()) if not document.is_blank)


def encode_beginnings(model: MeasurableModel, input_spec: InputSpec, documents: Iterator[Document], name: str) -> np.ndarray:
    """The first ids of the first texts that have enough of them."""
    ids = (model.encode(document.text[: MAX_CHARS_PER_TOKEN * input_spec.length]) for document in documents)
    sequences = [*itertools.islice((token_ids[: input_spec.length] for token_ids in ids if len(token_ids) >= input_spec.length), input_spec.sequences)]
    if len(sequences) < input_spec.sequences:
        raise UserError(
            f'{input_spec.sequences} texts of {input_spec.length} tokens are wanted and {name} has {len(sequences)}; lower '
            '--sequences or --length, or give another --source'
        )
    return np.array(sequences)


def load_held_out(model: RunModel, input_spec: InputSpec, domain: str | None = None) -> np.ndarray:
    """What the probes of a run's own training see, of another number and length."""
    probe = model.spec.probe
    sizes = dict(sequences=input_spec.sequences, length=input_spec.length, domain=domain or probe.domain)
    probe = dataclasses.replace(probe, inputs='natural', **sizes)
    return load_run_data(dataclasses.replace(model.spec, probe=probe)).probe_PT


INPUT_MAKERS = {'natural': read_natural, 'random': draw_random, 'repeated': draw_repeated}


def parse_positions(option: str, length: int) -> np.ndarray:
    """Places of tokens, from 0: replace:K has token 1 stand where token K does, swap:K each where the other does."""
    kind, _, position = option.partition(':')
    if kind not in ('replace', 'swap') or not position.isdecimal() or not 2 <= int(position) <= length:
        raise UserError(f'--positions={option} is none; give replace:K or swap:K, K from 2 to {length}')
    position_T = np.arange(length)
    position_T[0] = int(position) - 1
    if kind == 'swap':
        position_T[int(position) - 1] = 0
    return position_T
