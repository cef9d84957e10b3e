"""The sink probe: attention metrics of fixed held-out sequences during training."""

from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from sinklab.config.spec import ModelConfig, Spec
from sinklab.errors import UserError
from sinklab.loss_mask import strip_loss_mask
from sinklab.metrics import registry
from sinklab.metrics.metric import Arrays, MetricContext, make_context
from sinklab.model.attention import get_value_width
from sinklab.model.learned_kv import count_learned_kv
from sinklab.parallel import sharding
from sinklab.storage.files import atomic_write
from sinklab.train import state
from sinklab.train.step import make_hidden_states_fn
from sinklab.train.validation_loss import pad_rows


def estimate_sequence_bytes(model: ModelConfig, length: int) -> int:
    """Estimate the bytes of the intermediates of one sequence that the metrics of the probe read."""
    num_keys = length + count_learned_kv(model)
    num_entries = length * model.width
    num_entries += (num_keys + length) * model.heads * (model.head_width + get_value_width(model))
    itemsize = np.dtype('float32' if model.dtype == 'float32' else 'uint16').itemsize
    return model.layers * (4 * model.heads * length * num_keys + itemsize * num_entries)


def estimate_probe_bytes(spec: Spec) -> int:
    """Estimate the bytes of the intermediates of all sequences of the probe."""
    return spec.probe.sequences * estimate_sequence_bytes(spec.model, spec.probe.length)


def check_probe_memory(spec: Spec, memory_bytes: int) -> None:
    if estimate_probe_bytes(spec) > memory_bytes // 2:
        raise UserError(
            f'a probe would capture {estimate_probe_bytes(spec) / 2**30:.1f} GiB, more than half of the '
            f'{memory_bytes / 2**30:.1f} GiB of memory; lower config.probe.sequences or config.probe.length'
        )


def get_probe_context(spec: Spec) -> MetricContext:
    return make_context(spec, spec.probe.length, count_learned_kv(spec.model))


def make_probe(spec: Spec, mesh: jax.sharding.Mesh) -> Callable[[dict, np.ndarray], dict[str, np.ndarray]]:
    """Make a function (params, ids_PT) -> arrays of the probe, by name, of sequences divided over the devices."""
    apply_model = make_hidden_states_fn(spec, capture=True)
    probe_context = get_probe_context(spec)

    def compute_arrays(params: dict, ids_PT: jax.Array) -> Arrays:
        _, _, intermediates = apply_model(params, ids_PT)
        return registry.compute_probe_arrays(intermediates, probe_context)

    compiled_arrays = jax.jit(compute_arrays, **state.get_replicated_jit_options(spec, mesh))

    def run_probe(params: dict, ids_PT: np.ndarray) -> dict[str, np.ndarray]:
        num_shards = sharding.count_batch_shards(mesh)
        filled_PT = pad_rows(ids_PT, -(-len(ids_PT) // num_shards) * num_shards)
        probe_arrays = jax.device_get(compiled_arrays(params, sharding.put_batch(strip_loss_mask(filled_PT), mesh)))
        return {name: array[:, : len(ids_PT)] if '_LP' in name else array for name, array in probe_arrays.items()}

    return run_probe


def compute_probe_metrics(
    probe_arrays: dict[str, np.ndarray], spec: Spec, trigger_PT: np.ndarray | None = None
) -> dict[str, float]:
    """Compute the metrics of the probe that are written to metrics.jsonl."""
    return registry.compute_numbers(dict(probe_arrays, trigger_PT=trigger_PT), get_probe_context(spec))


def save_probe(path: Path, probe_arrays: dict[str, np.ndarray], context: MetricContext) -> None:
    with atomic_write(path) as temporary_path, temporary_path.open('wb') as file:
        np.savez_compressed(file, **registry.select_saved_arrays(probe_arrays, context))
