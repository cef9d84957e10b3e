"""Everything that the table of measures says of a subject, on any inputs; a result is kept by what it is made of."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sinklab.cache import cache
from sinklab.files import run_files
from sinklab.files.regular import Damaged
from sinklab.files.whole import whole, writable
from sinklab.measure import table
from sinklab.measure.measure import Arrays
from sinklab.measure.setting import Setting
from sinklab.observe.subject import Subject, Watch, unwatched
from sinklab.record import Refusal
from sinklab.train.environment import versions

COMPUTING = 'jax', 'jaxlib', 'numpy', 'torch', 'transformers'


@dataclasses.dataclass(frozen=True)
class Measured:
    numbers: dict[str, float]
    arrays: Mapping[str, np.ndarray]  # as a probe's file has them


@dataclasses.dataclass(frozen=True)
class Kept:
    """What all measures keep of a layer that they can be taken of; equal ones are one program."""

    setting: Setting

    def __call__(self, layer: dict[str, Any]) -> Arrays:
        return table.kept(layer, self.setting, table.measurable(layer))


def measured(
    subject: Subject, ids_PT: np.ndarray, position_T: np.ndarray | None = None, watch: Watch = unwatched, **how: Any
) -> Measured:
    """Of so many sequences; `how` changes fields of the Setting, `position_T` the places of tokens."""
    setting = subject.setting(ids_PT.shape[1], **how)
    among = table.measurable(subject.reads)
    kept = subject.observe(ids_PT, Kept(setting), position_T, watch)
    if setting.triggers:
        kept |= dict(trigger_PT=subject.triggers(ids_PT))
    numbers = {name: float(value) for name, value in table.numbers(kept, setting, among).items()}
    arrays = table.file_arrays(kept, setting, among)
    return Measured(number_layers(numbers, subject), dict(arrays) | layer_arrays(subject))


def number_layers(numbers: dict[str, float], subject: Subject) -> dict[str, float]:
    """Number `norm/normed/LL` by the layers of the model, where not all of them have an attention that reads.

    It is the one number of each layer that is made of an array which hybrid models have of some layers alone.
    """
    layers = subject.array_layers.get('normed_LPTD', ())
    names = {f'norm/normed/{at:02}': f'norm/normed/{layer:02}' for at, layer in enumerate(layers, 1)}
    return {names.get(name, name): value for name, value in numbers.items()}


def layer_arrays(subject: Subject) -> dict[str, np.ndarray]:
    """Return what the L of the arrays of attention of an open model stands for.

    `attention_layer_L` has the layers, from 1, that have attention. Where these differ in their number of heads, all
    heads are kept as those of one layer, and `attention_layer_H` has the layer of each head.
    """
    layers = subject.array_layers.get('attention_LPHTS')
    if layers is None:
        return {}
    found = {'attention_layer_L': np.array(layers)}
    return found | ({'attention_layer_H': np.repeat(layers, subject.heads)} if len(set(subject.heads)) > 1 else {})


def remembered(
    subject: Subject, ids_PT: np.ndarray, position_T: np.ndarray | None = None, watch: Watch = unwatched, **how: Any
) -> Measured:
    """The same, computed once for a model and its inputs."""
    path = cache() / 'measured' / f'{name_of(subject, ids_PT, position_T, how)}.npz'
    try:
        return read_kept(path)
    except Damaged as error:
        run_files.warn(path, f'{error}; it is measured again')
    except OSError:  # nothing is kept there, or nobody may look
        pass
    found = measured(subject, ids_PT, position_T, watch, **how)
    try:
        with writable(path.parent):
            save(path, found, seal=seal(path.stem, found))
    except (Refusal, OSError) as error:
        why = ' '.join(str(error).partition('; ')[0].split())
        run_files.warn(path, f'what was measured is not kept ({why}); it is measured again the next time')
    return found


def read_kept(path: Path) -> Measured:
    """Read what was measured before. Raises Damaged where it is not what was kept under this name."""
    arrays = run_files.read_arrays(path, remedy='it is of no use')
    texts = [arrays.pop(name, None) for name in ('numbers', 'seal')]
    if any(text is None or text.shape or text.dtype.kind != 'U' for text in texts):
        raise Damaged(f'{path} is damaged (it has no numbers, or no seal)')
    found = Measured(run_files.decode_numbers(str(texts[0]), path), arrays)
    if str(texts[1]) != seal(path.stem, found):
        raise Damaged(f'{path} is damaged (it is not what was kept under this name)')
    return found


def seal(name: str, found: Measured) -> str:
    """Compute a digest of a result and of the name that it is kept under."""
    digest = hashlib.sha256(json.dumps([name, found.numbers]).encode())
    for key, array in sorted(found.arrays.items()):
        digest.update(f'{key} {array.dtype.itemsize} {array.shape} '.encode())  # of bfloat16 a file keeps the bits
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def name_of(subject: Subject, ids_PT: np.ndarray, position_T: np.ndarray | None, how: dict[str, Any]) -> str:
    """Of all that decides a result: the model, the inputs, the setting, and the code that measures."""
    setting = dataclasses.asdict(subject.setting(ids_PT.shape[1], **how))
    places = None if position_T is None else list(map(int, position_T))
    told = json.dumps([code(), subject.digest, setting, places, ids_PT.shape])
    return hashlib.sha256(told.encode() + np.int64(ids_PT).tobytes()).hexdigest()[:24]


@functools.cache
def code() -> str:
    """Of sinklab, and of the libraries that compute."""
    found = hashlib.sha256(json.dumps(versions(COMPUTING)).encode())
    for file in sorted(Path(__file__).parents[1].rglob('*.py')):
        found.update(file.read_bytes())
    return found.hexdigest()


def save(path: Any, found: Measured, **more: str) -> None:
    with whole(path) as unfinished, unfinished.open('wb') as file:
        np.savez_compressed(file, numbers=json.dumps(found.numbers), **found.arrays, **more)
