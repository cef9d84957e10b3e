"""The in-loop hook: what the table of measures keeps of fixed held-out sequences, as numbers and as a file."""

from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from sinklab import sharding
from sinklab.files.whole import whole
from sinklab.measure import table
from sinklab.measure.setting import Setting, setting_of
from sinklab.model.attention import COMBINATIONS
from sinklab.model.columns import count
from sinklab.record import Refusal
from sinklab.spec import Model, Spec
from sinklab.targets import readable
from sinklab.train import state
from sinklab.train.evaluation import equal_parts
from sinklab.train.forward import forward


def captured_bytes(model: Model, length: int) -> int:
    """What is captured of a sequence: matrices in float32; residuals, queries, keys, values, what heads aggregate."""
    keys = length + count(model)
    value_width = model.width if COMBINATIONS[model.combination].wide else model.head_width
    entries = length * model.width
    entries += (keys + length) * model.heads * (model.head_width + value_width)
    itemsize = np.dtype('float32' if model.dtype == 'float32' else 'uint16').itemsize
    return model.layers * (4 * model.heads * length * keys + itemsize * entries)


def capture_bytes(spec: Spec) -> int:
    """That of all sequences of a probe."""
    return spec.probe.sequences * captured_bytes(spec.model, spec.probe.length)


def check(spec: Spec, memory: int) -> None:
    if capture_bytes(spec) > memory // 2:
        raise Refusal(
            f'a probe would capture {capture_bytes(spec) / 2**30:.1f} GiB, more than half of the '
            f'{memory / 2**30:.1f} GiB here; lower config.probe.sequences or config.probe.length'
        )


def setting(spec: Spec) -> Setting:
    return setting_of(spec, spec.probe.length, count(spec.model))


def observer(spec: Spec, mesh: jax.sharding.Mesh) -> Callable[[dict, np.ndarray], dict[str, np.ndarray]]:
    """observe(params, ids_PT) -> the arrays that are kept, by names."""
    compiled = program(spec, mesh)

    def observe(params: dict, ids_PT: np.ndarray) -> dict[str, np.ndarray]:
        (filled_PT,) = equal_parts(ids_PT, len(ids_PT), sharding.ways(mesh))
        kept = jax.device_get(compiled(params, sharding.put(readable(filled_PT), mesh)))
        return {name: array[:, : len(ids_PT)] if '_LP' in name else array for name, array in kept.items()}

    return observe


def program(spec: Spec, mesh: jax.sharding.Mesh) -> Callable:
    """What computes the arrays that are kept, of sequences whose number the devices divide."""
    run, at = forward(spec, capture=True), setting(spec)

    def arrays(params: dict, ids_PT: jax.Array) -> dict[str, jax.Array]:
        _, _, captured = run(params, ids_PT)
        return table.arrays(captured, at)

    return jax.jit(arrays, **state.jit_options(spec, mesh))


def numbers(kept: dict[str, np.ndarray], spec: Spec, trigger_PT: np.ndarray | None = None) -> dict[str, float]:
    """What a probe adds to metrics.jsonl."""
    return table.numbers(dict(kept, trigger_PT=trigger_PT), setting(spec))


def save(path: Path, kept: dict[str, np.ndarray], setting: Setting) -> None:
    with whole(path) as unfinished, unfinished.open('wb') as file:
        np.savez_compressed(file, **table.file_arrays(kept, setting))
