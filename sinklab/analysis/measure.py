"""Measurement of a model: input sequences and metrics."""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np

from sinklab.analysis.model_protocol import MeasurableModel, ProgressFn, ignore_progress
from sinklab.analysis.run_model import RunModel
from sinklab.configs.open_models import PUBLISHED_SINK_RATES
from sinklab.data.run_data import load_run_data
from sinklab.data.sources import open_source
from sinklab.errors import UserError, format_unknown_name
from sinklab.metrics import registry
from sinklab.metrics.emergence import find_emergence, find_first_heads
from sinklab.metrics.metric import Arrays, MetricContext, name_by_layer
from sinklab.metrics.norms import compute_first_ratio
from sinklab.metrics.sink import SINK_THRESHOLD
from sinklab.storage.files import atomic_write
from sinklab.storage.paths import parse_path

INPUT_KINDS = 'natural', 'random', 'repeated', 'induction'
MAX_CHARS_PER_TOKEN = 40  # characters of a text that are encoded for each requested token


PUBLISHED_LENGTH = 64
# Defaults for Hugging Face models, which have no config of probes: the numbers of the paper.
OPEN_MODEL_DEFAULTS = dict(sequences=100, length=PUBLISHED_LENGTH, source='stdlib')
MIN_VALUES = dict(sequences=1, length=2, keys=1, seed=0)
ALLOWED_BITS = range(2, 17)


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
    loss: bool = False
    quantize: tuple[int, ...] = ()  # bits of weights and activations for which the loss of a run is computed
    gradients: bool = False  # compute the gradient-sink ratio of a run

    def __post_init__(self):
        if not self.inputs:
            raise UserError(f'--inputs is empty; give some of {", ".join(INPUT_KINDS)}')
        for kind in self.inputs:
            if kind not in INPUT_KINDS:
                raise UserError(format_unknown_name(f'--inputs={kind}', kind, INPUT_KINDS, 'inputs'))
        for name, minimum in MIN_VALUES.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise UserError(f'--{name}={value} is too small; give at least {minimum}')
        if invalid := [bits for bits in self.quantize if bits not in ALLOWED_BITS]:
            raise UserError(f'--quantize={invalid[0]} is not allowed; give bits from 2 to {ALLOWED_BITS[-1]}')
        if invalid := [threshold for threshold in self.thresholds if not 0 < threshold < 1]:
            raise UserError(f'--eps has {invalid[0]:g}; give shares of attention between 0 and 1')

    def fill_defaults(self, model: MeasurableModel) -> 'MeasureRequest':
        """Return the request with every None filled in.

        Raises:
            UserError: The request does not fit the model.
        """
        if (self.quantize or self.gradients) and not isinstance(model, RunModel):
            raise UserError(f'--quantize and --gradients need a run, and {model.name} is none; leave them out')
        defaults = dict(vars(model.spec.probe), source=None) if isinstance(model, RunModel) else OPEN_MODEL_DEFAULTS
        requested = {name: getattr(self, name) for name in OPEN_MODEL_DEFAULTS}
        request = dataclasses.replace(self, **{k: defaults[k] if v is None else v for k, v in requested.items()})
        length, max_length = request.length, model.max_length
        if max_length and length > max_length:
            raise UserError(f'{model.name} reads {max_length} tokens, but --length is {length}; lower it')
        min_length = max(1, model.make_context(length).prefix)  # shorter texts lie within the bidirectional prefix
        if invalid := [prefix_length for prefix_length in self.lengths if not min_length <= prefix_length <= length]:
            raise UserError(
                f'--lengths has {invalid[0]}, but texts have {length}; give {min_length} to {length}, or --length'
            )
        if (position_T := request.position_T) is not None:  # the importance of token K is reported, too
            default_keys = model.make_context(length).keys
            request = dataclasses.replace(request, keys=max(self.keys or default_keys, int(position_T[0]) + 1))
        if self.keys is not None and self.keys > length:
            raise UserError(f'--keys={self.keys} is beyond the text; give 1 to {length}')
        return request

    @property
    def position_T(self) -> np.ndarray | None:
        return parse_positions(self.positions, self.length) if self.positions else None

    @property
    def context_overrides(self) -> dict[str, Any]:
        """The fields of the MetricContext that the request changes."""
        overrides = dict(lengths=self.lengths, thresholds=self.thresholds) if self.lengths else {}
        return overrides | (dict(keys=self.keys) if self.keys else {})


RemarkFn = Callable[[str], Any]


def compute_period(length: int) -> int:
    """Compute the tokens of the first half of an `induction` text, which the second half repeats."""
    return (length + 1) // 2


