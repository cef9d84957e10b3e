"""The in-loop hook: attention and residuals of fixed held-out sequences, as numbers and as arrays for pictures."""

from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from sinklab import sharding
from sinklab.files import whole
from sinklab.measure import activations, backcopy, sink
from sinklab.model.columns import count
from sinklab.record import Refusal
from sinklab.spec import Spec
from sinklab.targets import readable
from sinklab.train import state
from sinklab.train.evaluation import equal_parts
from sinklab.train.forward import forward


def capture_bytes(spec: Spec) -> int:
    """Memory of the captured matrices and residuals."""
    model, probe = spec.model, spec.probe
    keys = probe.length + count(model)
    token = (
        4 * model.heads * keys + np.dtype('float32' if model.dtype == 'float32' else 'uint16').itemsize * model.width
    )
    return model.layers * probe.sequences * probe.length * token


def check(spec: Spec, memory: int) -> None:
    if capture_bytes(spec) > memory // 2:
        raise Refusal(
            f'a probe would capture {capture_bytes(spec) / 2**30:.1f} GiB, more than half of the '
            f'{memory / 2**30:.1f} GiB here; lower config.probe.sequences or config.probe.length'
        )


OF_ONE = 'attention_LHTS'  # of the first sequence


def observer(spec: Spec, mesh: jax.sharding.Mesh) -> Callable[[dict, np.ndarray], dict[str, np.ndarray]]:
    """observe(params, ids_PT) -> what `observed` has, and norm_LPT."""
    run = forward(spec, capture=True)

    def traced(params: dict, ids_PT: jax.Array) -> dict[str, jax.Array]:
        _, _, captured = run(params, ids_PT)
        seen = observed(captured.attention_BHTS, captured.columns, spec)
        return seen | dict(norm_LPT=activations.norms(captured.residual_BTD))

    compiled = jax.jit(traced, **state.jit_options(spec, mesh))

    def observe(params: dict, ids_PT: np.ndarray) -> dict[str, np.ndarray]:
        (filled_PT,) = equal_parts(ids_PT, len(ids_PT), sharding.ways(mesh))
        seen = jax.device_get(compiled(params, sharding.put(readable(filled_PT), mesh)))
        return {name: array if name == OF_ONE else array[:, : len(ids_PT)] for name, array in seen.items()}

    return observe


def observed(attention_LPHTS: jax.Array, columns: int, spec: Spec) -> dict[str, jax.Array]:
    """Importances by proxy, raw_LPH without one, the mass of rows, and attention_LHTS of the first sequence."""
    if spec.model.attention.normalizer in sink.IMPLICIT:
        attention_LPHTS, columns = sink.completed(attention_LPHTS, spec.model.attention.gain), columns + 1
    share_LPHTS = sink.proxy(attention_LPHTS)
    seen = dict(
        alpha_LPHK=sink.importance(share_LPHTS, spec.probe.keys, columns, spec.model.mask.prefix or 1),
        raw_LPH=sink.importance(attention_LPHTS, 1, columns)[..., 0],
        mass_LPH=sink.mass(attention_LPHTS).mean(-1),
        first_LPHT=share_LPHTS[..., columns],
        attention_LHTS=share_LPHTS[:, 0],
    )
    if columns:
        seen |= dict(star_LPHC=sink.star(share_LPHTS, columns))
    if (reach := reach_of(spec)) < spec.probe.length:
        seen |= dict(within_LPH=sink.within(share_LPHTS, reach, columns))
    if (window := spec.model.mask.window) and window < spec.probe.length:
        seen |= dict(edge_LPH=sink.edge(share_LPHTS, window, columns))
    return seen


def reach_of(spec: Spec) -> int:
    """How many queries can see the first token."""
    mask = spec.model.mask
    return min(mask.window or spec.probe.length, mask.block or spec.probe.length)


def numbers(observed: dict[str, np.ndarray], spec: Spec, trigger_PT: np.ndarray | None = None) -> dict[str, float]:
    """What a probe adds to metrics.jsonl."""
    columns = observed['star_LPHC'].shape[-1] if 'star_LPHC' in observed else 0
    uniform = sink.floor(spec.probe.length, columns, spec.model.mask.prefix or 1, reach_of(spec))
    found = sink.numbers(observed['alpha_LPHK'], observed['mass_LPH'], uniform)
    found |= sink.named('1/raw', observed['raw_LPH'])
    if 'star_LPHC' in observed:
        found |= sink.star_numbers(observed['star_LPHC'], spec.probe.length)
    if 'within_LPH' in observed:
        found |= sink.named('1/window', observed['within_LPH'])
    if 'edge_LPH' in observed:
        found |= sink.named('edge', observed['edge_LPH'])
    if prefix := spec.model.mask.prefix:
        found |= sink.prefix_numbers(observed['alpha_LPHK'][..., :prefix])
    if trigger_PT is not None:
        found |= backcopy.attention(observed['first_LPHT'], trigger_PT)
    return found | activations.numbers(observed['norm_LPT'])


def save(path: Path, observed: dict[str, np.ndarray]) -> None:
    """One .npz: alpha in full, means over sequences of the rest, one sequence's attention in half precision."""
    arrays = dict(
        alpha_LPHK=observed['alpha_LPHK'],
        mass_LH=observed['mass_LPH'].mean(1),
        norm_LT=observed['norm_LPT'].mean(1),
        attention_LHTS=observed['attention_LHTS'].astype(np.float16),
    )
    if 'star_LPHC' in observed:
        arrays['star_LH'] = observed['star_LPHC'].max(-1).mean(1)
    with whole(path) as unfinished, unfinished.open('wb') as file:
        np.savez_compressed(file, **arrays)
