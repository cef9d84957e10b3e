"""The in-loop hook: attention and residuals of fixed held-out sequences, as numbers and as arrays for pictures."""

from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from sinklab import sharding
from sinklab.folder import whole
from sinklab.measure import activations, sink
from sinklab.spec import Refusal, Spec
from sinklab.train import state


def capture_bytes(spec: Spec) -> int:
    """Memory of the captured matrices and residuals."""
    model, probe = spec.model, spec.probe
    token = (
        4 * model.heads * probe.length
        + np.dtype('float32' if model.dtype == 'float32' else 'uint16').itemsize * model.width
    )
    return model.layers * probe.sequences * probe.length * token


def check(spec: Spec, memory: int) -> None:
    if capture_bytes(spec) > memory // 2:
        raise Refusal(
            f'a probe would capture {capture_bytes(spec) / 2**30:.1f} GiB, more than half of the '
            f'{memory / 2**30:.1f} GiB here; lower config.probe.sequences or config.probe.length'
        )


def observer(spec: Spec, mesh: jax.sharding.Mesh) -> Callable[[dict, np.ndarray], dict[str, np.ndarray]]:
    """observe(params, ids_PT) -> alpha_LPHK, mass_LPH, norm_LPT, and attention_LHTS of the first sequence."""
    structure, _ = state.architecture(spec.model)

    def observe(params: dict, ids_PT: jax.Array) -> dict[str, jax.Array]:
        _, captured = nnx.merge(structure, params).hidden(ids_PT, capture=True)
        attention_LPHTS = captured.attention_BHTS
        return dict(
            alpha_LPHK=sink.importance(sink.proxy(attention_LPHTS), spec.probe.keys),
            mass_LPH=sink.mass(attention_LPHTS).mean(-1),
            norm_LPT=activations.norms(captured.residual_BTD),
            attention_LHTS=attention_LPHTS[:, 0],
        )

    return jax.jit(observe, out_shardings=sharding.replicated(mesh))


def numbers(observed: dict[str, np.ndarray]) -> dict[str, float]:
    """What a probe adds to metrics.jsonl."""
    length = observed['norm_LPT'].shape[-1]
    return {
        **sink.numbers(observed['alpha_LPHK'], observed['mass_LPH'], length),
        **activations.numbers(observed['norm_LPT']),
    }


def save(path: Path, observed: dict[str, np.ndarray]) -> None:
    """One .npz: alpha in full, means over sequences of the rest, one sequence's attention in half precision."""
    with whole(path) as unfinished, unfinished.open('wb') as file:
        np.savez_compressed(
            file,
            alpha_LPHK=observed['alpha_LPHK'],
            mass_LH=observed['mass_LPH'].mean(1),
            norm_LT=observed['norm_LPT'].mean(1),
            attention_LHTS=observed['attention_LHTS'].astype(np.float16),
        )
