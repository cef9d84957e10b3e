"""The programs of a run, to be compiled for its devices wherever those are."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from sinklab import sharding
from sinklab.spec import Hardware, Spec
from sinklab.train import evaluation, probe, state, step

Lower = Callable[[], jax.stages.Lowered]


def programs(spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh, backend: str) -> dict[str, Lower]:
    """By name, in the order in which a run comes to them; to be lowered under the mesh."""
    now = state.abstract(spec, mesh)
    ways = sharding.ways(mesh)
    _, rows = evaluation.division(spec.valid.windows, hardware.sequences(spec.optimizer.batch_size), ways)
    _, probed = evaluation.division(spec.probe.sequences, spec.probe.sequences, ways)

    # Where some tokens are triggers, losses are told of each token.
    valid = evaluation.tokenwise if spec.data.triggers else evaluation.mean_loss

    def ids(count: int, length: int) -> jax.ShapeDtypeStruct:
        where = sharding.of_batch(mesh, (count, length))
        return jax.ShapeDtypeStruct((count, length), jnp.int32, sharding=where)

    return {
        'state': lambda: state.creation(spec, mesh).lower(),
        'validation': lambda: valid(spec, mesh, backend).lower(now['params'], ids(rows, spec.data.length + 1)),
        'probe': lambda: probe.program(spec, mesh).lower(now['params'], ids(probed, spec.probe.length)),
        'step': lambda: step.train_step(spec, hardware, mesh, backend).lower(now, *step.given(spec, mesh)),
    }
