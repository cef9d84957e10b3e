"""A measure request, its job on one model, and its result as JSON and arrays."""

import dataclasses
import json
import math
from typing import Any

import numpy as np

from sinklab.analysis import measure
from sinklab.analysis.measure import PUBLISHED_LENGTH, Measurement, find_published, measure_selection
from sinklab.analysis.model_protocol import MeasurableModel, ProgressFn, ignore_progress
from sinklab.metrics.emergence import find_emergence, find_first_heads
from sinklab.metrics.metric import MetricInfo
from sinklab.metrics.propositions import judge_propositions
from sinklab.metrics.sink import SINK_THRESHOLD
from sinklab.schema import UserError, format_unknown_name
from sinklab.storage.atomic_write import atomic_write
from sinklab.storage.paths import parse_path

OPEN_MODEL_DEFAULTS = dict(
    sequences=100, length=PUBLISHED_LENGTH, source='stdlib'
)  # of what was not probed in a training: the paper's numbers
LOSS_INFO = MetricInfo('loss', 'loss', 'Mean of -log p of every token but the first.', 'nats')
MIN_VALUES = dict(sequences=1, length=2, keys=1, perturb=1, seed=0)


@dataclasses.dataclass(frozen=True)
class MeasureRequest:
    """None: as a run was probed, and USUAL of an open model."""

    inputs: tuple[str, ...] = ('natural',)
    source: str | None = None
    sequences: int | None = None
    length: int | None = None
    seed: int = 0
    keys: int | None = None  # the first tokens whose importance is told; at least K of `positions`
    lengths: tuple[int, ...] = ()  # sinks of the first T tokens, at these thresholds
    thresholds: tuple[float, ...] = (SINK_THRESHOLD,)
    positions: str | None = None
    perturb: int | None = None  # a token, from 1
    loss: bool = False
    selection: bool = False

    def __post_init__(self):
        if not self.inputs:
            raise UserError(f'--inputs is empty; give some of {", ".join(measure.INPUT_KINDS)}')
        for kind in self.inputs:
            if kind not in measure.INPUT_KINDS:
                raise UserError(format_unknown_name(f'--inputs={kind}', kind, measure.INPUT_KINDS, 'inputs'))
        for name, minimum in MIN_VALUES.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise UserError(f'--{name}={value} is nothing to measure; give at least {minimum}')
        if invalid := [threshold for threshold in self.thresholds if not 0 < threshold < 1]:
            raise UserError(f'--eps has {invalid[0]:g}; give shares of attention, more than 0 and less than 1')
        if len({f'{threshold:g}' for threshold in self.thresholds}) < len(self.thresholds):
            raise UserError('--eps has two thresholds that are one in six digits; leave one out')

    def fill_defaults(self, model: MeasurableModel) -> 'MeasureRequest':
        """With all that is None filled in; raises UserError where the model cannot be asked so."""
        defaults = dict(vars(model.spec.probe), source=None) if hasattr(model, 'spec') else OPEN_MODEL_DEFAULTS
        requested = {name: getattr(self, name) for name in OPEN_MODEL_DEFAULTS}
        request = dataclasses.replace(self, **{k: defaults[k] if v is None else v for k, v in requested.items()})
        length, max_length = request.length, model.max_length
        if max_length and length > max_length:
            raise UserError(f'{model.name} reads {max_length} tokens, and --length is {length}; lower it')
        min_length = max(1, model.make_setting(length).prefix)  # before which a text is not yet itself
        if invalid := [prefix_length for prefix_length in self.lengths if not min_length <= prefix_length <= length]:
            raise UserError(
                f'--lengths has {invalid[0]}, of texts of {length}; give {min_length} to {length}, or --length'
            )
        if request.positions:  # what stands at K is told, too
            default_keys = model.make_setting(length).keys
            request = dataclasses.replace(
                request, keys=max(self.keys or default_keys, int(request.position_T[0]) + 1)
            )
        for name in ('perturb', 'keys'):
            if (requested := getattr(self, name)) is not None and requested > length:
                raise UserError(f'--{name}={requested} is beyond the text; give 1 to {length}')
        return request

    @property
    def position_T(self) -> np.ndarray | None:
        return measure.parse_positions(self.positions, self.length) if self.positions else None

    @property
    def setting_overrides(self) -> dict[str, Any]:
        """What the Setting has of it."""
        overrides = dict(lengths=self.lengths, thresholds=self.thresholds) if self.lengths else {}
        return overrides | (dict(keys=self.keys) if self.keys else {})


@dataclasses.dataclass(frozen=True)
class MeasureResult:
    """Of a model, which is not kept with it."""

    header: dict[str, Any]  # model, digest, and of the question what USUAL names
    step: int | None  # of a run
    measurements: dict[str, Measurement]  # by inputs
    published: dict[str, float]
    propositions: list[dict[str, Any]]  # what must hold of one token, repeated, where they are of this model

    def to_dict(self) -> dict[str, Any]:
        """As it is printed, and kept in measured.json."""
        numbers = {name: replace_nonfinite(measurement.numbers) for name, measurement in self.measurements.items()}
        return dict(self.header, inputs=numbers, published=self.published, propositions=self.propositions)


