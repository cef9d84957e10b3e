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

# Defaults for Hugging Face models, which have no config of probes: the numbers of the paper.
OPEN_MODEL_DEFAULTS = dict(sequences=100, length=PUBLISHED_LENGTH, source='stdlib')
LOSS_INFO = MetricInfo('loss', 'loss', 'Mean of -log p of every token but the first.', 'nats')
MIN_VALUES = dict(sequences=1, length=2, keys=1, perturb=1, seed=0)


@dataclasses.dataclass(frozen=True)
class MeasureRequest:
    """A request to measure a model, as the command line gives it.

    A field that is None has the value of the run's probes, or that of OPEN_MODEL_DEFAULTS for a Hugging Face model.
    """

    inputs: tuple[str, ...] = ('natural',)
    source: str | None = None
    sequences: int | None = None
    length: int | None = None
    seed: int = 0
    keys: int | None = None  # the number of first tokens whose importance is reported; at least K of `positions`
    lengths: tuple[int, ...] = ()  # prefix lengths T for which sink rates are computed, at `thresholds`
    thresholds: tuple[float, ...] = (SINK_THRESHOLD,)
    positions: str | None = None
    perturb: int | None = None  # the position of the perturbed token, from 1
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
        """Return the request with every None filled in.

        Raises:
            UserError: The request does not fit the model.
        """
        defaults = dict(vars(model.spec.probe), source=None) if hasattr(model, 'spec') else OPEN_MODEL_DEFAULTS
        requested = {name: getattr(self, name) for name in OPEN_MODEL_DEFAULTS}
        request = dataclasses.replace(self, **{k: defaults[k] if v is None else v for k, v in requested.items()})
        length, max_length = request.length, model.max_length
        if max_length and length > max_length:
            raise UserError(f'{model.name} reads {max_length} tokens, and --length is {length}; lower it')
        min_length = max(1, model.make_setting(length).prefix)  # shorter texts lie within the bidirectional prefix
        if invalid := [prefix_length for prefix_length in self.lengths if not min_length <= prefix_length <= length]:
            raise UserError(
                f'--lengths has {invalid[0]}, of texts of {length}; give {min_length} to {length}, or --length'
            )
        if request.positions:  # the importance of token K is reported, too
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
        """The fields of the MetricSetting that the request changes."""
        overrides = dict(lengths=self.lengths, thresholds=self.thresholds) if self.lengths else {}
        return overrides | (dict(keys=self.keys) if self.keys else {})


@dataclasses.dataclass(frozen=True)
class MeasureResult:
    """The result of a MeasureJob. It does not hold the model, whose memory can be freed."""

    header: dict[str, Any]  # model, digest, and the fields of the request that OPEN_MODEL_DEFAULTS names
    step: int | None  # the step of a run
    measurements: dict[str, Measurement]  # for each input
    published: dict[str, float]
    propositions: list[dict[str, Any]]  # the paper's propositions on repeated tokens, if they cover this model

    def to_dict(self) -> dict[str, Any]:
        """Return the result as it is printed and written to measured.json."""
        numbers = {name: replace_nonfinite(measurement.numbers) for name, measurement in self.measurements.items()}
        return dict(self.header, inputs=numbers, published=self.published, propositions=self.propositions)


@dataclasses.dataclass(frozen=True)
class MeasureJob:
    """A complete request with the model and the input sequences."""

    model: MeasurableModel
    request: MeasureRequest
    ids_by_input: dict[str, np.ndarray]  # ids_PT for each input

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
        """Return the published sink rates if BOS and positions are those of the paper."""
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
    """Compute the metrics that need forward passes of their own."""
    metrics = {}
    if request.loss:
        metrics[LOSS_INFO.name] = float(np.nanmean(model.compute_loss(ids_PT, request.position_T)))
    if request.selection:
        metrics |= measure_selection(model, ids_PT, request.position_T)
    if request.perturb is not None:
        metrics |= measure.measure_perturbation(model, ids_PT, request.perturb - 1, request.seed, request.position_T)
    return metrics


def replace_nonfinite(numbers: dict[str, float]) -> dict[str, float | None]:
    """Replace nan and infinities by None, since JSON has no such numbers."""
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


def summarize_series(results: list[MeasureResult]) -> dict[str, dict[str, Any]]:
    """Return for each input when a sink emerges in the steps of a run, and in which heads first."""
    steps = [item.step for item in results]
    summaries = {}
    for name in results[0].measurements:
        measurements = [item.measurements[name] for item in results]
        alpha_NLH = [item.arrays['alpha_LPHJ'][..., 0].mean(1) for item in measurements]
        emergence_steps = find_emergence(steps, [item.numbers['sink/1'] for item in measurements])
        summaries[name] = dict(emergence=emergence_steps, heads=find_first_heads(steps, alpha_NLH, SINK_THRESHOLD))
    return summaries


def make_record(results: list[MeasureResult], is_series: bool) -> dict[str, Any]:
    """Make the record of one step, or that of a series of steps."""
    steps = [result.to_dict() for result in results]
    return dict(steps=steps, series=summarize_series(results)) if is_series else steps[0]


def write_results(results: list[MeasureResult], output_dir: str, is_series: bool) -> None:
    """Write measured.json and the arrays of each input.

    The files are DIR/measured.json and DIR/INPUT.npz, or DIR/STEP/INPUT.npz for a series of steps.
    """
    for result in results:
        step_dir = parse_path(output_dir) / (f'{result.step:08}' if is_series else '')
        step_dir.mkdir(parents=True, exist_ok=True)
        for name, measurement in result.measurements.items():
            measure.save_measurement(step_dir / f'{name.replace("/", "-")}.npz', measurement)
    with atomic_write(parse_path(output_dir) / 'measured.json') as unfinished:
        unfinished.write_text(
            json.dumps(make_record(results, is_series), indent=2, allow_nan=False), encoding='utf-8'
        )