def make_inputs(
    model: MeasurableModel, request: MeasureRequest, on_remark: RemarkFn = lambda _: None
) -> dict[str, np.ndarray]:
    """Make ids_PT for each kind of input.

    Repeated sequences do not get the training format, so that no other token stands before them. `on_remark` is
    called with a sentence if several texts are windows of one document.
    """
    num_sequences = request.sequences
    inputs: dict[str, np.ndarray] = {}
    for kind in request.inputs:
        rng = np.random.default_rng(request.seed)
        if kind == 'repeated':
            inputs[kind] = rng.integers(model.vocabulary, size=(num_sequences, 1)).repeat(request.length, 1)
            continue
        if kind == 'induction':
            half_PT = rng.integers(model.vocabulary, size=(num_sequences, compute_period(request.length)))
            ids_PT = np.tile(half_PT, 2)[:, : request.length]
        elif kind == 'random':
            ids_PT = rng.integers(model.vocabulary, size=(num_sequences, request.length))
        elif request.source is None:
            ids_PT = load_held_out(model, request)
        else:
            ids_PT = read_texts(model, request, on_remark)
        inputs[kind] = model.apply_training_format(ids_PT)
    return inputs


def read_texts(model: MeasurableModel, request: MeasureRequest, on_remark: RemarkFn) -> np.ndarray:
    """Return the beginnings of the first documents of a source that are long enough.

    If there are fewer documents than sequences, further sequences are windows of the same documents that do not
    overlap: the second of each document, then the third, and so on. `on_remark` says so.

    Raises:
        UserError: The documents have too few windows.
    """
    window_chars = MAX_CHARS_PER_TOKEN * request.length  # characters that are encoded for each window
    beginnings: list[list[int]] = []
    texts: list[str] = []
    for document in open_source(request.source).read_documents():
        ids = [] if document.is_blank else model.encode(document.text[:window_chars])
        if len(ids) >= request.length:
            texts.append(document.text[: window_chars * request.sequences])
            beginnings.append(ids[: request.length])
        if len(beginnings) == request.sequences:
            return np.array(beginnings)
    by_text = [model.encode_windows(text, request.length) for text in texts]
    in_rounds = itertools.chain.from_iterable(itertools.zip_longest(*by_text))
    windows = [window for window in in_rounds if window is not None][: request.sequences]
    if len(windows) < request.sequences:
        raise UserError(
            f'{request.sequences} texts of {request.length} tokens are needed, {request.source} has {len(windows)}; '
            'lower --sequences or --length, or give another --source'
        )
    on_remark(
        f'the {request.sequences} texts are windows of fewer documents ({len(texts)}), because no others have '
        f'{request.length} tokens'
    )
    return np.array(windows)


def load_held_out(model: RunModel, request: MeasureRequest) -> np.ndarray:
    """Load the probe sequences of the run, in the number and length of `request`."""
    sizes = dict(sequences=request.sequences, length=request.length)
    probe = dataclasses.replace(model.spec.probe, inputs='natural', **sizes)
    return load_run_data(dataclasses.replace(model.spec, probe=probe)).probe_PT


def parse_positions(option: str, length: int) -> np.ndarray:
    """Return the positions of tokens, from 0, for replace:K or swap:K.

    replace:K gives token 1 the position of token K, swap:K exchanges the positions of tokens 1 and K.
    """
    kind, _, position = option.partition(':')
    if kind not in ('replace', 'swap') or not position.isdecimal() or not 2 <= int(position) <= length:
        raise UserError(f'--positions={option} is not allowed; give replace:K or swap:K, K from 2 to {length}')
    position_T = np.arange(length)
    position_T[0] = int(position) - 1
    if kind == 'swap':
        position_T[int(position) - 1] = 0
    return position_T


