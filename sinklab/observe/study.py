"""One question to a model, with its answer: what `sinklab measure` asks, tells and keeps."""

import dataclasses
import json
import math
from typing import Any

import numpy as np

from sinklab.files.place import place
from sinklab.files.whole import whole
from sinklab.measure.emergence import emergence, first_heads
from sinklab.measure.measure import Number
from sinklab.measure.propositions import verdicts
from sinklab.measure.sink import THRESHOLD
from sinklab.observe import inputs, measuring, perturbation
from sinklab.observe.measuring import Measured
from sinklab.observe.published import LENGTH, published
from sinklab.observe.selection import selection
from sinklab.observe.subject import Subject, Watch, unwatched
from sinklab.record import Refusal, unknown

USUAL = dict(
    sequences=100, length=LENGTH, source='stdlib'
)  # of what was not probed in a training: the paper's numbers
LOSS = Number('loss', 'loss', 'Mean of -log p of every token but the first.', 'nats')
LEAST = dict(sequences=1, length=2, keys=1, perturb=1, seed=0)


@dataclasses.dataclass(frozen=True)
class Question:
    """None: as a run was probed, and USUAL of an open model."""

    inputs: tuple[str, ...] = ('natural',)
    source: str | None = None
    sequences: int | None = None
    length: int | None = None
    seed: int = 0
    keys: int | None = None  # the first tokens whose importance is told; at least K of `positions`
    lengths: tuple[int, ...] = ()  # sinks of the first T tokens, at these thresholds
    thresholds: tuple[float, ...] = (THRESHOLD,)
    positions: str | None = None
    perturb: int | None = None  # a token, from 1
    loss: bool = False
    selection: bool = False

    def __post_init__(self):
        if not self.inputs:
            raise Refusal(f'--inputs is empty; give some of {", ".join(inputs.INPUTS)}')
        for kind in self.inputs:
            if kind not in inputs.INPUTS:
                raise Refusal(unknown(f'--inputs={kind}', kind, inputs.INPUTS, 'inputs'))
        for name, least in LEAST.items():
            given = getattr(self, name)
            if given is not None and given < least:
                raise Refusal(f'--{name}={given} is nothing to measure; give at least {least}')
        if wrong := [one for one in self.thresholds if not 0 < one < 1]:
            raise Refusal(f'--eps has {wrong[0]:g}; give shares of attention, more than 0 and less than 1')
        if len({f'{one:g}' for one in self.thresholds}) < len(self.thresholds):
            raise Refusal('--eps has two thresholds that are one in six digits; leave one out')

    def of(self, subject: Subject) -> 'Question':
        """With all that is None filled in; raises Refusal where the model cannot be asked so."""
        usual = dict(vars(subject.spec.probe), source=None) if hasattr(subject, 'spec') else USUAL
        given = {name: getattr(self, name) for name in USUAL}
        full = dataclasses.replace(self, **{k: usual[k] if v is None else v for k, v in given.items()})
        length, longest = full.length, subject.longest
        if longest and length > longest:
            raise Refusal(f'{subject.name} reads {longest} tokens, and --length is {length}; lower it')
        least = max(1, subject.setting(length).prefix)  # before which a text is not yet itself
        if wrong := [one for one in self.lengths if not least <= one <= length]:
            raise Refusal(f'--lengths has {wrong[0]}, of texts of {length}; give {least} to {length}, or --length')
        if full.positions:  # what stands at K is told, too
            usual_keys = subject.setting(length).keys
            full = dataclasses.replace(full, keys=max(self.keys or usual_keys, int(full.position_T[0]) + 1))
        for name in ('perturb', 'keys'):
            if (given := getattr(self, name)) is not None and given > length:
                raise Refusal(f'--{name}={given} is beyond the text; give 1 to {length}')
        return full

    @property
    def position_T(self) -> np.ndarray | None:
        return inputs.positions(self.positions, self.length) if self.positions else None

    @property
    def how(self) -> dict[str, Any]:
        """What the Setting has of it."""
        how = dict(lengths=self.lengths, thresholds=self.thresholds) if self.lengths else {}
        return how | (dict(keys=self.keys) if self.keys else {})


