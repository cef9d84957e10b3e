"""The programs of a run, to be compiled for its devices wherever those are."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from sinklab import sharding
from sinklab.spec import Hardware, Spec
from sinklab.train import evaluation, probe, state, step

LowerFn = Callable[[], jax.stages.Lowered]


def get_programs(spec: Spec, hardware: Hardware, mesh: jax.sharding.Mesh, backend: str) -> dict[str, LowerFn]:
    """By name, in the order in which a run comes to them; to be lowered under the mesh."""
    abstract_state = state.make_abstract_state(spec, mesh)
    num_shards = sharding.count_shards(mesh)
    _, valid_rows = evaluation.compute_part_sizes(spec.valid.windows, hardware.get_micro_batch_size(spec.optimizer.batch_size), num_shards)
    _, probe_rows = evaluation.compute_part_sizes(spec.probe.sequences, spec.probe.sequences, num_shards)

    # Where some tokens are triggers, losses are told of each token.
    make_valid_loss = evaluation.make_token_loss if spec.data.triggers else evaluation.make_mean_loss

    def make_abstract_ids(count: int, length: int) -> jax.ShapeDtypeStruct:
        ids_sharding = sharding.make_batch_sharding(mesh, (count, length))
        return jax.ShapeDtypeStruct((count, length), jnp.int32, sharding=ids_sharding)

    return {
        'state': lambda: state.jit_create_state(spec, mesh).lower(),
        'validation': lambda: make_valid_loss(spec, mesh, backend).lower(abstract_state['params'], make_abstract_ids(valid_rows, spec.data.length + 1)),
        'probe': lambda: probe.jit_probe(spec, mesh).lower(abstract_state['params'], make_abstract_ids(probe_rows, spec.probe.length)),
        'step': lambda: step.make_train_step(spec, hardware, mesh, backend).lower(abstract_state, *step.make_abstract_inputs(spec, mesh)),
    }