def find_published(model_name: str, length: int) -> dict[str, float]:
    """Return the published sink rates for each kind of input, if model and length are of the paper.

    The model is recognized by the last part of its path or hub name.
    """
    base_name = PurePath(model_name.removeprefix('hf:')).name.lower()
    if length != PUBLISHED_LENGTH:
        return {}
    return next((numbers for name, numbers in PUBLISHED_SINK_RATES.items() if name.lower() == base_name), {})


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The metrics of one input, and the arrays that they are computed from."""

    numbers: dict[str, float]
    arrays: Mapping[str, np.ndarray]  # the arrays of a probe file


@dataclasses.dataclass(frozen=True)
class MetricExtractor:
    """A function that extracts from captured arrays what the metrics need.

    It is a dataclass because equal extractors share one compiled program.
    """

    context: MetricContext
    metrics: registry.Metrics

    def __call__(self, arrays: dict[str, Any]) -> Arrays:
        return registry.compute_arrays(arrays, self.context, registry.select_measurable(arrays, self.metrics))


def measure_model(
    model: MeasurableModel,
    ids_PT: np.ndarray,
    position_T: np.ndarray | None = None,
    on_progress: ProgressFn = ignore_progress,
    names: tuple[str, ...] | None = None,
    **overrides: Any,
) -> Measurement:
    """Compute metrics of the given sequences.

    Args:
        model: The model to measure.
        ids_PT: The token ids.
        position_T: The positions of the tokens; None: 0, 1, 2, ...
        on_progress: Called with the number of sequences of each finished batch.
        names: Compute only numbers of these names, and those that begin with one of them and a slash; ('',): all
            numbers; None: also the matrices of the first text, which need the memory of all layers at once.
        **overrides: Fields of the MetricContext to change.
    """
    context = model.make_context(ids_PT.shape[1], **overrides)
    metrics = registry.select_measurable(model.available_arrays)
    if names is not None:
        metrics = registry.select_by_name(names, metrics)
    captured = model.capture(ids_PT, MetricExtractor(context, metrics), position_T, on_progress)
    if context.triggers and isinstance(model, RunModel):
        captured |= dict(trigger_PT=ids_PT < model.spec.data.triggers)
    numbers = {name: float(value) for name, value in registry.compute_numbers(captured, context, metrics).items()}
    arrays = registry.select_saved_arrays(captured, context, metrics)
    layers = model.array_layers.get('attention_LPHTS')
    layer_arrays = {} if layers is None else {'attention_layer_L': np.array(layers)}  # from 0, with attention
    return Measurement(numbers, dict(arrays) | layer_arrays)


@dataclasses.dataclass(frozen=True)
class MeasureResult:
    """The result of a MeasureJob. It does not hold the model, whose memory can be freed."""

    record: dict[str, Any]  # as it is printed and written to measured.json
    step: int | None  # the step of a run
    measurements: dict[str, Measurement]  # for each input


@dataclasses.dataclass(frozen=True)
class MeasureJob:
    """A complete request with the model and the input sequences."""

    model: MeasurableModel
    request: MeasureRequest
    ids_by_input: dict[str, np.ndarray]  # ids_PT for each input
    remarks: tuple[str, ...] = ()  # on the inputs

    @property
    def num_sequences(self) -> int:
        return sum(map(len, self.ids_by_input.values()))

    def run(self, on_progress: ProgressFn = ignore_progress, names: tuple[str, ...] | None = None) -> MeasureResult:
        """Measure all inputs; `names` as in `measure_model`."""
        measurements = {name: self.measure_input(name, on_progress, names) for name in self.ids_by_input}
        optional_fields = {name: value for name in ('seed', 'positions') if (value := getattr(self.request, name))}
        remarks = [*self.model.remarks, *self.remarks]
        is_unchanged = self.model.bos == 'auto' and not self.request.positions  # as in the paper
        record = dict(
            model=self.model.name,
            dtype=self.model.dtype,
            bos=self.model.bos,
            **{name: getattr(self.request, name) for name in OPEN_MODEL_DEFAULTS},
            **optional_fields,
            **(dict(remarks=remarks) if remarks else {}),
            inputs={name: replace_nonfinite(measurement.numbers) for name, measurement in measurements.items()},
            published=find_published(self.model.name, self.request.length) if is_unchanged else {},
        )
        step = self.model.step if isinstance(self.model, RunModel) else None
        return MeasureResult(record, step, measurements)

    def measure_input(self, name: str, on_progress: ProgressFn, names: tuple[str, ...] | None) -> Measurement:
        ids_PT = self.ids_by_input[name]
        position_T = self.request.position_T
        period = compute_period(self.request.length) if name == 'induction' else 0
        overrides = self.request.context_overrides | dict(repeated=name == 'repeated', period=period)
        measurement = measure_model(self.model, ids_PT, position_T, on_progress, names, **overrides)
        numbers = {}
        if self.request.loss or self.request.quantize:
            numbers['loss'] = float(np.nanmean(self.model.compute_token_losses(ids_PT, position_T)))
        if isinstance(self.model, RunModel):
            for bits in self.request.quantize:
                loss_PT = self.model.compute_token_losses(ids_PT, position_T, bits)
                numbers[f'loss/int{bits}'] = float(np.nanmean(loss_PT))
            if self.request.gradients:
                ratio_LP = compute_first_ratio(self.model.compute_gradient_norms(ids_PT, position_T))
                numbers['gradient_sink_ratio'] = float(np.median(ratio_LP))
                numbers |= name_by_layer('gradient_sink_ratio', np.median(ratio_LP, 1), first=0)
        return dataclasses.replace(measurement, numbers=measurement.numbers | numbers)


def make_job(model: MeasurableModel, request: MeasureRequest) -> MeasureJob:
    full_request = request.fill_defaults(model)
    remarks: list[str] = []
    ids_by_input = make_inputs(model, full_request, remarks.append)
    return MeasureJob(model, full_request, ids_by_input, tuple(remarks))


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
    steps = [result.record for result in results]
    return dict(steps=steps, series=summarize_series(results)) if is_series else steps[0]


def write_results(results: list[MeasureResult], output_dir: str, is_series: bool) -> None:
    """Write measured.json and the arrays of each input.

    The files are DIR/measured.json and DIR/INPUT.npz, or DIR/STEP/INPUT.npz for a series of steps.
    """
    for result in results:
        step_dir = parse_path(output_dir) / (f'{result.step:08}' if is_series else '')
        step_dir.mkdir(parents=True, exist_ok=True)
        for name, measurement in result.measurements.items():
            with atomic_write(step_dir / f'{name}.npz') as unfinished, unfinished.open('wb') as file:
                np.savez_compressed(file, numbers=json.dumps(measurement.numbers), **measurement.arrays)
    with atomic_write(parse_path(output_dir) / 'measured.json') as unfinished:
        unfinished.write_text(
            json.dumps(make_record(results, is_series), indent=2, allow_nan=False), encoding='utf-8'
        )