@dataclasses.dataclass(frozen=True)
class MeasureJob:
    """A question with what it is asked of."""

    model: MeasurableModel
    request: MeasureRequest
    ids_by_input: dict[str, np.ndarray]  # _PT, by inputs

    @property
    def num_sequences(self) -> int:
        return sum(map(len, self.ids_by_input.values()))

    def run(self, on_progress: ProgressFn = ignore_progress) -> MeasureResult:
        measurements = {name: self.measure_input(name, on_progress) for name in self.ids_by_input}
        header = dict(model=self.model.name, digest=self.model.digest)
        header |= {name: getattr(self.request, name) for name in OPEN_MODEL_DEFAULTS}
        if self.model.remarks:
            header |= dict(remarks=[*self.model.remarks])
        step = getattr(self.model, 'step', None)
        return MeasureResult(
            header, step, measurements, self.get_published(), self.evaluate_propositions(measurements)
        )

    def get_published(self) -> dict[str, float]:
        """Of a model that is asked as the published one was."""
        is_unchanged = self.model.bos == 'auto' and not self.request.positions
        return find_published(self.model.name, self.request.length) if is_unchanged else {}

    def evaluate_propositions(self, measurements: dict[str, Measurement]) -> list[dict[str, Any]]:
        is_covered = self.model.is_causal_softmax(self.request.length) and not self.request.positions
        if 'repeated' not in measurements or not is_covered:
            return []
        judged = judge_propositions(self.model.position, replace_nonfinite(measurements['repeated'].numbers))
        return [dict(claim=claim, number=number, holds=holds) for claim, number, holds in judged]

    def measure_input(self, name: str, on_progress: ProgressFn) -> Measurement:
        ids_PT, overrides = (
            self.ids_by_input[name],
            self.request.setting_overrides | dict(repeated=name == 'repeated'),
        )
        measurement = measure.measure_cached(self.model, ids_PT, self.request.position_T, on_progress, **overrides)
        return dataclasses.replace(
            measurement, numbers=measurement.numbers | compute_extra_metrics(self.model, ids_PT, self.request)
        )


def make_job(model: MeasurableModel, request: MeasureRequest) -> MeasureJob:
    full_request = request.fill_defaults(model)
    input_fields = {field.name: getattr(full_request, field.name) for field in dataclasses.fields(measure.InputSpec)}
    return MeasureJob(
        model, full_request, measure.make_inputs(model, full_request.inputs, measure.InputSpec(**input_fields))
    )


def compute_extra_metrics(model: MeasurableModel, ids_PT: np.ndarray, request: MeasureRequest) -> dict[str, float]:
    """What takes passes of its own."""
    metrics = {}
    if request.loss:
        metrics[LOSS_INFO.name] = float(np.nanmean(model.compute_loss(ids_PT, request.position_T)))
    if request.selection:
        metrics |= measure_selection(model, ids_PT, request.position_T)
    if request.perturb is not None:
        metrics |= measure.measure_perturbation(model, ids_PT, request.perturb - 1, request.seed, request.position_T)
    return metrics


def replace_nonfinite(numbers: dict[str, float]) -> dict[str, float | None]:
    """As JSON can say them."""
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


def summarize_series(results: list[MeasureResult]) -> dict[str, dict[str, Any]]:
    """By inputs, of several steps of a run: when its sink emerges, and in which heads first."""
    steps = [item.step for item in results]
    summaries = {}
    for name in results[0].measurements:
        measurements = [item.measurements[name] for item in results]
        alpha_NLH = [item.arrays['alpha_LPHJ'][..., 0].mean(1) for item in measurements]
        emergence_steps = find_emergence(steps, [item.numbers['sink/1'] for item in measurements])
        summaries[name] = dict(emergence=emergence_steps, heads=find_first_heads(steps, alpha_NLH, SINK_THRESHOLD))
    return summaries


def make_record(results: list[MeasureResult], is_series: bool) -> dict[str, Any]:
    """Of one step, or of all of a run."""
    steps = [result.to_dict() for result in results]
    return dict(steps=steps, series=summarize_series(results)) if is_series else steps[0]


def write_results(results: list[MeasureResult], output_dir: str, is_series: bool) -> None:
    """DIR/measured.json, and the arrays of each input as DIR/INPUT.npz, or as DIR/STEP/INPUT.npz of all steps."""
    for result in results:
        step_dir = parse_path(output_dir) / (f'{result.step:08}' if is_series else '')
        step_dir.mkdir(parents=True, exist_ok=True)
        for name, measurement in result.measurements.items():
            measure.save_measurement(step_dir / f'{name.replace("/", "-")}.npz', measurement)
    with atomic_write(parse_path(output_dir) / 'measured.json') as unfinished:
        unfinished.write_text(
            json.dumps(make_record(results, is_series), indent=2, allow_nan=False), encoding='utf-8'
        )
