"""Everything that the table of measures says of a subject, on any inputs; a result is kept by what it is made of."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sinklab.cache import get_cache_dir
from sinklab.files import run_files
from sinklab.files.regular import DamagedFileError
from sinklab.files.whole import atomic_write, writable_folder
from sinklab.measure import table
from sinklab.measure.measure import Arrays
from sinklab.measure.setting import MetricSetting
from sinklab.observe.subject import MeasurableModel, ProgressFn, ignore_progress
from sinklab.record import UserError
from sinklab.train.environment import get_package_versions

NUMERIC_PACKAGES = 'jax', 'jaxlib', 'numpy', 'torch', 'transformers'


@dataclasses.dataclass(frozen=True)
class Measurement:
    numbers: dict[str, float]
    arrays: Mapping[str, np.ndarray]  # as a probe's file has them


@dataclasses.dataclass(frozen=True)
class MetricExtractor:
    """What all measures keep of a layer that they can be taken of; equal ones are one program."""

    setting: MetricSetting

    def __call__(self, arrays: dict[str, Any]) -> Arrays:
        return table.compute_arrays(arrays, self.setting, table.select_measurable(arrays))


def measure_model(
    model: MeasurableModel, ids_PT: np.ndarray, position_T: np.ndarray | None = None, on_progress: ProgressFn = ignore_progress, **overrides: Any
) -> Measurement:
    """Of so many sequences; `how` changes fields of the Setting, `position_T` the places of tokens."""
    setting = model.make_setting(ids_PT.shape[1], **overrides)
    metrics = table.select_measurable(model.available_arrays)
    captured = model.capture(ids_PT, MetricExtractor(setting), position_T, on_progress)
    if setting.triggers:
        captured |= dict(trigger_PT=model.triggers(ids_PT))
    numbers = {name: float(value) for name, value in table.compute_numbers(captured, setting, metrics).items()}
    arrays = table.select_saved_arrays(captured, setting, metrics)
    return Measurement(renumber_layers(numbers, model), dict(arrays) | make_layer_arrays(model))


def renumber_layers(numbers: dict[str, float], model: MeasurableModel) -> dict[str, float]:
    """Number `norm/normed/LL` by the layers of the model, where not all of them have an attention that reads.

    It is the one number of each layer that is made of an array which hybrid models have of some layers alone.
    """
    layers = model.array_layers.get('normed_LPTD', ())
    names = {f'norm/normed/{index:02}': f'norm/normed/{layer:02}' for index, layer in enumerate(layers, 1)}
    return {names.get(name, name): value for name, value in numbers.items()}


def make_layer_arrays(model: MeasurableModel) -> dict[str, np.ndarray]:
    """Return what the L of the arrays of attention of an open model stands for.

    `attention_layer_L` has the layers, from 1, that have attention. Where these differ in their number of heads, all
    heads are kept as those of one layer, and `attention_layer_H` has the layer of each head.
    """
    layers = model.array_layers.get('attention_LPHTS')
    if layers is None:
        return {}
    arrays = {'attention_layer_L': np.array(layers)}
    return arrays | ({'attention_layer_H': np.repeat(layers, model.heads_per_layer)} if len(set(model.heads_per_layer)) > 1 else {})


def measure_cached(
    model: MeasurableModel, ids_PT: np.ndarray, position_T: np.ndarray | None = None, on_progress: ProgressFn = ignore_progress, **overrides: Any
) -> Measurement:
    """The same, computed once for a model and its inputs."""
    path = get_cache_dir() / 'measured' / f'{compute_cache_key(model, ids_PT, position_T, overrides)}.npz'
    try:
        return read_cached(path)
    except DamagedFileError as error:
        run_files.warn_once(path, f'{error}; it is measured again')
    except OSError:  # nothing is kept there, or nobody may look
        pass
    measurement = measure_model(model, ids_PT, position_T, on_progress, **overrides)
    try:
        with writable_folder(path.parent):
            save_measurement(path, measurement, seal=digest_measurement(path.stem, measurement))
    except (UserError, OSError) as error:
        reason = ' '.join(str(error).partition('; ')[0].split())
        run_files.warn_once(path, f'what was measured is not kept ({reason}); it is measured again the next time')
    return measurement


def read_cached(path: Path) -> Measurement:
    """Read what was measured before. Raises Damaged where it is not what was kept under this name."""
    arrays = run_files.read_arrays(path, remedy='it is of no use')
    texts = [arrays.pop(name, None) for name in ('numbers', 'seal')]
    if any(text is None or text.shape or text.dtype.kind != 'U' for text in texts):
        raise DamagedFileError(f'{path} is damaged (it has no numbers, or no seal)')
    measurement = Measurement(run_files.decode_numbers(str(texts[0]), path), arrays)
    if str(texts[1]) != digest_measurement(path.stem, measurement):
        raise DamagedFileError(f'{path} is damaged (it is not what was kept under this name)')
    return measurement


def digest_measurement(cache_key: str, measurement: Measurement) -> str:
    """Compute a digest of a result and of the name that it is kept under."""
    hasher = hashlib.sha256(json.dumps([cache_key, measurement.numbers]).encode())
    for key, array in sorted(measurement.arrays.items()):
        hasher.update(f'{key} {array.dtype.itemsize} {array.shape} '.encode())  # of bfloat16 a file keeps the bits
        hasher.update(np.ascontiguousarray(array).tobytes())
    return hasher.hexdigest()


def compute_cache_key(model: MeasurableModel, ids_PT: np.ndarray, position_T: np.ndarray | None, overrides: dict[str, Any]) -> str:
    """Of all that decides a result: the model, the inputs, the setting, and the code that measures."""
    setting = dataclasses.asdict(model.make_setting(ids_PT.shape[1], **overrides))
    positions = None if position_T is None else list(map(int, position_T))
    key_json = json.dumps([digest_code(), model.digest, setting, positions, ids_PT.shape])
    return hashlib.sha256(key_json.encode() + np.int64(ids_PT).tobytes()).hexdigest()[:24]


@functools.cache
def digest_code() -> str:
    """Of sinklab, and of the libraries that compute."""
    hasher = hashlib.sha256(json.dumps(get_package_versions(NUMERIC_PACKAGES)).encode())
    for file in sorted(Path(__file__).parents[1].rglob('*.py')):
        hasher.update(file.read_bytes())
    return hasher.hexdigest()


def save_measurement(path: Any, measurement: Measurement, **extra_arrays: str) -> None:
    with atomic_write(path) as unfinished, unfinished.open('wb') as file:
        np.savez_compressed(file, numbers=json.dumps(measurement.numbers), **measurement.arrays, **extra_arrays)