@dataclasses.dataclass(frozen=True)
class Answer:
    """Of a model, which is not kept with it."""

    about: dict[str, Any]  # model, digest, and of the question what USUAL names
    step: int | None  # of a run
    found: dict[str, Measured]  # by inputs
    published: dict[str, float]
    propositions: list[dict[str, Any]]  # what must hold of one token, repeated, where they are of this model

    def told(self) -> dict[str, Any]:
        """As it is printed, and kept in measured.json."""
        numbers = {name: finite(one.numbers) for name, one in self.found.items()}
        return dict(self.about, inputs=numbers, published=self.published, propositions=self.propositions)


@dataclasses.dataclass(frozen=True)
class Study:
    """A question with what it is asked of."""

    subject: Subject
    question: Question
    ids: dict[str, np.ndarray]  # _PT, by inputs

    @property
    def sequences(self) -> int:
        return sum(map(len, self.ids.values()))

    def answer(self, watch: Watch = unwatched) -> Answer:
        found = {name: self.measured(name, watch) for name in self.ids}
        about = dict(model=self.subject.name, digest=self.subject.digest)
        about |= {name: getattr(self.question, name) for name in USUAL}
        if self.subject.remarks:
            about |= dict(remarks=[*self.subject.remarks])
        step = getattr(self.subject, 'step', None)
        return Answer(about, step, found, self.published(), self.propositions(found))

    def published(self) -> dict[str, float]:
        """Of a model that is asked as the published one was."""
        as_is = self.subject.bos == 'auto' and not self.question.positions
        return published(self.subject.name, self.question.length) if as_is else {}

    def propositions(self, found: dict[str, Measured]) -> list[dict[str, Any]]:
        in_order = self.subject.is_plain(self.question.length) and not self.question.positions
        if 'repeated' not in found or not in_order:
            return []
        told = verdicts(self.subject.position, finite(found['repeated'].numbers))
        return [dict(claim=claim, number=number, holds=holds) for claim, number, holds in told]

    def measured(self, name: str, watch: Watch) -> Measured:
        ids_PT, how = self.ids[name], self.question.how | dict(repeated=name == 'repeated')
        found = measuring.remembered(self.subject, ids_PT, self.question.position_T, watch, **how)
        return dataclasses.replace(found, numbers=found.numbers | beside(self.subject, ids_PT, self.question))


def study(subject: Subject, asked: Question) -> Study:
    question = asked.of(subject)
    of_texts = {field.name: getattr(question, field.name) for field in dataclasses.fields(inputs.Wanted)}
    return Study(subject, question, inputs.inputs(subject, question.inputs, inputs.Wanted(**of_texts)))


def beside(subject: Subject, ids_PT: np.ndarray, question: Question) -> dict[str, float]:
    """What takes passes of its own."""
    found = {}
    if question.loss:
        found[LOSS.name] = float(np.nanmean(subject.loss(ids_PT, question.position_T)))
    if question.selection:
        found |= selection(subject, ids_PT, question.position_T)
    if question.perturb is not None:
        found |= perturbation.spread(subject, ids_PT, question.perturb - 1, question.seed, question.position_T)
    return found


def finite(numbers: dict[str, float]) -> dict[str, float | None]:
    """As JSON can say them."""
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


def series(answers: list[Answer]) -> dict[str, dict[str, Any]]:
    """By inputs, of several steps of a run: when its sink emerges, and in which heads first."""
    steps = [one.step for one in answers]
    told = {}
    for name in answers[0].found:
        each = [one.found[name] for one in answers]
        alpha_NLH = [one.arrays['alpha_LPHJ'][..., 0].mean(1) for one in each]
        emerged = emergence(steps, [one.numbers['sink/1'] for one in each])
        told[name] = dict(emergence=emerged, heads=first_heads(steps, alpha_NLH, THRESHOLD))
    return told


def record(answers: list[Answer], of_all: bool) -> dict[str, Any]:
    """Of one step, or of all of a run."""
    told = [one.told() for one in answers]
    return dict(steps=told, series=series(answers)) if of_all else told[0]


def keep(answers: list[Answer], folder: str, of_all: bool) -> None:
    """DIR/measured.json, and the arrays of each input as DIR/INPUT.npz, or as DIR/STEP/INPUT.npz of all steps."""
    for one in answers:
        at = place(folder) / (f'{one.step:08}' if of_all else '')
        at.mkdir(parents=True, exist_ok=True)
        for name, found in one.found.items():
            measuring.save(at / f'{name.replace("/", "-")}.npz', found)
    with whole(place(folder) / 'measured.json') as unfinished:
        unfinished.write_text(json.dumps(record(answers, of_all), indent=2, allow_nan=False), encoding='utf-8')
